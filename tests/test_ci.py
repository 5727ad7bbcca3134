"""What other repositories take from here: the action, the pre-commit hook, the documented workflow,
completion in the shell. Each shell step is run, or at least read by bash."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from hlo_audit import completion
from hlo_audit.cli import cli
from hlo_audit.report.formats import FORMATS

TOP = Path(__file__).parent.parent
ACTION: dict[str, Any] = yaml.safe_load((TOP / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
DOCUMENT = (TOP / "docs" / "ci.md").read_text()
OPTIONS = {
    option
    for parameter in cli.commands["check"].params
    if isinstance(parameter, click.Option)
    for option in (*parameter.opts, *parameter.secondary_opts)
}


def blocks(language: str = "") -> list[str]:
    """The fenced blocks of the document, of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


def step(name: str) -> dict[str, Any]:
    return next(step for step in STEPS if step["name"] == name)


def expressions(value: object) -> list[str]:
    """What stands in ``${{ }}``, and in conditions, which need no braces."""
    return re.findall(r"\$\{\{(.*?)\}\}", yaml.safe_dump(value, width=10_000), re.DOTALL)


# -- the action


def test_the_action_declares_what_it_uses_and_uses_what_it_declares() -> None:
    conditions = " ".join(str(step.get("if", "")) for step in STEPS)
    text = " ".join(expressions(STEPS)) + conditions
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(ACTION["inputs"])
    assert all(isinstance(one["default"], str) for one in ACTION["inputs"].values())
    assert all(one["description"] for one in ACTION["inputs"].values())


def test_the_outputs_that_the_action_refers_to_are_written() -> None:
    conditions = " ".join(str(step.get("if", "")) for step in STEPS)
    text = " ".join(expressions(ACTION)) + conditions
    for identity, output in re.findall(r"steps\.([\w-]+)\.outputs\.([\w-]+)", text):
        (writer,) = (step for step in STEPS if step.get("id") == identity)
        assert f"{output}=" in writer["run"], output


@pytest.mark.parametrize("name", [one["name"] for one in STEPS if "run" in one])
def test_a_step_is_bash_and_takes_its_values_from_the_environment(name: str) -> None:
    script = step(name)["run"]
    assert step(name)["shell"] == "bash"
    # An expression in a script is put in before bash reads it: a way in for whoever names a branch.
    assert "${{" not in script
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr


def test_every_option_of_the_action_exists() -> None:
    text = step("Audit")["run"] + " ".join(str(one) for one in ACTION["inputs"].values())
    used = set(re.findall(r"--[a-z][a-z-]*", text))
    assert used
    assert used <= OPTIONS
    formats = set(re.findall(r"--output=(\w+)=", text))
    assert formats == set(FORMATS) - {"text"}


def test_forks_neither_upload_nor_comment() -> None:
    for name in ("Upload to code scanning", "Comment on the pull request"):
        assert "github.event.pull_request.head.repo.fork != true" in step(name)["if"]


