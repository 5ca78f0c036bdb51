"""Programs of the CUDA runtime and of NCCL: every call that they counted is in the recording, once."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.standin import needs
from tracepipe.tracer import CaptureRequest, capture

pytestmark = [pytest.mark.ebpf, needs("bcc")]


class Calls:
    """Calls that were recorded by the start of their names, and what the program counted."""

    def __init__(self, path: Path, command: list[str], output: pytest.CaptureFixture[str], hook: str) -> None:
        with path.open("wb") as sink:
            request = CaptureRequest(command, layers=("userspace",), hooks=(hook,) if hook else ())
            capture(request, sink, notify=lambda message: None)
        self._printed = output.readouterr().out
        records = [json.loads(line) for line in path.read_text().splitlines()]
        self.begins = [r for r in records if r["type"] in ("userspace", "hook") and r["phase"] == "B"]
        self.ends = [r for r in records if r["type"] == "userspace" and r["phase"] == "E"]
        self._kinds = Counter(re.match("cuda|cu|nccl|", r["name"])[0] for r in self.begins)  # type: ignore[index]

    def recorded(self, kind: str) -> int:
        return self._kinds[kind]

    def printed(self, what: str) -> int:
        return sum(int(n) for n in re.findall(rf"^{what}: (\d+)$", self._printed, re.MULTILINE))


@pytest.mark.parametrize("options", [[], ["--per-thread"], ["--threads", "2", "--fork"]])
@pytest.mark.parametrize("program", ["vec_add_runtime", "vec_add_static"])
def test_runtime_calls_and_the_driver_calls_below_them(
    tmp_path: Path, standin: Path, capfd: pytest.CaptureFixture[str], program: str, options: list[str]
) -> None:
    calls = Calls(tmp_path / "run.jsonl", [str(standin / program), "-i", "2", *options], capfd, "")
    assert calls.recorded("cuda") == calls.printed("calls") > 0
    # Those that only cuGetProcAddress gives are among them.
    assert calls.printed("hidden driver calls") > 0
    assert calls.recorded("cu") == calls.printed("driver calls")
    launches = [r["args"] for r in calls.begins if re.fullmatch("cudaLaunchKernel(_ptsz)?", r["name"])]
    # Its name lies in a page that the program does not touch before it is registered.
    assert {arguments.get("kernel") for arguments in launches} == {"vectorAdd"}
    devices = [record["args"]["device"] for record in calls.ends if record["name"] == "cudaGetDevice"]
    assert set(devices) == {0}


def test_a_stripped_static_runtime_shows_in_the_driver_calls(
    tmp_path: Path, standin: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = Calls(tmp_path / "run.jsonl", [str(standin / "vec_add_stripped")], capfd, "")
    assert calls.recorded("cuda") == 0
    assert calls.recorded("cu") == calls.printed("driver calls") > 0


def test_a_hook_on_nccl(tmp_path: Path, standin: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hook = "uprobe:libnccl.so:ncclAllReduce(from: ptr, to: ptr, count: u64, datatype: i32)"
    command = [str(standin / "vec_add"), "-n", "1000", "-i", "3", "--nccl"]
    calls = Calls(tmp_path / "run.jsonl", command, capfd, hook)
    reduces = [begin for begin in calls.begins if begin["name"] == "ncclAllReduce"]
    assert [begin["args"]["count"] for begin in reduces] == [1000] * 3
    assert {begin["args"]["datatype"] for begin in reduces} == {7}  # ncclFloat32
    # The others are ncclCommInitAll and ncclCommDestroy, which were not asked for.
    assert calls.recorded("nccl") == 3 == calls.printed("nccl calls") - 2
    assert calls.recorded("cu") == calls.printed("calls")
