"""Proofs for the terminal: what each fix does on each target, the numerics, and which is best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hlo_audit._version import __version__
from hlo_audit.proof import Best, Proof, ProofReport, Run, Side
from hlo_audit.report.wording import format_bytes, plain

_VERDICTS = {
    "clears": ("clears", "green"),
    "does-not-clear": ("does not clear", "red"),
    "nothing-to-clear": ("nothing to clear", "dim"),
    "not-counted": ("not counted", "dim"),
    "refused": ("refused", "dim"),
    "failed": ("not compiled", "bold red"),
}

_INPUTS = "exact inputs: no sum rounds, so that its order cannot matter; random: normal floats"


def print_proof(
    console: Console, report: ProofReport, environment: Mapping[str, str | None]
) -> None:
    """Print the proofs by target, the numerics, the best fix for each target, and the verdict.

    Args:
        environment: see :func:`hlo_audit.report.environment`.
    """
    found = [f"{name} {version}" for name, version in environment.items() if version]
    console.print(Text(f"hlo-audit {__version__}  " + "  ".join(found), style="dim"))
    for model, proofs in groupby(report.proofs, key=lambda proof: proof.fix.model):
        console.print()
        settings = "  ".join(f"{k}={v}" for k, v in report.plan.settings[model].items())
        flags = "".join(f"  --xla-flag {k}={v}" for k, v in report.plan.xla_flags.items())
        console.print(Text(plain(model + flags), style="bold"))
        console.print(Text(plain(settings), style="dim"))
        for _, on_target in groupby(proofs, key=lambda p: (p.topology, p.mode, p.fix.before)):
            console.print()
            for block in _target(list(on_target)):
                console.print(block)
    for block in _numerics(report.runs):
        console.print(block)
    console.print()
    console.print(Text("best fix, by estimated cycles", style="bold"))
    console.print(_indented(_best_table(report.best), 2))
    console.print()
    console.print(_verdict(report))


def _indented(renderable: RenderableType, by: int) -> Padding:
    return Padding(renderable, (0, 0, 0, by), expand=False)


def _target(proofs: Sequence[Proof]) -> Iterator[RenderableType]:
    """What each fix does on one topology in one mode."""
    first = proofs[0]
    where = _place(first)
    before = next((proof.before for proof in proofs if proof.before), None)
    cost = _cycles(before) if before else ""
    yield Text.assemble((plain(f"{where}  {first.mode}"), "bold"), f"  {first.fix.before}{cost}")
    by_fix: dict[str, list[Proof]] = {}
    for proof in proofs:
        by_fix.setdefault(proof.fix.name, []).append(proof)
    for name, of_fix in by_fix.items():
        yield _indented(Text.assemble((name, "bold"), _cost(of_fix)), 2)
        yield _indented(_rules_table(of_fix), 4)
        for line in _remarks(of_fix):
            yield _indented(line, 4)


def _place(part: Proof | Best) -> str:
    return f"{part.topology} CPU devices" if part.platform == "cpu" else part.topology


def _cycles(side: Side) -> str:
    return "" if side.estimated_cycles is None else f"  {side.estimated_cycles:,} est. cycles"


def _cost(proofs: Sequence[Proof]) -> str:
    sides = next(((p.before, p.after) for p in proofs if p.before and p.after), None)
    if sides is None:
        return ""
    before, after = sides
    if before.estimated_cycles is None or after.estimated_cycles is None:
        return ""
    saved = _saved(before.estimated_cycles - after.estimated_cycles, before.estimated_cycles)
    return f"{_cycles(after)}, {saved}"


def _saved(cycles: int, of: int) -> str:
    if cycles == 0:
        return "the same"
    return f"{abs(cycles):,} ({abs(cycles) / of:.1%}) {'less' if cycles > 0 else 'more'}"


def _rules_table(proofs: Sequence[Proof]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for width in (28, 6, 13):
        table.add_column(min_width=width)
    table.add_column()
    for proof in proofs:
        words, style = _VERDICTS[proof.verdict]
        if proof.failures:
            style = "bold red"
        elif proof.claims:
            words += ", as claimed"
        findings, moved = "-", "-"
        if proof.before and proof.after:
            findings = _change(str(proof.before.findings), str(proof.after.findings))
            if proof.before.bytes or proof.after.bytes:
                moved = _change(format_bytes(proof.before.bytes), format_bytes(proof.after.bytes))
        row = (f"{proof.rule.code} {proof.rule.slug}", findings, moved)
        table.add_row(*(Text(cell) for cell in row), Text(words, style=style))
    return table


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"


def _remarks(proofs: Sequence[Proof]) -> Iterator[Text]:
    """Each once: what the layout brings, what it says of where it does not help, what is wrong."""
    brings = {code: more for proof in proofs for code, more in proof.brings.items()}
    # A rule with a row of its own shows that there.
    for code in (code for code in brings if code not in {proof.rule.code for proof in proofs}):
        yield Text(f"brings {brings[code]} more of {code}", style="yellow")
    no_help = [p.fix.cost for p in proofs if p.verdict == "does-not-clear" or _is_slower(p)]
    if no_help:
        yield Text(f"cost: {no_help[0]}", style="dim")
    for reason in dict.fromkeys(proof.reason for proof in proofs if proof.reason):
        yield Text(plain(reason), style="dim")
    for error in dict.fromkeys(str(proof.error) for proof in proofs if proof.error):
        yield Text(plain(error), style="bold red")
    for failure in dict.fromkeys(failure for proof in proofs for failure in proof.failures):
        yield Text(f"fails: {plain(failure)}", style="bold red")


def _is_slower(proof: Proof) -> bool:
    if proof.before is None or proof.after is None:
        return False
    return (proof.after.estimated_cycles or 0) > (proof.before.estimated_cycles or 0)


def _best_table(bests: Sequence[Best]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    several = len({best.model for best in bests}) > 1
    for best in bests:
        fix = best.fix
        if fix is None or fix.estimated_cycles is None or fix.saved_cycles is None:
            answer = Text(f"none: {plain(best.reason)}", style="dim")
        else:
            saved = _saved(fix.saved_cycles, best.estimated_cycles or 1)
            answer = Text.assemble(
                (fix.layout, "bold green"), f"  {fix.estimated_cycles:,}, {saved}"
            )
            if fix.leaves:
                left = ", ".join(f"{count} {code}" for code, count in fix.leaves.items())
                answer.append(f"; leaves {left}")
            as_fast = [
                other.layout
                for other in best.candidates[1:]
                if other.estimated_cycles == fix.estimated_cycles
            ]
            if as_fast:
                answer.append(f"; {' and '.join(as_fast)} costs as much")
        name = f"{best.model}  " if several else ""
        table.add_row(plain(f"{name}{_place(best)}"), best.mode, answer)
    return table


def _numerics(runs: Sequence[Run]) -> Iterator[RenderableType]:
    """The numerics of each fix, the modes of one kind of inputs in one line."""
    for (model, devices), of_model in groupby(
        runs, key=lambda run: (run.comparison.model, run.comparison.devices)
    ):
        listed = list(of_model)
        yield Text()
        yield Text(f"numerics of {model}, run on {devices} CPU devices", style="bold")
        sizes = "  ".join(f"{k}={v}" for k, v in listed[0].comparison.settings.items())
        yield _indented(Text(plain(sizes), style="dim"), 2)
        yield _indented(Text(_INPUTS, style="dim"), 2)
        # What is claimed alike, in either mode and of either kind of inputs, is one line.
        claims: dict[tuple[str, float, str], list[Run]] = {}
        for run in listed:
            agreement = run.agreement
            claim = (run.comparison.after, agreement.tolerance, agreement.reason)
            claims.setdefault(claim, []).append(run)
        for alike in claims.values():
            yield _indented(_numerics_line(alike), 2)
            for line in _numerics_remarks(alike):
                yield _indented(line, 4)


def _numerics_line(runs: Sequence[Run]) -> Text:
    agreement = runs[0].agreement
    inputs = " and ".join(dict.fromkeys(run.agreement.inputs for run in runs))
    modes = " and ".join(dict.fromkeys(run.comparison.mode for run in runs))
    line = Text.assemble((runs[0].comparison.after, "bold"), f", {inputs} inputs, {modes}: ")
    if not all(run.passed for run in runs):
        return line.append("fails", style="bold red")
    if any(run.reason for run in runs):
        return line.append("refused", style="dim")
    if all(d.identical for run in runs for d in run.differences.values()):
        line.append("bit for bit", style="green")
    else:
        most = max(d.largest or 0.0 for run in runs for d in run.differences.values())
        line.append(f"at most {most:.1e} apart", style="green")
    if agreement.tolerance:
        line.append(f", claimed {agreement.closely}")
    return line.append(f" ({agreement.reason})", style="dim")


def _numerics_remarks(runs: Sequence[Run]) -> Iterator[Text]:
    for run in runs:
        where = f"{run.comparison.mode}, {run.agreement.inputs}"
        if run.error is not None:
            yield Text(plain(f"{where}: {run.error}"), style="bold red")
        for failure in run.failures:
            yield Text(plain(f"{where}: {failure}"), style="bold red")
    for reason in dict.fromkeys(run.reason for run in runs if run.reason and run.passed):
        yield Text(plain(reason), style="dim")


def _verdict(report: ProofReport) -> Text:
    parts: tuple[Proof | Run, ...] = (*report.proofs, *report.runs)
    failed = sum(len(part.failures) for part in parts)
    lines = []
    if report.errors:
        lines.append(Text(f"{len(report.errors)} could not be compiled or run", style="bold red"))
    if failed:
        lines.append(Text(f"not proven: {failed} claims fail", style="bold red"))
    elif not report.errors:
        claims = sum(proof.claims for proof in report.proofs)
        held = f"proven: {claims} claims to clear hold, and " if claims else ""
        agree = sum(not run.reason for run in report.runs)
        lines.append(Text(f"{held}{agree} runs agree", style="bold green"))
    if not report.plan.claimed:
        words = "only measured: what a fix claims to clear is of the model's own settings"
        lines.append(Text(words, style="dim"))
    return Text("\n").join(lines)
