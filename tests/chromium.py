"""Drives a headless Chromium over its debugging protocol, through a pipe: no driver, no port.

The protocol is described at https://chromedevtools.github.io/devtools-protocol/; a message is JSON
that ends in a NUL.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

EXECUTABLE = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if (found := shutil.which(name))
    ),
    None,
)

_TIMEOUT_SECONDS = 60.0


class Browser:
    """A browser with one page.

    Attributes:
        events: what it has told since :meth:`open`, as (method, parameters).
    """

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process = process
        self._to, self._back = to, back
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result.

        Raises:
            RuntimeError: where it fails.
            TimeoutError: where there is no answer.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.append((answer["method"], answer.get("params", {})))

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while b"\0" not in self._buffer:
            if not select([self._back], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._back, 1 << 20)
            if not part:
                raise RuntimeError("the browser has gone")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def open(
        self,
        page: Path,
        *,
        width: int = 1440,
        height: int = 900,
        dark: bool = False,
        javascript: bool = True,
        fragment: str = "",
    ) -> None:
        """Load a file, and wait until it is there."""
        # Another document first: the same one at another fragment is not loaded again.
        self._navigate("about:blank")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not javascript)
        self._navigate(page.as_uri() + fragment)

    def _navigate(self, url: str) -> None:
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            answer = self._read()
            if "method" in answer:
                self.events.append((answer["method"], answer.get("params", {})))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def problems(self) -> list[str]:
        """What the page has logged, thrown, asked the network for, or been refused."""
        self.evaluate("new Promise(requestAnimationFrame)")  # what is late comes before the answer
        found = []
        for method, parameters in self.events:
            if method == "Network.requestWillBeSent" and not parameters["request"][
                "url"
            ].startswith("file:"):
                found.append(f"asks for {parameters['request']['url'][:200]}")
            elif method in (
                "Log.entryAdded",
                "Runtime.consoleAPICalled",
                "Runtime.exceptionThrown",
                "Audits.issueAdded",
                "Page.javascriptDialogOpening",
            ):
                found.append(f"{method}: {json.dumps(parameters)[:400]}")
        return found


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, ended afterwards."""
    assert EXECUTABLE is not None
    reads, to = os.pipe()
    back, writes = os.pipe()

    def as_three_and_four() -> None:
        # Moved out of the way first: either may be 3 or 4 itself.
        ends = os.dup(reads), os.dup(writes)
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    command = [
        EXECUTABLE,
        "--headless",
        "--no-sandbox",  # where the tests run as root, in a container
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    process = subprocess.Popen(
        command,
        preexec_fn=as_three_and_four,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(reads)
    os.close(writes)
    try:
        yield Browser(process, to, back)
    finally:
        os.close(to)
        os.close(back)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
