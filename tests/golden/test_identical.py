"""The native core and its reference in Python write the same bytes, and find the same, whatever they read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracepipe.event.tables
import tracepipe.layout.draw
import tracepipe.layout.merging
import tracepipe.readers.tracepipe1
from benchmarks.recordings import write_lone_warps, write_mixed, write_threads, write_warps
from tests.golden import hostile, test_anything, test_property
from tests.golden.both import converted
from tests.golden.cases import Case, cases, with_sample
from tests.native import layered as layered_lines
from tests.native import packets
from tests.support.cores import CORES, running
from tracepipe.converters import CONVERTERS
from tracepipe.layout import WARP_TRACKS, LayoutOptions
from tracepipe.native import PURE
from tracepipe.readers import layered, perfetto_events, sorted_rows
from tracepipe.recording.convert import ConversionOptions, check


@pytest.fixture(autouse=True, scope="module")
def native() -> Iterator[None]:
    """Skips all of this where there is nothing to compare."""
    with running("native"):
        yield


@contextmanager
def recorded(data: bytes) -> Iterator[Path]:
    """A file with this."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.jsonl")
        path.write_bytes(data)
        yield path


def lines_of(records: list[Any]) -> bytes:
    """The text of records after a header."""
    return b"".join(hostile._dumped(record) + b"\n" for record in [hostile.HEADER, *records])


