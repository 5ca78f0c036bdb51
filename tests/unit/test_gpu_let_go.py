"""The libraries at the end of a recording, with stand-ins of NVIDIA's that do as the documentation says.

tests/gpu tries the same with NVIDIA's own, on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gpu_channel import collected
from tests.support.gpu_libraries import build_library
from tests.support.gpu_records import kernel_renderer, warp_renderer
from tests.support.recorded_program import Recorded
from tracepipe.tracer.gpu.choice import CALLS_VARIABLE, calls_text
from tracepipe.tracer.gpu.engines.channel import Channel
from tracepipe.tracer.gpu.engines.kernels import KernelStream

UNNAMED = "kernel whose name was lost"


@pytest.fixture
def program(kernels_library: Path) -> Path:
    """A program with CUPTI, and the library of `kernels` in it."""
    return kernels_library.parent / "program"


@pytest.fixture
def patched_program(warps_library: Path) -> Path:
    """A program with Compute Sanitizer's API, and the library of `warps` in it."""
    return warps_library.parent / "program"


@pytest.fixture
def recorded(program: Path) -> Iterator[Recorded]:
    made = Recorded(program, kernel_renderer())
    assert made.answer() == "begun"
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.end()


@pytest.fixture
def patched(patched_program: Path) -> Iterator[Recorded]:
    made = Recorded(patched_program, warp_renderer())
    assert [made.answer(), made.answer()] == ["patched", "begun"]
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.end()


# kernels


def test_the_last_records_come_and_cupti_is_asked_for_nothing_more(recorded: Recorded) -> None:
    recorded.do("launch 3")
    assert recorded.do("asked") == "asked for some"
    assert recorded.do("callbacks") == "some callbacks"
    recorded.stop()
    assert len(recorded.of("gpu_kernel")) == 3
    assert recorded.do("asked") == "asked for nothing"
    while recorded.do("callbacks") != "no callbacks":
        pass
    assert recorded.do("launch 2") == "launch"
    assert recorded.end() == 0
    assert len(recorded.of("gpu_kernel")) == 3
    assert recorded.of("loss") == []


def test_calls_that_record_an_event_or_wait_have_it_and_their_stream(recorded: Recorded) -> None:
    recorded.do("waits")
    recorded.stop()
    assert [(call["name"], call["args"]) for call in recorded.of("userspace")] == [
        ("cuEventRecord", {"result": 0, "context": 1, "stream": 13, "event": 1}),
        ("cuStreamWaitEvent", {"result": 0, "context": 1, "stream": 14, "event": 1}),
        ("cuStreamSynchronize", {"result": 0, "context": 1, "stream": 14}),
        ("cuEventSynchronize", {"result": 0, "context": 1, "event": 1}),
    ]
    assert recorded.do("asked") == "asked for nothing"


def test_cupti_leaves_a_process_that_has_no_graphs(recorded: Recorded) -> None:
    """Also while a thread is in a call. Another profiler finds it as it was before."""
    recorded.do("launch 3")
    recorded.do("stay")
    recorded.stop()
    while recorded.do("finalized") != "finalized":
        pass
    recorded.do("leave")
    recorded.do("launch 3")
    assert recorded.do("subscribe") == "subscribe"
    assert recorded.end() == 0
    assert len(recorded.of("gpu_kernel")) == 3
    assert recorded.of("loss") == []


@pytest.mark.parametrize("why", ["graph", "queue 1", "take"])
def test_cupti_stays_where_the_program_would_be_harmed(recorded: Recorded, why: str) -> None:
    """It has a graph, or records are forced out, or CUPTI is another profiler's."""
    recorded.do("launch 3")
    recorded.do(why)
    recorded.stop()
    while recorded.do("callbacks") != "no callbacks":
        pass
    assert recorded.do("finalized") == "there"
    assert recorded.end() == 0


def test_callbacks_stay_until_no_thread_is_in_a_call(recorded: Recorded) -> None:
    """Else CUPTI would give all later records of the thread the number of that call."""
    recorded.do("graph")
    recorded.do("stay")
    recorded.stop()
    recorded.do("launch 10")
    assert [recorded.do("callbacks") for _ in range(50)] == ["some callbacks"] * 50
    recorded.do("leave")
    while recorded.do("callbacks") != "no callbacks":
        pass
    assert recorded.do("spoiled") == "whole"
    assert recorded.of("userspace") == [], "it had not returned"
    assert recorded.end() == 0


