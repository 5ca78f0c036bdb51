"""A GPU's hardware has one sampler: the second is refused, and reads who the first is."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

import pytest

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.sampling_lock import SamplingLock

_HOLDS = """
import sys
from tracepipe.tracer.gpu.sampling_lock import SamplingLock
lock = SamplingLock(sys.argv[1:])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def uuid() -> str:
    return f"GPU-{secrets.token_hex(16)}"


def test_the_second_sampler_of_a_gpu_is_refused_and_reads_who_holds_it(uuid: str) -> None:
    with SamplingLock([uuid]):
        for _ in range(8):  # however often it is asked
            with pytest.raises(
                CaptureUnavailable, match=rf"{uuid.lower()} .* by process {os.getpid()} \(.+\)"
            ):
                SamplingLock([uuid.upper()])
    SamplingLock([uuid]).close()


def test_other_gpus_are_free(uuid: str) -> None:
    with SamplingLock([uuid]), SamplingLock([f"{uuid}-other"]):
        pass


def test_several_gpus_are_sampled_together_or_not_at_all(uuid: str) -> None:
    others = [f"{uuid}-{number}" for number in (1, 2, 3)]
    with SamplingLock([others[1]]):
        with pytest.raises(CaptureUnavailable, match="-2 is being sampled"):
            SamplingLock(others)
        SamplingLock([others[0], others[2]]).close()


def test_a_killed_process_releases_the_lock(uuid: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS, uuid], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(CaptureUnavailable, match=f"process {holder.pid} "):
            SamplingLock([uuid])
        holder.kill()
        holder.wait()
        SamplingLock([uuid]).close()


def test_a_command_does_not_inherit_it(uuid: str) -> None:
    lock = SamplingLock([uuid])
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):
        lock.close()
        SamplingLock([uuid]).close()
