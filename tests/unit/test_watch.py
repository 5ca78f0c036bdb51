"""Conditions of a flight recorder: what they say, and when they come true."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

import pytest

from tests.support.gpu_records import annotation_renderer, kernel_renderer, warp_renderer
from tests.unit.test_annotations import begun, ended
from tests.unit.test_capture_record import PROBES, raw
from tests.unit.test_gpu_carries import entry, leave
from tests.unit.test_gpu_kernels import LAUNCH, call, function, hello, kernel, name, record
from tracepipe.errors import TracepipeError
from tracepipe.tracer.flight import Watch
from tracepipe.tracer.gpu.engines.annotations import AnnotationKind
from tracepipe.tracer.gpu.engines.kernels import KernelKind
from tracepipe.tracer.gpu.engines.streams import GpuEngine, GpuRenderer
from tracepipe.tracer.records.record import CALL_ENTER, CALL_RETURN, SYSCALL_ENTER, SYSCALL_EXIT
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.records.unrendered import Condition, Conditions
from tracepipe.tracer.request import Filters, Last, Plan, Scope

MS = 10**6
PLAN = Plan((), (), PROBES, Scope("system"), Filters(), 4096)
WITH_SYSCALLS = Plan(("syscall",), ("syscall",), PROBES, Scope("system"), Filters(), 4096)
FUTEX = {name: number for number, name in SYSCALLS[platform.machine()].items()}["futex"]


@pytest.fixture(autouse=True)
def threads_are_believed_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, whatever threads this machine has."""
    monkeypatch.setattr("tracepipe.tracer.flight.own_namespace", lambda: (1, 1))


class Device:
    """An engine for GPUs, as far as it is asked what it records."""

    def __init__(self, renderer: GpuRenderer, *layers: str) -> None:
        self.layers, self._renderer = frozenset(layers), renderer

    def renderer(self) -> GpuRenderer:
        return self._renderer


def watch(*when: str, device: Any = None, last_ms: int = 4000, plan: Plan = PLAN) -> Watch:
    engine: GpuEngine | None = device
    return Watch(Last(last_ms * MS, when=when), plan, engine)


def took(symbol: str, start_ms: float, end_ms: float, tid: int = 12) -> bytes:
    return enter(symbol, start_ms, tid) + raw(CALL_RETURN, symbol, ts_ns=int(end_ms * MS), tid=tid)


def enter(symbol: str, at_ms: float, tid: int = 12) -> bytes:
    return raw(CALL_ENTER, symbol, ts_ns=int(at_ms * MS), tid=tid)


def test_a_condition_names_functions_by_a_pattern_and_kernels_by_an_expression() -> None:
    call_, kernel_ = Conditions(["cuda*Synchronize > 50ms", " kernel:gemm|conv >1.5s "]).all
    assert call_ == Condition("cuda*Synchronize > 50ms", "call", "cuda*Synchronize", 50 * MS)
    assert (kernel_.pattern, kernel_.limit_ns, kernel_.kind) == ("gemm|conv", 1500 * MS, "kernel")
    assert call_.fits("cudaStreamSynchronize", "call")
    assert not call_.fits("cudaStreamSynchronize", "kernel")
    assert kernel_.fits("void conv2d<float>(int)", "kernel")
    (with_sign,) = Conditions(["kernel:a<b> > 5ms"]).all
    assert with_sign.pattern == "a<b>"


@pytest.mark.parametrize(
    ("text", "kind", "pattern"),
    [
        ("call:cuInit>1ms", "call", "cuInit"),
        ("syscall:futex* > 1ms", "syscall", "futex*"),
        ("nvtx: step 3 > 4  > 1ms", "nvtx", "step 3 > 4"),
        ("nvtx:epoch:1 > 1ms", "nvtx", "epoch:1"),
        ("at::add > 1ms", "call", "at::add"),
    ],
)
def test_a_condition_states_what_it_is_about(text: str, kind: str, pattern: str) -> None:
    assert Conditions([text]).all == [Condition(text, kind, pattern, MS)]


