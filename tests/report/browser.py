"""Headless Chromium by its DevTools protocol, with the standard library alone: a WebSocket client, calls and events."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """Return where a Chromium is, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class WebSocket:
    """The client's half of RFC 6455, as far as DevTools needs it: text, fragments, masks."""

    def __init__(self, host: str, port: int, path: str, timeout: float = 30) -> None:
        self.stream = socket.create_connection((host, port), timeout=timeout)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = (
            *(f"GET {path} HTTP/1.1", f"Host: {host}:{port}", "Upgrade: websocket", "Connection: Upgrade"),
            *(f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""),
        )
        self.stream.sendall("\r\n".join(lines).encode())
        self.file = self.stream.makefile("rb")
        status = self.file.readline()
        assert b" 101 " in status, status
        while self.file.readline().strip():
            pass

    def send(self, text: str) -> None:
        payload, mask = text.encode(), os.urandom(4)
        size = len(payload)
        head = b"\x81" + (
            bytes([0x80 | size])
            if size < 126
            else b"\xfe" + size.to_bytes(2, "big")
            if size < 65536
            else b"\xff" + size.to_bytes(8, "big")
        )
        self.stream.sendall(head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload)))

    def receive(self) -> str:
        text = b""
        while True:
            first, second = self.file.read(2)
            size = second & 0x7F
            if size >= 126:
                size = int.from_bytes(self.file.read(2 if size == 126 else 8), "big")
            payload = self.file.read(size)
            if first & 0x0F in (0, 1):
                text += payload
                if first & 0x80:
                    return text.decode()
            elif first & 0x0F == 8:
                raise ConnectionError("the browser closed the connection")

    def close(self) -> None:
        self.file.close()
        self.stream.close()


class Browser:
    """One page in a browser of its own; events are kept in the order they came."""

    def __init__(self, folder: Path, width: int = 1100, height: int = 900) -> None:
        program = find()
        assert program is not None
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        words += ["--remote-debugging-port=0", f"--user-data-dir={folder}", f"--window-size={width},{height}"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([program, *words, "about:blank"], stdout=quiet, stderr=quiet)
        self.events: list[dict[str, Any]] = []
        self.number = 0
        try:
            self.socket = self._connect(folder / "DevToolsActivePort")
            targets = self.call("Target.getTargets")["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._stop()
            raise

    session: str | None = None

    def _connect(self, file: Path) -> WebSocket:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if file.exists() and len(lines := file.read_text(encoding="utf-8").split()) == 2:
                return WebSocket("127.0.0.1", int(lines[0]), lines[1])
            assert self.process.poll() is None, f"the browser ended with {self.process.returncode}"
            time.sleep(0.05)
        raise TimeoutError("the browser did not open its port in a minute")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; keep the events that come before its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        self.socket.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        while True:
            answer = json.loads(self.socket.receive())
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, url: str) -> None:
        """Load a page, and wait until it is there."""
        self.call("Page.navigate", url=url)
        until = time.monotonic() + 30
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            assert time.monotonic() < until, url
            time.sleep(0.05)
        self.settle()

    def run(self, code: str) -> Any:
        """Return what an expression in the page gives."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait for the page to be drawn anew."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def size(self, width: int, height: int, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0, held: bool = False) -> None:
        button = "left" if clicks or held else "none"
        more = {"button": button, "clickCount": clicks, "buttons": 1 if held else 0}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        """Click in the middle of an element, as a person would."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, clicks=1)
        self.settle()

    def middle(self, selector: str) -> tuple[float, float]:
        code = f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
        x, y = self.run(code + " return [b.left + b.width / 2, b.top + b.height / 2]; })()")
        return x, y

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)
        self.settle()

    def screenshot(self, path: Path, whole: bool = False) -> None:
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def troubles(self) -> list[str]:
        """Return what the console has of errors and warnings, and exceptions."""
        found = []
        for event in self.events:
            what = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(what["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
                found.append(str(what["args"]))
            elif event.get("method") == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
                found.append(str(what["entry"]))
        return found

    def requests(self) -> list[str]:
        """Return the addresses that were asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session = None
        with contextlib.suppress(OSError, ValueError, AssertionError, subprocess.TimeoutExpired):
            self.call("Browser.close")  # so that it clears away its own files
            self.process.wait(10)
        self.socket.close()
        self._stop()
