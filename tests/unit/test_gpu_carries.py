"""What is kept of dropped records of the channel: the lines of later ones are as if nothing was dropped."""

from __future__ import annotations

import json
from typing import Any

from tests.support.gpu_records import annotation_renderer, kernel_renderer, pack_record, warp_renderer
from tests.unit.test_annotations import DATA, begun, ended
from tests.unit.test_gpu_kernels import LAUNCH, call, function, gpu, hello, kernel, name, record
from tracepipe.tracer.gpu.engines import api_calls, warps
from tracepipe.tracer.gpu.engines.annotations import (
    LABEL,
    AnnotationKind,
    Label,
)
from tracepipe.tracer.gpu.engines.channel import Kind
from tracepipe.tracer.gpu.engines.kernels import LAYERS, TAKEN, KernelDecoder, KernelKind
from tracepipe.tracer.gpu.engines.streams import GpuRenderer, ProcessDecoder
from tracepipe.tracer.gpu.engines.warps import WarpDecoder, WarpKind

Line = dict[str, Any]
START_NS = 5000


def read(texts: list[str]) -> list[Line]:
    return [json.loads(line) for line in texts]


def resumed(renderer: GpuRenderer, dropped: bytes, kept: bytes = b"") -> tuple[list[Line], list[Line]]:
    """The lines of what was under way, and those of what was kept."""
    carry = renderer.carry()
    carry.add(dropped)
    again = renderer.carry()
    again.add(b"".join(carry.carried()))
    assert again.carried() == carry.carried()
    fresh = renderer.anew()
    begin = read(fresh.resume(carry.carried(), START_NS).texts)
    return begin, read(fresh.render(kept).texts)


def test_kernels_and_calls_keep_their_names_processes_and_gpus() -> None:
    other = record(KernelKind.KERNEL, kernel(1, 1), pid=41)
    named = hello() + gpu(1) + name(1, "add(int)") + function(LAUNCH, "cudaLaunchKernel_v7000")
    dropped = name(9, "first", pid=41) + other + named + record(KernelKind.KERNEL, kernel(10, 7, gpu=1))
    kept = record(KernelKind.CALL, call(5990, LAUNCH, 9)) + record(KernelKind.KERNEL, kernel(6000, 9, gpu=1))
    whole = kernel_renderer()
    whole.render(dropped)
    begin, lines = resumed(kernel_renderer(), dropped, kept)
    assert begin == []
    assert lines == read(whole.render(kept).texts)
    assert [line["name"] for line in lines] == ["cudaLaunchKernel", "add(int)"]
    assert lines[1]["launch"] == 1 << 32 | 9


def test_that_another_profiler_took_over_is_stated_in_later_recordings_too() -> None:
    (loss,), _ = resumed(kernel_renderer(), record(KernelKind.TAKEN, TAKEN.pack(1000, 2000)))
    assert (loss["type"], loss["ts_ns"], loss["dur_ns"]) == ("loss", START_NS, 0)


def test_a_repeated_message_of_a_process_is_kept_once() -> None:
    carry = kernel_renderer().carry()
    carry.add(name(1, "add(int)") * 1000)
    assert carry.carried().known == name(1, "add(int)")


def test_what_is_kept_is_bounded() -> None:
    carry = kernel_renderer().carry()
    carry.memory.left_bytes = 1000
    carry.add(b"".join(name(number, "k" * 100) for number in range(100)))
    assert 0 < len(carry.carried().known) < 1000


def pushed(name: str, depth: int, domain: int = 0) -> bytes:
    return begun(AnnotationKind.PUSH, name, depth, domain)


def label(what: int, number: int, text: str) -> bytes:
    return pack_record(AnnotationKind.LABEL, 42, 43, 1000, LABEL.pack(what, 0, 0, number) + text.encode())


