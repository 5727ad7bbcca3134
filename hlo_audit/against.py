"""What a run is compared with where there is no baseline file: a git revision, or another report.

A revision is checked out into a temporary worktree, in which the same programs are compiled with
the same options. A path is a dump, an HLO file, or a report that ``--format json`` wrote.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from hlo_audit.baseline import Baseline, Entry, entry_of, entry_of_json
from hlo_audit.ending_signals import ended_by_signals, signals_ignored
from hlo_audit.errors import HloAuditError, UsageError
from hlo_audit.own_json import MOST_REPORT_BYTES, Value, kind_of, parse
from hlo_audit.program import Lowering, Subject
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.whole_file import read_text_within

# What git sets for its hooks, and would take for the worktree's own.
_OF_THIS_CHECKOUT = frozenset(
    {
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
        "GIT_COMMON_DIR",
        "GIT_DIR",
        "GIT_INDEX_FILE",
        "GIT_NAMESPACE",
        "GIT_OBJECT_DIRECTORY",
        "GIT_PREFIX",
        "GIT_WORK_TREE",
    }
)


@dataclass(frozen=True)
class Revision:
    """A commit of the repository around the working directory.

    Attributes:
        top: the folder of the checkout.
        commit: its hash.
        name: as it was asked for, with the start of the hash.
    """

    top: Path
    commit: str
    name: str


def find_revision(name: str, folder: Path) -> Revision:
    """The commit that ``name`` stands for in the repository around ``folder``.

    Raises:
        UsageError: where there is no git, no repository or no such revision.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        raise UsageError(
            f"--against {name}: there is no such file or folder, and this is no git repository",
            hint="give a revision inside of a repository, or a dump or a JSON report",
        )
    # As git reads it, a leading dash included.
    wanted = f"{name}^{{commit}}"
    commit = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", wanted)
    if commit is None:
        raise UsageError(
            f"--against {name}: there is no such revision, file or folder",
            hint="a shallow clone has few revisions: git fetch --unshallow",
        )
    return Revision(Path(top), commit, f"{name} ({commit[:10]})")


@contextlib.contextmanager
def checked_out(revision: Revision) -> Iterator[Path]:
    """A temporary worktree of a revision; it is removed whatever ends the block, signals included.

    Raises:
        UsageError: where git cannot make it.
    """
    with ended_by_signals():
        outer = _folder_for(revision)
        worktree = outer / revision.top.name
        try:
            added = _run_git(
                revision.top,
                *("-c", f"core.hooksPath={os.devnull}"),
                *("worktree", "add", "--detach", "--quiet", str(worktree), revision.commit),
            )
            if added.returncode:
                reason = " ".join(added.stderr.split())[:200]
                raise UsageError(f"git cannot check out {revision.name}: {reason}")
            yield worktree
        finally:
            with signals_ignored():
                _run_git(revision.top, "worktree", "remove", "--force", str(worktree))
                shutil.rmtree(outer, ignore_errors=True)
                _run_git(revision.top, "worktree", "prune")


def _folder_for(revision: Revision) -> Path:
    """A new folder; of one name for one commit, so that what is compiled there is found again in
    the cache, which goes by the paths of the sources."""
    digest = sha256(f"{revision.top}\0{revision.commit}".encode("utf-8", "replace")).hexdigest()
    folder = Path(tempfile.gettempdir()).resolve() / f"hlo-audit-{digest[:16]}"
    try:
        folder.mkdir(mode=0o700)
    except OSError:  # another run is there
        return Path(tempfile.mkdtemp(prefix="hlo-audit-")).resolve()
    return folder


def _git(folder: Path, *arguments: str) -> str | None:
    """The one line that git prints; ``None`` where it fails."""
    done = _run_git(folder, *arguments)
    return done.stdout.strip() if done.returncode == 0 else None


def _run_git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in _OF_THIS_CHECKOUT}
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except FileNotFoundError:
        raise UsageError("git is not installed, which --against needs for a revision") from None


@contextlib.contextmanager
def standing_in(worktree: Path, top: Path) -> Iterator[None]:
    """Work in ``worktree`` as if it were the checkout ``top``: the working directory and the
    folders that Python imports from are moved there, for this process and those that it starts."""
    here = Path.cwd()
    path = list(sys.path)
    there = worktree / here.relative_to(top) if here.is_relative_to(top) else worktree
    if not there.is_dir():  # the revision does not have this folder
        there = worktree
    # Last: a package that is installed from this checkout by an import hook is found there first.
    usual = [str(folder) for folder in (there, worktree, worktree / "src") if folder.is_dir()]
    moved = [_moved(entry or str(here), top, worktree) for entry in path]
    os.chdir(there)
    sys.path[:] = list(dict.fromkeys([*moved, *usual]))
    try:
        yield
    finally:
        sys.path[:] = path
        os.chdir(here)


def _moved(path: str, top: Path, worktree: Path) -> str:
    whole = Path(path).resolve()
    # An environment in the checkout is none of the revision's.
    if not whole.is_relative_to(top) or Path(sys.prefix).resolve() in (whole, *whole.parents):
        return path
    return str(worktree / whole.relative_to(top))


def as_of(subjects: Sequence[Subject], revision: Revision, worktree: Path) -> list[Lowering]:
    """The programs to compile in the worktree.

    Raises:
        UsageError: for one that is no program of the repository.
    """
    lowerings = []
    for subject in subjects:
        if not isinstance(subject, Lowering):
            raise UsageError(
                f"{subject.label} is no program that could be compiled at {revision.name}",
                hint="compare it with another dump: --against PATH",
            )
        where, _, function = subject.build.rpartition(":")
        if where.startswith("hlo_audit."):
            raise UsageError(
                f"{subject.program} is a reference model, the same at every revision",
                hint="give a program of the repository, or --against a dump or a JSON report",
            )
        if Path(where).is_absolute():
            where = _moved(where, revision.top, worktree)
        lowerings.append(replace(subject, build=f"{where}:{function}"))
    return lowerings


