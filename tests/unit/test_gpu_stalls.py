"""Stall reasons by the library, with a stand-in of CUPTI that has the samples which the test gives it."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_records import kernel_renderer, pack_record
from tests.support.recorded_program import Recorded
from tracepipe.errors import CaptureUnavailable
from tracepipe.event.checks import first_fault
from tracepipe.reports import REPORTS
from tracepipe.store.run import load_run
from tracepipe.tracer.engines.engine import Listeners, NoProbes
from tracepipe.tracer.gpu.engines.channel import MALFORMED, NAME, Kind
from tracepipe.tracer.gpu.engines.kernels import KernelStream, StallStream
from tracepipe.tracer.gpu.engines.stalls import HEAD, LOSS, STALL, STALL_PC, STALLS_VARIABLE, StallKind
from tracepipe.tracer.gpu.engines.streams import GpuEngine
from tracepipe.tracer.request import CaptureRequest
from tracepipe.tracer.session import run_session

MATMUL, REDUCE = 0, 1
LONG, LONG_NOT_ISSUED, BARRIER, SELECTED = range(4)
Start = Callable[..., Recorded]


@pytest.fixture(params=["stalls", "kernels"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts a program that is recorded, with stall reasons alone or with kernels too."""
    library: Path = request.getfixturevalue(f"{request.param}_library")
    made: list[Recorded] = []

    def begin(windows: bool = False) -> Recorded:
        settings = {STALLS_VARIABLE: "1"}
        made.append(Recorded(library.parent / "program", kernel_renderer(), windows, **settings))
        assert made[-1].answer() == "begun"
        return made[-1]

    yield begin
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.end()


def sample(recorded: Recorded, function: int, offset: int, reason: int, count: int, context: int = 1) -> None:
    recorded.do(f"sample {context} {function} {offset} {reason} {count}")


