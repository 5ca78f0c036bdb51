"""The channel between traced processes and the capture: what is committed arrives, the rest is counted."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
from pathlib import Path

import pytest

from tests.support.gpu_records import pack_record
from tracepipe.capture.gpu.engines import transport
from tracepipe.capture.gpu.engines.transport import Channel, records
from tracepipe.errors import CaptureUnavailable

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tracepipe/capture/gpu/native"


@pytest.fixture(scope="session")
def producer(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    program = tmp_path_factory.mktemp("native") / "producer"
    source = ROOT / "tests/gpu/producer.cpp"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{NATIVE}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    return str(program)


def _run(producer: str, channel: Channel, *arguments: str) -> None:
    subprocess.run([producer, *arguments], env={**os.environ, **channel.environment()}, check=True)


def _texts(chunk: bytes) -> list[bytes]:
    return [bytes(record.payload) for record in records(chunk)]


def test_what_four_threads_put_at_once_arrives_in_order_or_is_counted(producer: str, tmp_path: Path) -> None:
    channel = Channel.create(1 << 16, folder=tmp_path)
    process = subprocess.Popen([producer, "many", "20000"], env={**os.environ, **channel.environment()})
    last = dict.fromkeys(range(4), -1)
    arrived = 0
    is_over = False
    while not is_over:
        is_over = process.poll() is not None
        for record in records(channel.collect()):
            thread, number = struct.unpack_from("<II", record.payload)
            assert number > last[thread]
            assert bytes(record.payload[8:]) == bytes([ord("a") + thread]) * (number * 7 % 290)
            assert record.kind == 20
            assert record.pid == process.pid
            last[thread] = number
            arrived += 1
    assert process.returncode == 0
    assert arrived >= (1 << 16) // 336  # what the ring holds of the longest, however late the reader comes
    assert arrived + channel.dropped().get(20, 0) == 80_000
    channel.close()


def test_a_record_that_was_never_finished_ends_what_can_be_read_until_the_last_call(
    producer: str, tmp_path: Path
) -> None:
    channel = Channel.create(1 << 16, folder=tmp_path)
    _run(producer, channel, "torn")
    assert _texts(channel.collect()) == [b"before"]
    assert channel.collect() == b""
    assert _texts(channel.collect(is_final=True)) == [b"after"]
    assert channel.collect(is_final=True) == b""
    channel.close()


def test_what_a_killed_capture_left_can_be_read(producer: str, tmp_path: Path) -> None:
    left = tmp_path / "left"
    reader = os.fork()
    if reader == 0:
        channel = Channel.create(1 << 16, folder=tmp_path)
        channel.path.rename(left)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(reader, 0)
    subprocess.run([producer, "torn"], env={**os.environ, transport.CHANNEL_VARIABLE: str(left)}, check=True)
    channel = Channel(left)
    assert _texts(channel.collect(is_final=True)) == [b"before", b"after"]
    channel.close()
    assert not left.exists()


def test_a_full_ring_whose_reader_is_gone_does_not_hold_the_target_up(producer: str, tmp_path: Path) -> None:
    channel = Channel.create(1 << 16, folder=tmp_path, wait_us=60_000_000)
    channel.say_closed()
    _run(producer, channel, "many", "1000")
    assert channel.dropped()[20] > 0
    channel.close()


def test_a_file_that_is_no_channel_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(8192))
    with pytest.raises(CaptureUnavailable, match="no GPU channel"):
        Channel(other)
    with pytest.raises(CaptureUnavailable, match="cannot be opened"):
        Channel(tmp_path / "missing")


def test_packed_records_are_read_back() -> None:
    chunk = pack_record(3, 42, 43, 1000, b"abc") + pack_record(4, 42, 44, 2000, b"")
    assert [(r.kind, r.pid, r.tid, r.time_ns, bytes(r.payload)) for r in records(chunk)] == [
        (3, 42, 43, 1000, b"abc"),
        (4, 42, 44, 2000, b""),
    ]