# -- paths


def read_report(path: Path) -> Baseline:
    """What a report that ``--format json`` wrote found.

    Raises:
        UsageError: for a file that is none.
    """
    try:
        data = parse(read_text_within(path, MOST_REPORT_BYTES)).value
        if kind_of(data) == "a baseline":
            raise UsageError(f"{path} is a baseline, not a report", hint="give it by --baseline")
        programs = data["programs"]
        entries = tuple(
            entry_of_json(Value(_as_entry(program), f"programs[{number}]"))
            for number, program in enumerate(programs)
            if "error" not in program
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error)[:200] if isinstance(error, ValueError) else type(error).__name__
        raise UsageError(
            f"{path} is no report of hlo-audit: {reason}", hint="--format json writes one"
        ) from None
    return Baseline(str(path), entries)


def is_report(path: Path) -> bool:
    """Whether a file is to be read as a report, and not as HLO."""
    return path.is_file() and path.suffix == ".json"


def _as_entry(program: dict[str, Any]) -> dict[str, Any]:
    """A program of a report, as a baseline has it."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for finding in program["findings"]:
        if finding.get("suppressed") is None:
            groups.setdefault((finding["rule"], finding["fingerprint"]), []).append(finding)
    versions = {name: version for name, version in program["versions"].items() if version}
    return {
        **{
            name: program[name]
            for name in ("program", "mode", "layout", "platform", "topology", "settings")
        },
        "module": None if program["mode"] is not None else program["module"],
        "mesh": program.get("mesh", {}),
        "xla_flags": program["xla_flags"],
        "versions": versions,
        "counts": program["counts"],
        "findings": [
            {
                "rule": rule,
                "fingerprint": fingerprint,
                "count": len(group),
                "bytes": sum(one["bytes"] for one in group if one["bytes"] is not None)
                if any(one["bytes"] is not None for one in group)
                else None,
                "message": group[0]["message"],
            }
            for (rule, fingerprint), group in groups.items()
        ],
    }


def entries_of(audits: Sequence[ProgramAudit], name: str) -> Baseline:
    """What other audits found; a program that could not be audited is not among them.

    Raises:
        HloAuditError: where none could be audited.
    """
    errors = [audit.error for audit in audits if audit.error is not None]
    if errors and len(errors) == len(audits):
        raise errors[0]
    entries = (entry_of(audit, Path()) for audit in audits if audit.error is None)
    return Baseline(name, tuple(entries))


def alike(
    baseline: Baseline, roots: Sequence[Path], baseline_root: Path
) -> Callable[[Sequence[ProgramAudit]], list[Entry | None]]:
    """Pair programs with those of another path, where names cannot be the same.

    By what both say: the same program, compiled in the same way; then, among the rest, the ones
    that are alone in their mode, layout, topology, module and place below the given path; then in
    fewer of them; at last the only two that are left.

    Args:
        roots: the paths that the programs were given as.
        baseline_root: the path of the baseline.

    Returns:
        A function that gives each audit its entry. It raises a :class:`UsageError` where no audit
        has one.
    """

    def pair(audits: Sequence[ProgramAudit]) -> list[Entry | None]:
        current = [entry_of(audit, Path()) for audit in audits]
        pairs: dict[int, Entry] = {}
        left = list(baseline.entries)
        views: tuple[tuple[Callable[[Entry], object], Callable[[Entry], object]], ...] = (
            (lambda e: e.key, lambda e: e.key),
            (
                lambda e: (_described(e), _below(e.program, roots)),
                lambda e: (_described(e), _below(e.program, [baseline_root])),
            ),
            (_described, _described),
            (lambda e: e.module, lambda e: e.module),
            (lambda e: None, lambda e: None),
        )
        for view, baseline_view in views:
            waiting = [number for number in range(len(current)) if number not in pairs]
            of_current = [view(current[number]) for number in waiting]
            of_baseline = [baseline_view(entry) for entry in left]
            for number, seen in zip(waiting, of_current, strict=True):
                if of_current.count(seen) == of_baseline.count(seen) == 1:
                    pairs[number] = left[of_baseline.index(seen)]
            used = {id(entry) for entry in pairs.values()}
            left = [entry for entry in left if id(entry) not in used]
        if audits and not pairs:
            raise UsageError(
                f"{baseline.name} holds no program that could be compared with {audits[0].label}",
                hint="give a dump or a report of the same programs",
            )
        return [pairs.get(number) for number in range(len(current))]

    return pair


def _described(entry: Entry) -> tuple[str | None, ...]:
    return (entry.mode, entry.layout, entry.topology, entry.module)


def _below(program: str, roots: Sequence[Path]) -> str:
    for root in roots:
        with contextlib.suppress(ValueError):
            # Entries name paths as seen from the working directory.
            return Path(program).relative_to(os.path.relpath(root)).as_posix()
    return program


def refuse_failed(error: HloAuditError, name: str) -> None:
    """Let a program that is not there at the other revision be a new one; other errors are told.

    Raises:
        HloAuditError: of the same kind, where the compiler failed.
    """
    if error.exit_code != UsageError.exit_code:
        raise type(error)(f"at {name}: {error.message}", hint=error.hint, log=error.log)