def test_a_capture_that_was_killed_is_treated_as_stopped(recorded: Recorded) -> None:
    recorded.do("launch 3")
    recorded.wait_for(3)
    recorded.lose_reader()
    while (answer := recorded.do("asked")) != "asked for nothing":
        assert answer == "asked for some"


def test_a_profiler_may_subscribe_as_soon_as_the_recording_is_over(recorded: Recorded) -> None:
    recorded.do("launch 1")
    recorded.stop()
    assert recorded.do("subscribe") == "subscribe"
    assert recorded.do("subscribe") == "refused", "there is one at a time"
    assert recorded.end() == 0


def test_calls_are_a_loss_where_another_profiler_has_subscribed_before(program: Path) -> None:
    recorded = Recorded(program, kernel_renderer(), STANDIN_SUBSCRIBED="1")
    assert recorded.answer() == "begun"
    recorded.do("launch 3")
    (loss,) = recorded.channel.losses(KernelStream.lost_layers, KernelStream.lost_reasons)
    assert recorded.end() == 0
    assert (len(recorded.of("gpu_kernel")), recorded.of("userspace")) == (3, [])
    assert (loss.layer, loss.count) == ("userspace", 1)
    assert "another profiler had CUPTI's callbacks" in loss.reason


def test_what_another_profiler_takes_over_is_a_loss_with_a_reason(recorded: Recorded) -> None:
    recorded.do("launch 3")
    recorded.wait_for(3)
    recorded.do("start 4")
    recorded.wait_for(7, "userspace")
    recorded.do("take")
    recorded.do("launch 50")
    recorded.stop()
    assert len(recorded.of("gpu_kernel")) == 3
    (loss,) = recorded.of("loss")
    assert (loss["layer"], loss["count"]) == ("gpu_kernel", 4)
    assert "another profiler took over CUPTI in process" in loss["reason"]
    assert "kernels of 4 launches and all later ones are lost" in loss["reason"]
    assert recorded.renderer.losses == {"gpu_kernel": 4}
    assert [note for note in recorded.renderer.notes if "another profiler" in note]
    assert recorded.do("asked") == "asked for nothing"
    assert recorded.end() == 0


def test_the_loss_is_reported_too_where_the_program_ends(recorded: Recorded) -> None:
    recorded.do("launch 3")
    recorded.wait_for(3)
    recorded.do("take")
    recorded.do("launch 50")
    assert recorded.end() == 0
    (loss,) = recorded.of("loss")
    assert (loss["layer"], loss["count"]) == ("gpu_kernel", 1), "one at least"
    assert loss["reason"].endswith(": kernels of later launches are lost")


@pytest.mark.slow
def test_it_is_noticed_while_the_program_goes_on(recorded: Recorded) -> None:
    recorded.do("launch 3")
    recorded.wait_for(3)
    recorded.do("take")
    recorded.wait_for(1, "loss")
    assert recorded.channel.is_over(), "there is nothing more to come"


def test_a_program_that_ends_has_given_all(recorded: Recorded) -> None:
    recorded.do("launch 100")
    assert recorded.end() == 0
    assert len(recorded.of("gpu_kernel")) == 100
    assert recorded.of("loss") == []


def test_pending_work_of_the_gpu_is_waited_for_at_the_end(recorded: Recorded) -> None:
    recorded.do("launch 3")
    recorded.do("queue 200")
    recorded.channel.stop()
    while recorded.do("asked") != "asked for nothing":
        pass
    assert not recorded.channel.is_over()
    recorded.do("run")
    recorded.stop()
    assert len(recorded.of("gpu_kernel")) == 203
    assert min(event["ts_ns"] for event in recorded.of("gpu_kernel")) > 0
    assert recorded.of("loss") == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stop", "end"])
def test_work_that_is_not_done_then_is_a_loss_and_has_no_times(recorded: Recorded, end: str) -> None:
    """Of the recording, or of the program: CUPTI's records of it are zeros."""
    recorded.do("launch 3")
    recorded.do("queue 200")
    getattr(recorded, end)()
    assert len(recorded.of("gpu_kernel")) == 3
    assert min(event["ts_ns"] for event in recorded.events) > 0
    (loss,) = recorded.of("loss")
    assert (loss["layer"], loss["count"]) == ("gpu_kernel", 200)
    assert loss["reason"].endswith("200 had not ended when the recording did")
    assert recorded.renderer.losses == {"gpu_kernel": 200}
    assert len(recorded.of("userspace")) == 203


