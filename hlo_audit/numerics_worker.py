"""The process that runs models for real: ``python -m hlo_audit.numerics_worker RESULTS_FD``.

:mod:`hlo_audit.numerics` starts it with as many CPU devices as the models take. It reads a JSON
list of comparisons from standard input and answers each, in order, with a JSON line on a pipe of
its own, so that nothing a program prints can break in: ``{"differences": {inputs: {array: ...}}}``,
or ``{"error": ..., "layout": ...}`` with the layout that could not be run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hlo_audit.compile_worker import (
    as_audit_error,
    end_with_parent,
    load_build,
    make_mesh,
    resolve_mesh,
    write_no_core_files,
)
from hlo_audit.lazy_import import lazy_import
from hlo_audit.program import Lowering, Mode, Setting

jax = lazy_import("jax")
numpy = lazy_import("numpy")


@dataclass(frozen=True)
class Comparison:
    """Two layouts of a model to be run on the same inputs.

    Attributes:
        model: its name.
        run: import path of the function that runs it (see :class:`hlo_audit.program.Model`).
        mode: the type of every mesh axis.
        before: the layout that shows the fault.
        after: the layout after the fix.
        settings: passed to ``run`` by keyword.
        mesh: axis name -> size; one may be ``-1``.
        devices: the number of CPU devices.
    """

    model: str
    run: str
    mode: Mode
    before: str
    after: str
    settings: Mapping[str, Setting]
    mesh: Mapping[str, int]
    devices: int

    @property
    def label(self) -> str:
        """Names it among others, such as ``lm-head/explicit/vocab-embed``."""
        return f"{self.model}/{self.mode}/{self.after}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """How far one array of the two layouts is apart.

    Attributes:
        identical: bit for bit, the sign of zero and the dtype included.
        largest: the largest absolute difference, as a share of the largest magnitude in the array
            before; ``None`` where that is no number, or the shapes differ.
    """

    identical: bool
    largest: float | None


class _Failed(Exception):
    """What a layout raised when it was run."""

    def __init__(self, layout: str, error: BaseException) -> None:
        super().__init__(layout)
        self.layout = layout
        self.error = error


Results = Mapping[str, Mapping[str, Any]]
"""Kind of inputs -> array name -> array."""


def main(arguments: Sequence[str]) -> None:
    """Answer each comparison of standard input."""
    results_fd = int(arguments[0])
    os.set_inheritable(results_fd, False)
    end_with_parent()
    write_no_core_files()
    comparisons = [Comparison(**data) for data in json.load(sys.stdin)]
    ran: dict[str, Results] = {}
    for comparison in comparisons:
        line = memoryview(json.dumps(_answer(comparison, ran)).encode() + b"\n")
        while line:
            line = line[os.write(results_fd, line) :]


def _answer(comparison: Comparison, ran: dict[str, Results]) -> dict[str, Any]:
    try:
        before = _run_once(comparison, comparison.before, ran)
        after = _run_once(comparison, comparison.after, ran)
    except _Failed as failed:
        error = as_audit_error(failed.error, "build", _lowering(comparison, failed.layout))
        told = {"kind": error.kind, "message": error.message, "hint": error.hint}
        return {"error": told, "layout": failed.layout}
    return {
        "differences": {
            inputs: {name: asdict(difference) for name, difference in arrays.items()}
            for inputs, arrays in compare(before, after).items()
        }
    }


def _run_once(comparison: Comparison, layout: str, ran: dict[str, Results]) -> Results:
    """Run a layout, unless an earlier comparison has: all share their baseline."""
    key = json.dumps({**comparison.to_json(), "before": layout, "after": layout}, sort_keys=True)
    if key not in ran:
        try:
            ran[key] = _run(comparison, layout)
        # The boundary of the process: what a model raises is the answer for that layout.
        except BaseException as error:
            raise _Failed(layout, error) from None
    return ran[key]


def _run(comparison: Comparison, layout: str) -> Results:
    devices = list(jax.devices("cpu"))
    sizes = resolve_mesh(comparison.mesh, len(devices), str(len(devices)))
    mesh = make_mesh(devices, sizes, comparison.mode)
    results: Results = load_build(comparison.run)(mesh, layout=layout, **comparison.settings)
    return results


def _lowering(comparison: Comparison, layout: str) -> Lowering:
    """The run as a program, for the wording of its errors."""
    return Lowering(
        program=comparison.model,
        build=comparison.run,
        mode=comparison.mode,
        layout=layout,
        settings=comparison.settings,
        mesh=comparison.mesh,
        platform="cpu",
        topology=str(comparison.devices),
    )


def compare(before: Results, after: Results) -> dict[str, dict[str, Difference]]:
    """How far each array of ``after`` is from that of ``before``, by inputs and array name.

    An array that only one of them has differs.
    """
    differences: dict[str, dict[str, Difference]] = {}
    for inputs in dict.fromkeys((*before, *after)):
        ours, theirs = before.get(inputs, {}), after.get(inputs, {})
        differences[inputs] = {
            name: _difference(ours[name], theirs[name])
            if name in ours and name in theirs
            else Difference(False, None)
            for name in dict.fromkeys((*ours, *theirs))
        }
    return differences


def _difference(before: Any, after: Any) -> Difference:
    before, after = (numpy.ascontiguousarray(array) for array in (before, after))
    if before.shape != after.shape:
        return Difference(False, None)
    identical = before.dtype == after.dtype and before.tobytes() == after.tobytes()
    before, after = before.astype(numpy.float64), after.astype(numpy.float64)
    if not (numpy.isfinite(before).all() and numpy.isfinite(after).all()):
        return Difference(identical, None)
    largest = float(numpy.abs(after - before).max(initial=0.0))
    scale = float(numpy.abs(before).max(initial=0.0))
    if largest and not scale:
        return Difference(identical, None)
    return Difference(identical, largest / scale if scale else 0.0)


if __name__ == "__main__":
    main(sys.argv[1:])