def totals(records: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Samples by function and reason."""
    found: Counter[tuple[str, str]] = Counter()
    for record in records:
        assert first_fault(record) is None
        for function, reason, count in zip(
            record["function"], record["reason"], record["samples"], strict=True
        ):
            found[record["functions"][function], record["reasons"][reason]] += count
    return found


def losses(recorded: Recorded) -> list[tuple[int, str]]:
    assert all(loss["layer"] == "gpu_stall" for loss in recorded.of("loss"))
    return [(loss["count"], loss["reason"].partition(": ")[2]) for loss in recorded.of("loss")]


def test_samples_are_added_up_by_function_and_reason_and_by_instruction(start: Start) -> None:
    recorded = start()
    recorded.do("context 1")
    sample(recorded, MATMUL, 16, LONG, 60)
    sample(recorded, MATMUL, 16, LONG_NOT_ISSUED, 60)
    sample(recorded, MATMUL, 32, LONG, 20)
    sample(recorded, MATMUL, 32, SELECTED, 20)
    sample(recorded, REDUCE, 16, BARRIER, 5)
    recorded.wait_for(1, "gpu_stall")
    sample(recorded, REDUCE, 16, BARRIER, 7)
    assert recorded.end() == 0
    expected = {
        ("matmul(float*)", "long_scoreboard"): 80,
        ("matmul(float*)", "selected"): 20,
        ("reduce", "barrier"): 12,
    }
    assert totals(recorded.of("gpu_stall")) == expected, "and what is not issued is not counted twice"
    by_instruction = recorded.of("gpu_stall_pc")
    assert totals(by_instruction) == expected
    assert {
        (record["functions"][function], record["modules"][function], offset)
        for record in by_instruction
        for function, offset in zip(record["function"], record["offset"], strict=True)
    } == {
        ("matmul(float*)", f"{0xABC:016x}", 16),
        ("matmul(float*)", f"{0xABC:016x}", 32),
        ("reduce", f"{0xABC:016x}", 16),
    }
    assert losses(recorded) == []
    assert (recorded.renderer.stall_samples, recorded.renderer.notes) == (112, [])
    assert {record["period_cycles"] for record in recorded.of("gpu_stall")} == {1 << 18}


def test_a_stretch_without_samples_is_reported_once(start: Start) -> None:
    recorded = start()
    recorded.do("context 1")
    sample(recorded, REDUCE, 16, BARRIER, 5)
    recorded.wait_for(2, "gpu_stall")
    recorded.stop()
    first, second = recorded.of("gpu_stall")
    assert (first["samples"], second["samples"]) == ([5], [])
    assert second["ts_ns"] == first["ts_ns"] + first["dur_ns"]


def test_the_end_of_a_recording_ends_sampling_and_the_program_goes_on(start: Start) -> None:
    recorded = start()
    recorded.do("context 1")
    assert recorded.do("sampling") == "1 on"
    sample(recorded, REDUCE, 16, BARRIER, 5)
    recorded.stop()
    assert totals(recorded.of("gpu_stall")) == {("reduce", "barrier"): 5}
    assert recorded.do("sampling") == "1 off"
    while recorded.do("callbacks") != "no callbacks":
        pass
    recorded.do("context 2")
    assert recorded.do("sampling") == "1 off, 2 off"
    recorded.do("destroy 1")
    assert recorded.end() == 0


def test_a_capture_that_is_killed_ends_it_too(start: Start) -> None:
    recorded = start()
    recorded.do("context 1")
    recorded.lose_reader()
    while recorded.do("sampling") != "1 off":
        pass
    assert recorded.end() == 0


def test_what_came_before_the_program_is_killed_is_in_the_file(start: Start) -> None:
    recorded = start()
    recorded.do("context 1")
    sample(recorded, REDUCE, 16, BARRIER, 5)
    recorded.wait_for(1, "gpu_stall")
    recorded.process.send_signal(signal.SIGKILL)
    assert recorded.end() == -signal.SIGKILL
    assert totals(recorded.of("gpu_stall")) == {("reduce", "barrier"): 5}


def test_a_context_that_is_destroyed_gives_its_last_samples(start: Start) -> None:
    """The stand-in aborts where it is asked for those of a context that is gone."""
    recorded = start()
    recorded.do("context 1")
    recorded.do("context 2")
    sample(recorded, REDUCE, 16, BARRIER, 5)
    recorded.do("destroy 1")
    assert recorded.do("sampling") == "2 on"
    sample(recorded, MATMUL, 16, LONG, 3, context=2)
    assert recorded.end() == 0
    assert totals(recorded.of("gpu_stall")) == {
        ("reduce", "barrier"): 5,
        ("matmul(float*)", "long_scoreboard"): 3,
    }
    assert losses(recorded) == []


def test_nothing_is_asked_of_cupti_while_a_module_is_unloaded(start: Start) -> None:
    """The stand-in aborts otherwise. What was sampled is taken before, and what is sampled afterwards too."""
    recorded = start()
    recorded.do("context 1")
    sample(recorded, REDUCE, 16, BARRIER, 5)
    recorded.do("unload 50")
    sample(recorded, MATMUL, 16, LONG, 3)
    recorded.wait_for(2, "gpu_stall")
    assert recorded.end() == 0
    assert totals(recorded.of("gpu_stall")) == {
        ("reduce", "barrier"): 5,
        ("matmul(float*)", "long_scoreboard"): 3,
    }


def test_samples_that_were_dropped_are_losses(start: Start) -> None:
    recorded = start()
    recorded.do("context 1")
    recorded.do("drop 1 70")
    recorded.wait_for(1, "loss")
    recorded.do("drop 1 30")
    recorded.do("full 1")
    recorded.wait_for(2, "loss")
    assert recorded.end() == 0
    counts = Counter[str]()
    for count, why in losses(recorded):
        counts[why] += count
    assert counts == {"the GPU had no room for samples": 100, "the GPU's buffer for samples was full": 1}
    assert recorded.renderer.losses == {"gpu_stall": 101}


@pytest.mark.parametrize(
    "call", ["Enable", "GetNumStallReasons", "GetStallReasons", "SetConfigurationAttribute"]
)
def test_what_cupti_refuses_is_a_loss_and_the_context_is_not_sampled(start: Start, call: str) -> None:
    recorded = start()
    recorded.do(f"fail {call}")
    recorded.do("context 1")
    assert recorded.do("sampling") == "1 off"
    recorded.do("destroy 1")
    assert recorded.end() == 0
    assert losses(recorded) == [(1, f"cuptiPCSampling{call}: an error")]


def test_data_that_cupti_does_not_give_ends_the_sampling(start: Start) -> None:
    recorded = start()
    recorded.do("context 1")
    sample(recorded, REDUCE, 16, BARRIER, 5)
    recorded.wait_for(1, "gpu_stall")
    recorded.do("fail GetData")
    recorded.wait_for(1, "loss")
    while recorded.do("sampling") != "1 off":  # it ends after it was asked to
        pass
    assert recorded.end() == 0
    assert losses(recorded) == [(1, "cuptiPCSamplingGetData: an error")]
    assert totals(recorded.of("gpu_stall")) == {("reduce", "barrier"): 5}


def test_a_profiler_that_subscribes_meanwhile_is_refused_or_ends_the_recording(
    start: Start, request: pytest.FixtureRequest
) -> None:
    recorded = start()
    is_alone = "[stalls]" in request.node.name
    assert recorded.do("subscribe") == ("refused" if is_alone else "subscribe")
    assert recorded.end() == 0


def test_windows_start_and_stop_it(start: Start) -> None:
    recorded = start(windows=True)
    recorded.channel.arm(2)
    recorded.do("context 1")
    assert recorded.do("sampling") == "1 off"
    recorded.channel.set_window(is_open=True)
    while recorded.do("sampling") != "1 on":
        pass
    sample(recorded, REDUCE, 16, BARRIER, 5)
    recorded.wait_for(1, "gpu_stall")
    recorded.channel.set_window(is_open=False)
    while recorded.do("sampling") != "1 off":
        pass
    assert recorded.end() == 0
    assert totals(recorded.of("gpu_stall")) == {("reduce", "barrier"): 5}
    assert losses(recorded) == []


@pytest.mark.parametrize("call", ["Start", "Stop"])
def test_a_window_that_cupti_refuses_is_a_loss(start: Start, call: str) -> None:
    recorded = start(windows=True)
    recorded.channel.arm(2)
    recorded.do("context 1")
    recorded.do(f"fail {call}")
    recorded.channel.set_window(is_open=True)
    if call == "Stop":
        while recorded.do("sampling") != "1 on":
            pass
        recorded.channel.set_window(is_open=False)
    recorded.wait_for(1, "loss")
    assert recorded.end() == 0
    assert losses(recorded) == [(1, f"cuptiPCSampling{call}: an error")]


def instruction_of_module(start: Start, cubin: Path, content: bytes) -> dict[str, Any]:
    """What is recorded of an instruction that was sampled after a module had been loaded."""
    cubin.write_bytes(content)
    recorded = start()
    recorded.do("context 1")
    recorded.do(f"load {cubin}")
    sample(recorded, REDUCE, 32, BARRIER, 5)
    assert recorded.end() == 0
    (record,) = recorded.of("gpu_stall_pc")
    return record


def test_lines_of_the_source_are_those_that_the_module_has(start: Start, tmp_path: Path) -> None:
    record = instruction_of_module(start, tmp_path / "cubin", b"\x7fELF .debug_line and more")
    assert (record["lines"], record["line"]) == (["/src/kernel.cu:2"], [1])


def test_a_module_without_lines_has_offsets_alone(start: Start, tmp_path: Path) -> None:
    record = instruction_of_module(start, tmp_path / "cubin", b"\x7fELF")
    assert record["offset"] == [32]
    assert "line" not in record


def test_without_the_setting_nothing_is_sampled(kernels_library: Path) -> None:
    assert STALLS_VARIABLE not in os.environ
    recorded = Recorded(kernels_library.parent / "program", kernel_renderer())
    assert recorded.answer() == "begun"
    recorded.do("context 1")
    assert recorded.do("sampling") == "1 off"
    assert recorded.end() == 0


def test_a_second_capture_of_a_gpu_is_refused(stalls_library: Path, kernels_library: Path) -> None:
    sampled = [f"GPU-{os.getpid()}-{id(stalls_library)}"]
    engine = GpuEngine([StallStream(stalls_library, sampled=sampled)])
    assert engine.environment()[STALLS_VARIABLE]
    assert engine.layers == {"gpu_stall"}
    assert not engine.sees
    with pytest.raises(CaptureUnavailable, match=f"sampled by process {os.getpid()} "):
        KernelStream(kernels_library, sampled=sampled)
    plain = GpuEngine([KernelStream(kernels_library)])
    assert STALLS_VARIABLE not in plain.environment()
    plain.close()
    engine.close()
    KernelStream(kernels_library, sampled=sampled).close()


def test_a_process_that_runs_already_is_refused(stalls_library: Path) -> None:
    engine = GpuEngine([StallStream(stalls_library, sampled=[])])
    with pytest.raises(CaptureUnavailable, match="Process 7 is already running"):
        engine.enter([7])
    engine.close()


def rendered(*records: tuple[int, bytes]) -> list[dict[str, Any]]:
    """The lines of records of process 42."""
    chunk = b"".join(pack_record(kind, 42, 42, 1000, payload) for kind, payload in records)
    return [json.loads(text) for text in kernel_renderer().render(chunk).texts]


HEAD_OF_GOOD = HEAD.pack(5, 9, 0, 18)


@pytest.mark.parametrize(
    "record",
    [
        (StallKind.STALLS, b""),
        (StallKind.STALLS, HEAD_OF_GOOD + b"\0"),
        (StallKind.STALLS, HEAD.pack(9, 5, 0, 18)),
        (StallKind.STALLS, HEAD.pack(0, 5, 0, 18)),
        (StallKind.STALLS, HEAD.pack(5, 1 << 63, 0, 18)),
        (StallKind.STALLS, HEAD.pack(5, 9, 0, 99)),
        (StallKind.STALLS, HEAD_OF_GOOD + STALL.pack(1, 1, 1) * 9000),
        (StallKind.STALL_PCS, HEAD_OF_GOOD + STALL_PC.pack(1, 1, (1 << 64) - 1, 0, 1, 1)),
        (StallKind.STALL_REASON, b"\0"),
        (StallKind.STALL_LOSS, LOSS.pack(5, 9, 0)),
        (StallKind.STALL_LOSS, LOSS.pack(5, 9, 1 << 60)),
        (StallKind.STALL_LOSS, LOSS.pack(9, 5, 1)),
    ],
)
def test_a_record_that_no_library_of_ours_writes_is_a_loss(record: tuple[int, bytes]) -> None:
    (loss,) = rendered(record)
    assert (loss["type"], loss["reason"]) == ("loss", MALFORMED)


def test_names_that_did_not_come_have_words_in_their_place() -> None:
    (record,) = rendered((StallKind.STALLS, HEAD_OF_GOOD + STALL.pack(77, 5, 3)))
    assert (record["functions"], record["reasons"]) == (["function whose name was lost"], ["reason 5"])
    assert (record["ts_ns"], record["dur_ns"], record["samples"]) == (5, 4, [3])


@pytest.mark.parametrize("kind", [StallKind.STALLS, StallKind.STALL_PCS])
def test_long_names_take_several_lines_and_all_samples_stay(kind: int) -> None:
    names = [(Kind.NAME, NAME.pack(number) + b"%d" % number + b"f" * 50_000) for number in range(1, 200)]
    entries = [
        STALL.pack(number, 3, number)
        if kind == StallKind.STALLS
        else STALL_PC.pack(number, 7, 16, number, 3, number)
        for number in range(1, 200)
    ]
    records = rendered(*names, (kind, HEAD_OF_GOOD + b"".join(entries)))
    assert len(records) > 1
    assert all(first_fault(record) is None for record in records)
    assert all(len(json.dumps(record)) < 1 << 20 for record in records)
    assert sum(sum(record["samples"]) for record in records) == sum(range(1, 200))


@pytest.mark.parametrize("kind", [StallStream, KernelStream])
def test_a_capture_has_them_in_its_file_and_the_report(
    tmp_path: Path, request: pytest.FixtureRequest, kind: type[KernelStream]
) -> None:
    name = "stalls" if kind is StallStream else "kernels"
    library: Path = request.getfixturevalue(f"{name}_library")
    does = ("context 1", "launch 3", "sample 1 0 16 0 60", "sample 1 0 32 3 40", "drop 1 7", "quit")
    orders = "; ".join(f"echo {words}" for words in does)
    command = ["sh", "-c", f"({orders}) | {library.parent / 'program'}"]
    asked = CaptureRequest(command, ("userspace",), gpu="off" if name == "stalls" else name, gpu_stalls=True)
    engine, path = GpuEngine([kind(library, sampled=[])]), tmp_path / "run.jsonl"
    try:
        with path.open("wb") as file:
            summary = run_session(NoProbes(), "", asked, file, Listeners(print), engine)
    finally:
        engine.close()
    assert summary.losses == {"gpu_stall": 7}
    *lines, footer = [json.loads(text) for text in path.read_text().splitlines()]
    assert footer["losses"] == {"gpu_stall": 7}
    assert all(first_fault(line) is None for line in lines)
    assert len([line for line in lines if line["type"] == "gpu_kernel"]) == (3 if name == "kernels" else 0)
    found = REPORTS["stalls"].run(load_run(str(path)), REPORTS["stalls"].options()).as_json()
    assert [(row["kernel"], row["samples"], row["memory_percent"]) for row in found["groups"]] == [
        ("matmul", 100, 60.0)
    ]
    assert [(row["offset"], row["samples"]) for row in found["instructions"]] == [("+0x10", 60)]
