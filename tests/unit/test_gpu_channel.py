"""The channel between traced processes and the capture: what is committed arrives, the rest is counted."""

from __future__ import annotations

import errno
import mmap
import os
import select
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.support.compiled import compiled
from tests.support.gpu_channel import collected
from tracepipe.tracer.gpu.engines import channel as channels
from tracepipe.tracer.gpu.engines.channel import (
    FULL,
    OVERWRITTEN,
    RECORD,
    TORN,
    Channel,
    records,
    whole_bytes,
)

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tracepipe/tracer/gpu/native"
PRODUCED_AT, CONSUMED_AT, DROPPED_AT, RING_AT = 64, 128, 192, 4096
KEPT_AT, UNSENT_AT, KEPT_BYTES = 1024, 3072, 1 << 20
RING = 1 << 16
BUSY, COMMITTED = 1, 2
U64, UNSENT = struct.Struct("<Q"), struct.Struct("<IIqq")


@pytest.fixture(scope="session")
def producer(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    program = tmp_path_factory.mktemp("native") / "producer"
    source = ROOT / "tests/gpu/producer.cpp"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    folders = [f"-I{NATIVE}", f"-I{ROOT / 'tracepipe/marks/include'}"]
    return str(compiled([compiler, *flags, *folders, str(source)], program))


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = Channel(RING)
    yield made
    made.close()


class Process:
    """A connected process that has the channel's memory, and writes into it what it likes."""

    def __init__(self, channel: Channel) -> None:
        (name,) = channel.environment().values()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(f"\0{name}")
        channel.accept()
        _, (self.memory, *_), _, _ = socket.recv_fds(self.socket, 1, 1)
        self.map = mmap.mmap(self.memory, 0)
        _, self.key, self.ring_bytes = struct.unpack_from("<3Q", self.map)

    def set(self, at: int, value: int) -> None:
        U64.pack_into(self.map, at, value)

    def put(self, position: int, payload: bytes, *, length: int | None = None, state: int = COMMITTED) -> int:
        """A record as the library would write it, or with another length; the position after it."""
        tag = (position | state) ^ self.key
        claimed = len(payload) if length is None else length
        record = RECORD.pack(tag & (1 << 64) - 1, claimed, 20, 42, 43, 1000) + payload
        at = RING_AT + position % self.ring_bytes
        self.map[at : at + len(record)] = record
        after = position + whole_bytes(len(payload))
        self.set(PRODUCED_AT, after)
        return after

    def close(self) -> None:
        self.map.close()
        os.close(self.memory)
        self.socket.close()


@pytest.fixture
def process(channel: Channel) -> Iterator[Process]:
    made = Process(channel)
    yield made
    made.close()


def payloads(chunk: bytes) -> list[bytes]:
    return [bytes(record.payload) for record in records(chunk)]


def losses(channel: Channel) -> dict[str, int]:
    return {loss.reason: loss.count for loss in channel.losses({})}


def start(producer: str, channel: Channel, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    settings = {**os.environ, **channel.environment()}
    return subprocess.Popen([producer, *arguments], env=settings, stdin=pipe, stdout=pipe, text=True)


def wait_for_line(channel: Channel, stream: IO[str] | None, wanted: str) -> list[bytes]:
    """Collect until the program says it; it says one line at a time."""
    assert stream is not None
    chunks = list[bytes]()
    while not select.select([stream], [], [], 0.001)[0]:
        chunks.append(channel.collect())
    assert stream.readline() == f"{wanted}\n"
    chunks.append(channel.collect())
    return payloads(b"".join(chunks))


# What arrives


@pytest.mark.slow
def test_what_four_threads_put_at_once_arrives_in_order_or_is_counted(
    producer: str, channel: Channel
) -> None:
    chunk, _ = collected(channel, [producer, "many", "20000"])
    last = dict.fromkeys(range(4), -1)
    arrived = 0
    for record in records(chunk):
        thread, number = struct.unpack_from("<II", record.payload)
        assert number > last[thread]
        assert bytes(record.payload[8:]) == bytes([ord("a") + thread]) * (number * 7 % 290)
        assert record.kind == 20
        last[thread] = number
        arrived += 1
    assert arrived >= RING // 336  # what the ring holds of the longest, however late the reader comes
    assert arrived + losses(channel).get(FULL, 0) == 80_000


def test_a_record_that_was_never_finished_is_passed_over_by_the_last_call_and_counted(
    producer: str, channel: Channel
) -> None:
    with start(producer, channel, "torn") as process:
        while process.poll() is None:
            channel.accept()
    assert payloads(channel.collect()) == [b"before"]
    assert channel.collect() == b""
    assert losses(channel) == {}
    assert payloads(channel.collect(is_final=True)) == [b"after"]
    assert losses(channel) == {TORN: 1}
    assert channel.collect(is_final=True) == b""


@pytest.mark.parametrize("cut", [16, 32, 64])
@pytest.mark.parametrize("torn", [False, True])
def test_a_record_over_the_middle_of_a_full_ring_is_collected_at_the_end(
    channel: Channel, process: Process, cut: int, torn: bool
) -> None:
    half, at = RING // 2, 0
    while half - cut - at > RING // 8:
        at = process.put(at, b"x" * 1000)
    at = process.put(at, b"x" * (half - cut - at - RECORD.size), state=BUSY if torn else COMMITTED)
    assert at == half - cut
    for _ in range(3):
        at = process.put(at, b"y" * 100)
    assert payloads(channel.collect(is_final=True))[-3:] == [b"y" * 100] * 3
    assert losses(channel) == ({TORN: 1} if torn else {})


# Its end


def test_a_process_that_is_asked_sends_its_last_record_and_lets_go(producer: str, channel: Channel) -> None:
    with start(producer, channel, "until_over") as process:
        wait_for_line(channel, process.stdout, "begun")
        assert not channel.is_over()
        assert channel.processes() == {process.pid}
        channel.stop()
        assert wait_for_line(channel, process.stdout, "over")[-1] == b"last"
        assert channel.is_over() and not channel.processes()
        assert process.poll() is None, "the program goes on"
        process.communicate()
    assert process.returncode == 0


def test_a_process_learns_that_the_capture_was_killed(producer: str) -> None:
    read, write = os.pipe()
    if (reader := os.fork()) == 0:
        channel = Channel(RING)
        os.write(write, "".join(channel.environment().values()).encode())
        while True:
            channel.accept()
    name = os.read(read, 200).decode()
    pipe = subprocess.PIPE
    settings = {**os.environ, channels.CHANNEL_VARIABLE: name}
    with subprocess.Popen(
        [producer, "until_over"], env=settings, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.kill(reader, 9)
        assert process.stdout.readline() == "over\n"
        process.communicate()
    os.waitpid(reader, 0)
    assert process.returncode == 0
    os.close(read)
    os.close(write)


def test_a_forked_child_does_not_stand_for_its_dead_parent(producer: str, channel: Channel) -> None:
    with start(producer, channel, "fork") as process:
        wait_for_line(channel, process.stdout, "alone")
        process.wait()
        assert channel.is_over()
        assert process.stdin is not None
        process.stdin.close()


def test_nobody_is_let_in_after_the_end(producer: str, channel: Channel) -> None:
    channel.stop()
    settings = {**os.environ, **channel.environment()}
    done = subprocess.run([producer, "many", "1"], env=settings)
    assert done.returncode == 3, "no channel: it records nothing"
    assert channel.is_over()


def test_a_full_ring_without_a_reader_does_not_delay_the_target(producer: str) -> None:
    channel = Channel(RING, wait_us=600_000_000)
    with start(producer, channel, "many", "1000") as process:
        while channel.is_over():
            channel.accept()
        channel.close()
        assert process.wait() == 0


# Who may write


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_gets_no_memory(channel: Channel) -> None:
    (name,) = channel.environment().values()
    if (child := os.fork()) == 0:
        os.setuid(12345)
        other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        other.connect(f"\0{name}")
        os._exit(1 if other.recv(1) else 0)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        channel.accept()
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert channel.is_over()


def test_its_size_cannot_be_changed(process: Process) -> None:
    """Reading beyond the end of a file that was cut would be a signal 7."""
    for size_bytes in (0, 4096, 1 << 30):
        with pytest.raises(PermissionError) as refusal:
            os.truncate(process.memory, size_bytes)
        assert refusal.value.errno == errno.EPERM


# What a process may have written


@pytest.mark.parametrize("produced", [1 << 63, (1 << 64) - 1, RING + 16])
def test_an_impossible_counter_ends_the_reading_and_is_counted(
    channel: Channel, process: Process, produced: int
) -> None:
    process.put(0, b"record")
    process.set(PRODUCED_AT, produced)
    assert channel.collect() == b""
    assert losses(channel) == {OVERWRITTEN: 1}
    process.set(PRODUCED_AT, 48)
    assert channel.collect(is_final=True) == b"", "what is repaired is not believed"
    assert process.socket.recv(1) == b"", "it is asked to let go"


def test_a_counter_that_goes_back_is_seen(channel: Channel, process: Process) -> None:
    process.put(0, b"record")
    assert payloads(channel.collect()) == [b"record"]
    process.set(PRODUCED_AT, 0)
    assert channel.collect() == b""
    assert losses(channel) == {OVERWRITTEN: 1}


def test_the_process_cannot_change_how_far_the_reader_has_read(channel: Channel, process: Process) -> None:
    after = process.put(0, b"first")
    channel.collect()
    process.set(CONSUMED_AT, 1 << 60)
    process.put(after, b"second")
    assert payloads(channel.collect()) == [b"second"]


def test_a_record_that_is_committed_while_it_is_copied_is_whole(
    channel: Channel, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of many bytes may take the last ones first."""
    copied = channel._bytes
    process.put(0, bytes(64), state=BUSY)

    def ends_first(start: int, size: int) -> bytes:
        end = copied(start, size)[RECORD.size :]
        process.put(0, b"x" * 64)
        return copied(start, size)[: RECORD.size] + end

    monkeypatch.setattr(channel, "_bytes", ends_first)
    found = payloads(channel.collect())
    monkeypatch.setattr(channel, "_bytes", copied)
    assert found + payloads(channel.collect()) == [b"x" * 64]


@pytest.mark.parametrize("dropped", [(1 << 64) - 1, (1 << 41) + 1, 4])
def test_an_impossible_count_of_drops_is_not_a_loss(channel: Channel, process: Process, dropped: int) -> None:
    process.set(DROPPED_AT + 8 * 20, 5)
    assert losses(channel) == {FULL: 5}
    process.set(DROPPED_AT + 8 * 20, dropped)
    assert losses(channel) == {OVERWRITTEN: 1}
    assert losses(channel) == {}


def test_what_a_process_left_is_read_once_whatever_it_says_of_it(channel: Channel, process: Process) -> None:
    for number, (sent, content) in enumerate([(0, b"left"), (2, b"sent"), ((1 << 64) - 1, b"x"), (0, b"")]):
        process.map[KEPT_AT + 16 * number : KEPT_AT + 16 * (number + 1)] = struct.pack("<IIQ", 42, 1, sent)
        at = RING_AT + process.ring_bytes + number * KEPT_BYTES
        process.map[at : at + len(content)] = content
    for number, (launches, warps) in enumerate([(3, 5), (-1, 0), (1 << 62, -(1 << 63))]):
        UNSENT.pack_into(process.map, UNSENT_AT + 32 * number, 42, 9, launches, warps)
    found = payloads(channel.collect(is_final=True))
    assert [left.rstrip(b"\0") for left in found] == [b"left", b"nt", b"", b""]
    counted = losses(channel)
    unread = {f"process 42 ended before {n} were read from the GPU": n for n in (3, 5)}
    assert len(counted) == 2
    assert unread.items() <= counted.items()
    assert (channel.collect(is_final=True), losses(channel)) == (b"", {})


@pytest.mark.parametrize("length", [0, 5, 1000, RING // 4, RING // 4 + 1, 1 << 31, (1 << 32) - 1])
@pytest.mark.parametrize("state", [0, BUSY, COMMITTED, 3])
def test_a_forged_length_takes_no_more_than_the_ring(
    channel: Channel, process: Process, length: int, state: int
) -> None:
    after = process.put(0, b"first")
    after = process.put(after, b"forged", length=length, state=state)
    process.put(after, b"last")
    found = payloads(channel.collect()) + payloads(channel.collect(is_final=True))
    assert found[0] == b"first"
    assert sum(map(len, found)) <= RING
    assert channel.collect(is_final=True) == b""


def test_a_ring_of_nothing_is_passed_over_at_the_end(channel: Channel, process: Process) -> None:
    process.map[RING_AT : RING_AT + RING] = os.urandom(RING)
    process.set(PRODUCED_AT, RING)
    assert channel.collect() == b""
    assert channel.collect(is_final=True) == b""
    assert losses(channel) == {TORN: 2}, "one in each half"


def test_a_process_that_keeps_filling_the_ring_does_not_hold_the_reader(
    channel: Channel, process: Process
) -> None:
    position = 0
    while position < RING:
        position = process.put(position, b"")
    assert len(payloads(channel.collect())) == RING // 64
    assert len(payloads(channel.collect())) == RING // 64
    assert channel.collect() == b""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_producer_writes_nowhere_else_whatever_its_header_says(
    producer: str, channel: Channel, seed: int
) -> None:
    """A program with a bad pointer: it loses its records, and goes on."""
    collected(channel, [producer, "forged", str(seed)])
    assert OVERWRITTEN in losses(channel)
