"""What calls do to memory, recorded once each: by the call, not by those around it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.hooks import hook_of, shipped_probe
from tracepipe.event.checks import first_fault
from tracepipe.hooks.hook import FilePlace, Hook, Probe
from tracepipe.hooks.sets import load_set
from tracepipe.hooks.slots import slots
from tracepipe.tracer.records.effects import OPEN_CALLS_MAX, THREADS_MAX, Effects
from tracepipe.tracer.records.line import Lines

PID, TID, CPU = 4242, 4243, 1
FAILED = 2
_NAMES = load_set("cuda-runtime").values


def _own(text: str, effect: str) -> Probe:
    hook = hook_of(text)
    return Probe(
        hook.pattern,
        hook.pattern,
        FilePlace("/lib/own.so", 16),
        Hook(hook.target, hook.library, hook.pattern, hook.layer, hook.signature, effect=effect),
    )


class Thread:
    """A thread that calls functions one after the other, 10 ns apart; `events` are what they did."""

    def __init__(self, effects: Effects | None = None, tid: int = TID) -> None:
        self.effects = effects or Effects(_NAMES)
        self.tid, self.now_ns = tid, 1000
        self.events: list[dict[str, Any]] = []

    def enter(self, probe: str | Probe, *arguments: int) -> None:
        """Enter a call with the arguments that have slots; halves of a slot as they are packed."""
        probe = shipped_probe(probe) if isinstance(probe, str) else probe
        assert len(arguments) == len(slots(probe.signature)), probe.symbol
        self.now_ns += 10
        self.effects.enter(self.tid, probe, self.now_ns, (*arguments, *[0] * (8 - len(arguments))))

    def leave(self, probe: str | Probe, result: int = 0, out: int = 0) -> dict[str, Any] | None:
        """Return from a call; its event."""
        probe = shipped_probe(probe) if isinstance(probe, str) else probe
        self.now_ns += 10
        lines = Lines()
        if done := self.effects.leave(self.tid, probe, self.now_ns, result, out):
            done.add_to(lines, (PID, self.tid, CPU))
        if not lines.texts:
            return None
        (line,), (layer,) = lines.texts, lines.layers
        assert line.endswith("\n")
        event: dict[str, Any] = json.loads(line)
        assert event["type"] == layer
        self.events.append(event)
        return event

    def call(
        self, probe: str | Probe, *arguments: int, result: int = 0, out: int = 0
    ) -> dict[str, Any] | None:
        """A call with nothing inside."""
        self.enter(probe, *arguments)
        return self.leave(probe, result, out)


def test_an_allocation_has_size_and_address_and_who_made_it() -> None:
    thread = Thread()
    assert thread.call("cuMemAlloc_v2", 4096, out=0x7F0000) == {
        "ts_ns": 1020,
        "type": "memory",
        "name": "alloc",
        "phase": "I",
        "pid": PID,
        "tid": TID,
        "cpu": CPU,
        "args": {"size": 4096, "address": 0x7F0000, "call": "cuMemAlloc_v2"},
    }


@pytest.mark.parametrize(
    ("symbol", "arguments", "out", "name", "args"),
    [
        ("cuMemAllocAsync_ptsz", (64, 7), 5, "alloc", {"size": 64, "address": 5, "stream": 7}),
        ("cuMemAllocPitch_v2", (100, 3, 4), 5, "alloc", {"size": 300, "address": 5}),
        ("cuMemCreate", (1 << 21, 0), 9, "alloc", {"size": 1 << 21, "address": 9}),
        ("cuMemAllocHost_v2", (64,), 5, "alloc_host", {"size": 64, "address": 5}),
        ("cuMemFree_v2", (5,), 0, "free", {"address": 5}),
        ("cuMemFreeAsync", (5, 7), 0, "free", {"address": 5, "stream": 7}),
        ("cuMemFreeHost", (5,), 0, "free_host", {"address": 5}),
        ("cuMemRelease", (9,), 0, "free", {"address": 9}),
        ("cuMemsetD32_v2", (5, 0xFF, 10), 0, "set", {"size": 40, "address": 5, "value": 0xFF}),
        (
            "cuMemsetD2D16Async",
            (5, 512, 1, 10, 3, 7),
            0,
            "set",
            {"size": 60, "address": 5, "value": 1, "stream": 7},
        ),
        ("cudaMemset", (5, 0xFFFFFFFF, 100), 0, "set", {"size": 100, "address": 5, "value": -1}),
        ("cudaMemset2D", (5, 512, 0, 10, 3), 0, "set", {"size": 30, "address": 5, "value": 0}),
        ("cudaMalloc", (4096,), 5, "alloc", {"size": 4096, "address": 5}),
        ("cudaHostAlloc", (64, 0), 5, "alloc_host", {"size": 64, "address": 5}),
    ],
)
def test_every_kind_of_memory_event(
    symbol: str, arguments: tuple[int, ...], out: int, name: str, args: dict[str, Any]
) -> None:
    event = Thread().call(symbol, *arguments, out=out)
    assert event is not None
    assert (event["type"], event["name"], event["phase"]) == ("memory", name, "I")
    assert event["args"] == {**args, "call": symbol}


def test_a_copy_lasts_as_long_as_its_call() -> None:
    assert Thread().call("cuMemcpyHtoD_v2_ptds", 1, 2, 4096) == {
        "ts_ns": 1010,
        "type": "transfer",
        "name": "HtoD",
        "phase": "X",
        "dur_ns": 10,
        "pid": PID,
        "tid": TID,
        "cpu": CPU,
        "args": {"size": 4096, "direction": "HtoD", "from": 2, "to": 1, "call": "cuMemcpyHtoD_v2_ptds"},
    }


def test_an_asynchronous_copy_is_an_instant_as_its_call_says_nothing_of_its_end() -> None:
    event = Thread().call("cuMemcpyDtoHAsync_v2", 1, 2, 4096, 7)
    assert event is not None
    assert (event["ts_ns"], event["phase"], "dur_ns" in event) == (1020, "I", False)
    assert event["args"]["stream"] == 7


@pytest.mark.parametrize(("kind", "name"), [(0, "HtoH"), (1, "HtoD"), (2, "DtoH"), (3, "DtoD")])
def test_the_runtimes_kind_is_the_direction(kind: int, name: str) -> None:
    event = Thread().call("cudaMemcpy", 1, 2, 4096, kind)
    assert event is not None
    assert (event["name"], event["args"]["direction"]) == (name, name)


def test_the_names_of_a_users_set_are_those_of_all_recordings() -> None:
    thread = Thread(Effects({"cudaMemcpyKind": {1: "H2D"}}))
    event = thread.call("cudaMemcpy", 1, 2, 4096, 1)
    assert event is not None
    assert (event["name"], event["args"]["direction"]) == ("HtoD", "HtoD")


@pytest.mark.parametrize("kind", [4, 9])
def test_a_copy_of_unknown_direction_is_named_copy(kind: int) -> None:
    event = Thread().call("cudaMemcpy", 1, 2, 4096, kind)
    assert event is not None
    assert event["name"] == "copy"
    assert "direction" not in event["args"]


def test_an_allocation_of_the_runtime_is_recorded_by_its_driver_call_alone() -> None:
    thread = Thread()
    thread.enter("cudaMalloc", 4000)
    thread.call("cuMemAlloc_v2", 4096, out=5)
    assert thread.leave("cudaMalloc", out=5) is None
    assert [event["args"]["call"] for event in thread.events] == ["cuMemAlloc_v2"]


def test_an_allocation_is_recorded_by_the_runtimes_call_where_the_drivers_failed_or_is_not_seen() -> None:
    thread = Thread()
    thread.enter("cudaMalloc", 4000)
    thread.call("cuMemAlloc_v2", 4096, result=FAILED)
    assert thread.leave("cudaMalloc", out=5) is not None
    assert thread.call("cudaMalloc", 4000, out=6) is not None
    assert [event["args"]["address"] for event in thread.events] == [5, 6]


def test_another_effect_inside_a_call_hides_nothing() -> None:
    thread = Thread()
    thread.enter("cudaMemcpy", 1, 2, 4096, 1)
    thread.call("cuMemAllocHost_v2", 4096, out=5)
    assert thread.leave("cudaMemcpy") is not None
    assert [event["name"] for event in thread.events] == ["alloc_host", "HtoD"]


def test_a_call_on_another_thread_hides_nothing() -> None:
    thread = Thread()
    other = Thread(thread.effects, tid=TID + 1)
    thread.enter("cudaMalloc", 4000)
    other.now_ns = thread.now_ns + 1
    assert other.call("cuMemAlloc_v2", 4096, out=5) is not None
    thread.now_ns = other.now_ns
    assert thread.leave("cudaMalloc", out=6) is not None


def test_entries_that_come_with_their_returns_hide_what_is_around_them_too() -> None:
    effects = Effects()
    inner, outer = shipped_probe("cuMemcpyHtoD_v2"), shipped_probe("cudaMemcpy")
    effects.enter(TID, inner, 20, (1, 2, 4096, 0))
    assert effects.leave(TID, inner, 30, 0, 0) is not None
    effects.enter(TID, outer, 10, (1, 2, 4096, 1))
    assert effects.leave(TID, outer, 40, 0, 0) is None


def test_a_copy_without_a_direction_has_that_of_the_copy_around_it() -> None:
    thread = Thread()
    thread.enter("cudaMemcpyAsync", 1, 2, 4096, 2, 7)
    event = thread.call("cuMemcpyAsync", 1, 2, 4096, 7)
    assert event is not None
    assert (event["name"], event["args"]["call"]) == ("DtoH", "cuMemcpyAsync")
    assert thread.leave("cudaMemcpyAsync") is None


def test_several_copies_inside_one_are_all_reported() -> None:
    thread = Thread()
    thread.enter("cudaMemcpy", 1, 2, 8192, 1)
    thread.call("cuMemcpyHtoD_v2", 1, 2, 4096)
    thread.call("cuMemcpyHtoD_v2", 1, 2, 4096)
    assert thread.leave("cudaMemcpy") is None
    assert sum(event["args"]["size"] for event in thread.events) == 8192


def test_calls_that_failed_did_nothing() -> None:
    thread = Thread()
    thread.call("cuMemAlloc_v2", 4096, result=FAILED)
    thread.call("cuMemFree_v2", 5, result=FAILED)
    thread.call("cuMemcpyHtoD_v2", 1, 2, 4096, result=FAILED)
    assert thread.events == []


def test_the_upper_half_of_a_result_means_nothing() -> None:
    assert Thread().call("cuMemAlloc_v2", 4096, result=0xDEAD << 32, out=5) is not None


def test_nothing_is_reported_about_nothing() -> None:
    thread = Thread()
    thread.call("cudaFree", 0)
    thread.call("cudaMalloc", 0)
    thread.call("cuMemcpyHtoD_v2", 1, 2, 0)
    assert thread.events == []


def test_an_allocation_whose_address_could_not_be_read_is_still_one() -> None:
    event = Thread().call("cuMemAlloc_v2", 4096, out=0)
    assert event is not None
    assert event["args"] == {"size": 4096, "call": "cuMemAlloc_v2"}


def test_a_return_without_its_entry_does_nothing() -> None:
    thread = Thread()
    assert thread.leave("cuMemAlloc_v2", out=5) is None
    thread.enter("cudaMalloc", 4000)
    assert thread.leave("cuMemAlloc_v2", out=5) is None
    assert thread.leave("cudaMalloc", out=5) is not None


def test_a_call_inside_that_lost_its_return_does_not_hide_the_one_around_it() -> None:
    thread = Thread()
    thread.enter("cudaMalloc", 4000)
    thread.enter("cuMemAlloc_v2", 4096)
    event = thread.leave("cudaMalloc", out=5)
    assert event is not None
    assert event["args"]["size"] == 4000
    assert thread.leave("cuMemAlloc_v2", out=5) is None


def test_calls_that_never_return_take_a_bounded_amount_of_memory() -> None:
    thread = Thread()
    thread.enter("cudaMalloc", 4000)
    for _ in range(OPEN_CALLS_MAX):
        thread.enter("cuMemFree_v2", 5)
    assert thread.leave("cudaMalloc", out=5) is None  # forgotten
    assert thread.leave("cuMemFree_v2") is not None


def test_threads_that_never_return_take_a_bounded_amount_of_memory() -> None:
    effects, probe = Effects(), shipped_probe("cuMemAlloc_v2")
    for tid in range(THREADS_MAX + 1):
        effects.enter(tid, probe, 10, (4096, 0, 0, 0))
    tids = (0, 1, THREADS_MAX)
    assert [bool(effects.leave(tid, probe, 20, 0, 5)) for tid in tids] == [False, True, True]


def test_a_users_own_functions_have_effects_too() -> None:
    thread = Thread()
    allocate = _own("uprobe:libown.so:own_alloc(size_bytes: u32, out address: u32) -> i32", "alloc")
    release = _own("uprobe:libown.so:own_release(out address: ptr)", "free")
    thread.call(allocate, 64 | 7 << 32, result=7 << 32, out=0xFFFFFFFF00000005)
    thread.call(release, result=123, out=5)
    assert [event["args"] for event in thread.events] == [
        {"size": 64, "address": 5, "call": "own_alloc"},
        {"address": 5, "call": "own_release"},
    ]


def test_the_lines_are_events_of_the_format() -> None:
    thread = Thread()
    thread.call("cuMemAlloc_v2", 4096, out=5)
    thread.call("cuMemcpyHtoD_v2", 1, 2, 4096)
    thread.call("cuMemcpyHtoDAsync_v2", 1, 2, 4096, 7)
    assert len(thread.events) == 3
    for event in thread.events:
        assert first_fault(event) is None


def test_an_event_that_belongs_to_no_process_names_none() -> None:
    effects, probe = Effects(), shipped_probe("cuMemAlloc_v2")
    effects.enter(TID, probe, 10, (4096, 0, 0, 0))
    lines = Lines()
    done = effects.leave(TID, probe, 20, 0, 5)
    assert done is not None
    done.add_to(lines, (0, 0, CPU))
    (line,) = lines.texts
    assert json.loads(line).keys() & {"pid", "tid"} == set()
