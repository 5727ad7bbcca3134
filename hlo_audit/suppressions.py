"""Findings that somebody has given a reason to leave: in the config, or on the Python line.

``# hlo-audit: ignore[HLA002] reason`` stands at the end of the line that traced the finding, or of
another line of its statement, or on a line of its own above. Without a rule or a reason it
suppresses nothing, and is reported.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hlo_audit.errors import HloAuditError
from hlo_audit.gate import Notice
from hlo_audit.hlo import SourceLocation
from hlo_audit.program_audit import ProgramAudit, Suppressed
from hlo_audit.rule import Finding, Rule, find_rule

Locate = Callable[[SourceLocation], Path | None]
"""The file of the repository that a line is in; ``None`` for another's."""

_COMMENT = re.compile(r"#\s*hlo-audit:\s*ignore\b\s*(\[[^\]]*\])?\s*(.*)", re.DOTALL)
_MOST_SOURCE_BYTES = 16 << 20


@dataclass(frozen=True)
class Suppression:
    """What is suppressed, and why. A finding is covered where all that is given holds.

    Attributes:
        by: whether it stands in the config or on a source line.
        where: its own file and line, for a reader.
        reason: why.
        rules: codes; empty for all rules.
        fingerprint: of the finding; ``None`` for any.
        op_name, source, program: patterns, in which ``*`` stands for any text; ``None`` for any.
            ``source`` is of a file's path from the repository's top, or of such a path and a
            function, as ``model.py:apply``.
        lines: of a comment, the file and the lines that it is for.
    """

    by: Literal["config", "source"]
    where: str
    reason: str
    rules: frozenset[str] = frozenset()
    fingerprint: str | None = None
    op_name: str | None = None
    source: str | None = None
    program: str | None = None
    lines: tuple[Path, range] | None = None

    def covers(self, audit: ProgramAudit, finding: Finding, frames: Sequence[Frame]) -> bool:
        """Whether a finding is one of these.

        Args:
            frames: the lines of the repository that traced it.
        """
        if self.rules and finding.rule not in self.rules:
            return False
        if self.fingerprint is not None and finding.fingerprint != self.fingerprint:
            return False
        if self.lines is not None:
            file, lines = self.lines
            return any(frame.file == file and frame.line in lines for frame in frames)
        names = {name for frame in frames for name in (frame.name, frame.with_function)}
        return (
            _fits(self.op_name, [finding.op_name])
            and _fits(self.source, names)
            and _fits(self.program, [audit.program, audit.label])
        )


UseState = Literal["used", "unused", "bad"]


@dataclass(frozen=True)
class Use:
    """What a suppression was good for.

    Attributes:
        by, where: see :class:`Suppression`.
        state: ``unused`` where its rules were applied and its lines traced, and it suppressed
            nothing; ``bad`` for a comment that cannot be read.
        message: what is wrong; ``""`` for one that was used.
        number: tells those of one line apart.
    """

    by: Literal["config", "source"]
    where: str
    state: UseState
    message: str = ""
    number: int = 0

    @property
    def order(self) -> tuple[bool, str, str, int, int]:
        """Those that cannot be read first, then by place."""
        file, _, text = self.where.rpartition(":")
        line = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0
        return (self.state != "bad", self.by, file, line, self.number)


def notices_of(uses: Iterable[Use], *, whole: bool, strict: bool) -> Iterator[Notice]:
    """What is to be put right: comments that cannot be read, then what nobody needs any more.

    Args:
        uses: of one run, or of all runs that have a part of the programs each.
        whole: whether these are of all programs.
        strict: whether the gate fails for it.
    """
    uses = list(uses)
    used = {(one.where, one.number) for one in uses if one.state == "used"}
    for one in sorted(dict.fromkeys(uses), key=lambda one: one.order):
        if one.state == "bad":
            yield Notice("bad-suppression", f"{one.where}: {one.message}", fails=strict)
        elif one.state == "unused" and whole and (one.where, one.number) not in used:
            yield Notice("unused-suppression", f"{one.where}: {one.message}", fails=strict)


@dataclass(frozen=True)
class Frame:
    """A line of the repository: ``name`` is its file's path from the top, with ``/``."""

    file: Path
    name: str
    line: int
    function: str

    @property
    def with_function(self) -> str:
        """``model.py:apply``."""
        return f"{self.name}:{self.function}"


def _fits(pattern: str | None, texts: Iterable[str]) -> bool:
    if pattern is None:
        return True
    wanted = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
    return any(wanted.fullmatch(text) for text in texts)


