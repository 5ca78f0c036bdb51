"""The live view on a terminal: a pseudo-terminal here, read by a small screen."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.live_records import ENTER, RETURN, F, plan, record
from tracepipe.terminal import live_view as live_view_module
from tracepipe.terminal.live_view import CommandOutput, live_view
from tracepipe.tracer.engines.engine import Chunk
from tracepipe.tracer.live.totals import LiveSink

_CONTROL = re.compile(rb"\x1b\[(\?25[lh]|(\d*)([A-Za-z])|[\d;]*m)|[\r\n]|[^\x1b\r\n]+")
PATIENCE_S = 60


class Screen:
    """Lines of a terminal without an end: text, line feeds, cursor up, erasing."""

    def __init__(self) -> None:
        self.lines = [""]
        self.row = self.column = 0

    def feed(self, data: bytes) -> None:
        for match in _CONTROL.finditer(data):
            piece, command = match[0], match[3]
            if piece == b"\n":
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append("")
            elif piece == b"\r":
                self.column = 0
            elif command == b"A":
                self.row = max(0, self.row - int(match[2] or 1))
            elif command == b"K":
                self.lines[self.row] = ""
            elif piece[0] != 0x1B:
                text = piece.decode()
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
                self.column += len(text)


def on_terminal(child: Callable[[], None], until: Callable[[bytes], bytes] = lambda _: b"") -> bytes:
    """Everything that `child` writes to a terminal of its own; `until` gives what is typed at any time."""
    pid, terminal = pty.fork()
    if pid == 0:
        status = 1
        try:  # pytest's own are not the terminal
            sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
            child()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    written, give_up_s = b"", time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_s:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            read = os.read(terminal, 1 << 16)
        except OSError:  # the child has ended
            break
        written += read
        if typed := until(written):
            os.write(terminal, typed)
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, written.decode()
    return written


def shown(written: bytes) -> list[str]:
    screen = Screen()
    screen.feed(written)
    return [line.rstrip() for line in screen.lines]


def calls(sink: LiveSink, count: int) -> None:
    sink.put(Chunk((record(ENTER, 1000, F) + record(RETURN, 3000, F)) * count))


def watching(command: list[str], **options: object) -> Callable[[], None]:
    """A view of made-up calls while a command runs."""

    def child() -> None:
        sink = LiveSink()
        with live_view(sink.snapshot, sys.stderr, "a title", **options):  # type: ignore[arg-type]
            sink.begin(plan(), time.monotonic_ns())
            with subprocess.Popen(command) as process:
                while process.poll() is None:
                    calls(sink, 10)
                    time.sleep(0.02)  # the pace of the made-up calls, not a wait
            calls(sink, 1)
            sink.finish()
            assert sink.wait(PATIENCE_S)

    return child


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", f"import os, sys, time\n{code}"]


@pytest.mark.slow
def test_the_commands_output_stays_whole_above_the_view() -> None:
    code = """
for i in range(60):
    print(f"line {i}")
    print(f"\\x1b[32merror {i}\\x1b[0m", file=sys.stderr)
    time.sleep(0.02)
print("tty", os.isatty(1), os.isatty(2), os.get_terminal_size().columns)
"""
    written = on_terminal(watching(python(code)))
    lines = shown(written)
    expected = [text for i in range(60) for text in (f"line {i}", f"error {i}")]
    assert lines[:121] == [*expected, "tty True True 100"]
    assert "a title" in lines[121]
    table = [line for line in lines if re.match(r"userspace  f  ", line)]
    assert len(table) == 1, "one table is left"
    assert b"\x1b[32merror 7\x1b[0m" in written, "colours pass"
    assert written.count(b"a title") > 3, "it was drawn again and again"


@pytest.mark.slow
def test_a_line_without_an_end_is_seen_and_kept() -> None:
    code = """
for i in range(20):
    print(f"\\rdone {i}", end="")
    time.sleep(0.04)
print("\\rdone 20\\nand no end", end="")
"""
    written = on_terminal(watching(python(code)))
    lines = shown(written)
    assert lines[:2] == ["done 20", "and no end"]
    assert re.search(rb"done (5|6|7|8|9|10|11|12|13|14|15)\b", written), "while it was not complete"
    assert "a title" in lines[2]


def test_a_line_that_ends_when_the_view_is_closed_is_one_line() -> None:
    has_read, read = threading.Event(), CommandOutput.read

    def read_once(output: CommandOutput) -> str:
        """The view's thread gets the first of it alone."""
        if threading.current_thread() is threading.main_thread():
            return read(output)
        text = "" if has_read.is_set() else read(output)
        if text:
            has_read.set()
        return text

    def child() -> None:
        CommandOutput.read = read_once  # type: ignore[method-assign]
        sink = LiveSink()
        with live_view(sink.snapshot, sys.stderr, "a title"):
            sink.begin(plan(), time.monotonic_ns())
            os.write(1, b"begun, ")
            assert has_read.wait(PATIENCE_S)
            os.write(1, b"and ended")
            sink.finish()
            assert sink.wait(PATIENCE_S)

    lines = shown(on_terminal(child))
    assert lines[0] == "begun, and ended"
    assert "a title" in lines[1]


