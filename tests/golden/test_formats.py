"""What the files are beyond their events: they concatenate, they compress, their tracks stand in order."""

from __future__ import annotations

import io
import json
import re
import zlib
from collections import Counter
from pathlib import Path

import orjson
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from tests.golden.asked import Asked
from tests.golden.cases import FIXTURES, Case, cases, with_sample
from tracepipe.converters import CONVERTERS
from tracepipe.recording.convert import Conversion, ConversionOptions

FLOWS = Case(FIXTURES / "flows")
EVERY_LAYER = Case(FIXTURES / "host-layers")
SLOTS = Case(FIXTURES / "warps-slots")


def all_slices(asked: Asked) -> Counter[str]:
    """Names of slices and instants, wherever they are drawn."""
    return Counter(one.name for _, track in asked.seen().slices for one in track)


@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_a_compressed_trace_holds_the_same_packets(case: Case) -> None:
    plain, compressed = (case.convert("perfetto", compress=compress)[0] for compress in (False, True))
    unpacked = []
    for packet in pb.Trace.FromString(compressed).packet:
        packed = packet.compressed_packets
        unpacked += pb.Trace.FromString(zlib.decompress(packed)).packet if packed else [packet]
    assert len(compressed) < len(plain)
    assert unpacked == [*pb.Trace.FromString(plain).packet]


@pytest.mark.parametrize("case", [FLOWS, EVERY_LAYER, SLOTS], ids=lambda case: case.name)
def test_a_compressed_trace_gives_the_same_answers(case: Case) -> None:
    one, other = (Asked(case.convert("perfetto", compress=compress)[0]) for compress in (False, True))
    assert other.problems == []
    assert other.seen().lines() == one.seen().lines()
    assert other.ranks == one.ranks


def test_compressing_makes_a_trace_smaller() -> None:
    case = Case(FIXTURES / "gpu-h200")
    assert len(case.convert("perfetto", compress=True)[0]) < len(case.convert("perfetto")[0]) / 2


@pytest.mark.parametrize("compress", [False, True])
def test_traces_with_the_same_tracks_concatenate(compress: bool) -> None:
    # Names are interned anew where the second file begins, and its clock starts anew.
    trace, _ = FLOWS.convert("perfetto", compress=compress)
    once, twice = Asked(trace), Asked(trace + trace)
    assert twice.problems == []
    assert all_slices(twice) == Counter({name: 2 * count for name, count in all_slices(once).items()})
    assert [path for path, _ in twice.seen().slices] == [path for path, _ in once.seen().slices]


def test_traces_with_other_tracks_open_and_keep_every_slice() -> None:
    # Tracks are numbered from 1 in each file, so the second file's are drawn on the first one's.
    first, second = (
        Case(FIXTURES / name).convert("perfetto")[0] for name in ("layered-launch", "host-layers")
    )
    assert all_slices(Asked(first + second)) == all_slices(Asked(first)) + all_slices(Asked(second))


def test_a_trace_that_lost_its_last_half_packet_still_opens() -> None:
    whole, _ = FLOWS.convert("perfetto")
    # The last packet ends a slice: that one is open at the end of the trace, and none is missing.
    assert all_slices(Asked(whole[:-1])) == all_slices(Asked(whole))


def names_in_order(asked: Asked, parent: str) -> list[str]:
    """The children of a track as Perfetto orders them: by rank."""
    ids = {row["id"]: row["name"] for row in asked.tracks.values()}
    return [row["name"] for row in asked.ranks if ids.get(row["parent_id"]) == parent]


def test_layers_of_a_thread_are_ordered_from_the_outside_in() -> None:
    asked = Asked(EVERY_LAYER.convert("perfetto")[0])
    # The scheduler's events are in rows of Perfetto's own: see test_switches.py.
    layers = ["CUDA API", "syscalls", "driver", "memory", "transfers"]
    assert names_in_order(asked, "vec_add") == layers