def test_a_range_may_have_a_name_that_is_a_pattern_of_others() -> None:
    (condition,) = Conditions(["nvtx:step [3] > 1ms"]).all
    assert [condition.fits(name, "nvtx") for name in ("step [3]", "step 3", "step 4")] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "it has no '>' and time"),
        ("cuInit 5ms", "it has no '>' and time"),
        ("cuInit > soon", "'soon'"),
        ("cuInit >= 5ms", "'= 5ms'"),
        ("> 5ms", "there is no name before '>'"),
        ("syscall: > 5ms", "there is no name before '>'"),
        ("kernel:( > 5ms", "'(' is not a regular expression"),
        ("sycall:futex > 5ms", "'sycall' is not a known condition"),
    ],
)
def test_a_wrong_condition_is_refused_with_the_part_that_is_wrong(text: str, part: str) -> None:
    with pytest.raises(TracepipeError, match=re.escape(f"--when {text!r} cannot be understood")) as refused:
        Conditions([text])
    assert part in refused.value.message
    assert refused.value.hint


def test_an_unknown_kind_is_refused_with_a_near_one() -> None:
    with pytest.raises(TracepipeError) as refused:
        Conditions(["sycall:futex > 5ms"])
    assert refused.value.hint.startswith("Did you mean syscall")


def test_what_is_not_recorded_is_refused_with_a_name_that_is_near() -> None:
    with pytest.raises(TracepipeError, match="no recorded function") as refused:
        watch("cuInitt > 5ms")
    assert refused.value.hint == "Did you mean cuInit?"
    with pytest.raises(TracepipeError, match="no kernels are recorded"):
        watch("kernel:gemm > 5ms")
    watch("cudaWhatever > 5ms", device=Device(kernel_renderer(), "userspace", "gpu_kernel"))
    with pytest.raises(TracepipeError, match="no system calls are recorded"):
        watch("syscall:futex > 5ms")
    with pytest.raises(TracepipeError, match="no recorded system call has such a name") as refused:
        watch("syscall:futexx > 5ms", plan=WITH_SYSCALLS)
    assert refused.value.hint.startswith("Did you mean futex")
    with pytest.raises(TracepipeError, match="no ranges of NVTX are recorded"):
        watch("nvtx:step > 5ms", device=Device(kernel_renderer(), "userspace", "gpu_kernel"))


def test_a_call_that_took_longer_is_written_a_second_after_and_then_not_for_the_time_that_is_kept() -> None:
    watching = watch("cuInit > 50ms")
    watching.add(took("cuInit", 0, 50) + took("cuMemAlloc_v2", 0, 90))
    assert watching.due(100 * MS) == ""
    watching.add(took("cuInit", 100, 151))
    assert [watching.due(at * MS) for at in (200, 1199)] == ["", ""]
    assert watching.due(1200 * MS) == "cuInit > 50ms: cuInit took 51.0 ms"
    watching.add(took("cuInit", 2000, 2100))
    assert [watching.due(at * MS) for at in (2100, 5199, 5200, 6300)] == [""] * 4
    watching.add(took("cuInit", 5300, 5400))
    assert watching.due(6300 * MS) == ""
    assert watching.due(7300 * MS) == "cuInit > 50ms: cuInit took 100 ms"


def test_a_short_time_is_written_after_a_quarter_of_it() -> None:
    watching = watch("cuInit > 50ms", last_ms=400)
    watching.add(took("cuInit", 0, 60))
    assert watching.due(60 * MS) == "" and watching.due(159 * MS) == ""
    assert watching.due(160 * MS)


def test_a_call_that_does_not_end_is_written_too_and_again_when_it_does() -> None:
    watching = watch("cuInit > 50ms")
    watching.add(enter("cuInit", 0))
    assert [watching.due(at * MS) for at in (50, 51, 1050)] == ["", "", ""]
    assert watching.due(1051 * MS) == "cuInit > 50ms: cuInit still runs after 51.0 ms"
    assert watching.due(9000 * MS) == ""
    watching.add(raw(CALL_RETURN, "cuInit", ts_ns=9500 * MS))
    assert watching.due(9500 * MS) == ""
    assert watching.due(10500 * MS) == "cuInit > 50ms: cuInit took 9.50 s"


def test_a_call_that_ends_before_it_is_written_is_written_with_its_length() -> None:
    watching = watch("cuInit > 50ms")
    watching.add(enter("cuInit", 0))
    assert watching.due(60 * MS) == ""
    watching.add(raw(CALL_RETURN, "cuInit", ts_ns=80 * MS))
    assert watching.due(1060 * MS) == "cuInit > 50ms: cuInit took 80.0 ms"


