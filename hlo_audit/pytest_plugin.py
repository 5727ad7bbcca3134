"""The pytest plugin: hold programs to budgets in tests.

::

    def test_layouts(hlo_audit_check):
        hlo_audit_check("train.py:train_step", mesh={"fsdp": 4}, max={"relayout-copy": 0})

    @pytest.mark.hlo_audit(topology="v5p:2x2x1", mesh={"fsdp": 4}, max={"relayout-copy": 0})
    def test_layouts_too(hlo_audit_check):
        hlo_audit_check(train_step)

The marker gives options to every call in its test, class or module; the nearest wins, and the call
over all. pytest imports this file at its start in every project: nothing is imported here that
costs time, and neither jax nor the rest of this package before a test asks for the fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from hlo_audit.report import Report

MARKER = "hlo_audit"


class Check(Protocol):
    """What the fixture gives: :func:`hlo_audit.check` with the options of the test's markers."""

    def __call__(self, program: Any, *args: Any, **options: Any) -> Report: ...


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(**options): options of hlo_audit.check for the fixture hlo_audit_check, such as "
        'max={"relayout-copy": 0}, mesh, mode or topology',
    )


@pytest.fixture
def hlo_audit_check(request: pytest.FixtureRequest) -> Check:
    """Audit a program and fail where it has more findings than ``max`` says: ``hlo_audit.check``,
    with the options of the marker ``hlo_audit``."""
    from hlo_audit.api import check

    options: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers(MARKER))):  # the nearest last
        if marker.args:
            raise pytest.UsageError(f"the marker {MARKER} takes its options by keyword")
        options.update(marker.kwargs)

    def run(program: Any, *args: Any, **given: Any) -> Report:
        __tracebackhide__ = True
        return check(program, *args, **{"max": {}, **options, **given})

    return run