ENDS = [
    "_exit",
    "SIGKILL",
    "exit",
    *(
        pytest.param(how, marks=pytest.mark.slow)
        for how in (
            "abort", "SIGSEGV", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGBUS", "SIGFPE", "SIGILL",
            "null", "trap", "stack", "terminate", "throw", "exit_in_thread", "quick_exit", "exec", "fork",
        )
    ),
]  # fmt: skip


def end_by(recorded: Recorded, how: str) -> None:
    assert recorded.process.stdin is not None
    recorded.process.stdin.write(f"end {how}\n".encode())
    assert recorded.end() == 7 or recorded.process.returncode < 0


@pytest.mark.parametrize("how", ENDS)
def test_a_program_that_ends_has_each_launch_recorded_or_counted(recorded: Recorded, how: str) -> None:
    recorded.do("launch 30")
    recorded.do("queue 3")
    end_by(recorded, how)
    assert [kernel["name"] in ("f", UNNAMED) for kernel in recorded.of("gpu_kernel")] == [True] * 30
    assert len({kernel["launch"] for kernel in recorded.of("gpu_kernel")}) == 30
    assert {loss["layer"] for loss in recorded.of("loss")} == {"gpu_kernel"}
    assert recorded.renderer.losses == {"gpu_kernel": 3}
    calls = [call for call in recorded.of("userspace") if call["name"] == "cuLaunchKernel"]
    assert len(calls) == 33
    assert all(
        "ended when the" in loss["reason"] or "the process ended" in loss["reason"]
        for loss in recorded.of("loss")
    )


@pytest.mark.parametrize("how", ["_exit", "SIGKILL"])
@pytest.mark.parametrize("works", [["late", "launch 31"], ["queue 1", "start 30"]])
def test_kernels_without_times_or_without_records_are_counted(
    recorded: Recorded, works: list[str], how: str
) -> None:
    """Where CUPTI writes times only when it is asked for buffers, or kernels only when they have ended."""
    for work in works:
        recorded.do(work)
    end_by(recorded, how)
    assert len(recorded.of("gpu_kernel")) + recorded.renderer.losses.get("gpu_kernel", 0) == 31
    assert len(recorded.of("userspace")) == 31


@pytest.mark.parametrize("is_flushing", [False, True])
def test_what_a_program_has_waited_for_is_sent_before_it_goes_on(
    recorded: Recorded, is_flushing: bool
) -> None:
    """What follows may end it, and CUPTI writes times only when it is flushed, perhaps by another thread that
    began before the work had ended.
    """
    recorded.do("late")
    if is_flushing:
        recorded.do("lasts")
    recorded.do("launch 30")
    assert recorded.do("flushed") == "not flushed"
    recorded.do("waits")
    assert recorded.do("flushed") == "flushed"
    end_by(recorded, "SIGKILL")
    assert len(recorded.of("gpu_kernel")) == 30
    assert recorded.renderer.losses == {}


def test_kernels_that_cupti_had_written_nowhere_are_counted(recorded: Recorded) -> None:
    recorded.do("hidden")
    recorded.do("launch 30")
    end_by(recorded, "SIGKILL")
    kernels, calls = recorded.of("gpu_kernel"), recorded.of("userspace")
    assert (len(kernels) + recorded.renderer.losses.get("gpu_kernel", 0), len(calls)) == (30, 30)


# Loads the libraries, records with ours, and lets the other profiler start; prints what that one was given.
OTHER_PROFILER = """
import ctypes, sys
library, other, is_later, how = *sys.argv[1:3], "later" in sys.argv, sys.argv[-1]
load = lambda path: ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
profiler = None if is_later else load(other)
ours = load(library)
ours.InitializeInjection()
profiler = profiler or load(other)
for _ in range(3):
    ours.standin_launch()
assert getattr(profiler, f"profiler_{how}")() == 0, "it is refused"
for _ in range(2):
    ours.standin_launch()
print(profiler.profiler_unknown_buffers())
"""


