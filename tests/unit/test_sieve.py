"""What is left out of a chunk of records changes nothing for whoever follows what is under way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.cores import cores_here, running
from tests.unit.test_capture_record import PROBES, raw
from tracepipe.tracer.records import record
from tracepipe.tracer.records.record import RECORD, RECORD_BYTES
from tracepipe.tracer.records.render import RecordRenderer
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.records.unrendered import Carried, Conditions, RecordCarry, RecordSpans, Sieve, Span

_LOST = 0.1  # share of the records that are missing
_SWITCHES, _SYSCALL_KINDS = (record.SWITCH_IN, record.SWITCH_OUT), (record.SYSCALL_ENTER, record.SYSCALL_EXIT)
_KINDS = (
    *(record.CALL_ENTER, record.CALL_RETURN) * 6,
    *_SWITCHES * 2,
    *_SYSCALL_KINDS * 2,
    *(record.MORE, record.TEXT, record.SERVED, record.EVENT, record.WAKEUP, record.MIGRATE),
    *(record.THREAD_NEW, record.THREAD_NAME, record.THREAD_IDS, record.THREAD_END, record.WINDOW, 31),
)


def some(chance: random.Random) -> bytes:
    """Records of any kind in any order, and calls in each other of which some are lost."""
    made, threads, functions = [], chance.randrange(1, 6), chance.randrange(1, len(PROBES))
    for ts_ns in range(0, chance.choice((0, 5, 200, 1000)) * 1000, 1000):
        kind = chance.choice(_KINDS)
        made.append(
            raw(
                kind,
                chance.randrange(functions),
                *(chance.choice((0, 0, 0, 0x10, 0x20, 0x7000)) for _ in range(2)),
                ts_ns=ts_ns,
                tid=chance.randrange(threads),
                cpu=chance.randrange(3),
            )
        )
        while chance.random() < 0.1:  # calls in a row, one in the other
            number, depth, tid = (
                chance.randrange(functions),
                chance.randrange(1, 100),
                chance.randrange(threads),
            )
            calls = [raw(record.CALL_ENTER, number, ts_ns=ts_ns + at, tid=tid) for at in range(depth)]
            calls += [
                raw(record.CALL_RETURN, number, ts_ns=ts_ns + depth + at, tid=tid) for at in range(depth)
            ]
            made += [call for call in calls if chance.random() > _LOST]
    return b"".join(made)


def cut(chunk: bytes, chance: random.Random) -> Iterator[bytes]:
    """The same records as chunks of any size."""
    at = 0
    while at < len(chunk):
        size_bytes = chance.randrange(1, 300) * RECORD_BYTES
        yield chunk[at : at + size_bytes]
        at += size_bytes


def carried(chunks: list[bytes]) -> Carried:
    carry = RecordCarry(PROBES)
    for chunk in chunks:
        carry.add(chunk)
    return carry.carried()


def spans(chunks: list[bytes]) -> list[Span]:
    wanted = Conditions(["cuInit > 5ns", "cuMemAlloc_v2 > 40ns", "syscall:? > 9us"])
    reader = RecordSpans(PROBES, wanted, {0: "a", 2: "b", 3: "not looked at"}, lambda _: True)
    found: list[Span] = []
    for now_ns, chunk in enumerate(chunks):
        found += reader.ended(chunk)
        found += sorted(reader.under_way(now_ns * 10_000))
    return found


def counts(chunks: list[bytes]) -> list[dict[str, int]]:
    renderer = RecordRenderer(PROBES, SYSCALLS["x86_64"], {})
    return [renderer.counts(chunk) for chunk in chunks]


@pytest.mark.parametrize("seed", range(60))
def test_both_cores_carry_find_and_count_the_same(seed: int) -> None:
    chance = random.Random(seed)
    chunks = list(cut(some(chance), chance))
    made = []
    for core in cores_here():
        with running(core):
            made.append((carried(chunks), spans(chunks), counts(chunks)))
    assert made.count(made[0]) == len(made)


def test_events_are_counted_by_their_layers(core: str) -> None:
    chunk = b"".join(some(random.Random(seed)) for seed in range(8))
    kinds = Counter(fields[4] for fields in RECORD.iter_unpack(chunk))
    (made,) = counts([chunk])
    assert made["scheduler"] == sum(kinds[kind] for kind in (*_SWITCHES, record.WAKEUP, record.MIGRATE))
    assert made["syscall"] == sum(kinds[kind] for kind in _SYSCALL_KINDS)
    assert sum(made.values()) - made["scheduler"] - made["syscall"] == sum(
        kinds[kind] for kind in (record.CALL_ENTER, record.CALL_RETURN, record.EVENT)
    )


def test_the_core_leaves_out_what_is_over() -> None:
    calls = raw(record.CALL_ENTER, "cuInit") + raw(record.CALL_RETURN, "cuInit")
    turns = raw(record.SWITCH_IN) + raw(record.SWITCH_OUT, 0, 1)
    with running("native"):
        sieve = Sieve(PROBES, {record.CALL_ENTER, record.CALL_RETURN, *_SWITCHES})
        last = raw(record.CALL_ENTER, "cuMemAlloc_v2", ts_ns=2000)
        needed = sieve.needed(1000 * (calls + turns) + last)
    assert len(needed) == len(turns) // 2 + len(last)
    assert needed.endswith(last)