@dataclass
class Suppressor:
    """Takes suppressed findings out of audits, and tells what suppresses nothing.

    Attributes:
        configured: those of the config.
        rules: all rules, by which comments are read.
        top: the folder that names of files are relative to.
        locate: finds the file of a line.
    """

    configured: Sequence[Suppression]
    rules: Sequence[Rule]
    top: Path
    locate: Locate
    _comments: dict[Path, list[Suppression | Use]] = field(default_factory=dict)
    _used: set[int] = field(default_factory=set)
    _frames: dict[SourceLocation, Frame | None] = field(default_factory=dict)

    def apply(self, audits: Iterable[ProgramAudit]) -> list[ProgramAudit]:
        """The audits, with what is suppressed set apart."""
        return [self._apply(audit) for audit in audits]

    def _apply(self, audit: ProgramAudit) -> ProgramAudit:
        for line in audit.traced:
            self._frame(line)
        kept: list[Finding] = []
        suppressed: list[Suppressed] = []
        for finding in audit.findings:
            lines = [*([finding.source] if finding.source else []), *finding.stack]
            frames = [frame for frame in map(self._frame, lines) if frame is not None]
            known = [*self.configured, *self._comments_in(frame.file for frame in frames)]
            covering = [one for one in known if one.covers(audit, finding, frames)]
            self._used.update(map(id, covering))
            if covering:
                first = covering[0]
                suppressed.append(Suppressed(finding, first.by, first.reason, first.where))
            else:
                kept.append(finding)
        return replace(audit, findings=tuple(kept), suppressed=tuple(suppressed))

    def uses(self, audits: Sequence[ProgramAudit], *, whole: bool) -> list[Use]:
        """What each suppression was good for.

        Args:
            audits: those that were given to :meth:`apply`, before or after.
            whole: whether they are, maybe with those of other runs, all programs: else none is
                unused.
        """
        traced: dict[Path, set[int]] = {}
        for frame in self._frames.values():
            if frame is not None:
                traced.setdefault(frame.file, set()).add(frame.line)
                self._read(frame.file)
        comments = [one for found in self._comments.values() for one in found]
        uses = [one for one in comments if isinstance(one, Use)]
        applied = {code for audit in audits for code, n in audit.counts.items() if n is not None}
        in_source = (one for one in comments if isinstance(one, Suppression))
        numbers: Counter[str] = Counter()
        for one in (*self.configured, *in_source):
            number = numbers[one.where]
            numbers[one.where] += 1
            what = ", ".join(sorted(one.rules)) or "finding"
            message = f"suppresses nothing: no {what} is there any more"
            if id(one) in self._used:
                uses.append(Use(one.by, one.where, "used", number=number))
            elif not whole or (one.rules and not one.rules & applied):
                continue
            elif one.lines is None or not traced[one.lines[0]].isdisjoint(one.lines[1]):
                uses.append(Use(one.by, one.where, "unused", message, number))
        return sorted(uses, key=lambda one: one.order)

    def _frame(self, line: SourceLocation) -> Frame | None:
        if line not in self._frames:
            file = self.locate(line)
            self._frames[line] = (
                None if file is None else Frame(file, self._name(file), line.line, line.function)
            )
        return self._frames[line]

    def _name(self, file: Path) -> str:
        return (file.relative_to(self.top) if file.is_relative_to(self.top) else file).as_posix()

    def _comments_in(self, files: Iterable[Path]) -> Iterator[Suppression]:
        for file in dict.fromkeys(files):
            yield from (one for one in self._read(file) if isinstance(one, Suppression))

    def _read(self, file: Path) -> list[Suppression | Use]:
        if file not in self._comments:
            self._comments[file] = list(self._comments_of(file))
        return self._comments[file]

    def _comments_of(self, file: Path) -> Iterator[Suppression | Use]:
        for number, lines, comment in find_comments(_text(file)):
            where = f"{self._name(file)}:{number}"
            codes, reason = comment
            try:
                if not codes:
                    raise ValueError("it names no rule: write ignore[HLA002] reason")
                if not reason:
                    raise ValueError("it gives no reason: write ignore[HLA002] reason")
                rules = frozenset(find_rule(self.rules, code).code for code in codes)
            except (ValueError, HloAuditError) as error:
                yield Use("source", where, "bad", f"suppresses nothing: {error}")
            else:
                yield Suppression("source", where, reason, rules, lines=(file, lines))


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > _MOST_SOURCE_BYTES:
            return ""
        with tokenize.open(file) as source:
            return source.read()
    except (OSError, SyntaxError, ValueError):
        return ""


def find_comments(text: str) -> Iterator[tuple[int, range, tuple[tuple[str, ...], str]]]:
    """The line of each suppressing comment of a Python text, the lines that it is for, and its
    rules and its reason, as they are written.

    It is for the statement that it stands in, or for the next where it stands alone. A text that
    is no Python has none from where that shows.
    """
    if "hlo-audit" not in text:
        return
    waiting: list[tuple[int, tuple[tuple[str, ...], str]]] = []
    first: int | None = None
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                found = _COMMENT.match(token.string)
                if found is not None:
                    codes = [code.strip() for code in (found[1] or "")[1:-1].split(",")]
                    comment = (tuple(filter(None, codes)), found[2].strip())
                    waiting.append((token.start[0], comment))
            elif token.type == tokenize.NEWLINE:
                lines = range(first or token.start[0], token.start[0] + 1)
                yield from ((number, lines, comment) for number, comment in waiting)
                waiting, first = [], None
            elif token.type not in _NO_STATEMENT and first is None:
                first = token.start[0]
    except (tokenize.TokenError, SyntaxError):
        return


_NO_STATEMENT = (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
