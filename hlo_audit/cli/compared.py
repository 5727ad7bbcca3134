"""What a check compares with: a baseline file, a git revision, a dump or a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hlo_audit.cli.output import say
from hlo_audit.errors import UsageError

if TYPE_CHECKING:
    from hlo_audit.against import Revision
    from hlo_audit.baseline import Baseline
    from hlo_audit.config import Config
    from hlo_audit.gate import Comparison, Notice
    from hlo_audit.program import Subject
    from hlo_audit.program_audit import ProgramAudit
    from hlo_audit.rule import Rule
    from hlo_audit.suppressions import Suppressor

Audit = Callable[[Sequence["Subject"]], "list[ProgramAudit]"]


def plan_comparison(
    config: Config, *, baseline: Path | None, update: bool, against: str | None, strict: bool
) -> Compared:
    """What the options ask for, over the config; what can be wrong without an audit is told here.

    Raises:
        UsageError: for options that exclude each other, and for what is not there.
    """
    from hlo_audit.baseline import read_baseline

    if against is not None and (baseline is not None or update):
        raise UsageError("--against takes the place of a baseline", hint="give one of them")
    if against is not None:
        other = _find(against)
        return Compared(config, strict, other=other, known=_read_if_report(other))
    path = baseline or config.baseline
    if update and path is None:
        raise UsageError(
            "--update-baseline: which file?", hint="give --baseline FILE, or name it in the config"
        )
    # Read before anything is compiled: what is wrong with it is told at once.
    known = None if path is None or (update and not path.exists()) else read_baseline(path)
    return Compared(config, strict, baseline_path=path, update=update, known=known)


def _find(against: str) -> Path | Revision:
    from hlo_audit.against import find_revision

    if not against:
        raise UsageError("--against is empty", hint="is a variable not set?")
    try:
        there = Path(against).exists()
    except (OSError, ValueError):
        there = False
    return Path(against) if there else find_revision(against, Path.cwd())


def _read_if_report(other: Path | Revision) -> Baseline | None:
    from hlo_audit.against import is_report, read_report

    return read_report(other) if isinstance(other, Path) and is_report(other) else None


@dataclass
class Compared:
    """How the programs of a run are compared.

    Attributes:
        baseline_path: the baseline file.
        update: whether to write it.
        other: the path or the revision to compare with in its place.
        known: what the baseline file, or the report at the path, holds; ``None`` where it is to be
            written first, or compiled, or read from a dump.
        notices: what is to be told of the other side; filled by :meth:`against`.
    """

    config: Config
    strict: bool
    baseline_path: Path | None = None
    update: bool = False
    other: Path | Revision | None = None
    known: Baseline | None = None
    notices: list[Notice] = field(default_factory=list)

    @property
    def has_baseline(self) -> bool:
        """Whether there is something to compare with."""
        return self.baseline_path is not None or self.other is not None

    @property
    def revision(self) -> Revision | None:
        """The revision to compare with, if it is one."""
        return None if isinstance(self.other, Path) else self.other

    def refuse(self, subjects: Sequence[Subject]) -> None:
        """Refuse programs that have no other side, before anything is compiled.

        Raises:
            UsageError: for one that no revision has.
        """
        if self.revision is not None:
            from hlo_audit.against import as_of

            as_of(subjects, self.revision, self.revision.top)

    def against(
        self,
        audits: Sequence[ProgramAudit],
        subjects: Sequence[Subject],
        audit: Audit,
        *,
        whole: bool,
        quiet: bool,
    ) -> Comparison | None:
        """Read or make the other side; write the baseline, where that is asked for.

        Args:
            audits: what is found in ``subjects``.
            audit: audits other subjects in the same way.
            whole: whether these are all programs.
            quiet: say nothing on standard error of what is done.

        Raises:
            HloAuditError: for what cannot be read or compiled.
        """
        if self.baseline_path is not None:
            return self._baseline(audits, self.baseline_path, whole=whole, quiet=quiet)
        if isinstance(self.other, Path):
            return self._path(self.other, subjects, audit)
        if self.other is not None:
            if not quiet:
                say(f"now as of {self.other.name}:")
            return self._revision(self.other, subjects, audit)
        return None

    def _baseline(
        self, audits: Sequence[ProgramAudit], path: Path, *, whole: bool, quiet: bool
    ) -> Comparison:
        from hlo_audit.baseline import Baseline, entry_of, updated, write_baseline
        from hlo_audit.gate import Comparison

        baseline = Baseline(str(path)) if self.known is None else self.known
        if self.update:
            audited = [audit for audit in audits if audit.error is None]
            current = [entry_of(audit, path.parent) for audit in audited]
            all_there = whole and len(audited) == len(audits)
            baseline, changes = updated(baseline, current, whole=all_there)
            changed = write_baseline(baseline, path)
            if not quiet:
                for change in changes:
                    say(f"{path}: {change}")
                if not changed:
                    say(f"{path} is up to date")
        return Comparison(baseline, path.parent, strict=self.strict, whole=whole)

    def _path(self, path: Path, subjects: Sequence[Subject], audit: Audit) -> Comparison:
        from hlo_audit.against import alike, entries_of
        from hlo_audit.gate import Comparison
        from hlo_audit.program import Recorded

        baseline = self.known
        if baseline is None:
            suppressor = suppressor_of(self.config, self._rules(), Path.cwd())
            baseline = entries_of(suppressor.apply(audit([Recorded(path)])), str(path))
        roots = [subject.path for subject in subjects if isinstance(subject, Recorded)]
        return Comparison(
            baseline,
            pair=alike(baseline, roots, path),
            strict=self.strict,
            source="dump" if self.known is None else "report",
        )

    def _revision(
        self, revision: Revision, subjects: Sequence[Subject], audit: Audit
    ) -> Comparison:
        from hlo_audit.against import as_of, checked_out, refuse_failed, standing_in
        from hlo_audit.baseline import Baseline, entry_of
        from hlo_audit.gate import Comparison, Notice

        with checked_out(revision) as worktree:
            lowerings = as_of(subjects, revision, worktree)
            with standing_in(worktree, revision.top):
                audits = audit(lowerings)
            suppressor = suppressor_of(self.config, self._rules(), worktree)
            audits = suppressor.apply(audits)
        entries = []
        for one in audits:
            if one.error is not None:
                refuse_failed(one.error, revision.name)
                message = f"{one.label}: {revision.name} does not have this program: {one.error}"
                self.notices.append(Notice("not-in-baseline", message, one.label))
            else:
                entries.append(entry_of(one, Path()))
        baseline = Baseline(revision.name, tuple(entries))
        return Comparison(baseline, strict=self.strict, source="revision")

    def _rules(self) -> Sequence[Rule]:
        from hlo_audit.rules import ALL_RULES

        return ALL_RULES


def suppressor_of(config: Config, rules: Sequence[Rule], folder: Path) -> Suppressor:
    """What suppresses findings in the repository around ``folder``."""
    from hlo_audit.hlo import SourceLocation
    from hlo_audit.report.sources import Repository
    from hlo_audit.suppressions import Suppressor

    repository = Repository.around(folder)

    def locate(line: SourceLocation) -> Path | None:
        place = repository.place(line) if line.file else None
        return repository.root / place.path if place is not None and place.in_repository else None

    return Suppressor(config.suppressions, rules, repository.root, locate)
