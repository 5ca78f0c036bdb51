"""The progress bar: on a terminal, for what takes long, and never in the way of output."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tracepipe.terminal import messages
from tracepipe.terminal.messages import progress


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes over a second."""
    monkeypatch.setattr(messages, "_QUIET_S", 0.0)


def shown_by(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal gets that is standard error while `work` is done."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    screen, theirs = os.openpty()
    # Not in a fixture: pytest has a standard error of its own for each phase of a test.
    with open(theirs, "w") as standard_error, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", standard_error)
        work()
    seen = b""
    with contextlib.suppress(OSError):  # a terminal without its other end is an error, not an end
        while piece := os.read(screen, 1 << 16):
            seen += piece
    os.close(screen)
    return seen.decode()


def half_done(title: str) -> None:
    """Work with progress."""
    with progress(title) as update:
        assert update is not None
        update(1_500_000, 3_000_000)


def test_short_work_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_by(lambda: half_done("convert run.jsonl"), monkeypatch) == ""


def test_nothing_is_shown_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress("convert run.jsonl") as update:
        assert update is None


@pytest.mark.parametrize("name", ["run.jsonl", "run{0}.jsonl", "{task.nothing}", "run[red].jsonl", "[/red]"])
def test_a_bar_has_the_name_of_the_file_whatever_it_is(
    name: str, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown_by(lambda: half_done(f"convert {name}"), monkeypatch)
    assert f"convert {name} " in text
    assert "1.5/3.0 MB" in text
    assert text.endswith("\x1b[2K")  # and it is gone


def test_a_bar_gives_the_cursor_back_when_interrupted(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt), progress("convert run.jsonl") as update:
            assert update is not None
            update(1, 2)
            raise KeyboardInterrupt

    text = shown_by(interrupted, monkeypatch)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_what_goes_to_a_file_stays_out_of_the_terminal(
    tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def validated() -> None:  # as by `tracepipe validate run.jsonl > faults`
        with (tmp_path / "faults").open("w") as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", file)
            with progress("validate run.jsonl") as update:
                assert update is not None
                update(1, 2)
                print("run.jsonl:17: ts_ns: is missing")

    assert "is missing" not in shown_by(validated, monkeypatch)
    assert (tmp_path / "faults").read_text() == "run.jsonl:17: ts_ns: is missing\n"
