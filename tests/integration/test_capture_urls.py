"""Captures into object storage: two ranks of a job, and a capture that is refused or interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from tests.support.here import build_here
from tests.support.program import PYTHONPATH
from tests.support.s3_server import Bucket, s3_server
from tests.support.standin import needs
from tests.support.waiting import wait_until
from tracepipe.recording.convert import check

CAPTURE = [
    *(sys.executable, "-m", "tracepipe", "capture"),
    *("--method", "prebuilt", "--layers", "syscall", "--gpu", "off"),
]

pytestmark = [pytest.mark.ebpf, needs("prebuilt")]


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with s3_server("captured") as one:
        yield one


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Of a capture whose temporary files are in a folder."""
    return os.environ | {"PYTHONPATH": PYTHONPATH, "TMPDIR": str(folder)} | more


def test_the_ranks_of_a_job_become_a_dataset(bucket: Bucket, tmp_path: Path) -> None:
    for rank in range(2):
        of_rank = environment(tmp_path, RANK=str(rank), WORLD_SIZE="2")
        command = [*CAPTURE, "-o", bucket.url("runs/%h/%r.jsonl.zst"), "--", "true"]
        subprocess.run(command, check=True, capture_output=True, env=of_rank)
    assert list(tmp_path.iterdir()) == []
    build_here(bucket.url("runs/"), str(tmp_path / "ds"))
    ranks = pl.read_parquet(tmp_path / "ds/layer=ranks/**/*.parquet", hive_partitioning=True).sort("rank")
    assert ranks["rank"].to_list() == [0, 1]
    assert ranks["world_size"].to_list() == [2, 2]
    assert ranks["source"].str.starts_with(bucket.url("runs/")).all()


def test_an_object_that_exists_keeps_the_command_from_starting(bucket: Bucket, tmp_path: Path) -> None:
    url = bucket.put("there.jsonl", b"older")
    for option, code, started in (((), 1, False), (("--force",), 0, True)):
        began = tmp_path / "began"
        command = [*CAPTURE, *option, "-o", url, "--", "touch", str(began)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path))
        assert (done.returncode, began.exists()) == (code, started), done.stderr
    assert bucket.get("there.jsonl") != b"older"


def test_an_interrupted_capture_is_copied_too(bucket: Bucket, tmp_path: Path) -> None:
    began, url = tmp_path / "began", bucket.url("interrupted.jsonl")
    command = [*CAPTURE, "-o", url, "--", "sh", "-c", f"touch {began}; exec sleep 60"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment(tmp_path)) as capture:
        wait_until(lambda: capture.poll() is not None or began.exists())
        capture.send_signal(signal.SIGTERM)
        assert capture.wait() == 128 + signal.SIGTERM
    account = check(url, "", print)
    assert account.notes == []
    assert account.counts["syscall"] > 0
    assert list(tmp_path.iterdir()) == [began]


def test_a_recording_that_ends_first_is_copied_while_the_command_runs(bucket: Bucket, tmp_path: Path) -> None:
    url, go = bucket.url("early.jsonl"), tmp_path / "go"
    program = f"while [ ! -e {go} ]; do sleep 0.05; done"
    command = [*CAPTURE, "--duration", "200ms", "-o", url, "--", "sh", "-c", program]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment(tmp_path)) as capture:
        try:
            wait_until(lambda: capture.poll() is not None or bucket.keys("early") == ["early.jsonl"])
            assert capture.poll() is None
        finally:
            go.touch()
        assert capture.wait() == 0
    assert list(tmp_path.iterdir()) == [go]
