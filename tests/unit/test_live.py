"""Totals of records, the thread that adds them up, and the lines that show them."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from tests.support.live_records import (
    ENDED,
    ENTER,
    EVENT,
    IN,
    IRQ,
    LAYERS,
    MARK,
    MIGRATE,
    MORE,
    NV,
    OUT,
    PREEMPTED,
    PROBES,
    RETURN,
    SLEEPING,
    SYSCALL,
    SYSCALL_END,
    TEXT,
    THREAD_IDS,
    THREAD_NAME,
    THREAD_NEW,
    WAKEUP,
    F,
    G,
    plan,
    record,
)  # fmt: skip
from tracepipe.terminal.live_table import View, functions_that_fit, ordered, view_lines
from tracepipe.tracer.engines.engine import Chunk
from tracepipe.tracer.live.totals import (
    FunctionTotal,
    Histogram,
    LiveSink,
    MemoryTotal,
    Snapshot,
    ThreadTotal,
    Totals,
    bounds_ns,
    bucket_of,
    function_of,
)
from tracepipe.tracer.records.record import Loss
from tracepipe.units import duration_text

SYSCALLS = {0: "read", 16: "ioctl"}


def totals_of(*records: bytes, start_ns: int = 0) -> Totals:
    totals = Totals(
        map(function_of, PROBES), SYSCALLS, start_ns, LAYERS, name_of=lambda pid, tid: f"{pid}/{tid}"
    )
    totals.add(b"".join(records))
    return totals


def by_name(snapshot: Snapshot) -> dict[str, FunctionTotal]:
    return {total.name: total for total in snapshot.functions}


def only_thread(snapshot: Snapshot) -> ThreadTotal:
    (thread,) = snapshot.threads
    return thread


# ── calls ──


def test_calls_nest_and_are_measured() -> None:
    totals = totals_of(
        record(ENTER, 100, F),
        record(ENTER, 110, G),
        record(RETURN, 150, G),
        record(ENTER, 160, G),
        record(RETURN, 260, G),
        record(RETURN, 400, F),
    )
    found = by_name(totals.snapshot(500))
    assert (found["f"].count, found["f"].latencies.total_ns, found["f"].latencies.max_ns) == (1, 300, 300)
    assert (found["g"].count, found["g"].latencies.total_ns, found["g"].latencies.max_ns) == (2, 140, 100)
    assert found["f"].unmeasured == found["g"].unmeasured == found["f"].open_count == 0
    assert totals.snapshot(500).counts == {"userspace": 6}


def test_threads_do_not_mix() -> None:
    totals = totals_of(
        record(ENTER, 100, F, tid=1),
        record(ENTER, 200, F, tid=2),
        record(RETURN, 210, F, tid=1),
        record(RETURN, 260, F, tid=2),
    )
    assert by_name(totals.snapshot(300))["f"].latencies.total_ns == 110 + 60


def test_recursion() -> None:
    depth = 10
    records = [record(ENTER, 10 * i, F) for i in range(depth)]
    records += [record(RETURN, 1000 + 10 * i, F) for i in range(depth)]
    latencies = by_name(totals_of(*records).snapshot(2000))["f"].latencies
    assert (latencies.count, latencies.max_ns) == (depth, 1000 + 10 * (depth - 1))


def test_a_lost_return_ends_with_the_call_around_it() -> None:
    totals = totals_of(
        record(ENTER, 100, F),
        record(ENTER, 110, G),  # whose return is lost
        record(RETURN, 200, F),
        record(ENTER, 300, G),
        record(RETURN, 310, G),
    )
    found = by_name(totals.snapshot(400))
    assert (found["f"].latencies.count, found["f"].latencies.total_ns) == (1, 100)
    assert (found["g"].latencies.count, found["g"].latencies.total_ns) == (1, 10)
    assert (found["g"].count, found["g"].unmeasured, found["g"].open_count) == (2, 1, 0)


def test_a_return_without_its_entry_is_counted_only() -> None:
    totals = totals_of(record(RETURN, 100, F), record(ENTER, 200, F), record(RETURN, 230, F))
    snapshot = totals.snapshot(300)
    assert by_name(snapshot)["f"].latencies.total_ns == 30
    assert by_name(snapshot)["f"].unmeasured == 0, "of the entries none"
    assert snapshot.counts == {"userspace": 3}


def test_what_was_open_at_a_loss_is_not_paired_with_a_later_return() -> None:
    totals = totals_of(record(ENTER, 100, F), record(ENTER, 110, NV))
    totals.lose(Loss("userspace", 2, 110, 900, "full"))  # the return of f and the next entry of f
    totals.add(record(RETURN, 1000, NV) + record(RETURN, 1010, F))
    snapshot = totals.snapshot(2000)
    found = by_name(snapshot)
    assert (found["f"].latencies.count, found["f"].unmeasured) == (0, 1)
    assert found["nv_ioctl"].latencies.total_ns == 890, "its layer lost nothing"
    assert snapshot.losses == {"userspace": 2}
    assert snapshot.unmeasured == 1


def test_a_loss_of_an_unknown_layer_is_one_of_all() -> None:
    totals = totals_of(
        record(ENTER, 1, F), record(SYSCALL, 2, 0), record(IN, 3), record(RETURN, 4, G), record(EVENT, 5, IRQ)
    )
    totals.lose(Loss(None, 1, 0, 9, "full"))
    totals.add(record(RETURN, 20, F) + record(SYSCALL_END, 21, 0) + record(OUT, 22, 0, SLEEPING))
    snapshot = totals.snapshot(30)
    assert snapshot.losses == {"unknown": 1}
    assert [total.latencies.count for total in snapshot.functions] == [0] * len(snapshot.functions)
    assert only_thread(snapshot).running_ns == 0


def test_calls_in_progress() -> None:
    totals = totals_of(record(ENTER, 100, F, tid=1), record(ENTER, 300, F, tid=2), record(SYSCALL, 120, 16))
    found = by_name(totals.snapshot(1000))
    assert (found["f"].open_count, found["f"].oldest_ns, found["f"].unmeasured) == (2, 100, 0)
    assert (found["ioctl"].open_count, found["ioctl"].oldest_ns) == (1, 120)


def test_instants_have_no_latency_and_are_never_open() -> None:
    totals = totals_of(*[record(ENTER, i, MARK) for i in range(1000)], record(EVENT, 1000, IRQ, tid=0))
    snapshot = totals.snapshot(2000)
    found = by_name(snapshot)
    assert (found["mark"].count, found["mark"].open_count, found["mark"].unmeasured) == (1000, 0, 0)
    assert (found["irq"].layer, found["irq"].count, found["irq"].unmeasured) == ("scheduler", 1, 0)
    assert snapshot.counts == {"userspace": 1000, "scheduler": 1}


def test_calls_that_never_return_take_no_room() -> None:
    totals = totals_of()
    chunk = b"".join(record(ENTER, i, F) for i in range(80_000))  # longjmp, again and again
    totals.add(chunk)
    snapshot = totals.snapshot(10**9)
    total = by_name(snapshot)["f"]
    assert total.count == 80_000
    assert total.open_count < 1000
    assert total.open_count + total.unmeasured == 80_000


def test_system_calls() -> None:
    totals = totals_of(
        record(SYSCALL_END, 90, 0),  # entered before the recording
        record(SYSCALL, 100, 16),
        record(SYSCALL_END, 150, 16),
        record(SYSCALL, 200, 999),
        record(SYSCALL_END, 210, 16),  # of another number: neither is measured
    )
    snapshot = totals.snapshot(300)
    found = by_name(snapshot)
    assert (found["ioctl"].count, found["ioctl"].latencies.total_ns) == (1, 50)
    assert (found["syscall 999"].count, found["syscall 999"].unmeasured) == (1, 1)
    assert snapshot.counts == {"syscall": 5}


def test_times_that_run_backwards_are_not_latencies() -> None:
    totals = totals_of(record(ENTER, 500, F), record(RETURN, 400, F), record(SYSCALL, 9, 0))
    found = by_name(totals.snapshot(600))
    assert (found["f"].count, found["f"].latencies.count, found["f"].unmeasured) == (1, 0, 1)


def test_a_thread_id_that_is_used_again_is_another_thread() -> None:
    totals = totals_of(
        record(ENTER, 100, F), record(SYSCALL, 110, 0), record(THREAD_NEW, 900, 1), record(RETURN, 1000, F)
    )
    found = by_name(totals.snapshot(2000))
    assert (found["f"].latencies.count, found["f"].unmeasured, found["f"].open_count) == (0, 1, 0)
    assert found["read"].open_count == 0


def test_records_that_are_not_events_are_not_counted() -> None:
    totals = totals_of(record(TEXT, 1, F), record(MORE, 1, F), record(THREAD_NAME, 1), record(THREAD_IDS, 2))
    snapshot = totals.snapshot(3)
    assert (snapshot.counts, snapshot.functions, snapshot.threads) == ({}, [], [])


def test_counting_alone_is_exact() -> None:
    records = [record(ENTER, 1, F), record(RETURN, 2, F), record(SYSCALL, 3, 0), record(SYSCALL_END, 4, 0)]
    records += [
        record(IN, 5),
        record(OUT, 6),
        record(EVENT, 7, IRQ),
        record(ENTER, 8, MARK),
        record(TEXT, 9, F),
    ]
    totals = totals_of()
    totals.count(b"".join(records) * 100)
    snapshot = totals.snapshot(10)
    assert snapshot.counts == {"userspace": 300, "syscall": 200, "scheduler": 300}
    found = by_name(snapshot)
    assert (found["f"].count, found["f"].unmeasured) == (100, 100)
    assert (found["read"].count, found["read"].unmeasured) == (100, 100)
    assert found["mark"].unmeasured == 0
    assert snapshot.unmeasured == 200


def test_counting_alone_loses_sight_of_what_is_open() -> None:
    totals = totals_of(record(ENTER, 100, F))
    totals.count(record(RETURN, 200, F) + record(ENTER, 300, F))
    totals.add(record(RETURN, 1000, F))
    found = by_name(totals.snapshot(2000))
    assert (found["f"].count, found["f"].latencies.count, found["f"].unmeasured) == (2, 0, 2)


def test_any_records_in_any_order_are_counted_exactly() -> None:
    dice = random.Random(5)
    made: Counter[str] = Counter()
    totals = totals_of()
    for _ in range(300):
        chunk = b""
        for _ in range(dice.randrange(60)):
            kind = dice.choice(
                [ENTER, RETURN, SYSCALL, SYSCALL_END, OUT, IN, WAKEUP, MIGRATE, THREAD_NEW, 77]
            )
            number = dice.choice([F, G, NV])
            state = dice.choice([0, SLEEPING, ENDED])
            time_ns = dice.randrange(10**6)
            chunk += record(kind, time_ns, number, state, dice.randrange(3), tid=dice.randrange(4))
            if kind in (ENTER, RETURN):
                made["kernel" if number == NV else "userspace"] += 1
            elif kind in (SYSCALL, SYSCALL_END):
                made["syscall"] += 1
            elif kind in (OUT, IN, WAKEUP, MIGRATE):
                made["scheduler"] += 1
        (totals.count if dice.random() < 0.1 else totals.add)(chunk)
        if dice.random() < 0.1:
            totals.lose(Loss(dice.choice(["userspace", "scheduler", None]), 1, 0, 1, "full"))
    snapshot = totals.snapshot(10**6)
    assert snapshot.counts == dict(made)
    for total in snapshot.functions:
        assert total.unmeasured >= 0
        assert total.latencies.count + total.open_count + total.unmeasured == total.count


# ── threads ──


def test_where_a_thread_spends_its_time() -> None:
    totals = totals_of(
        record(THREAD_NAME, 0, 0, int.from_bytes(b"worker", "little")),
        record(IN, 100),
        record(OUT, 300, 0, SLEEPING),
        record(WAKEUP, 1000, 9, 1),
        record(IN, 1050),
        record(OUT, 1150, 0, PREEMPTED),
        record(IN, 1180),
        record(MIGRATE, 1190, 0, 0, 1),
    )
    snapshot = totals.snapshot(1280)
    thread = only_thread(snapshot)
    assert (thread.name, thread.switches) == ("worker", 2)
    assert thread.running_ns == 200 + 100 + 100, "until now"
    assert thread.waits == {"sleeping": 700, "for a processor": 50, "preempted": 30}
    assert snapshot.counts == {"scheduler": 7}


def test_threads_that_ran_before_the_recording() -> None:
    totals = totals_of(record(OUT, 1500, 0, SLEEPING, 2), start_ns=1000)
    thread = only_thread(totals.snapshot(2000))
    assert (thread.running_ns, thread.name) == (500, "7/7")


def test_switches_that_were_not_reported_are_not_losses() -> None:
    totals = totals_of(record(OUT, 100, 0, SLEEPING, 1), record(IN, 200), record(IN, 400, 0, 0, 1))
    snapshot = totals.snapshot(500)
    assert not snapshot.losses
    assert only_thread(snapshot).running_ns == 100


def test_ids_of_a_pid_namespace_are_shown() -> None:
    totals = totals_of(
        record(THREAD_IDS, 1, 0, 3 << 32 | 4, tid=70, tgid=60), record(IN, 2, tid=70), record(OUT, 5, tid=70)
    )
    thread = only_thread(totals.snapshot(9))
    assert (thread.pid, thread.tid) == (3, 4)


def test_many_short_threads_are_summed_up() -> None:
    records = []
    for tid in range(1, 3001):
        records += [record(IN, tid * 10, tid=tid, tgid=tid), record(OUT, tid * 10 + 4, 0, ENDED, tid=tid)]
    snapshot = totals_of(*records).snapshot(10**6)
    assert len(snapshot.threads) <= 1100
    rest = snapshot.threads[-1]
    assert (rest.tid, rest.name) == (0, "threads that ended")
    assert rest.ended + len(snapshot.threads) - 1 == 3000
    assert sum(thread.running_ns for thread in snapshot.threads) == 3000 * 4
    assert sum(thread.switches for thread in snapshot.threads) == 3000


# ── durations ──


def test_buckets_hold_what_they_state() -> None:
    for duration_ns in [*range(3000), 2**20, 2**33 - 1, 3 * 10**9, 10**15]:
        low_ns, high_ns = bounds_ns(bucket_of(duration_ns))
        assert low_ns <= duration_ns < high_ns
        assert high_ns - low_ns <= max(1, low_ns / 16)
    for bucket in range(500):
        assert bounds_ns(bucket)[1] == bounds_ns(bucket + 1)[0]


def test_percentiles_are_near_and_totals_exact() -> None:
    dice = random.Random(3)
    durations = [int(dice.lognormvariate(9, 2)) for _ in range(20_000)]
    histogram = Histogram()
    histogram.add(durations[:7000])
    histogram.add(durations[7000:])
    assert (histogram.count, histogram.total_ns) == (len(durations), sum(durations))
    assert histogram.max_ns == max(durations)
    durations.sort()
    for percent in (1, 50, 95, 99.9):
        exact = durations[-(-len(durations) * percent // 100).__int__() - 1]
        assert histogram.percentile_ns(percent) == pytest.approx(exact, rel=1 / 32)
    assert histogram.percentile_ns(100) == pytest.approx(max(durations), rel=1 / 32)
    assert sum(histogram.spread((256, 4096, 1 << 20))) == len(durations)
    assert Histogram().percentile_ns(50) == 0


def test_one_duration_is_its_own_percentile() -> None:
    histogram = Histogram()
    histogram.add([1_000_003])
    assert histogram.percentile_ns(50) <= histogram.max_ns == 1_000_003
    assert histogram.spread((1 << 10, 1 << 20)) == [0, 1, 0]


# ── the thread that adds up ──


def test_the_sink_adds_up_in_order() -> None:
    sink = LiveSink()
    assert sink.snapshot() is None
    sink.begin(plan(), time.monotonic_ns())
    sink.put(Chunk(record(ENTER, 100, F)))
    sink.put(Loss("userspace", 3, 100, 200, "full", cpu=1))
    sink.put(Chunk(record(RETURN, 300, F) + record(ENTER, 400, G) + record(RETURN, 450, G)))
    snapshot = sink.snapshot()
    assert snapshot is not None
    found = by_name(snapshot)
    assert (found["f"].unmeasured, found["g"].latencies.total_ns) == (1, 50)
    sink.finish()
    assert sink.wait(60) and sink.is_done
    assert sink.counts == {"userspace": 4}
    assert (sink.losses, sink.cpu_losses) == ({"userspace": 3}, {"userspace": {1: 3}})
    last, again = sink.snapshot(), sink.snapshot()
    assert last is not None and again is not None
    assert last.now_ns == again.now_ns, "time stops at the end"
    sink.close()


def test_a_sink_that_is_behind_counts_exactly() -> None:
    sink = LiveSink(behind_bytes=-1)
    sink.begin(plan(), 0)
    for _ in range(50):
        sink.put(Chunk((record(ENTER, 1, F) + record(RETURN, 2, F)) * 100))
    sink.finish()
    assert sink.wait(60)
    snapshot = sink.snapshot()
    assert snapshot is not None
    assert snapshot.counts == {"userspace": 10_000}
    assert (snapshot.unmeasured, by_name(snapshot)["f"].latencies.count) == (5000, 0)


def test_a_sink_that_never_began_closes() -> None:
    sink = LiveSink()
    sink.close()
    assert (sink.is_done, sink.counts, sink.losses) == (True, {}, {})


# ── the lines ──


def total(name: str, durations_ns: list[int], count: int = 0, **more: int) -> FunctionTotal:
    histogram = Histogram()
    histogram.add(durations_ns)
    return FunctionTotal("userspace", name, count or len(durations_ns), histogram, **more)


SNAPSHOT = Snapshot(
    now_ns=3 * 10**9,
    start_ns=10**9,
    layers=("userspace", "scheduler"),
    functions=[
        total("cuLaunchKernel", [2000, 2000, 4000]),
        total("cuCtxSynchronize", [10**6], 4, open_count=1, oldest_ns=10**9, unmeasured=2),
        total("cuMark\x1b[2J", [], 9000),
    ],
    threads=[ThreadTotal(12, 11, "worker", 10**9, 5, {"sleeping": 900_000_000, "preempted": 1000})],
    counts={"userspace": 18_000, "scheduler": 11},
    losses={"userspace": 5},
)


def texts(view: View) -> list[str]:
    return [line.text for line in view_lines(SNAPSHOT, view)]


def test_the_table() -> None:
    shown = texts(View("./app"))
    assert shown[0] == "2.00 s   18,011 events   9.01k/s   ./app"
    assert shown[1] == "userspace 18,000 (9.00k/s) · scheduler 11 (5.50/s)"
    assert shown[2] == "lost: 5 userspace · 2 calls counted without a latency"
    assert shown[3].split()[:8] == ["layer", "function", "count", "per", "s", "total", "p50", "p95"]
    assert shown[4].split() == [
        "userspace", "cuCtxSynchronize", "4", "2.00", "1.00", "ms", "999", "µs", "999", "µs", "1.00", "ms",
        "1", "for", "2.00", "s", "2", "█",
    ]  # fmt: skip
    assert shown[5].split()[:6] == ["userspace", "cuLaunchKernel", "3", "1.50", "8.00", "µs"]
    assert shown[6].split() == ["userspace", "cuMark\\x1b[2J", "9,000", "4.50k"], "no escape sequence"
    assert shown[8].split() == ["worker", "11", "12", "1.00", "s", "50", "5", "900", "ms", "1.00", "µs"]


def test_the_table_states_what_was_moved() -> None:
    allocated, copied = (
        {"alloc": MemoryTotal(3, 3 << 20)},
        {"HtoD": MemoryTotal(2, 2048), "DtoH": MemoryTotal(1, 1024)},
    )
    on_gpu = {"HtoD (GPU)": MemoryTotal(2, 2048)}
    for snapshot, line in (
        (replace(SNAPSHOT, allocated=allocated), "allocated 3.00 MiB in 3"),
        (replace(SNAPSHOT, copied=copied | on_gpu), "copied 3.00 KiB in 3 (HtoD 2.00 KiB, DtoH 1.00 KiB)"),
        (replace(SNAPSHOT, copied=on_gpu), "copied 2.00 KiB in 2"),
        (replace(SNAPSHOT, allocated=allocated, is_memory_partial=True), "at least allocated 3.00 MiB in 3"),
    ):
        assert view_lines(snapshot, View("./app"))[3].text == line
    function = replace(SNAPSHOT.functions[0], size_bytes=3 << 20)
    head, row = view_lines(replace(SNAPSHOT, functions=[function]), View("./app"))[3:5]
    at = head.text.index("bytes") + len("bytes")
    assert row.text[:at].endswith("3.00 MiB")


def test_a_narrow_table_leaves_columns_out_and_cuts_no_number() -> None:
    for width in range(24, 200):
        shown = texts(View("./app " * 9, width=width))
        assert max(map(len, shown)) <= width
        if width >= 60:
            assert any("9,000" in line for line in shown)
            assert all("1.00 ms" in line for line in shown if "cuCtxSync" in line)
    assert "cuLaunchKernel" in " ".join(texts(View("./app", width=60)))


def test_the_order_of_the_table() -> None:
    def names(view: View) -> list[str]:
        return [total.name[:6] for total in ordered(SNAPSHOT, view)]

    assert names(View("", sort="total")) == ["cuCtxS", "cuLaun", "cuMark"]
    assert names(View("", sort="count")) == ["cuMark", "cuCtxS", "cuLaun"]
    before = Snapshot(0, 0, functions=[total("cuMark\x1b[2J", [], 9000)])
    assert names(View("", sort="rate", before=before)) == ["cuCtxS", "cuLaun", "cuMark"]


def test_rates_are_those_since_the_last_view() -> None:
    before = Snapshot(2 * 10**9, 10**9, counts={"userspace": 17_000})
    assert texts(View("x", before=before))[1].startswith("userspace 18,000 (1.00k/s)")


def test_top_states_what_it_leaves_out() -> None:
    shown = texts(View("x", top=1))
    assert "and 2 more functions" in shown
    assert not any("cuLaunchKernel" in line for line in shown)


def test_the_view_fits_a_terminal() -> None:
    many = Snapshot(
        10, 0, ("userspace",), [total(f"f{i}", [5]) for i in range(99)],
        [ThreadTotal(i, i, "t", 5, 1, {}) for i in range(1, 30)], {"userspace": 1}, {},
    )  # fmt: skip
    for height in range(20, 80):
        view = View("x", top=functions_that_fit(height, many))
        assert len(view_lines(many, view)) <= height
    assert functions_that_fit(24, many) < functions_that_fit(50, many)


def test_other_encodings() -> None:
    for line in texts(View("é", ascii_only=True)):
        line.encode("ascii")


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0 ns"), (999, "999 ns"), (1000, "1.00 µs"), (12_345, "12.3 µs"), (123_456, "123 µs"),
        (999_499, "999 µs"), (999_950, "1.00 ms"), (59_900_000_000, "59.9 s"), (3600 * 10**9, "60 min"),
        (61 * 86_400 * 10**9, "61 days"),
    ],
)  # fmt: skip
def test_durations(duration_ns: int, text: str) -> None:
    assert duration_text(duration_ns) == text
