"""What is kept of dropped records of the channel: the lines of later ones are as if nothing was dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.gpu_records import pack_record
from tests.unit.test_annotations import DATA, begun, ended
from tests.unit.test_gpu_kernels import LAUNCH, call, function, gpu, hello, kernel, name, record
from tracepipe.tracer.engines.engine import DeviceRenderer
from tracepipe.tracer.gpu.engines import carries, kernel_records, transport
from tracepipe.tracer.gpu.engines import warp_records as warps
from tracepipe.tracer.gpu.engines.annotation_records import (
    KIND_END,
    KIND_LABEL,
    KIND_POP,
    KIND_PUSH,
    KIND_START,
    LABEL,
    LABEL_DOMAIN,
    LABEL_THREAD,
)
from tracepipe.tracer.gpu.engines.annotations import AnnotationsRenderer, NoRecords
from tracepipe.tracer.gpu.engines.carries import KernelsCarry, WarpsCarry
from tracepipe.tracer.gpu.engines.kernel_records import KIND_CALL, KIND_KERNEL, KIND_TAKEN, TAKEN
from tracepipe.tracer.gpu.engines.kernels import KernelsRenderer
from tracepipe.tracer.gpu.engines.transport import KIND_CLOCK, KIND_NAME
from tracepipe.tracer.gpu.engines.warps import WarpRenderer

Line = dict[str, Any]
START_NS = 5000


def read(texts: list[str]) -> list[Line]:
    return [json.loads(line) for line in texts]


def resumed(renderer: DeviceRenderer, dropped: bytes, kept: bytes = b"") -> tuple[list[Line], list[Line]]:
    """The lines of what was under way, and those of what was kept."""
    carry = renderer.carry()
    carry.take(dropped)
    again = renderer.carry()
    again.take(b"".join(carry.carried()))
    assert again.carried() == carry.carried()
    fresh = renderer.anew()
    begin = read(fresh.resume(carry.carried(), START_NS).texts)
    return begin, read(fresh.render(kept).texts)


def test_kernels_and_calls_keep_their_names_processes_and_gpus() -> None:
    other = record(KIND_KERNEL, kernel(1, 1), pid=41)
    named = hello() + gpu(1) + name(1, "add(int)") + function(LAUNCH, "cudaLaunchKernel_v7000")
    dropped = name(9, "first", pid=41) + other + named + record(KIND_KERNEL, kernel(10, 7, gpu=1))
    kept = record(KIND_CALL, call(5990, LAUNCH, 9)) + record(KIND_KERNEL, kernel(6000, 9, gpu=1))
    whole = KernelsRenderer()
    whole.render(dropped)
    begin, lines = resumed(KernelsRenderer(), dropped, kept)
    assert begin == []
    assert lines == read(whole.render(kept).texts)
    assert [line["name"] for line in lines] == ["cudaLaunchKernel", "add(int)"]
    assert lines[1]["launch"] == 1 << 32 | 9


def test_that_another_profiler_took_over_is_stated_in_later_recordings_too() -> None:
    (loss,), _ = resumed(KernelsRenderer(), record(KIND_TAKEN, TAKEN.pack(1000, 2000)))
    assert (loss["type"], loss["ts_ns"], loss["dur_ns"]) == ("loss", START_NS, 0)


def test_a_repeated_message_of_a_process_is_kept_once() -> None:
    carry = KernelsRenderer().carry()
    carry.take(name(1, "add(int)") * 1000)
    assert carry.carried().known == name(1, "add(int)")


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carries, "KEPT_BYTES", 1000)
    carry = KernelsRenderer().carry()
    carry.take(b"".join(name(number, "k" * 100) for number in range(100)))
    assert 0 < len(carry.carried().known) < 1000


def pushed(name: str, depth: int, domain: int = 0) -> bytes:
    return begun(KIND_PUSH, name, depth, domain)


def label(what: int, number: int, text: str) -> bytes:
    return pack_record(KIND_LABEL, 42, 43, 1000, LABEL.pack(what, 0, 0, number) + text.encode())


def test_ranges_that_are_open_begin_with_the_recording_and_end_in_it() -> None:
    dropped = [
        label(LABEL_DOMAIN, DATA, "loader"),
        pushed("epoch", 0),
        pushed("step 1", 1),
        ended(KIND_POP, 1),
        pushed("step 2", 1),
        pushed("batch", 0, DATA),
        begun(KIND_START, "overlap", 77),
        begun(KIND_START, "over", 78),
        ended(KIND_END, 78),
    ]
    kept = [ended(KIND_POP, 1), ended(KIND_POP, 0, DATA), ended(KIND_END, 77), ended(KIND_POP, 0)]
    begin, lines = resumed(AnnotationsRenderer(NoRecords()), b"".join(dropped), b"".join(kept))
    assert sorted(line["name"] for line in begin) == ["batch", "epoch", "overlap", "step 2"]
    assert {line["ts_ns"] for line in begin} == {START_NS}
    assert {line["args"]["began_ns"] for line in begin} == {1000}
    assert [(line["phase"], line["name"]) for line in lines] == [
        ("E", "step 2"), ("E", "batch"), ("E", "overlap"), ("E", "epoch")
    ]  # fmt: skip
    assert lines[1]["domain"] == "loader"


def test_a_range_around_one_whose_record_was_lost_is_in_its_place() -> None:
    begin, lines = resumed(AnnotationsRenderer(NoRecords()), pushed("inner", 2), ended(KIND_POP, 2))
    assert [line["name"] for line in begin] == ["inner"]
    assert [(line["phase"], line["name"]) for line in lines] == [("E", "inner")]


def test_the_programs_names_of_threads_are_in_later_recordings_too() -> None:
    begin, _ = resumed(AnnotationsRenderer(NoRecords()), label(LABEL_THREAD, 44, "loader"))
    assert [(line["tid"], line["comm"]) for line in begin] == [(44, "loader")]


def test_annotations_pass_on_records_of_the_gpu() -> None:
    renderer = AnnotationsRenderer(KernelsRenderer())
    dropped = hello() + pushed("step", 0) + gpu() + name(1, "add(int)")
    begin, lines = resumed(renderer, dropped, record(KIND_KERNEL, kernel(6000, 9)))
    assert [line["name"] for line in (*begin, *lines)] == ["step", "add(int)"]


def clock(source_ns: int, of_gpu: int = 0) -> bytes:
    return record(KIND_CLOCK, warps.CLOCK.pack(of_gpu, source_ns, source_ns + 10, source_ns + 20))


def entry(function_name: int, time_ns: int) -> bytes:
    return pack_record(
        warps.KIND_CALL_ENTER, 42, 43, time_ns, warps.CALL_ENTER.pack(function_name, 0, 0, 0, 3, 0, 0)
    )


def leave(function_name: int, time_ns: int) -> bytes:
    return pack_record(warps.KIND_CALL_EXIT, 42, 43, time_ns, warps.CALL_EXIT.pack(function_name, 0, 3, 0))


def test_the_last_clock_pairs_and_calls_under_way_are_lines_of_a_recording_of_warps() -> None:
    names = name(5, "cuStreamSynchronize") + name(6, "cudaStreamSynchronize")
    dropped = names + b"".join(clock(at) for at in range(0, 500, 100)) + clock(50, 1)
    dropped += entry(6, 10) + entry(5, 20) + leave(5, 30) + entry(5, 40)
    begin, lines = resumed(WarpRenderer({}), dropped, leave(5, 6000) + leave(6, 6001))
    pairs = [(line["clock"], line["source_ns"]) for line in begin if line["type"] == "clock"]
    assert sorted(pairs) == [("globaltimer:0", 300), ("globaltimer:0", 400), ("globaltimer:1", 50)]
    calls = [line for line in begin if line["type"] == "userspace"]
    assert [(line["name"], line["ts_ns"], line["args"]["began_ns"]) for line in calls] == [
        ("cudaStreamSynchronize", START_NS, 10),
        ("cuStreamSynchronize", START_NS, 40),
    ]
    assert [(line["phase"], line["name"]) for line in lines] == [
        ("E", "cuStreamSynchronize"),
        ("E", "cudaStreamSynchronize"),
    ]


def test_records_are_divided_by_when_they_were_put() -> None:
    early, late = (pack_record(KIND_NAME, 42, 1, at, bytes(8) + b"add") for at in (4999, 5000))
    assert KernelsRenderer().carry().divide(early + late + early, START_NS) == (early + early, late)


def test_work_that_ran_is_written_however_early_its_record_came() -> None:
    ran = pack_record(KIND_KERNEL, 42, 1, 4999, kernel(4000, 9))
    assert AnnotationsRenderer(KernelsRenderer()).carry().divide(ran, START_NS) == (b"", ran)
    counted = pack_record(warps.KIND_WARPS, 42, 1, 4999, bytes(8))
    assert WarpRenderer({}).carry().divide(counted, START_NS) == (b"", counted)


def kinds(module: object) -> set[int]:
    return {value for name, value in vars(module).items() if name.startswith("KIND_")}


def test_each_kind_of_record_is_carried_or_an_event_that_needs_no_other() -> None:
    """A new kind matters to later records, or it does not: decide it where carries are."""
    of_kernels, of_warps = KernelsCarry(), WarpsCarry()
    events = {*kernel_records.LAYERS, kernel_records.KIND_ANY}
    assert kinds(kernel_records) - events - {kernel_records.KIND_TAKEN} <= of_kernels.kinds
    # One is counted alone, and a sample is an event.
    both = kinds(transport) - {KIND_CLOCK, transport.KIND_STACK_BEYOND, transport.KIND_SAMPLE}
    assert both <= of_kernels.kinds
    assert both <= of_warps.kinds
    seen = {warps.KIND_WARPS, warps.KIND_KERNEL, warps.KIND_CALL_ENTER, warps.KIND_CALL_EXIT}
    assert kinds(warps) - seen - {warps.KIND_LOST_WARPS} <= of_warps.kinds
