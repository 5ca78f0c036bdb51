"""The library reads and converts: as the command does, and event by event."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tracepipe
from benchmarks.recordings import write_mixed
from tests.support.program import PYTHONPATH
from tests.support.recordings import GPU_CLOCK, PAIR, event, span, write
from tracepipe import cli
from tracepipe.converters import CONVERTERS
from tracepipe.event.model import LAYERS

ROOT = Path(__file__).parents[2]
INPUTS = sorted((ROOT / "fixtures").glob("*/input.*"))
FOOTER = {"type": "footer", "counts": {"userspace": 1, "gpu_kernel": 1}, "losses": {"userspace": 7}}
LOSS = {"type": "loss", "layer": "userspace", "count": 7, "ts_ns": 2_500}
WARPS = {
    "type": "gpu_warp", "name": "k", "ts_ns": 500_000, "clock": GPU_CLOCK, "gpu": 0, "stream": 3, "launch": 1,
    "grid": [2, 1, 1], "block": [64, 1, 1], "warp": [0, 3, 1], "sm": [5, 6, 5], "slot": [0, 1, 2],
    "entry_ns": [0, 40, 10], "entry_mask": [4294967295, 255, 1], "exit_count": [2, 1, 0],
    "exit_ns": [100, 300, 50], "exit_clk": [170, 510, 85], "exit_mask": [1, 4294967294, 255],
    "ranges": ["load", "mma"], "range_count": [2, 1, 0], "range_name": [0, 1, 1], "range_clk": [0, 255, 17],
    "range_dur_clk": [170, 255, 34], "range_open": [0, 1, 0],
    "args": {"function": "k(int)"},
}  # fmt: skip


@pytest.fixture(params=["native", "pure"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, with run.jsonl; read by the native core, and by Python."""
    monkeypatch.setenv("TRACEPIPE_PURE", "1" if request.param == "pure" else "0")
    monkeypatch.chdir(tmp_path)
    kernel = span(500_100, 500_600, "k", "gpu_kernel", clock=GPU_CLOCK, gpu=0, stream=3, launch=1)
    call = event("B", 2_100, "cuLaunchKernel", cpu=1, comm="vec", launch=1, args={"grid": [2, 1, 1]})
    write(tmp_path / "run.jsonl", PAIR, call, LOSS, kernel, WARPS, "no event", FOOTER)
    return tmp_path


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """The exit code of a command, and what it says."""

    def ran(*argv: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tracepipe", *argv])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capsys.readouterr().err

    return ran


# Conversion --------------------------------------------------------------------------------------------


def test_converting_is_what_the_command_does(run: Path, command: Callable[..., tuple[int, str]]) -> None:
    for name, made in (("perfetto", "run.pftrace"), ("chrome", "run.json")):
        account = tracepipe.convert("run.jsonl", format=name)
        ours = Path(made).read_bytes()
        assert account.output == made
        # The same refusal, word by word.
        with pytest.raises(tracepipe.OutputError) as refused:
            tracepipe.convert(Path("run.jsonl"), format=name)
        code, errors = command("convert", "run.jsonl", "-f", name)
        assert (code, errors) == (1, f"tracepipe: {refused.value}\n  {refused.value.hint}\n")
        code, _ = command("convert", "run.jsonl", "-f", name, "--force")
        assert (code, Path(made).read_bytes()) == (0, ours)
        assert tracepipe.convert("run.jsonl", format=name, force=True).output == made
        assert Path(made).read_bytes() == ours


def test_a_conversion_reports_what_was_read(run: Path) -> None:
    account = tracepipe.convert(
        "run.jsonl", "x", options=tracepipe.ConvertOptions(warp_tracks="sm", thread_exits=True)
    )
    assert {layer: account.counts[layer] for layer in LAYERS if account.counts[layer]} == {
        "userspace": 1, "gpu_kernel": 1, "gpu_warp": 3,
    }  # fmt: skip
    assert account.losses == {"userspace": 7}
    assert (account.skipped, [problem.line for problem in account.problems]) == (1, [7])
    assert (account.outcomes.unclosed, account.outcomes.causality) == (1, 1)
    assert [(statement["clock"], statement["method"]) for statement in account.clocks] == [(GPU_CLOCK, "fit")]
    assert repr(account) == (
        "<Account of run.jsonl (tracepipe): 1 userspace, 1 gpu_kernel, 3 gpu_warp; 1 line skipped; "
        "lost: 7 userspace>"
    )


def test_a_stream_is_written_to_and_stays_open(run: Path, capfdbinary: Any) -> None:
    stream = io.BytesIO()
    assert tracepipe.convert("run.jsonl", stream, "text").output == ""
    assert b"cuLaunchKernel" in stream.getvalue()
    assert tracepipe.convert("run.jsonl", format="text").output == "-"
    assert capfdbinary.readouterr().out == stream.getvalue()


def test_a_stream_that_compresses_is_not_compressed_again(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "again.jsonl.gz"
    with gzip.open(out, "wb") as stream:
        tracepipe.convert("run.jsonl", stream, "tracepipe")  # type: ignore[arg-type]
    assert gzip.decompress(out.read_bytes()).startswith(b'{"type":"header"')


def test_what_goes_wrong_leaves_no_file(run: Path) -> None:
    with pytest.raises(tracepipe.InputError, match=r"run.jsonl:7: ") as refused:
        tracepipe.convert("run.jsonl", options=tracepipe.ConvertOptions(strict=True))
    assert (refused.value.path, refused.value.line) == ("run.jsonl", 7)
    with pytest.raises(tracepipe.FormatError, match="no output format is called 'svg'") as unknown:
        tracepipe.convert("run.jsonl", format="svg")
    assert unknown.value.hint == f"Use one of: {', '.join(CONVERTERS)}."
    with pytest.raises(tracepipe.FormatError, match="chrome has no compressed form"):
        tracepipe.convert("run.jsonl", format="chrome", options=tracepipe.ConvertOptions(compress=True))
    with pytest.raises(tracepipe.FormatError, match="drawn as 'block'"):
        tracepipe.convert("run.jsonl", options=tracepipe.ConvertOptions(warp_tracks="block"))
    with pytest.raises(tracepipe.FormatError, match="no input format is called 'perf'"):
        tracepipe.convert("run.jsonl", options=tracepipe.ConvertOptions(source_format="perf"))
    with pytest.raises(tracepipe.ClockError, match="cannot place"):
        tracepipe.convert(
            "run.jsonl", options=tracepipe.ConvertOptions(assume_offset={GPU_CLOCK: "boottime"})
        )
    with pytest.raises(tracepipe.InputError, match="cannot be read"):
        tracepipe.convert("nothing.jsonl")
    assert [path.name for path in run.iterdir()] == ["run.jsonl"]


# Events ------------------------------------------------------------------------------------------------


def test_events_have_their_fields_by_name(run: Path) -> None:
    call, kernel, *_ = tracepipe.open("run.jsonl")
    assert (call.ts_ns, call.dur_ns, call.end_ns, call.layer, call.name, call.phase) == (
        2_100, None, None, "userspace", "cuLaunchKernel", "B",
    )  # fmt: skip
    assert (call.pid, call.tid, call.cpu, call.comm, call.launch, call.gpu) == (1, 1, 1, "vec", 1, None)
    assert (dict(call.args), call.source_ns, call.bound_ns) == ({"grid": [2, 1, 1]}, None, 0)
    # 500 000 of the GPU's clock are 2 000.
    assert (kernel.ts_ns, kernel.dur_ns, kernel.end_ns, kernel.source_ns) == (2_100, 500, 2_600, 500_100)
    assert (kernel.clock, kernel.gpu, kernel.stream, kernel.launch) == (GPU_CLOCK, 0, 3, 1)
    assert kernel.bound_ns is not None and 10 <= kernel.bound_ns < 20
    assert (dict(kernel.args), kernel.grid) == ({}, None)
    assert repr(call) == (
        "Event(ts_ns=2100, layer='userspace', name='cuLaunchKernel', phase='B', pid=1, tid=1, cpu=1, "
        "comm='vec', launch=1, args={'grid': [2, 1, 1]})"
    )
    with pytest.raises(TypeError):
        call.args["grid"] = None  # type: ignore[index]


def test_each_warp_is_an_event(run: Path) -> None:
    warps = [one for one in tracepipe.open("run.jsonl") if isinstance(one, tracepipe.Warp)]
    assert [(one.warp, one.block_index, one.warp_in_block, one.sm, one.slot) for one in warps] == [
        (0, 0, 0, 5, 0), (3, 1, 1, 6, 1), (1, 0, 1, 5, 2),
    ]  # fmt: skip
    first, other, running = warps
    assert (first.layer, first.name, first.phase, first.launch) == ("gpu_warp", "k", "X", 1)
    assert (first.source_ns, first.entry_mask, first.args["function"]) == (500_000, (1 << 32) - 1, "k(int)")
    assert [(one.ts_ns - first.ts_ns, one.mask, one.cycles) for one in first.exits] == [
        (100, 1, 170), (300, (1 << 32) - 2, 510),
    ]  # fmt: skip
    assert (first.dur_ns, first.cycles, first.end_ns) == (300, 510, first.ts_ns + 300)
    assert (other.ts_ns - first.ts_ns, other.dur_ns, other.cycles) == (40, 50, 85)
    assert (running.phase, running.exits, running.dur_ns, running.end_ns) == ("B", (), None, None)
    assert running.cycles is None
    assert [(one.name, one.ts_ns - first.ts_ns, *one[2:]) for one in first.ranges] == [
        ("load", 0, 100, 170, False), ("mma", 150, 150, 255, True),
    ]  # fmt: skip
    assert other.ranges == (tracepipe.WarpRange("mma", other.ts_ns + 10, 20, 34, False),)
    assert running.ranges == ()
    assert repr(running).startswith(
        f"Warp(ts_ns={running.ts_ns}, layer='gpu_warp', name='k', phase='B', warp=1"
    )


def test_a_thread_of_a_gpu_has_its_block_and_its_index(run: Path) -> None:
    thread = {"block": [2, 0, 1], "thread": [31, 1, 0]}
    write(
        run / "run.jsonl",
        event("I", 2_000, "k", "gpu_thread", **thread),
        event("I", 2_001, "k", "gpu_thread"),
    )
    placed, unplaced = tracepipe.open("run.jsonl")
    assert (placed.block, placed.thread, placed.grid) == ((2, 0, 1), (31, 1, 0), None)
    assert (unplaced.block, unplaced.thread) == (None, None)
    assert "block=(2, 0, 1), thread=(31, 1, 0)" in repr(placed)


def test_what_is_known_of_the_recording(run: Path) -> None:
    with tracepipe.open("run.jsonl") as events:
        assert events.header.command == ["./vec_add"]
        assert (events.path, events.source_format, events.trace_clock) == (
            "run.jsonl",
            "tracepipe",
            "monotonic",
        )
        assert repr(events) == "<Events of run.jsonl (tracepipe) on the clock monotonic>"
        next(events)
        with pytest.raises(tracepipe.TracepipeError, match="was not read to its end"):
            _ = events.account
        assert len(list(events)) == 4
    assert events.counts["gpu_warp"] == 3
    assert events.losses == {"userspace": 7}
    assert [problem.line for problem in events.problems] == [7]
    assert [statement["clock"] for statement in events.clocks] == [GPU_CLOCK]


def test_an_assumed_offset_has_no_bound(run: Path) -> None:
    *_, kernel, first, _, _ = tracepipe.open(
        "run.jsonl", tracepipe.ReadOptions(assume_offset={GPU_CLOCK: 1_000})
    )
    assert (kernel.ts_ns, kernel.source_ns, kernel.bound_ns) == (501_100, 500_100, None)
    assert first.bound_ns is None


def test_events_that_nothing_places_are_counted(run: Path) -> None:
    write(run / "run.jsonl", span(500_100, 500_600, "k", "gpu_kernel", clock=GPU_CLOCK))
    events = tracepipe.open("run.jsonl")
    assert list(events) == []
    assert events.account.unplaced == {GPU_CLOCK: 1}


def test_the_file_is_closed_by_the_end_of_the_block(run: Path) -> None:
    def opened() -> list[str]:
        links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return [str(path.readlink()) for path in links if path.exists() and path.samefile("run.jsonl")]

    with tracepipe.open("run.jsonl") as events:
        next(events)
        assert opened()
    assert opened() == []
    events = tracepipe.open("run.jsonl")
    for _ in events:
        pass
    assert opened() == []
    with pytest.raises(StopIteration):
        next(events)
    events = tracepipe.open("run.jsonl", tracepipe.ReadOptions(strict=True))
    with pytest.raises(tracepipe.InputError):
        list(events)
    assert opened() == []


def test_a_bad_line_is_refused_where_it_stands(run: Path) -> None:
    with pytest.raises(tracepipe.InputError, match=r"run\.jsonl:7"):
        list(tracepipe.open("run.jsonl", tracepipe.ReadOptions(strict=True)))
    with pytest.raises(tracepipe.FormatError):
        tracepipe.open("run.jsonl", tracepipe.ReadOptions(source_format="perf"))
    with pytest.raises(tracepipe.InputError):
        tracepipe.open("nothing.jsonl")


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.parent.name)
def test_every_recording_is_read_whole(path: Path) -> None:
    with tracepipe.open(path) as events:
        # A hook has the name of its own layer.
        counted = Counter(one.layer if one.layer in LAYERS else "hook" for one in events if repr(one))
    counts, unplaced = events.counts, events.account.unplaced
    if not unplaced:
        assert counted == Counter({layer: counts[layer] for layer in LAYERS if counts[layer]})
    account = tracepipe.convert(path, io.BytesIO(), "text")
    assert (counts, events.losses, events.problems) == (account.counts, account.losses, account.problems)
    assert (events.clocks, unplaced) == (account.clocks, account.unplaced)


def test_events_are_those_of_the_lines() -> None:
    path = ROOT / "fixtures/capture-h200/input.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    expected = [one for one in records if one.get("clock", "monotonic") == "monotonic" and "phase" in one]
    kept = list(tracepipe.open(path))  # all are good when the file has been read
    found = [one for one in kept if one.source_ns is None]
    assert len(found) == len(expected) > 1000
    names = ("ts_ns", "dur_ns", "name", "phase", "pid", "tid", "cpu", "comm", "launch", "gpu", "stream")
    for one, record in zip(found, expected, strict=True):
        assert {name: getattr(one, name) for name in names} == {name: record.get(name) for name in names}
        assert (one.layer, dict(one.args)) == (record["type"], record.get("args", {}))


# Frames ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["capture-h200", "losses", "bpftime-divergence"])
def test_frames_hold_what_the_events_state(case: str) -> None:
    (path,) = (ROOT / "fixtures" / case).glob("input.*")
    loaded, events = tracepipe.load(path), tracepipe.open(path)
    warps = [(one.name, one.warp, one.ts_ns, one.end_ns) for one in events if isinstance(one, tracepipe.Warp)]
    assert loaded.warps.select("name", "warp", "entry_ns", "last_exit_ns").fetchall() == warps
    assert (loaded.facts.counts, loaded.facts.losses) == (events.counts, events.losses)
    assert (loaded.facts.path, loaded.facts.clocks) == (str(path), events.clocks)


def test_a_relation_can_be_asked_when_nothing_refers_to_its_run() -> None:
    calls = tracepipe.load(ROOT / "fixtures/capture-h200/input.jsonl").calls
    gc.collect()
    assert len(calls.pl()) == len(calls.fetchall()) > 0


@pytest.mark.slow
def test_without_the_libraries_of_the_reports_all_but_tables_work(run: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('duckdb', 'polars', 'scipy', 'matplotlib', 'jinja2')))\n"
        "import tracepipe\n"
        "assert tracepipe.convert('run.jsonl').output and list(tracepipe.open('run.jsonl'))\n"
        "try: tracepipe.load('run.jsonl').calls\n"
        "except tracepipe.LibraryMissing as missing: print(missing.hint)\n"
    )
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "pip install duckdb\n", done.stderr


# Memory ------------------------------------------------------------------------------------------------

MEASURE = r"""
import re, sys, tracepipe
for event in tracepipe.open(sys.argv[1]):
    event.args
print(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_recording(tmp_path: Path) -> None:
    peaks_mb = []
    for count in (100_000, 300_000):
        path = tmp_path / f"{count}.jsonl"
        write_mixed(path, count, unique=True)
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, path], check=True, capture_output=True, text=True
        )
        peaks_mb.append(int(re.sub(r"\D", "", done.stdout)) / 1024)
    assert peaks_mb[1] - peaks_mb[0] < 8, peaks_mb
