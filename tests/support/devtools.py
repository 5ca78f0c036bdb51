"""A headless Chromium, driven by the DevTools protocol over a pipe: no port, no driver program.

Messages are JSON, each ended by a NUL byte. Chromium reads them from file descriptor 3 and writes its own
to 4 (`--remote-debugging-pipe`).
"""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import select
import shutil
import subprocess
import tempfile
import time
import urllib.parse
from pathlib import Path
from types import TracebackType
from typing import Any

# The host rule keeps every name from being resolved: a page that needs the network fails here, visibly.
# --no-sandbox: Chromium's sandbox refuses to start as root. /dev/shm is often too small in containers.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)
_IN_FD, _OUT_FD = 3, 4
_END_S = 10


class BrowserError(Exception):
    """Chromium ended, did not answer in time, or a script in the page failed."""


def find_chromium() -> Path | None:
    """Debian's Chromium, or None. The binary itself where it is known: /usr/bin/chromium is a script."""
    binary = Path("/usr/lib/chromium/chromium")
    on_path = shutil.which("chromium")
    return binary if binary.exists() else Path(on_path) if on_path else None


class Page:
    """One blank page of a Chromium of its own, `width` × `height` CSS pixels; closed with the `with` block.

    `exceptions` are those that no script of the page caught, and the page's alerts. After `watch` there are
    `requests`, the addresses that the page asked for, and `complaints`, what the console got beside them.
    """

    def __init__(self, chromium: Path, width: int, height: int) -> None:
        self.exceptions: list[str] = []
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="tracepipe-chromium-", ignore_cleanup_errors=True)
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        self._site: Path | None = None
        self._start(chromium, [*_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"])
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            self.call("Runtime.enable")
            self.call("Page.enable")
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def _start(self, chromium: Path, arguments: list[str]) -> None:
        child_in, self._to_child = os.pipe()
        self._from_child, child_out = os.pipe()
        # A shell moves the pipes to the descriptors that Chromium expects; exec keeps the process id.
        script = f'exec "$@" {_IN_FD}<&{child_in} {_OUT_FD}>&{child_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", str(chromium), *arguments],
            pass_fds=(child_in, child_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(child_in)
        os.close(child_out)

    def call(self, method: str, timeout_s: float = 60, **params: Any) -> dict[str, Any]:
        """The result of one DevTools command. Raises BrowserError if it failed or was not answered."""
        asked_id = self._send(method, params)
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._next_message(method, deadline)
            if "id" not in answer:
                self._on_event(answer["method"], answer["params"])
            if answer.get("id") != asked_id:
                continue
            if "error" in answer:
                raise BrowserError(f"{method}: {answer['error']['message']}")
            result: dict[str, Any] = answer["result"]
            return result

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._write(json.dumps(message).encode() + b"\0")
        return self._last_id

    def _on_event(self, name: str, params: dict[str, Any]) -> None:
        if name == "Runtime.exceptionThrown":
            self.exceptions.append(_described(params["exceptionDetails"]))
        elif name == "Page.javascriptDialogOpening":
            # Until it is answered, a dialog holds every script of the page.
            self.exceptions.append(f"alert: {params['message']}")
            self._send("Page.handleJavaScriptDialog", {"accept": True})
        elif name == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif name == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif name == "Runtime.consoleAPICalled":
            self.complaints.append(f"{params['type']}: {params['args']}")
        elif name == "Fetch.requestPaused":
            self._send("Fetch.fulfillRequest", self._answer(params["requestId"], params["request"]["url"]))

    def _answer(self, request_id: str, url: str) -> dict[str, Any]:
        path = urllib.parse.unquote(urllib.parse.urlsplit(url).path).lstrip("/") or "index.html"
        assert self._site
        file = self._site / path
        if not file.is_file():
            return {"requestId": request_id, "responseCode": 404}
        kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
        return {
            "requestId": request_id,
            "responseCode": 200,
            "responseHeaders": [{"name": "Content-Type", "value": kind}],
            "body": base64.b64encode(file.read_bytes()).decode(),
        }

    def watch(self) -> None:
        """Takes down what the page asks for, and what the console gets, from now on."""
        self.call("Network.enable")
        self.call("Log.enable")

    def prefer(self, scheme: str) -> None:
        """Sets the system's colour scheme: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def play_site(self, origin: str, files: Path) -> None:
        """Answers each request to `origin` from the folder `files`, as if the site were reached.

        The page is then of that origin in every respect: security policy, CORS, permissions. It may fetch
        from the loopback interface, as after the user's yes to Chrome's question about it.
        """
        self._site = files
        # A service worker's script is fetched outside the page, where nothing answers for the site.
        self.call("Page.addScriptToEvaluateOnNewDocument", source="delete Navigator.prototype.serviceWorker")
        self.call(
            "Browser.setPermission", origin=origin, permission={"name": "loopback-network"}, setting="granted"
        )
        self.call("Fetch.enable", patterns=[{"urlPattern": f"{origin}/*"}])

    def _write(self, message: bytes) -> None:
        try:
            while message:
                message = message[os.write(self._to_child, message) :]
        except BrokenPipeError as error:
            raise BrowserError("Chromium has ended") from error

    def _next_message(self, method: str, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._from_child], [], [], left_s)[0]:
                raise BrowserError(f"{method}: no answer from Chromium in time")
            data = os.read(self._from_child, 1 << 20)
            if not data:
                raise BrowserError(f"{method}: Chromium has ended")
            self._buffer += data
        raw, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(raw)
        return message

    def navigate(self, url: str) -> None:
        """Starts to load `url`."""
        self.call("Page.navigate", url=url)

    def run(self, script: str, timeout_s: float = 60) -> Any:
        """The value of the JavaScript expression `script`, awaited if it is a promise."""
        result = self.call(
            "Runtime.evaluate", timeout_s, expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise BrowserError(_described(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait_until(self, condition: str, timeout_s: float) -> None:
        """Returns once the JavaScript expression `condition` is true, looked at every frame."""
        self.run(
            "new Promise(done => { const look = () => { let now = false;"
            f" try {{ now = !!({condition}); }} catch {{}}"
            " now ? done() : setTimeout(look, 20); }; look(); })",
            timeout_s,
        )

    def resize(self, width: int, height: int) -> None:
        """Makes the page `width` × `height` CSS pixels of one screenshot pixel each."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self) -> bytes:
        """The page as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """Ends Chromium and removes its profile."""
        try:
            self._session = None
            self.call("Browser.close", timeout_s=_END_S)
            self._process.wait(_END_S)
        except (BrowserError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._to_child)
        os.close(self._from_child)
        self._profile.cleanup()

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _described(details: dict[str, Any]) -> str:
    thrown = details.get("exception", {})
    return str(thrown.get("description") or thrown.get("value") or details["text"])