def test_a_call_that_hangs_since_the_last_recording_is_written_when_the_time_has_passed() -> None:
    watching = watch("cuInit > 50ms")
    watching.add(took("cuInit", 0, 60))
    assert watching.due(60 * MS) == ""
    assert watching.due(1060 * MS).endswith("took 60.0 ms")
    watching.add(enter("cuInit", 1070))
    assert watching.due(5059 * MS) == ""
    assert watching.due(5060 * MS) == ""
    assert watching.due(6060 * MS) == "cuInit > 50ms: cuInit still runs after 3.99 s"


def test_calls_of_threads_and_nested_calls_are_distinguished() -> None:
    watching = watch("cuInit > 50ms")
    watching.add(enter("cuInit", 0, tid=1) + took("cuInit", 40, 41, tid=2))
    inner = (
        enter("cuInit", 10, tid=3)
        + took("cuInit", 20, 30, tid=3)
        + raw(CALL_RETURN, "cuInit", ts_ns=55 * MS, tid=3)
    )
    watching.add(inner + raw(CALL_RETURN, "cuInit", ts_ns=45 * MS, tid=1))
    assert watching.due(60 * MS) == "" and watching.due(2000 * MS) == ""


def test_kernels_and_calls_of_cupti_are_looked_at() -> None:
    device = Device(kernel_renderer(), "userspace", "gpu_kernel")
    watching = watch("kernel:^add > 400ns", "cudaLaunch* > 1ms", device=device)
    watching.add(hello() + name(1, "add(int)") + name(2, "mul(int)"), of_device=True)
    watching.add(
        function(LAUNCH, "cudaLaunchKernel_v7000") + record(KernelKind.CALL, call(10, LAUNCH, 9)),
        of_device=True,
    )
    watching.add(record(KernelKind.KERNEL, kernel(100, 9, named=2)), of_device=True)
    assert watching.due(0) == "" and watching.due(2000 * MS) == ""
    watching.add(record(KernelKind.KERNEL, kernel(100, 9)), of_device=True)
    assert watching.due(3000 * MS) == ""
    assert watching.due(4000 * MS) == "kernel:^add > 400ns: add(int) took 500 ns"


def test_a_call_of_cupti_that_took_longer_is_found_by_its_name() -> None:
    watching = watch("cudaLaunch* > 99ns", device=Device(kernel_renderer(), "userspace", "gpu_kernel"))
    watching.add(
        function(LAUNCH, "cudaLaunchKernel_v7000") + record(KernelKind.CALL, call(10, LAUNCH, 9)),
        of_device=True,
    )
    assert watching.due(0) == ""
    assert watching.due(1000 * MS) == "cudaLaunch* > 99ns: cudaLaunchKernel took 100 ns"


def test_calls_of_the_warps_engine_are_looked_at_also_while_they_go_on() -> None:
    device = Device(warp_renderer(), "userspace", "gpu_kernel")
    watching = watch("cuStreamSynchronize > 50ms", device=device)
    watching.add(name(5, "cuStreamSynchronize") + entry(5, 10 * MS) + leave(5, 20 * MS), of_device=True)
    assert watching.due(30 * MS) == ""
    watching.add(entry(5, 40 * MS), of_device=True)
    assert watching.due(91 * MS) == ""
    assert (
        watching.due(1091 * MS) == "cuStreamSynchronize > 50ms: cuStreamSynchronize still runs after 51.0 ms"
    )


def test_annotations_are_passed_over() -> None:
    device = Device(annotation_renderer(kernels=True), "userspace", "gpu_kernel", "annotation")
    watching = watch("kernel:add > 400ns", device=device)
    watching.add(
        begun(AnnotationKind.PUSH, "add") + name(1, "add(int)") + record(KernelKind.KERNEL, kernel(100, 9)),
        of_device=True,
    )
    assert watching.due(0) == ""
    assert watching.due(1000 * MS) == "kernel:add > 400ns: add(int) took 500 ns"
    alone = Device(annotation_renderer(), "annotation")
    watch("cuInit > 1ms", device=alone).add(begun(AnnotationKind.PUSH, "cuInit"), of_device=True)


