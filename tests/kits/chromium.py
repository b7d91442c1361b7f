"""A headless Chromium, driven over its pipe of the DevTools protocol: pages, requests, pictures."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Browser", "BrowserError", "browser"]

PROGRAM = "chromium"
# Nothing but the pages: no updates, no reports. Root, as the lab has it, gets no sandbox.
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--lang=en"),
)


class BrowserError(Exception):
    """Chromium refused a command, or a script in a page failed."""


class Browser:
    """One page of a running Chromium."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        """Addresses that pages asked for, in order."""
        self.problems: list[str] = []
        """Errors in the console, and exceptions of scripts."""
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:  # noqa: ANN401 - JSON of the protocol
        """Send a command and return its result; events that come before it are noted."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    msg = f"{method}: {answer['error']}"
                    raise BrowserError(msg)
                return answer["result"]

    def show(self, *, width: int, height: int, dark: bool) -> None:
        """Set the size of the window and the colours that the reader prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        wanted = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[wanted])

    def open(self, url: str) -> None:
        """Open a page, and return when everything that it loads is there."""
        self._loaded = False
        failure = self.call("Page.navigate", url=url).get("errorText")
        if failure:
            msg = f"{url}: {failure}"
            raise BrowserError(msg)
        while not self._loaded:
            self._next()

    def run(self, script: str) -> Any:  # noqa: ANN401 - JSON
        """Return the value of an expression in the page; of a promise, its outcome."""
        wanted = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **wanted)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._answers, 1 << 16)
            if not part:
                msg = "chromium ended"
                raise BrowserError(msg)
            self._received += part
        one, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            self.problems.append(str(values["exceptionDetails"]))
        elif event == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.problems.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with a profile folder of its own, and end it."""
    # The browser reads commands from descriptor 3 and writes answers to 4.
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    started = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", started, "chromium", PROGRAM, *OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(commands, answers)
    finally:
        process.terminate()
        process.wait(timeout=60)
        os.close(commands)
        os.close(answers)