class Runner:
    """Runs the action's shell steps as GitHub's runner does, with stand-ins for pip and gh."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.output = folder / "output"
        self.summary = folder / "summary"
        self.log = folder / "log"
        for path in (self.output, self.summary, self.log):
            path.touch()
        self.stand_in(
            "python-of-the-job",
            f'if [[ " $* " == *" -m pip "* ]]\n'
            f'then printf "%s\\n" "$@" >> {shlex.quote(str(self.log))}\n'
            f'else exec {shlex.quote(sys.executable)} "$@"; fi',
        )

    def stand_in(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)

    def run(self, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script = self.folder / "step.sh"
        script.write_text(step(name)["run"])
        assert set(environment) <= set(step(name)["env"])
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
            timeout=300,
            env={
                **os.environ,
                "NO_COLOR": "1",
                "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
                "PYTHON": "python-of-the-job",
                "RUNNER_TEMP": str(self.folder),
                "GITHUB_OUTPUT": str(self.output),
                "GITHUB_STEP_SUMMARY": str(self.summary),
                "GITHUB_REPOSITORY": "owner/project",
                **environment,
            },
        )

    def outputs(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.output.read_text().splitlines())


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_the_install_step_installs_the_action_or_what_is_asked_for(runner: Runner) -> None:
    result = runner.run("Install hlo-audit", REQUIREMENTS="", ACTION_PATH="/the action")
    assert result.returncode == 0, result.stderr
    assert runner.log.read_text().splitlines()[-1] == "/the action"
    outputs = runner.outputs()
    assert re.fullmatch(r"py3\.\d+-[\w.]+-[\w.]+", outputs["versions"])
    assert (Path(outputs["folder"]) / "reports").is_dir()
    asked = "hlo-audit==0.1.0\n\njax[tpu]==0.10.2\n"
    runner.run("Install hlo-audit", REQUIREMENTS=asked, ACTION_PATH="/the action")
    assert runner.log.read_text().splitlines()[-2:] == ["hlo-audit==0.1.0", "jax[tpu]==0.10.2"]


def audit(runner: Runner, *, programs: str, **environment: str) -> Any:
    reports = runner.folder / "reports"
    reports.mkdir(exist_ok=True)
    given = {"BUDGETS": "", "ARGUMENTS": "", "ANNOTATE": "true", **environment}
    cache = str(runner.folder / "cache")
    return runner.run(
        "Audit", PROGRAMS=programs, REPORTS=str(reports), HLO_AUDIT_CACHE_DIR=cache, **given
    )


def test_the_audit_step_reports_and_passes_on_the_exit_code(
    runner: Runner, dumps: Callable[[str], Path]
) -> None:
    dump = dumps("lm_head_versions") / "jax-0.12.0-explicit"
    result = audit(
        runner,
        programs=f"\n{dump}\n",
        BUDGETS="relayout-copy=3\nmissed-reduce-scatter=0\n",
        ARGUMENTS="--select=HLA002\n--select=missed-reduce-scatter\n",
    )
    assert result.returncode == 0, result.stderr
    outputs = runner.outputs()
    assert (outputs["exit-code"], outputs["reported"]) == ("1", "true")
    reports = Path(outputs["report-dir"])
    assert sorted(path.name for path in reports.iterdir()) == [
        *("report.github.txt", "report.json", "report.md", "report.sarif", "report.xml")
    ]
    lines = result.stdout.splitlines()
    token = lines[0].removeprefix("::stop-commands::")
    end = lines.index(f"::{token}::")
    assert len(token) > 30
    assert "gate failed" in lines[:end]
    assert lines[end + 1].startswith("::error title=hlo-audit%3A gate failed::")
    assert runner.run("Write the job summary", REPORT=str(reports / "report.md")).returncode == 0
    assert "gate failed" in runner.summary.read_text()
    assert runner.run("Pass on the verdict", CODE="1").returncode == 1
    quiet = audit(runner, programs=str(dump), ANNOTATE="false")
    assert "::error" not in quiet.stdout


def test_input_that_is_wrong_leaves_no_report(runner: Runner) -> None:
    result = audit(runner, programs="no/such/dump")
    assert result.returncode == 0
    assert runner.outputs()["exit-code"] == "2"
    assert "reported" not in runner.outputs()


def test_the_reports_of_shards_are_merged(runner: Runner, dumps: Callable[[str], Path]) -> None:
    names = ("cpu-auto", "cpu-explicit")
    programs = "\n".join(str(dumps("lm_head_platforms") / name) for name in names)
    for index in (1, 2):
        arguments = f"--shard={index}/2\n--exit-zero\n"
        sharded = audit(runner, programs=programs, ARGUMENTS=arguments, BUDGETS="HLA001=0")
        assert runner.outputs()["exit-code"] == "0", sharded.stderr
        folder = runner.folder / "shards" / f"hlo-audit {index}"
        folder.mkdir(parents=True)
        shutil.copy(runner.folder / "reports" / "report.json", folder)
    merged = audit(runner, programs="", MERGE="shards/*/report.json\n", BUDGETS="HLA001=0")
    assert runner.outputs()["exit-code"] == "1", merged.stderr
    assert "gate failed" in merged.stdout
    assert "cpu-explicit" in (runner.folder / "reports" / "report.md").read_text()
    missing = audit(runner, programs="", MERGE="elsewhere/*.json")
    assert runner.outputs()["exit-code"] == "2"
    assert "there is no report elsewhere/*.json" in missing.stderr


@pytest.mark.parametrize("found", ["", "11\n12"])
def test_the_comment_is_made_once_and_then_edited(runner: Runner, found: str) -> None:
    log = shlex.quote(str(runner.log))
    runner.stand_in(
        "gh",
        f'if [[ "$*" == *--jq* ]]; then printf "%s" {shlex.quote(found)}\n'
        f'else printf "%s\\n" "$@" >> {log}; cat "${{@: -1:1}}" 2>/dev/null || true; fi',
    )
    report = runner.folder / "report.md"
    report.write_text("the report\n")
    result = runner.run(
        "Comment on the pull request",
        REPORT=str(report),
        PULL_REQUEST="7",
        CATEGORY='a --> b"$(touch x)',
        GH_TOKEN="none",
    )
    assert result.returncode == 0, result.stderr
    called = runner.log.read_text()
    if found:
        assert "PATCH\nrepos/owner/project/issues/comments/11\n" in called
    else:
        assert "POST\nrepos/owner/project/issues/7/comments\n" in called
    (field,) = (line for line in called.splitlines() if line.startswith("body=@"))
    assert Path(field.removeprefix("body=@")).read_text() == (
        "<!-- hlo-audit: a -- btouch x -->\nthe report\n"
    )
    assert not (runner.folder / "x").exists()


def test_a_token_that_may_not_comment_does_not_fail_the_job(runner: Runner) -> None:
    runner.stand_in("gh", "exit 1")
    report = runner.folder / "report.md"
    report.write_text("the report\n")
    result = runner.run(
        "Comment on the pull request",
        REPORT=str(report),
        PULL_REQUEST="7",
        CATEGORY="hlo-audit",
        GH_TOKEN="none",
    )
    assert result.returncode == 0
    assert result.stdout.startswith("::notice")


# -- the hook of pre-commit


def hook() -> dict[str, Any]:
    (one,) = yaml.safe_load((TOP / ".pre-commit-hooks.yaml").read_text())
    assert set(one) == {
        *("id", "name", "description", "language", "entry", "files", "types", "require_serial")
    }
    return dict(one)


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("module_0000.jit_step.cl_1004524046.after_codegen.txt", True),
        ("dumps/module_0001.jit_step.sm_9.0_gpu_after_optimizations.txt", False),
        ("dumps/module_0001.jit_step.after_optimizations.txt.gz", True),
        ("a/step.hlo", True),
        ("a/step.hlo.pb.gz", True),
        ("module_0000.jit_step.0007.simplification.after_a.before_b.txt", False),
        ("notes.txt", False),
        ("requirements.txt", False),
    ],
)
def test_the_hook_takes_final_modules(path: str, taken: bool) -> None:
    assert bool(re.search(hook()["files"], path)) is taken


def test_the_hook_holds_a_file_against_a_budget(dumps: Callable[[str], Path]) -> None:
    (path,) = (dumps("lm_head_versions") / "jax-0.12.0-explicit").glob("*.after_codegen.txt")
    entry = shlex.split(hook()["entry"])
    assert entry[0] == "hlo-audit"
    command = [sys.executable, "-m", "hlo_audit", *entry[1:], "--max", "relayout-copy=3"]
    result = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "HLA002 is 4, at most 3" in result.stdout


# -- the documents


def test_the_documented_workflow_fits_the_action() -> None:
    workflow = next(block for block in blocks("yaml") if "on:\n  pull_request" in block)
    read = yaml.safe_load(workflow)
    (job,) = read["jobs"].values()
    (use,) = (one for one in job["steps"] if "/hlo-audit@" in one.get("uses", ""))
    assert set(use["with"]) <= set(ACTION["inputs"])
    assert use["with"]["upload-sarif"] == use["with"]["comment"] == "true"
    assert job["permissions"] == {
        "contents": "read",
        "security-events": "write",
        "pull-requests": "write",
    }
    assert "relayout-copy=0" in use["with"]["max"].split()
    for name in re.findall(r"steps\.audit\.outputs\.([\w-]+)", workflow):
        assert name in ACTION["outputs"]
    for argument in use["with"]["args"].split():
        assert argument.partition("=")[0] in OPTIONS
    rules = {budget.partition("=")[0] for budget in use["with"]["max"].split()}
    assert rules <= set(completion.rules())


def test_the_workflow_of_shards_fits_the_action() -> None:
    (workflow,) = (block for block in blocks("yaml") if "--shard=" in block)
    jobs = yaml.safe_load(workflow)["jobs"]
    for job in jobs.values():
        (use,) = (one for one in job["steps"] if "/hlo-audit@" in one.get("uses", ""))
        assert set(use["with"]) <= set(ACTION["inputs"])
        for argument in use["with"].get("args", "").splitlines():
            assert argument.partition("=")[0] in OPTIONS
    shards = jobs["shard"]["strategy"]["matrix"]["shard"]
    assert f"matrix.shard }}}}/{len(shards)}" in workflow
    assert shards == list(range(1, len(shards) + 1))
    (uploaded,) = (one for one in jobs["shard"]["steps"] if "upload-artifact" in one["uses"])
    (taken,) = (one for one in jobs["merge"]["steps"] if "download-artifact" in one["uses"])
    assert uploaded["with"]["name"].startswith(taken["with"]["pattern"].removesuffix("*"))


def test_every_yaml_block_parses_and_the_hook_in_one_exists() -> None:
    read = [yaml.safe_load(block) for block in blocks("yaml")]
    (hooks,) = (one for one in read if "repos" in one)
    (repository,) = hooks["repos"]
    assert [one["id"] for one in repository["hooks"]] == [hook()["id"]]


def test_every_option_in_the_document_exists() -> None:
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", DOCUMENT))
    assert {"--output", "--format", "--max"} <= used
    assert used <= OPTIONS


def test_every_format_stands_in_the_document() -> None:
    for format_ in FORMATS:
        assert f"| `{format_}` |" in DOCUMENT


# -- completion in the shell


def complete(*words: str, **environment: str) -> list[str]:
    """What bash is offered for the last of ``words``."""
    result = subprocess.run(
        [sys.executable, "-m", "hlo_audit"],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "_HLO_AUDIT_COMPLETE": "bash_complete",
            "COMP_WORDS": shlex.join(["hlo-audit", *words]),
            "COMP_CWORD": str(len(words)),
            **environment,
        },
    )
    return [line.partition(",")[2] for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ch"], ["check"]),
        (["check", "--select", "relay"], ["relayout-copy"]),
        (["check", "--ignore", "HLA00"], [n for n in completion.rules() if n.startswith("HLA00")]),
        (["check", "--max", "missed"], ["missed-reduce-scatter=0"]),
        (["check", "--rule-option", "relayout"], ["relayout-copy.min_bytes=65536"]),
        (["check", "--topology", "v6"], [n for n in completion.topologies() if n.startswith("v6")]),
        (["check", "lm-head", "--layout", "vocab"], ["vocab-embed", "vocab-parallel"]),
        (["check", "lm-head", "--set", "embe"], ["embed=512"]),
        (["check", "--mode", "e"], ["explicit"]),
        (["check", "--format", "s"], ["sarif"]),
        (["check", "--output", "ju"], ["ju", "junit=report.xml"]),
        (["check", "lm-h"], ["lm-h", "lm-head"]),
        (["explain", "unfold"], ["unfolded-transpose"]),
        (["prove", "lm-"], ["lm-head"]),
        (["lower", "lm-"], ["lm-head"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_names_are_completed(words: list[str], offered: list[str]) -> None:
    assert complete(*words) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell: str) -> None:
    assert f"_HLO_AUDIT_COMPLETE={shell}_source hlo-audit" in DOCUMENT
    result = subprocess.run(
        [sys.executable, "-m", "hlo_audit"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "_HLO_AUDIT_COMPLETE": f"{shell}_source"},
    )
    assert f"_HLO_AUDIT_COMPLETE={shell}_complete" in result.stdout
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=result.stdout, text=True, check=False)
        assert checked.returncode == 0


def test_completion_imports_no_jax() -> None:
    code = (
        "import sys\n"
        "from hlo_audit.completion import layouts, settings, topologies, rules_and_models\n"
        "assert settings(['lm-head']) and layouts([]) and topologies() and rules_and_models()\n"
        "heavy = {'jax', 'jaxlib', 'numpy', 'pandas', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_completed_topology_can_be_compiled_for() -> None:
    from hlo_audit.topology import parse_tpu_topology

    for name in completion.topologies():
        parse_tpu_topology(name)