@pytest.mark.parametrize("how", ["registers", "subscribes", "subscribes_v2"])
@pytest.mark.parametrize("when", ["before", "later"])
def test_another_profiler_is_given_no_buffers_of_ours(kernels_library: Path, when: str, how: str) -> None:
    """It may be loaded before our library, and while that records."""
    source = Path(__file__).parents[1] / "gpu/other_profiler.cpp"
    folder = kernels_library.parent
    other = build_library(folder / "other_profiler.so", source, folder / "libcupti.so.13")
    channel = Channel(1 << 20)
    command = [sys.executable, "-c", OTHER_PROFILER, str(kernels_library), str(other), when, how]
    chunk, printed = collected(channel, command)
    channel.close()
    assert printed == "0\n"
    renderer = kernel_renderer()
    lines = [json.loads(line) for line in renderer.render(chunk).texts]
    assert sum(line["type"] == "gpu_kernel" for line in lines) == 3, "all until then"
    (loss,) = [line for line in lines if line["type"] == "loss"]
    assert "another profiler took over CUPTI" in loss["reason"]


# warps


def test_a_launch_that_does_not_end_does_not_hold_the_memory_of_later_ones(patched: Recorded) -> None:
    patched.do("launch")  # which waits for memory on the GPU, 8 MiB; each of the others takes 1280 bytes
    patched.do("queued 1")
    for count in range(1, 8):
        patched.do("kernels 1000")
        patched.wait_for(count * 1000)
    end_by(patched, "_exit")
    assert len(patched.of("gpu_kernel")) == 7000
    assert patched.of("loss") == []
    assert {(loss.layer, loss.count) for loss in patched.losses} == {("gpu_kernel", 1), ("gpu_warp", 1)}


@pytest.mark.parametrize("how", ENDS)
def test_a_program_that_ends_has_each_launch_and_its_warps_recorded_or_counted(
    patched: Recorded, how: str
) -> None:
    patched.do("launch")  # which waits for memory on the GPU
    patched.do("kernels 30")
    patched.do("sync")
    patched.do("queued 3")
    end_by(patched, how)
    losses = {(loss.layer, loss.count): loss.reason for loss in patched.losses}
    kernels = [kernel for kernel in patched.of("gpu_kernel") if kernel["ts_ns"]]
    assert len(kernels) == sum(len(batch["warp"]) for batch in patched.of("gpu_warp")) == 30
    if "exit" in how and how != "_exit":
        assert (patched.renderer.losses, losses) == ({"gpu_kernel": 3, "gpu_warp": 3}, {})
    else:
        assert losses.keys() == {("gpu_kernel", 3), ("gpu_warp", 3)}
        assert all(reason.endswith("ended before 3 were read from the GPU") for reason in losses.values())


@pytest.mark.slow
def test_the_program_is_unpatched_at_the_end_and_then_there_are_no_callbacks(patched: Recorded) -> None:
    """It makes no call meanwhile."""
    patched.do("launch")
    patched.stop()
    assert [event["phase"] for event in patched.of("userspace")] == ["B", "E"]
    assert patched.answer() == "unpatched"
    assert patched.do("callbacks") == "callbacks"
    assert patched.do("launch") == "launch"
    assert patched.end() == 0
    assert len(patched.of("userspace")) == 2


def test_it_is_unpatched_for_a_capture_that_is_gone_too(patched: Recorded) -> None:
    patched.do("launch")
    patched.lose_reader()
    assert patched.answer() == "unpatched"
    assert patched.do("callbacks") == "callbacks"


@pytest.mark.slow
def test_nothing_is_unpatched_while_a_thread_is_in_a_call(patched: Recorded) -> None:
    patched.do("stay")
    patched.stop()
    assert [patched.do("launch") for _ in range(50)] == ["launch"] * 50, "nobody is held up for long"
    assert sorted([patched.do("leave"), patched.answer()]) == ["leave", "unpatched"]
    assert patched.do("callbacks") == "callbacks"


def test_a_thread_that_waits_for_the_gpu_does_not_count(patched: Recorded) -> None:
    patched.do("wait")
    patched.stop()
    assert patched.answer() == "unpatched"
    assert patched.do("callbacks") == "callbacks"
    assert patched.do("leave") == "leave"
    assert patched.end() == 0


@pytest.mark.slow
def test_nothing_is_unpatched_while_the_gpu_has_something_to_do(patched: Recorded) -> None:
    """A kernel may be the program's next call away from its end, so that is not held up for it."""
    patched.do("busy")
    patched.stop()
    assert [patched.do("launch") for _ in range(50)] == ["launch"] * 50
    assert sorted([patched.do("idle"), patched.answer()]) == ["idle", "unpatched"]


