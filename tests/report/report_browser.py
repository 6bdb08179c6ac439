"""A headless Chromium, driven by its own protocol over a pair of pipes: pictures, clicks, print, what it complains about.

No driver and no web socket library: ``--remote-debugging-pipe`` takes JSON messages, each ended by a zero byte, on file
descriptor 3 and answers on 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_PATIENCE_SECONDS = 120.0


class Browser:
    """One page. Use as a context manager.

    Attributes:
        complaints: Console messages of any level, exceptions and what the log says (a missing file, a blocked one).
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        # Descriptors 3 and 4 may be in use here; the shell puts them in their places.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec 3<&{to_child} 4>&{from_child}; exec "$@"', "bash", CHROMIUM, *options],
            pass_fds=(to_child, from_child),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_child)
        os.close(from_child)
        self._number, self._rest, self._session = 0, b"", ""
        self._loaded = False
        self.complaints: list[str] = []

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility", "DOM"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        """The next message, noted where it is an event."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium has said nothing for {_PATIENCE_SECONDS:g} s")
            more = os.read(self._in, 1 << 20)
            if not more:
                raise RuntimeError("Chromium is gone")
            self._rest += more
        raw, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        about, told = message.get("method"), message.get("params", {})
        if about == "Runtime.consoleAPICalled":
            self.complaints.append(f"{told['type']}: {told['args']}")
        elif about == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        elif about == "Log.entryAdded":
            self.complaints.append(f"{told['entry']['level']}: {told['entry']['text']}")
        elif about == "Page.loadEventFired":
            self._loaded = True
        return message

    # ------------------------------------------------------------------------------------------------------- the page

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Load a file in a window ``width`` pixels wide."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._next()

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{script}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the left button in the middle of an element, wherever it is on the page."""
        # The click is aimed at the frame that is shown: two more frames, and the scrolling is in it.
        x, y = self.evaluate(
            f"(async () => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: str) -> None:
        """One key, on whatever has the focus."""
        text = {"text": " "} if code == "Space" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=code)

    def picture(self, path: Path) -> Path:
        """The whole page as PNG."""
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))
        return path

    def print(self, path: Path, inches: tuple[float, float] = (8.27, 11.69), *, backgrounds: bool = False) -> Path:
        """The page as it is printed on a sheet of ``inches`` (A4), as PDF."""
        width, height = inches
        told = self.call("Page.printToPDF", paperWidth=width, paperHeight=height, printBackground=backgrounds)
        path.write_bytes(base64.b64decode(told["data"]))
        return path

    def names(self) -> list[tuple[str, str, str]]:
        """Role, name and description of everything that a screen reader is told of."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (n["role"]["value"], n.get("name", {}).get("value", ""), n.get("description", {}).get("value", ""))
            for n in nodes
            if not n["ignored"]
        ]