@contextmanager
def little_at_once(chunk_bytes: int, window_events: int, kept_max: int = 1 << 15) -> Iterator[None]:
    """Reads few lines at a time, and lets the tables keep few shapes and arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracepipe.readers.tracepipe1, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(tracepipe.layout.merging, "WINDOW_EVENTS", window_events)
        patch.setattr(tracepipe.event.tables, "KEPT_MAX", kept_max)
        patch.setattr(tracepipe.layout.draw, "KEPT_MAX", kept_max)
        yield


def problems_of(path: Path) -> dict[str, list[str]]:
    """What each core says of the lines of a file."""
    problems: dict[str, list[str]] = {}
    for core in CORES:
        with running(core):
            check(str(path), "tracepipe", problems.setdefault(core, []).append)
    return problems


options = st.builds(
    lambda tracks, exits, compress, offset: ConversionOptions(
        "tracepipe", compress=compress, assumed=offset, layout=LayoutOptions(tracks, exits)
    ),
    st.sampled_from(WARP_TRACKS),
    st.booleans(),
    st.booleans(),
    st.sampled_from(
        [{}, {}, {"globaltimer:1": 5}, {"globaltimer:0": -6_000_000, "globaltimer:1": "realtime"}]
    ),
)


@pytest.mark.parametrize("to", CONVERTERS)
@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_fixtures_give_the_same_bytes(case: Case, to: str) -> None:
    converted(case.input, to, case.options(), CORES)


@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_fixtures_give_the_same_bytes_compressed(case: Case) -> None:
    converted(case.input, "perfetto", case.options(compress=True), CORES)


@pytest.mark.slow
@settings(max_examples=30)
@given(hostile.recordings(), options)
def test_whatever_a_file_holds(data: bytes, options: ConversionOptions) -> None:
    with recorded(data) as path:
        for to in CONVERTERS:
            converted(path, to, options, CORES)
        problems = problems_of(path)
        assert problems["native"] == problems["pure"]


@pytest.mark.slow
@settings(max_examples=15)
@given(hostile.recordings(), options, st.sampled_from([200, 2_000]), st.sampled_from([1, 3, 20]))
def test_whatever_a_file_holds_however_little_is_read_at_once(
    data: bytes, options: ConversionOptions, chunk_bytes: int, window_events: int
) -> None:
    with recorded(data) as path, little_at_once(chunk_bytes, window_events):
        for to in ("perfetto", "chrome", "text"):
            converted(path, to, options, CORES)


@pytest.mark.slow
@settings(max_examples=15)
@given(hostile.recordings(), options, st.sampled_from([200, 2_000]))
def test_numbers_that_are_given_anew_in_every_batch_change_nothing(
    data: bytes, options: ConversionOptions, chunk_bytes: int
) -> None:
    with recorded(data) as path:
        for to in ("perfetto", "chrome", "text", "threads"):
            with little_at_once(chunk_bytes, 3):
                roomy = converted(path, to, options, CORES)
            with little_at_once(chunk_bytes, 3, kept_max=0):
                crowded = converted(path, to, options, CORES)
            assert crowded[1] == roomy[1]
            assert crowded[0] == roomy[0]


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(test_anything.lines, max_size=60), options)
def test_random_events(records: list[Any], options: ConversionOptions) -> None:
    with recorded(lines_of(records)) as path:
        for to in CONVERTERS:
            converted(path, to, options, CORES)


@pytest.mark.slow
@settings(max_examples=10, suppress_health_check=test_property.SLOW)
@given(test_property.recordings(), st.randoms(use_true_random=False))
def test_spans_in_any_order(recording: test_property.Recording, chance: Any) -> None:
    shuffled = test_property.shuffled(recording.lines, chance)
    with recorded(lines_of(shuffled)) as path, little_at_once(256, 4):
        for to in ("perfetto", "chrome", "text"):
            converted(path, to, None, CORES)


def deep_and_wide() -> list[dict[str, Any]]:
    """Calls deeper than a track shows, more overlaps than there are tracks for, and launches before calls."""
    event = {"type": "userspace", "name": "f", "phase": "B", "pid": 5, "tid": 5}
    records = [event | {"ts_ns": hostile.START_NS + at, "args": {"begun": at}} for at in range(700)]
    records += [event | {"phase": "E", "ts_ns": hostile.START_NS + 9_000 - at} for at in range(0, 700, 3)]
    wide = event | {"type": "syscall", "name": "ioctl", "phase": "X", "dur_ns": 5_000}
    records += [wide | {"ts_ns": hostile.START_NS + at} for at in range(90)]
    kernel = {"type": "gpu_kernel", "name": "k", "phase": "X", "gpu": 0, "dur_ns": 5}
    for launch in (1, (1 << 64) - 1, 1 << 63):
        records.append(kernel | {"ts_ns": hostile.START_NS + 10 * (launch % 5), "launch": launch})
        records.append(wide | {"tid": 6, "ts_ns": hostile.START_NS + 100, "launch": launch})
    slot = {
        "type": "gpu_warp",
        "name": "k",
        "ts_ns": hostile.START_NS,
        "gpu": 1,
        "sm": [0] * 90,
        "slot": [0] * 90,
    }
    return [*records, slot | {"warp": [*range(90)], "entry_ns": [*range(90)], "exit_ns": [5_000] * 90}]


HUGE_ROWS = b"""\
TIME(ms)     PROCESS          PID          EVENT                DETAILS
1            app              7            cudaMalloc           size=-99999999999999999999 bytes
2            app              7            cudaMalloc           returned=-9999999999999999999 (error)
3            app              7            cudaMemcpy           size=99999999999999999999 bytes, kind=1
4            app              7            cudaMemcpy           size=9223372036854775808 bytes, device=-9
5            app              7            cudaMemcpy           returned=9999999999999999999 (error)
"""


@pytest.mark.parametrize("to", CONVERTERS)
def test_integers_beyond_64_bits_that_only_text_can_have(to: str) -> None:
    with recorded(HUGE_ROWS) as path:
        output, account = converted(path, to, ConversionOptions("cuda-table"), CORES)
    assert account.counts["userspace"] == 5
    if to in ("chrome", "text"):
        sizes = (
            b"-99999999999999999999",
            b"-9999999999999999999",
            b"99999999999999999999",
            b"9223372036854775808",
        )
        assert all(size in output for size in sizes)


NESTED = [
    {"a": {"b": {}, "é": [None, {"c": None, "n": -7}], "s": "x"}},
    {"a": [[], [{}], 1.5]},
    {"a": {"launch": 1}},
]


@pytest.mark.parametrize("to", CONVERTERS)
def test_nested_arguments(to: str) -> None:
    deep: list[Any] = [1]
    for _ in range(11):
        deep.append({"k": deep[-1]})
    event = {"type": "userspace", "name": "f", "phase": "I", "pid": 5, "tid": 5}
    records = [
        event | {"ts_ns": hostile.START_NS + at, "args": args} for at, args in enumerate([*NESTED, *deep[1:]])
    ]
    twice = b'{"ts_ns":9,"type":"userspace","name":"f","phase":"I","args":{"a":{"k":1,"k":2}}}\n'
    with recorded(lines_of(records) + twice) as path:
        _, account = converted(path, to, ConversionOptions("tracepipe"), CORES)
    assert account.counts["userspace"] == len(records) + 1


@pytest.mark.parametrize("to", CONVERTERS)
@pytest.mark.parametrize("chunk_bytes", [1 << 12, 1 << 20])
def test_calls_too_deep_and_slices_that_no_track_takes(to: str, chunk_bytes: int) -> None:
    with recorded(lines_of(deep_and_wide())) as path, little_at_once(chunk_bytes, 50):
        _, account = converted(path, to, None, CORES)
    if CONVERTERS[to].of == "timeline" and chunk_bytes == 1 << 20:  # with fewer at once, some are late
        assert account.outcomes.undrawn == (90 - 65) * 2
        assert account.outcomes.overlaps == (700 - 512) + 89 * 2
        assert account.outcomes.causality == 3


@pytest.mark.slow
@pytest.mark.parametrize("unique", [False, True])
def test_thirty_thousand_events_of_a_program(unique: bool, tmp_path: Path) -> None:
    # Of a million, benchmarks/identical.py compares what is written.
    path = tmp_path / "run.jsonl"
    write_mixed(path, 30_000, unique=unique)
    for to in ("perfetto", "chrome") if unique else ("perfetto", "chrome", "text"):
        _, account = converted(path, to, None, CORES)
        assert sum(account.counts.values()) >= 30_000


@pytest.mark.slow
def test_many_launches(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_warps(path, 8_000)
    for to in ("perfetto", "chrome", "text"):
        converted(path, to, None, CORES)
    for warp_tracks, exits in (("logical", True), ("sm", False)):
        converted(path, "perfetto", ConversionOptions(layout=LayoutOptions(warp_tracks, exits)), CORES)


@pytest.mark.slow
def test_many_launches_of_one_warp(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_lone_warps(path, 1_000)
    for to in ("perfetto", "chrome", "text"):
        _, account = converted(path, to, None, CORES)
        assert account.counts["gpu_warp"] == 1_000
    converted(path, "perfetto", ConversionOptions(layout=LayoutOptions("sm", False)), CORES)


@pytest.mark.slow
def test_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "run.txt"
    write_threads(path, 8_000)
    for to in ("perfetto", "text", "threads"):
        converted(path, to, None, CORES)


@pytest.mark.parametrize("seed", range(6))
def test_packets_of_perfetto_give_the_same_events(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto_events, "_KEYS_MAX", 1 << 12)  # these two are changed by `read`
    monkeypatch.setattr(sorted_rows, "GIVEN_ROWS", 1 << 12)
    rng = Random(seed)
    for _ in range(15):
        data, kept, found = packets.trace(rng), rng.choice((0, 5, 1 << 12)), []
        for core in CORES:
            with running(core):
                found.append(packets.read(data, kept))
        assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(4))
def test_lines_of_layered_tracers_give_the_same_events(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PURE, "0")
    for owner, name in (
        (layered.LayeredLines, "chunk_bytes"),
        (layered, "KEYS_MAX"),
        (layered, "_STEMS_MAX"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # these are changed by `expect_the_same`
    rng = Random(seed)
    for _ in range(60):
        layered_lines.expect_the_same(rng)
