"""Signals that would end this process at once: let it clean up before; and the names of all."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signal_name(number: int) -> str:
    """Such as ``SIGSEGV``; ``signal 40`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a signal that would end this process at once unwind it instead, so that it cleans up."""

    def unwind(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    ours = {n: unwind for n in _ENDING_SIGNALS if signal.getsignal(n) is signal.SIG_DFL}
    with _signal_handlers(ours):
        yield


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Let an impatient second signal not break off the cleaning up."""
    with _signal_handlers(dict.fromkeys(_ENDING_SIGNALS, signal.SIG_IGN)):
        yield


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Let a signal take effect at the end."""
    held: list[int] = []

    def hold(number: int, _frame: object) -> None:
        held.append(number)

    try:
        with _signal_handlers(dict.fromkeys(_ENDING_SIGNALS, hold)):
            yield
    finally:
        for number in held[:1]:
            signal.raise_signal(number)


@contextlib.contextmanager
def _signal_handlers(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    # Python allows it in the main thread only, where it also runs the handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # One that is ignored stays so; one that is handled outside of Python cannot be put back.
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) not in (signal.SIG_IGN, None)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
