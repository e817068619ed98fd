"""A headless Chromium, driven over a pipe by the DevTools protocol: no package, no port."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEEDS_CHROMIUM = pytest.mark.skipif(BINARY is None, reason="there is no Chromium: apt-get install chromium")

CODES = {
    "Enter": 13,
    "Escape": 27,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}


class Browser:
    """A page in a browser; to be closed."""

    def __init__(self, width: int = 1400, height: int = 900) -> None:
        assert BINARY
        self._folder = tempfile.mkdtemp()
        take, self._to = os.pipe()
        self._from, give = os.pipe()
        words = [
            BINARY, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
            "--remote-debugging-pipe", f"--user-data-dir={self._folder}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(  # the pipes are 3 and 4 there
            ["bash", "-c", f'exec "$@" 3<&{take} 4>&{give}', "bash", *words],
            pass_fds=(take, give), stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(take)
        os.close(give)
        self._numbers, self._left = itertools.count(1), b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        for domain in ("Page", "Network", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """What the browser answers to a command; what it tells meanwhile is kept in `events`."""
        number = next(self._numbers)
        told = {"id": number, "method": method, "params": params} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._to, json.dumps(told).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            if "method" in message:
                self.events.append(message)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = os.read(self._from, 1 << 20)
            assert more, "the browser is gone"
            self._left += more
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path | str) -> None:
        """Load a file and wait until it is there."""
        self.events.clear()
        self("Page.navigate", url=Path(path).absolute().as_uri())
        deadline = time.monotonic() + 60
        while self.value("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, "the page does not load"
        self.settle()

    def settle(self) -> None:
        """Wait for two frames: what was asked for is drawn then."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def value(self, text: str) -> Any:
        """What an expression is, as data; raises what it throws."""
        found = self("Runtime.evaluate", expression=text, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """``moved``, ``pressed``, ``released`` or ``wheel`` at pixels of the window."""
        self("Input.dispatchMouseEvent", type=f"mouse{kind.capitalize()}", x=x, y=y, **more)

    def click(self, x: float, y: float, times: int = 1) -> None:
        """Press and release the left button."""
        self.mouse("moved", x, y)
        for count in range(1, times + 1):
            self.mouse("pressed", x, y, button="left", buttons=1, clickCount=count)
            self.mouse("released", x, y, button="left", clickCount=count)
        self.settle()

    def drag(self, x: float, y: float, x2: float, y2: float) -> None:
        """From one place to another with the left button down."""
        self.mouse("moved", x, y)
        self.mouse("pressed", x, y, button="left", buttons=1, clickCount=1)
        for part in (0.3, 0.6, 1):
            self.mouse("moved", x + part * (x2 - x), y + part * (y2 - y), button="left", buttons=1)
        self.mouse("released", x2, y2, button="left", clickCount=1)
        self.settle()

    def key(self, key: str, alt: bool = False) -> None:
        """Press a key on what has the focus, with its code: JupyterLab has no command for a key without one."""
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        code = {"windowsVirtualKeyCode": CODES[key], "code": key} if key in CODES else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self("Input.dispatchKeyEvent", type=kind, key=key, modifiers=1 if alt else 0, **more, **code)
        self.settle()

    def screenshot(self, path: Path | str) -> None:
        """Write a PNG."""
        Path(path).write_bytes(base64.b64decode(self("Page.captureScreenshot", format="png")["data"]))

    def faults(self) -> list[str]:
        """Errors that the page met since it was opened."""
        self.value("1")
        return [json.dumps(e["params"])[:500] for e in self.events if e["method"] == "Runtime.exceptionThrown"] + [
            str(e["params"]["entry"]["text"])
            for e in self.events
            if e["method"] == "Log.entryAdded" and e["params"]["entry"]["level"] == "error"
        ]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened, but for the page itself."""
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("file:")]
