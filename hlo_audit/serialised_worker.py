"""The process that reads serialised modules with XLA: ``python -P serialised_worker.py``.

XLA may abort, hang or fill the memory on a proto that is damaged, so it reads them here, under
limits that the system holds. :mod:`hlo_audit.serialised` starts this file by its path; it imports
nothing of this package. A request on standard input is a line of JSON and the bytes of the proto,
an answer on standard output a line of JSON and the bytes of the text, or a line with an error.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any, BinaryIO


def main() -> None:
    """Answer one request after another until the parent closes the pipe."""
    # What the C++ prints must not break into the answers, nor reach the user's terminal.
    answers = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    _limit(resource.RLIMIT_CORE, 0)
    requests = sys.stdin.buffer
    hlo_module = _hlo_module()  # before the limits: they are for what the protos take
    try:
        while line := requests.readline():
            request = json.loads(line)
            data = requests.read(request["bytes"])
            _limit(resource.RLIMIT_DATA, request["memory_bytes"])
            # It ends a hang, even where the parent was killed and cannot.
            _limit(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + request["cpu_seconds"])
            _answer(answers, hlo_module, data)
    except (KeyboardInterrupt, BrokenPipeError):
        # Of the parent, who has been told too. What is still in the buffer is not wanted.
        os._exit(0)


def _limit(what: int, most: int) -> None:
    """Set the soft limit, which may be raised again for the next request."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _hlo_module() -> Any:
    """XLA's type of modules; ``None`` without jaxlib."""
    try:
        try:
            from jaxlib._hlo import HloModule
        except ImportError:  # jaxlib before 0.8
            from jaxlib._jax import HloModule
    except ImportError:
        return None
    return HloModule


def _answer(answers: BinaryIO, hlo_module: Any, data: bytes) -> None:
    answer: dict[str, Any]
    text = b""
    try:
        if hlo_module is None:
            answer = {"error": "jaxlib"}
        else:
            module = hlo_module.from_serialized_hlo_module_proto(_module_proto(data))
            text = module.to_string().encode("utf-8", "replace")
            answer = {"bytes": len(text)}
    except MemoryError:
        answer = {"error": "memory"}
    except Exception as error:
        # XLA says what it does not like in more than one type of error.
        lines = str(error).splitlines()
        answer = {"error": "proto", "reason": lines[0] if lines else "not an HLO proto"}
    answers.write(json.dumps(answer).encode() + b"\n" + text)
    answers.flush()


def _module_proto(data: bytes) -> bytes:
    """The ``hlo_module`` field of an ``HloProto``, which is what XLA dumps.

    Both messages start with field 1 of wire type 2: the name of a module, or the module itself,
    which starts with such a field in turn.
    """
    if data[:1] != b"\x0a":
        raise ValueError("it does not start with the field 1 of one")
    length, shift, position = 0, 0, 1
    while position < min(len(data), 11):
        byte = data[position]
        length |= (byte & 0x7F) << shift
        shift, position = shift + 7, position + 1
        if not byte & 0x80:
            break
    inner = data[position : position + length]
    return inner if inner[:1] == b"\x0a" else data


if __name__ == "__main__":
    main()
