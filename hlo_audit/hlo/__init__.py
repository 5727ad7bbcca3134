"""HLO as data: shapes, instructions, computations and modules, and the parser of their text."""

from hlo_audit.hlo.attributes import Metadata, Sharding
from hlo_audit.hlo.frames import SourceLocation
from hlo_audit.hlo.memo import Memo
from hlo_audit.hlo.module import Alias, Computation, EntryLayout, Instruction, Module, Value
from hlo_audit.hlo.parser import parse_module
from hlo_audit.hlo.shape import Layout, Shape, element_bits, parse_shape

__all__ = [
    "Alias",
    "Computation",
    "EntryLayout",
    "Instruction",
    "Layout",
    "Memo",
    "Metadata",
    "Module",
    "Shape",
    "Sharding",
    "SourceLocation",
    "Value",
    "element_bits",
    "parse_module",
    "parse_shape",
]