def test_a_capture_of_a_stream_is_not_invalidated(patched: Recorded) -> None:
    """As it would be by asking whether the GPU is idle."""
    patched.do("capture")
    patched.stop()
    assert [patched.do("launch") for _ in range(50)] == ["launch"] * 50
    assert sorted([patched.do("captured"), patched.answer()]) == ["captured", "unpatched"]


def test_a_module_that_another_thread_loads_during_a_capture_is_not_patched(patched: Recorded) -> None:
    """The capture would be invalidated; what the module's kernels do is lost, with the reason."""
    assert patched.do("refused") == "refused"
    assert [patched.do("apart:f"), patched.answer()] == ["patched", "apart:f"]
    patched.do("capture")
    assert [patched.do("module:f"), patched.answer()] == ["patched", "module:f"]
    assert patched.do("apart:f") == "apart:f"
    patched.do("other:f")
    patched.do("captured")
    assert [patched.do("apart:f"), patched.answer()] == ["patched", "apart:f"]
    assert patched.end() == 0
    (loss,) = patched.of("loss")
    assert (loss["layer"], loss["count"]) == ("gpu_warp", 1)
    assert "loaded while a stream was captured" in loss["reason"]


def test_unloading_a_patched_module_waits_for_captures(patched: Recorded) -> None:
    patched.do("capture")
    assert patched.do("unload") == "unload"
    assert [patched.do("launch") for _ in range(50)] == ["launch"] * 50
    assert sorted([patched.do("captured"), patched.answer()]) == ["captured", "unloaded"]
    assert [patched.do("capture"), patched.do("captured")] == ["capture", "captured"]
    assert patched.end() == 0


def test_the_library_does_not_invalidate_captures_by_what_it_allocates(patched: Recorded) -> None:
    """A thread can have a mode for that once the driver is initialised, and the library's starts before."""
    assert patched.do("allocated") == "relaxed"


def test_marks_are_recorded_until_the_recording_ends(patched: Recorded) -> None:
    assert patched.do("marks") == "free"
    assert patched.do("load") == "patched"
    assert patched.answer() == "load"
    patched.do("mark")
    assert patched.do("marks") == "recorded"
    patched.do("mark")
    patched.wait_for(2)
    patched.stop()
    batches = patched.of("gpu_warp")
    assert [(one["ranges"], one["range_clk"], one["range_dur_clk"]) for one in batches] == [
        (["load", "mma"], [100, 300], [100, 700])
    ] * 2
    assert [one["range_open"] for one in batches] == [[0, 1]] * 2
    assert [patched.answer(), patched.answer()] == ["unpatched"] * 2
    assert patched.do("marks") == "free"
    assert patched.do("mark") == "mark"
    assert sorted([patched.do("unload"), patched.answer()]) == ["unload", "unloaded"]  # by two threads
    assert patched.end() == 0
    assert patched.of("loss") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "ranges"),
    [
        ("outer|inner", [("outer", 100, 500), ("inner", 200, 100), ("inner", 400, 100)]),
        ("inner", [("inner", 200, 100), ("inner", 400, 100)]),
    ],
)
def test_calls_of_functions_are_recorded_from_the_first_launch_on(
    patched_program: Path, pattern: str, ranges: list[tuple[str, int, int]]
) -> None:
    renderer = warp_renderer(gpu_warp_marks=f":{pattern}")
    patched = Recorded(patched_program, renderer, TRACEPIPE_GPU_CALLED=pattern)
    assert [patched.answer(), patched.answer()] == ["patched", "begun"]
    assert [patched.do("functions"), *(patched.answer() for _ in range(2))] == [
        "calls patched", "patched", "functions",
    ]  # fmt: skip
    patched.do("call")
    patched.wait_for(1, "gpu_warp")
    (batch,) = patched.of("gpu_warp")
    named = [batch["ranges"][at] for at in batch["range_name"]]
    assert list(zip(named, batch["range_clk"], batch["range_dur_clk"], strict=True)) == ranges
    assert patched.end() == 0
    assert (patched.of("loss"), patched.renderer.notes) == ([], [])