@pytest.mark.slow
def test_a_line_without_an_end_is_printed_once() -> None:
    counts: Counter[str] = Counter()
    is_drawn_again = threading.Event()

    def counted(name: str) -> None:
        method = getattr(live_view_module._OnTerminal, name)

        def call(drawing: object) -> None:
            counts[name] += 1
            if name == "_draw" and counts["_print"] and counts[name] > 3:
                is_drawn_again.set()
            method(drawing)

        setattr(live_view_module._OnTerminal, name, call)

    def child() -> None:
        counted("_draw")
        counted("_print")
        sink = LiveSink()
        with live_view(sink.snapshot, sys.stderr, "a title", interval_s=0.1):
            sink.begin(plan(), time.monotonic_ns())
            os.write(1, b"no end")
            assert is_drawn_again.wait(PATIENCE_S)
            sink.finish()
            assert sink.wait(PATIENCE_S)
        assert counts["_print"] == 2  # and when it is closed

    assert shown(on_terminal(child))[0] == "no end"


@pytest.mark.slow
def test_much_output_is_not_lost() -> None:
    lines = shown(on_terminal(watching(python("for i in range(20_000): print('row', i)"))))
    assert [line for line in lines if line.startswith("row")] == [f"row {i}" for i in range(20_000)]


def test_messages_of_our_own_stand_above_the_view_too() -> None:
    def child() -> None:
        sink = LiveSink()
        with live_view(sink.snapshot, sys.stderr, "a title"):
            print("not recorded: cuFoo", file=sys.stderr)
            sink.begin(plan(), time.monotonic_ns())
            calls(sink, 3)
            sink.finish()
            assert sink.wait(PATIENCE_S)
        print("after", file=sys.stderr)

    lines = shown(on_terminal(child))
    assert lines[0] == "not recorded: cuFoo"
    assert "6 events" in lines[1]
    assert lines[-2] == "after"


def test_the_terminal_is_given_back_after_an_error() -> None:
    def child() -> None:
        try:
            with live_view(LiveSink().snapshot, sys.stderr, "a title"):
                raise OSError("as a capture that cannot begin")
        except OSError as error:
            print("error:", error)
        assert os.ttyname(1) == os.ttyname(0)

    assert shown(on_terminal(child))[0] == "error: as a capture that cannot begin"


def test_the_view_takes_no_signals() -> None:
    def child() -> None:
        sink = LiveSink()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with live_view(sink.snapshot, sys.stderr, "a title"):
            sink.begin(plan(), time.monotonic_ns())
            print("ready", flush=True)
            received = signal.sigtimedwait({signal.SIGINT}, PATIENCE_S)
            assert received is not None
            assert received.si_signo == signal.SIGINT
            sink.finish()
            assert sink.wait(PATIENCE_S)

    typed = iter([b"\x03"])
    written = on_terminal(child, lambda seen: next(typed, b"") if b"ready" in seen else b"")
    assert any("a title" in line for line in shown(written))


@pytest.mark.parametrize("interval_s", [None, 0.05])
def test_elsewhere_there_are_plain_tables(interval_s: float | None) -> None:
    out, sink = io.StringIO(), LiveSink()
    with live_view(sink.snapshot, out, "a title", interval_s=interval_s):
        sink.begin(plan(), time.monotonic_ns())
        calls(sink, 5)
        give_up_s = time.monotonic() + PATIENCE_S
        while interval_s and out.getvalue().count("a title") < 3 and time.monotonic() < give_up_s:
            time.sleep(0.01)
        assert (out.getvalue() != "") == (interval_s is not None)
        sink.finish()
        assert sink.wait(PATIENCE_S)
    text = out.getvalue()
    assert "\x1b" not in text
    assert text.count("a title") >= (4 if interval_s else 1)
    last = text[text.rindex("a title") :]
    assert re.search(r"^userspace +f +5 .* 10\.0 .?s +2\.\d\d .?s", last, re.MULTILINE)
