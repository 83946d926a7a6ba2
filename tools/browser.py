"""Chromium without a window, by its DevTools protocol over two pipes: needs no library, no port and no network.

with served(folder) as address, Browser() as browser:
    browser.emulate(390, 844, dark=True)
    browser.open(address)
    browser.evaluate("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
LIMIT = 60.0  # seconds for an answer
# Chromium reads commands from descriptor 3 and writes answers to 4. Copies above 9 first, as the pipes may be 3 or 4.
START = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def program() -> str | None:
    """The path of a Chromium, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `problems` are its errors: exceptions, console errors, and requests that failed."""

    def __init__(self) -> None:
        path = program()
        if path is None:
            raise ValueError(f"no browser: expected one of {', '.join(NAMES)} on the path.")
        self.problems: list[str] = []
        self._number, self._rest, self._session = 0, b"", ""
        self._profile = tempfile.mkdtemp(prefix="kiloword-browser-")
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        command = [path, *SWITCHES, f"--user-data-dir={self._profile}", "about:blank"]
        words = [sys.executable, "-ISc", START, str(theirs), str(answers), *command]
        self._process = subprocess.Popen(words, pass_fds=(theirs, answers), stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(answers)
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser, and remove its profile."""
        self._process.terminate()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def emulate(self, width: int, height: int, dark: bool = False) -> None:
        """The size of the window in CSS pixels, and the colour scheme that the reader prefers."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def before(self, script: str) -> None:
        """Run a script in every page that is opened from now on, before its own."""
        self._call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def open(self, address: str) -> None:
        """Go to an address, and wait until the page is loaded."""
        self.problems.clear()
        self._call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited. Raises: RuntimeError for one that throws."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"].get("exception", answer))[:1000])
        return answer["result"].get("value")

    def wait(self, condition: str, limit: float = LIMIT) -> None:
        """Wait until an expression is true. Raises: TimeoutError."""
        end = time.monotonic() + limit
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} is still false; problems: {self.problems}")
            time.sleep(0.05)

    def keys(self, text: str) -> None:
        """Type into what has the focus; a line end is the Enter key, a tab the Tab key."""
        for letter in text:
            code = {"\n": ("Enter", 13, "\r"), "\t": ("Tab", 9, "")}.get(letter, (letter, 0, letter))
            key = {"key": code[0], "windowsVirtualKeyCode": code[1], "text": code[2]}
            self._call("Input.dispatchKeyEvent", type="keyDown", **key)
            self._call("Input.dispatchKeyEvent", type="keyUp", key=code[0], windowsVirtualKeyCode=code[1])

    def choose(self, selector: str, file: Path) -> None:
        """Choose a file in an input of the page."""
        root = self._call("DOM.getDocument")["root"]["nodeId"]
        node = self._call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._call("DOM.setFileInputFiles", nodeId=node, files=[str(file.absolute())])

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write the window, or the whole page, as a PNG."""
        shown = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shown["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _next(self) -> dict[str, Any]:
        """The next message. Raises: TimeoutError; RuntimeError when the browser has ended."""
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], LIMIT)[0]:
                raise TimeoutError(f"the browser did not answer within {LIMIT:.0f} s")
            data = os.read(self._read, 1 << 16)
            if not data:
                raise RuntimeError("the browser ended")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"])[:500])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: Any) -> None:
        """Nothing is printed."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A folder over HTTP on loopback, by Python's own server. Yields: its address, with a slash at the end."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()