def test_functions_that_do_not_fit_are_named(patched_program: Path) -> None:
    renderer = warp_renderer(gpu_warp_marks=":softmax")
    patched = Recorded(patched_program, renderer, TRACEPIPE_GPU_CALLED="softmax")
    assert [patched.answer(), patched.answer()] == ["patched", "begun"]
    assert patched.do("functions") == "patched"
    assert patched.answer() == "functions"
    assert patched.end() == 0
    assert patched.renderer.notes == ["no function fits --warp-marks 'softmax'; there are outer, inner"]


def test_a_program_that_ends_while_it_is_let_go_ends(patched: Recorded) -> None:
    patched.do("stay")
    patched.stop()
    assert patched.end() == 0


@pytest.mark.parametrize(
    ("pattern", "notes"),
    [
        ("attn|scale", []),
        ("_Z4attn", []),
        ("float\\*", []),
        ("^atn", ["no kernel fits --kernel '^atn'; near: attn"]),
        ("nothing", ["no kernel fits --kernel 'nothing'; the kernels launched were attn, add<int>"]),
    ],
)
def test_kernels_are_selected_by_both_their_names(
    patched_program: Path, pattern: str, notes: list[str]
) -> None:
    # A range that no launch is in: a GPU would be needed for one that is recorded.
    environment = {"TRACEPIPE_GPU_KERNELS": pattern, "TRACEPIPE_GPU_LAUNCHES": "99"}
    patched = Recorded(patched_program, warp_renderer(gpu_kernels=pattern), **environment)
    assert [patched.answer(), patched.answer()] == ["patched", "begun"]
    for kernel in ("_Z4attnPf", "_Z3addIiEvPT_", "_Z4attnPf"):
        patched.do(f"kernel:{kernel}")
    assert patched.end() == 0
    assert patched.renderer.notes == notes


def test_calls_that_only_ask_have_no_callback_for_long(patched_program: Path) -> None:
    environment = {CALLS_VARIABLE: calls_text("default")}
    patched = Recorded(patched_program, warp_renderer(), **environment)
    assert [patched.answer(), patched.answer()] == ["patched", "begun"]
    assert patched.do("ask") == "ask"
    patched.do("launch")
    assert patched.end() == 0
    assert [event["name"] for event in patched.of("userspace")] == ["cuLaunchKernel"] * 2


def recorded_kernels(patched: Recorded) -> dict[str, int]:
    return dict(Counter(event["name"] for event in patched.of("gpu_kernel")))


@pytest.mark.parametrize(
    ("selection", "wanted"),
    [
        ({}, {"f": 5, "g": 4}),
        ({"PER_KERNEL": "3"}, {"f": 3, "g": 3}),
        ({"PER_KERNEL": "3", "LAUNCHES": "3-8"}, {"f": 3, "g": 3}),
        ({"PER_KERNEL": "3", "LAUNCHES": "5-8"}, {"f": 1, "g": 3}),
        ({"BUDGET": "6"}, {"f": 5, "g": 1}),
        ({"PER_KERNEL": "2", "BUDGET": "6"}, {"f": 1, "g": 1}),
        ({"PER_KERNEL": "2", "BUDGET": "32"}, {"f": 2, "g": 2}),
    ],
)
def test_a_budget_is_for_each_kernel(
    patched_program: Path, selection: dict[str, str], wanted: dict[str, int]
) -> None:
    """f is launched five times first: without a limit it has what g then lacks."""
    environment = {f"TRACEPIPE_GPU_{name}": value for name, value in selection.items()}
    patched = Recorded(patched_program, warp_renderer(), **environment)
    assert [patched.answer(), patched.answer()] == ["patched", "begun"]
    patched.do("launch")  # waits for the library's memory
    for kernel in "fffffgggg":
        patched.do(f"kernel:{kernel}")
    assert patched.end() == 0
    assert recorded_kernels(patched) == wanted


def test_modules_of_which_all_is_recorded_are_not_patched(patched_program: Path) -> None:
    patched = Recorded(patched_program, warp_renderer(), TRACEPIPE_GPU_PER_KERNEL="2")
    assert [patched.answer(), patched.answer()] == ["patched", "begun"]
    patched.do("launch")  # waits for the library's memory
    for _ in range(5):
        assert patched.do("kernel:f") == "kernel:f"
    assert patched.do("module:f") == "module:f", "there is nothing to record of it"
    assert patched.do("module:h") == "patched"
    assert patched.answer() == "module:h"
    assert patched.end() == 0
    assert recorded_kernels(patched) == {"f": 2}
    assert patched.of("loss") == []
