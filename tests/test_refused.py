"""A program that jax refuses to trace for a merge of sharded axes is a finding, not an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import invoke
from hlo_audit.errors import RefusedReshapeError
from hlo_audit.program import Lowering
from hlo_audit.program_audit import audit_refused
from hlo_audit.rules import ALL_RULES


def refusal(operand: str, sizes: tuple[int, ...]) -> RefusedReshapeError:
    frames = (("train.py", 7, "step"), ("train.py", 20, "main"))
    return RefusedReshapeError("refused", operand=operand, sizes=sizes, frames=frames)


LOWERING = Lowering(
    program="train.py:step",
    build="train.py:step",
    mode="explicit",
    layout=None,
    settings={},
    mesh={"tensor": 8},
    platform="tpu",
    topology="v6e:2x4",
    xla_flags={},
)


@pytest.mark.parametrize(
    ("operand", "sizes"),
    [
        ("float32[2,16,4,64@tensor]", (2, 16, 256)),
        ("bfloat16[2@data,16,4,64@(tensor0,tensor1)]", (2, 16, 256)),
        ("float32[2,16,4,1,64@tensor]", (2, 1, 16, 256)),
        ("float32[2,16,4,64@tensor]", (8192,)),
    ],
)
def test_a_merge_of_a_later_sharded_axis_is_a_finding(operand: str, sizes: tuple[int, ...]) -> None:
    audit = audit_refused(LOWERING, refusal(operand, sizes), ALL_RULES)
    assert audit.error is None
    assert audit.counts == {"HLA001": None, "HLA002": None, "HLA003": None, "HLA004": None} | {
        "HLA005": 1
    }
    (finding,) = audit.findings
    assert finding.source is not None
    assert (finding.source.file, finding.source.line) == ("train.py", 7)
    assert [frame.line for frame in finding.stack] == [20]
    assert finding.details["kind"] == "refused"
    assert operand in finding.message


@pytest.mark.parametrize(
    ("operand", "sizes"),
    [
        ("float32[2,16,4@tensor,64]", (2, 16, 256)),  # the first of the merged ones
        ("float32[2,16,256@tensor]", (2, 16, 16, 16)),  # a split
        ("float32[2,16@data0,4,64]", (2, 16, 256)),  # of others
        ("float32[a,64@tensor]", (64,)),  # a size that is no number
        ("", (2,)),
    ],
)
def test_any_other_refusal_stays_an_error(operand: str, sizes: tuple[int, ...]) -> None:
    error = refusal(operand, sizes)
    audit = audit_refused(LOWERING, error, ALL_RULES)
    assert audit.error is error
    assert audit.findings == ()


MERGES = """\
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def mix(x, w):
    return x.reshape(2, 16, 4 * 64) @ w


def train_step(mesh):
    def step(x, w):
        return jnp.sum(mix(x, w))

    x = jax.ShapeDtypeStruct(
        (2, 16, 4, 64),
        jnp.float32,
        sharding=NamedSharding(mesh, PartitionSpec(None, None, None, "tensor")),
    )
    w = jax.ShapeDtypeStruct(
        (256, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, None))
    )
    return jax.jit(step), (x, w)
"""


def test_a_program_that_merges_a_sharded_axis_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MERGES)
    command = ["check", "train.py:train_step", "--mode", "explicit", "--mesh", "tensor=4"]
    options = ("--platform", "cpu", "--topology", "4", "--format", "json", "--max", "HLA005=0")
    result = invoke(*command, *options, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    (program,) = json.loads(result.stdout)["programs"]
    (finding,) = program["findings"]
    assert finding["rule"] == "HLA005"
    line = MERGES.splitlines().index("    return x.reshape(2, 16, 4 * 64) @ w") + 1
    assert finding["source"]["line"] == line
    assert finding["source"]["file"].endswith("train.py")
    assert [frame["function"] for frame in finding["stack"]] == ["step"]
    assert program["counts"]["HLA002"] is None
