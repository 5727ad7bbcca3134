"""The gate in a repository of its own, as its users meet it: a baseline, a branch that turns a
kernel the wrong way round, and the change that turns it back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import run
from hlo_audit.compiler import available_platform

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        available_platform() != "tpu", reason="libtpu is made for Linux x86-64 only"
    ),
]

TRAIN = """\
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

VOCAB, EMBED = 8192, 512


def head(hidden, kernel):
    return jnp.einsum("bse,ve->bsv", hidden, kernel.astype(hidden.dtype))


def train_step(mesh):
    def array(dtype, spec, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def loss(kernel, hidden, targets):
        logits = head(hidden, kernel).astype(jnp.float32)
        picked = jnp.sum(jnp.where(jnp.arange(VOCAB) == targets[..., None], logits, 0.0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    def step(kernel, momentum, hidden, targets):
        value, gradient = jax.value_and_grad(loss)(kernel, hidden, targets)
        momentum = 0.9 * momentum + gradient
        return kernel - 0.1 * momentum, momentum, value

    kernel = array(jnp.float32, P(None, "fsdp"), VOCAB, EMBED)
    hidden = array(jnp.bfloat16, P("fsdp"), 16, 128, EMBED)
    targets = array(jnp.int32, P("fsdp"), 16, 128)
    return jax.jit(step, donate_argnums=(0, 1)), (kernel, kernel, hidden, targets)
"""
TURNED = TRAIN.replace('"bse,ve->bsv"', '"bse,ev->bsv"').replace(
    'P(None, "fsdp"), VOCAB, EMBED', 'P("fsdp", None), EMBED, VOCAB'
)
UPDATE = TRAIN.splitlines().index("        return kernel - 0.1 * momentum, momentum, value") + 1

CONFIG = """\
modes = ["explicit"]
baseline = "hlo-audit-baseline.json"

[[programs]]
name = "train.py:train_step"
meshes = [{ fsdp = 4 }]
topologies = ["v5p:2x2x1"]
"""

TEST = """\
import pytest

import train


@pytest.mark.hlo_audit(mesh={"fsdp": 4}, topology="v5p:2x2x1", mode="explicit")
def test_no_relayout(hlo_audit_check):
    hlo_audit_check(train.train_step, max={"relayout-copy": 0})
"""


class Repository:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run("git", "init", "-q", "-b", "main")
        for key, value in (("user.name", "A"), ("user.email", "a@example.org")):
            self.run("git", "config", key, value)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    def audit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run("check", *arguments, cwd=self.folder)

    def commit(self, message: str, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name.replace("__", ".")).write_text(text)
        self.run("git", "add", "-A")
        assert self.run("git", "commit", "-q", "-m", message).returncode == 0


def test_a_kernel_turned_the_wrong_way_round_is_stopped_until_it_is_turned_back(
    tmp_path: Path,
) -> None:
    repository = Repository(tmp_path)
    repository.commit("a step", train__py=TRAIN, test_train__py=TEST)
    (tmp_path / "hlo-audit.toml").write_text(CONFIG)
    written = repository.audit("--update-baseline")
    assert written.returncode == 0, written.stderr
    repository.commit("a baseline")
    kept = repository.audit()
    assert kept.returncode == 0, kept.stdout + kept.stderr

    repository.run("git", "switch", "-q", "-c", "turned")
    repository.commit("turn the kernel", train__py=TURNED)
    stopped = repository.audit("--output", "sarif=audit.sarif")
    assert stopped.returncode == 1, stopped.stderr
    for told in (
        f"train.py:{UPDATE} in train_step.<locals>.step",
        "f32[128,8192] of parameter kernel is copied from {1,0:T(8,128)} to {0,1:T(8,128)}",
        "4.19 MB",
        "fix vocab-embed",
        "HLA002 is 4, 4 of them new, hlo-audit-baseline.json has 0",
    ):
        assert told in stopped.stdout
    (run,) = json.loads((tmp_path / "audit.sarif").read_text())["runs"]
    places = [
        result["locations"][0]["physicalLocation"]
        for result in run["results"]
        if result["ruleId"] == "HLA002"
    ]
    assert {place["artifactLocation"]["uri"] for place in places} == {"train.py"}
    assert UPDATE in {place["region"]["startLine"] for place in places}

    against = repository.audit("train.py:train_step", "--against", "main", "--no-config", *WAY)
    assert against.returncode == 1, against.stderr
    assert "HLA002 is 4, 4 of them new" in against.stdout

    tested = repository.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 1, tested.stdout
    assert f"train.py:{UPDATE}" in tested.stdout
    assert "f32[128,8192] of parameter kernel is copied" in tested.stdout

    repository.commit("turn it back", train__py=TRAIN)
    for again in (
        repository.audit(),
        repository.audit("train.py:train_step", "--against", "main", "--no-config", *WAY),
        repository.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
    ):
        assert again.returncode == 0, again.stdout + again.stderr


WAY = ("--mesh", "fsdp=4", "--topology", "v5p:2x2x1", "--mode", "explicit")