def blocked(start_ms: float, end_ms: float, number: int = FUTEX, tid: int = 12) -> bytes:
    begin = raw(SYSCALL_ENTER, number, ts_ns=int(start_ms * MS), tid=tid)
    return begin + raw(SYSCALL_EXIT, number, ts_ns=int(end_ms * MS), tid=tid)


def test_a_system_call_that_took_longer_is_written(core: str) -> None:
    watching = watch("syscall:fut* > 50ms", plan=WITH_SYSCALLS)
    watching.add(blocked(0, 50) + blocked(50, 150, number=FUTEX + 1) + took("cuInit", 0, 200))
    assert [watching.due(at * MS) for at in (200, 1200)] == ["", ""]
    watching.add(blocked(1200, 1251))
    assert watching.due(1260 * MS) == ""
    assert watching.due(2260 * MS) == "syscall:fut* > 50ms: futex took 51.0 ms"


def test_a_system_call_without_an_end_is_written_unless_its_end_was_lost() -> None:
    watching = watch("syscall:futex > 50ms", plan=WITH_SYSCALLS)
    watching.add(raw(SYSCALL_ENTER, FUTEX, ts_ns=0) + blocked(40, 41))
    assert watching.due(60 * MS) == "" and watching.due(2000 * MS) == ""
    watching.add(raw(SYSCALL_ENTER, FUTEX, ts_ns=2000 * MS))
    assert watching.due(2051 * MS) == ""
    assert watching.due(3051 * MS) == "syscall:futex > 50ms: futex still runs after 51.0 ms"


def test_calls_of_a_thread_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracepipe.tracer.flight.own_namespace", lambda: None)
    gone, here = 1 << 30, os.getpid()
    watching = watch("syscall:futex > 50ms", "cuInit > 50ms", plan=WITH_SYSCALLS)
    watching.add(raw(SYSCALL_ENTER, FUTEX, ts_ns=0, tid=gone) + enter("cuInit", 0, tid=gone))
    assert watching.due(60 * MS) == "" and watching.due(2000 * MS) == ""
    watching.add(raw(SYSCALL_ENTER, FUTEX, ts_ns=2000 * MS, tid=here))
    assert watching.due(2051 * MS) == ""
    assert watching.due(3051 * MS).endswith("futex still runs after 51.0 ms")


def test_a_range_that_took_longer_is_written_whatever_is_around_it() -> None:
    device = Device(annotation_renderer(), "annotation")
    watching = watch("nvtx:step* > 50ms", device=device)
    watching.add(
        begun(AnnotationKind.PUSH, "step 1", 0, at_ns=0) + begun(AnnotationKind.PUSH, "forward", 1, at_ns=0),
        of_device=True,
    )
    watching.add(
        ended(AnnotationKind.POP, 1, at_ns=45 * MS) + ended(AnnotationKind.POP, 0, at_ns=50 * MS),
        of_device=True,
    )
    assert [watching.due(at * MS) for at in (51, 1100)] == ["", ""]
    watching.add(begun(AnnotationKind.PUSH, "step 2", 0, at_ns=1100 * MS), of_device=True)
    watching.add(ended(AnnotationKind.POP, 0, at_ns=1151 * MS), of_device=True)
    assert watching.due(1160 * MS) == ""
    assert watching.due(2160 * MS) == "nvtx:step* > 50ms: step 2 took 51.0 ms"


def test_a_range_of_a_process_is_its_own_whatever_thread_ends_it_and_is_written_while_it_goes_on() -> None:
    device = Device(annotation_renderer(kernels=True), "annotation", "gpu_kernel", "userspace")
    watching = watch("nvtx:epoch > 50ms", device=device)
    both = begun(AnnotationKind.START, "epoch", 7, at_ns=0) + begun(
        AnnotationKind.START, "epoch", 8, at_ns=20 * MS
    )
    watching.add(both + ended(AnnotationKind.END, 7, tid=99, at_ns=45 * MS), of_device=True)
    assert watching.due(70 * MS) == ""
    assert watching.due(71 * MS) == ""
    assert watching.due(1071 * MS) == "nvtx:epoch > 50ms: epoch still runs after 51.0 ms"
