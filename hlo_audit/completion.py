"""What a shell may complete: the names that options and arguments take. Imports no jax.

Pairs come with a value, to be edited: a shell puts a blank after what it completes, so that half a
pair would have to be taken back first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hlo_audit.models import ALL_MODELS
from hlo_audit.program import Model
from hlo_audit.report.formats import FORMATS
from hlo_audit.rules import ALL_RULES


def programs() -> list[str]:
    """The reference models; dumps and files are for the shell to find."""
    return [model.name for model in ALL_MODELS]


def rules() -> list[str]:
    """Slugs and codes."""
    return [name for rule in ALL_RULES for name in (rule.slug, rule.code)]


def rules_and_models() -> list[str]:
    """Both."""
    return [*rules(), *programs()]


def output_formats() -> list[str]:
    """``FORMAT=PATH`` for each format, with a usual name."""
    endings = {"text": "txt", "junit": "xml", "markdown": "md", "github": "github.txt"}
    return [f"{name}=report.{endings.get(name, name)}" for name in FORMATS]


def rule_budgets() -> list[str]:
    """``RULE=0`` for each name of a rule."""
    return [f"{name}=0" for name in rules()]


def rule_options() -> list[str]:
    """``RULE.NAME=N`` for each threshold, with its default."""
    return [
        f"{rule.slug}.{name}={value}" for rule in ALL_RULES for name, value in rule.options.items()
    ]


def layouts(programs: Sequence[str]) -> list[str]:
    """The layouts of the given models, of all where none is given, and ``all``."""
    names = (layout.name for model in _chosen(programs) for layout in model.layouts)
    return [*_unique(names), "all"]


def settings(programs: Sequence[str]) -> list[str]:
    """``KEY=VALUE`` for each setting of the given models, of all where none is given, with its
    default."""
    pairs = (pair for model in _chosen(programs) for pair in model.configure({}).items())
    return _unique(f"{name}={value}" for name, value in pairs)


def topologies() -> list[str]:
    """Those that models are compiled for by default, and those that a fix makes a claim for."""
    by_default = [model.topologies["tpu"] for model in ALL_MODELS if "tpu" in model.topologies]
    fixes = [fix for rule in ALL_RULES for fix in rule.fixes]
    targets = [target for fix in fixes for target in (*fix.clears, *fix.slower)]
    return _unique([*by_default, *(name for target in targets for name in target.topologies)])


def _chosen(programs: Sequence[str]) -> list[Model]:
    return [model for model in ALL_MODELS if model.name in programs] or list(ALL_MODELS)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
