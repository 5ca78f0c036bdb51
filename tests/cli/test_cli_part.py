"""`tracepipe cut`: its options, what it refuses, and what it says."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.cli.test_output import piped
from tests.support.recordings import event, span, write

# Of the header of `write`.
START_NS = 1_000


def tracepipe(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    argv = [*map(str, arguments)]
    code, out, err = piped(argv, stdin)
    return subprocess.CompletedProcess(argv, code, out.encode(), err.encode())


def calls(count: int = 100) -> list[dict[str, Any]]:
    """A call each microsecond, which takes half of it."""
    starts_ns = range(START_NS, START_NS + count * 1_000, 1_000)
    return [span(start_ns, start_ns + 500, f"call {at}") for at, start_ns in enumerate(starts_ns)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    footer = {"type": "footer", "counts": {"userspace": 100}, "losses": {}, "ended_by": "exit 0"}
    return write(tmp_path / "run.jsonl", *calls(), footer)


def names(data: bytes) -> list[str]:
    return [line["name"] for line in map(json.loads, data.splitlines()) if line["type"] == "userspace"]


@pytest.mark.parametrize(
    ("times", "first", "last"),
    [
        (["--from", "10us", "--to", "12us"], 10, 11),
        (["--start", "10us", "--end", "12us"], 10, 11),
        (["--from", "10.5us", "--to", "12us"], 11, 11),
        (["--from", "97us"], 97, 99),
        (["--to", "2us"], 0, 1),
        (["--from", f"@{START_NS + 10_000}", "--to", f"@{START_NS + 12_001}ns"], 10, 12),
        (["--from", "0.00001", "--to", f"@{START_NS + 11_000}"], 10, 10),
    ],
)
def test_times_count_from_the_start_or_are_the_clocks_own(
    times: list[str], first: int, last: int, run: Path
) -> None:
    done = tracepipe("cut", run, *times, "-o", "-")
    assert done.returncode == 0, done.stderr
    assert names(done.stdout) == [f"call {at}" for at in range(first, last + 1)]


def test_times_count_from_the_first_event_where_nothing_says_when_the_recording_began(tmp_path: Path) -> None:
    lines = [{"ts": 5 + at, "type": "userspace", "name": f"call {at}", "pid": 1} for at in range(9)]
    path = tmp_path / "run.log"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = tracepipe("cut", path, "--from", "2ms", "--to", "4ms", "-o", "-")
    assert names(done.stdout) == ["call 2", "call 3"]
    assert json.loads(done.stdout.splitlines()[0])["clocks"] == ["trace"]


@pytest.mark.parametrize(
    ("times", "code", "message"),
    [
        ([], 2, "Give --from, --to or both."),
        (["--from", "x"], 1, "'x' is not a duration."),
        (["--from", "@-1"], 1, "'@-1' is not a time."),
        (["--from", "@" + "9" * 30], 1, "is not a time."),
        (["--from", "@" + "9" * 5000], 1, "is not a time."),
        (["--from", "2us", "--to", "2us"], 1, "The window is empty."),
        (["--from", "nsys"], 2, "nsys is not a time"),
    ],
)
def test_times_that_are_missing(times: list[str], code: int, message: str, run: Path, tmp_path: Path) -> None:
    done = tracepipe("cut", run, *times, "-o", tmp_path / "part.jsonl")
    assert (done.returncode, message in done.stderr.decode()) == (code, True), done.stderr
    assert not (tmp_path / "part.jsonl").exists()


def test_a_part_states_where_it_is_and_what_it_holds(run: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    done = tracepipe("cut", run, "--from", "10us", "--to", "12us", "-o", part)
    assert done.stderr.decode().splitlines() == [f"{run}: tracepipe, 2 userspace", f"wrote {part}"]
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    assert lines[0]["start"] == {"monotonic_ns": START_NS + 10_000}
    assert lines[0]["command"] == ["./vec_add"]
    edges = [(line["ts_ns"], line["phase"], line["cause"]) for line in lines if line["type"] == "window"]
    assert edges == [(START_NS + 10_000, "B", "cut"), (START_NS + 12_000, "E", "cut")]
    assert lines[-1] == {"type": "footer", "counts": {"userspace": 2}, "losses": {}}
    assert tracepipe("validate", part).returncode == 0


def test_a_part_behind_the_end_is_empty_and_has_a_note(run: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    done = tracepipe("cut", run, "--from", "5s", "-o", part)
    assert b"note: the recording ends before the part begins" in done.stderr
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    at_ns = START_NS + 5 * 10**9
    edges = [(line["ts_ns"], line["phase"]) for line in lines if line["type"] == "window"]
    assert edges == [(at_ns, "B"), (at_ns, "E")]


def test_files_are_replaced_with_force_alone_and_compressed_by_their_names(run: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl.zst"
    assert tracepipe("cut", run, "--to", "2us", "-o", part).returncode == 0
    again = tracepipe("cut", run, "--to", "3us", "-o", part)
    assert (again.returncode, b"exists" in again.stderr) == (1, True)
    assert tracepipe("cut", run, "--to", "3us", "-o", part, "--force").returncode == 0
    plain = zstandard.ZstdDecompressor().stream_reader(part.read_bytes(), read_across_frames=True).read()
    assert names(plain) == ["call 0", "call 1", "call 2"]
    itself = tracepipe("cut", run, "--to", "3us", "-o", run, "--force")
    assert (itself.returncode, b"is the recording itself" in itself.stderr) == (1, True)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_recording_may_come_from_a_pipe(is_compressed: bool, run: Path) -> None:
    data = gzip.compress(run.read_bytes()) if is_compressed else run.read_bytes()
    done = tracepipe("cut", "-", "--from", "1us", "--to", "2us", "-o", "-", stdin=data)
    assert names(done.stdout) == ["call 1"]


def test_an_error_names_the_input_and_not_its_copy() -> None:
    done = tracepipe("cut", "-", "--to", "2us", "-o", "-", stdin=b" ")
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, b"tracepipe: -: is empty")


def test_the_format_is_named_by_another_option_than_elsewhere() -> None:
    done = tracepipe("cut", "-", "--to", "2us", "-o", "-", stdin=b"nothing that is known")
    assert (done.returncode, b"Name it with --source" in done.stderr) == (1, True)
    done = tracepipe("cut", "-", "--to", "2us", "-o", "-", "--source", "tracepipe", stdin=b"nothing")
    assert b"the header is not JSON" in done.stderr


def test_a_strict_cut_refuses_a_bad_line_and_writes_nothing(tmp_path: Path) -> None:
    run, part = write(tmp_path / "run.jsonl", *calls(3), "{"), tmp_path / "part.jsonl"
    done = tracepipe("cut", run, "--to", "2us", "-o", part, "--strict")
    assert (done.returncode, part.exists()) == (1, False)
    assert b"run.jsonl:5" in done.stderr
    done = tracepipe("cut", run, "--to", "2us", "-o", part)
    assert (done.returncode, b"skipped: " in done.stderr) == (0, True)


def test_threads_are_called_in_a_part_as_at_the_end_of_the_recording(tmp_path: Path) -> None:
    lines = [event("I", 2_000, "mark", comm="before"), event("I", 3_000, "mark"), event("I", 9_000, "mark")]
    run, part = (
        write(tmp_path / "run.jsonl", *lines, event("I", 9_500, "x", comm="after")),
        tmp_path / "p.jsonl",
    )
    assert tracepipe("cut", run, "--from", "1.5us", "--to", "3us", "-o", part).returncode == 0
    messages = [json.loads(line) for line in part.read_text().splitlines()]
    assert [line for line in messages if line["type"] == "name"] == [
        {"type": "name", "pid": 1, "name": "after"},
        {"type": "name", "pid": 1, "tid": 1, "name": "after"},
    ]


def test_a_loss_without_a_time_stays_where_it_stood(tmp_path: Path) -> None:
    loss = {"type": "loss", "layer": "userspace", "count": 3}
    lines = [*calls(3), loss, *calls(9)[4:]]
    run, part = write(tmp_path / "run.jsonl", *lines), tmp_path / "part.jsonl"
    for times, count in ((["--from", "2us", "--to", "3us"], 1), (["--from", "4us"], 0)):
        done = tracepipe("cut", run, *times, "-o", part, "--force")
        assert (b"lost: 3 userspace events" in done.stderr) == (count == 1)
        messages = [json.loads(line) for line in part.read_text().splitlines()]
        assert [line for line in messages if line["type"] == "loss"] == [
            loss | {"ts_ns": START_NS + 2_000}
        ] * count


@pytest.mark.parametrize(("state", "kept"), [("sleeping", ["B", "E"]), ("dead", [])])
def test_a_thread_that_ends_before_a_part_is_not_in_it(state: str, kept: list[str], tmp_path: Path) -> None:
    runs = [
        event("B", 2_000, "running", "scheduler", cpu=0),
        event("E", 3_000, "running", "scheduler", cpu=0, args={"prev_state": state}),
    ]
    run = write(tmp_path / "run.jsonl", *runs, event("I", 9_000, "mark", tid=2))
    done = tracepipe("cut", run, "--from", "5us", "-o", "-")
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["phase"] for line in messages if line["type"] == "scheduler"] == kept


def test_any_format_becomes_an_event_file(tmp_path: Path, run: Path) -> None:
    done = tracepipe("convert", run, "-f", "tracepipe", "-o", tmp_path / "again.jsonl.gz")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again.jsonl.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert b"100 userspace" in tracepipe("convert", tmp_path / "again.jsonl.gz", "-f", "text").stderr