def test_multiprocessors_and_slots_are_ordered_by_number() -> None:
    asked = Asked(SLOTS.convert("perfetto")[0])
    assert names_in_order(asked, "GPU 0 NVIDIA H200") == ["active warps", "SM 2", "SM 4", "SM 10"]
    assert names_in_order(asked, "SM 2") == ["slot 0", "slot 1", "slot 2", "slot 3"]


def test_an_extra_track_stands_right_behind_its_own() -> None:
    asked = Asked(Case(FIXTURES / "host-ends").convert("perfetto")[0])
    ranks = [(row["rank"], row["name"]) for row in asked.ranks if row["name"].startswith(("CUDA", "drive"))]
    assert [name for _, name in sorted(ranks)] == [
        "CUDA API", "CUDA API (overlap 1)", "driver", "driver (overlap 1)",
    ]  # fmt: skip
    # The UI puts those of one rank in the order of their names or times.
    assert len({rank for rank, _ in ranks}) == len(ranks)


def test_chromes_tracks_are_ordered_too() -> None:
    # The trace processor keeps no sort_index; the viewers read it from the file.
    events = json.loads(SLOTS.convert("chrome")[0])["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {
        (e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"
    }
    first = min(pid for pid, tid in names if names[pid, tid] == "SM 10 / slot 0")
    mine = sorted((key for key in names if key[0] == first), key=order.__getitem__)
    drawn = [names[key] for key in mine]
    numbers = [tuple(map(int, re.findall(r"\d+", name))) for name in drawn if name.startswith("SM ")]
    assert drawn[0] == "active warps"
    assert numbers == sorted(numbers)
    assert len(numbers) == 9


def test_tracks_of_threads_are_joined_to_threads_and_processes() -> None:
    asked = Asked(Case(FIXTURES / "threads").convert("perfetto")[0])
    joined = {
        (row["name"], thread["tid"], thread["name"], thread["pid"], thread["process"])
        for row in asked.tracks.values()
        if row["utid"] is not None and row["parent_id"] is not None
        for thread in [asked.threads[row["utid"]]]
    }
    assert joined == {
        ("CUDA API", 4242, "vec_add", 4242, "vec_add"),
        ("CUDA API", 4245, "vec_add", 4242, "vec_add"),
        ("CUDA API", 4250, "vec_add", 4242, "vec_add"),
        ("CUDA API", 4300, "vec_add", 4300, "vec_add"),
        ("CUDA API", 4245, "vec_add", 4300, "vec_add"),
        ("CUDA API", 5, "vec_add", 5, "vec_add"),
        ("CUDA API", 7, "vec_add", 5, "vec_add"),
        ("driver", 7, None, 7, "vec_add"),
        ("syscalls", 5, None, 7, "vec_add"),
    }


def test_a_renamed_thread_has_its_last_name_everywhere() -> None:
    asked = Asked(EVERY_LAYER.convert("perfetto")[0])
    assert {thread["name"] for thread in asked.threads.values() if thread["tid"] == 4243} == {"vec_add:cuda"}
    assert [row["name"] for row in asked.tracks.values()].count("worker") == 0


def test_a_process_that_was_renamed_late_has_its_last_name_too(tmp_path: Path) -> None:
    recording = tmp_path / "run.jsonl"
    call = {"type": "userspace", "name": "f", "phase": "X", "dur_ns": 1, "pid": 5, "tid": 5}
    events = [{**call, "ts_ns": n * 9, "comm": "python" if n < 9000 else "infer"} for n in range(10_000)]
    header = {"type": "header", "schema": "tracepipe/1", "clock": "monotonic"}
    recording.write_bytes(b"\n".join(map(orjson.dumps, [header, *events])))
    out = io.BytesIO()
    Conversion(str(recording), CONVERTERS["perfetto"], ConversionOptions()).run(out)
    asked = Asked(out.getvalue())
    assert [thread["process"] for thread in asked.threads.values() if thread["tid"] == 5] == ["infer"]