def test_ranges_that_are_open_begin_with_the_recording_and_end_in_it() -> None:
    dropped = [
        label(Label.DOMAIN, DATA, "loader"),
        pushed("epoch", 0),
        pushed("step 1", 1),
        ended(AnnotationKind.POP, 1),
        pushed("step 2", 1),
        pushed("batch", 0, DATA),
        begun(AnnotationKind.START, "overlap", 77),
        begun(AnnotationKind.START, "over", 78),
        ended(AnnotationKind.END, 78),
    ]
    kept = [
        ended(AnnotationKind.POP, 1),
        ended(AnnotationKind.POP, 0, DATA),
        ended(AnnotationKind.END, 77),
        ended(AnnotationKind.POP, 0),
    ]
    begin, lines = resumed(annotation_renderer(), b"".join(dropped), b"".join(kept))
    assert sorted(line["name"] for line in begin) == ["batch", "epoch", "overlap", "step 2"]
    assert {line["ts_ns"] for line in begin} == {START_NS}
    assert {line["args"]["began_ns"] for line in begin} == {1000}
    assert [(line["phase"], line["name"]) for line in lines] == [
        ("E", "step 2"), ("E", "batch"), ("E", "overlap"), ("E", "epoch")
    ]  # fmt: skip
    assert lines[1]["domain"] == "loader"


def test_a_range_around_one_whose_record_was_lost_is_in_its_place() -> None:
    begin, lines = resumed(annotation_renderer(), pushed("inner", 2), ended(AnnotationKind.POP, 2))
    assert [line["name"] for line in begin] == ["inner"]
    assert [(line["phase"], line["name"]) for line in lines] == [("E", "inner")]


def test_the_programs_names_of_threads_are_in_later_recordings_too() -> None:
    begin, _ = resumed(annotation_renderer(), label(Label.THREAD, 44, "loader"))
    assert [(line["tid"], line["comm"]) for line in begin] == [(44, "loader")]


def test_annotations_pass_on_records_of_the_gpu() -> None:
    renderer = annotation_renderer(kernels=True)
    dropped = hello() + pushed("step", 0) + gpu() + name(1, "add(int)")
    begin, lines = resumed(renderer, dropped, record(KernelKind.KERNEL, kernel(6000, 9)))
    assert [line["name"] for line in (*begin, *lines)] == ["step", "add(int)"]


def clock(source_ns: int, of_gpu: int = 0) -> bytes:
    return record(Kind.CLOCK, warps.CLOCK.pack(of_gpu, source_ns, source_ns + 10, source_ns + 20))


def entry(function_name: int, time_ns: int) -> bytes:
    return pack_record(
        WarpKind.CALL_ENTER, 42, 43, time_ns, api_calls.CALL_ENTER.pack(function_name, 0, 0, 0, 3, 0, 0)
    )


def leave(function_name: int, time_ns: int) -> bytes:
    return pack_record(WarpKind.CALL_EXIT, 42, 43, time_ns, api_calls.CALL_EXIT.pack(function_name, 0, 3, 0))


def test_the_last_clock_pairs_and_calls_under_way_are_lines_of_a_recording_of_warps() -> None:
    names = name(5, "cuStreamSynchronize") + name(6, "cudaStreamSynchronize")
    dropped = names + b"".join(clock(at) for at in range(0, 500, 100)) + clock(50, 1)
    dropped += entry(6, 10) + entry(5, 20) + leave(5, 30) + entry(5, 40)
    begin, lines = resumed(warp_renderer(), dropped, leave(5, 6000) + leave(6, 6001))
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
    early, late = (pack_record(Kind.NAME, 42, 1, at, bytes(8) + b"add") for at in (4999, 5000))
    assert kernel_renderer().carry().divide(early + late + early, START_NS) == (early + early, late)


def test_work_that_ran_is_written_however_early_its_record_came() -> None:
    ran = pack_record(KernelKind.KERNEL, 42, 1, 4999, kernel(4000, 9))
    assert annotation_renderer(kernels=True).carry().divide(ran, START_NS) == (b"", ran)
    counted = pack_record(WarpKind.WARPS, 42, 1, 4999, bytes(8))
    assert warp_renderer().carry().divide(counted, START_NS) == (b"", counted)


def test_each_kind_of_record_is_carried_or_an_event_that_needs_no_other() -> None:
    """A new kind matters to later records, or it does not: decide it where the decoders are."""
    events = {*LAYERS, KernelKind.ANY}
    assert set(KernelKind) - events - {KernelKind.TAKEN} <= KernelDecoder.kept
    # One is counted alone, a sample is an event, and kept buffers come at the end.
    assert set(Kind) - {Kind.CLOCK, Kind.STACK_BEYOND, Kind.SAMPLE, Kind.KEPT} <= ProcessDecoder.kept
    seen = {WarpKind.WARPS, WarpKind.KERNEL, WarpKind.CALL_ENTER, WarpKind.CALL_EXIT}
    assert set(WarpKind) - seen - {WarpKind.LOST_WARPS} <= WarpDecoder.kept
