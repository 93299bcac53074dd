"""A real browser, Chromium without a window, driven over a pipe by its DevTools protocol."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-extensions", "--mute-audio"),
)


class Page:
    """A page and the messages of its console."""

    def __init__(self, reading: int, writing: int) -> None:
        self._read_pipe = reading
        self._write_pipe = writing
        self._number = 0
        self._unread = b""
        self._session = ""
        self._loaded = False
        self.console: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_pipe, json.dumps(message).encode() + b"\0")
        while True:
            arrived_message = self._next()
            if arrived_message.get("id") == self._number:
                assert "error" not in arrived_message, arrived_message
                return dict(arrived_message["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            chunk = os.read(self._read_pipe, 1 << 20)
            assert chunk, "the browser has ended"
            self._unread += chunk
        text, _, self._unread = self._unread.partition(b"\0")
        message = dict(json.loads(text))
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Log.entryAdded":
                self.console.append(message["params"]["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.console.append(str(message["params"]["exceptionDetails"]))
        return message

    def size(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        self._call("Emulation.setScrollbarsHidden", hidden=True)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def navigate(self, url: str) -> None:
        """Open another page, and return when it is loaded."""
        self._loaded = False
        self._call("Page.navigate", url=url)
        while not self._loaded:
            self._next()

    def run(self, script: str) -> Any:
        reply = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait(self, condition_text: str, script: str, within_s: float = 20.0) -> None:
        until(condition_text, lambda: self.run(script), within_s)

    def key(self, name: str) -> None:
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[name]
        fields: dict[str, Any] = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        if name == "Enter":
            fields["text"] = "\r"
        self._call("Input.dispatchKeyEvent", type="keyDown", **fields)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=name, code=name)

    def hide(self, *, hidden: bool) -> None:
        self.run(
            f"Object.defineProperty(document, 'hidden', {{value: {json.dumps(hidden)},"
            " configurable: true}); document.dispatchEvent(new Event('visibilitychange'))"
        )

    def names(self) -> list[tuple[str, str]]:
        """Return (role, name) of each element, as a screen reader receives them."""
        tree = self._call("Accessibility.getFullAXTree")["nodes"]
        return [
            (str(node["role"]["value"]), str(node.get("name", {}).get("value", "")))
            for node in tree
            if not node.get("ignored")
        ]

    def picture(self, path: Path, *, whole_page: bool = True) -> None:
        picture = self._call("Page.captureScreenshot", captureBeyondViewport=whole_page)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    assert CHROMIUM
    child_end, writing = os.pipe()
    reading, answers = os.pipe()

    def inherit() -> None:
        pipe_ends = os.dup(child_end), os.dup(answers)  # the duplicates may have the numbers 3 or 4
        for number, end in enumerate(pipe_ends, 3):
            os.dup2(end, number)

    sockets = tempfile.mkdtemp()  # a path of pytest is too long for sockets, once it has run often
    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(3, 4, child_end, answers),
        preexec_fn=inherit,
        env={**os.environ, "TMPDIR": sockets, "HOME": str(folder)},
    )
    os.close(child_end)
    os.close(answers)
    try:
        yield Page(reading, writing)
    finally:
        members = [psutil.Process(process.pid)]
        members += members[0].children(recursive=True)
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        psutil.wait_procs(members, timeout=5)
        shutil.rmtree(sockets, ignore_errors=True)
        os.close(reading)
        os.close(writing)
