"""Which rank of a job a process is, by the variables that launchers set."""

from __future__ import annotations

import os
import subprocess
from subprocess import PIPE

import pytest

from tests.support.launched import LAUNCHERS, VARIABLES
from tracepipe.errors import TracepipeError
from tracepipe.event.checks import first_fault
from tracepipe.launchers import RANK_MAX, Place, launcher_in, place_of
from tracepipe.tracer.frame import header_of, instant
from tracepipe.tracer.request import CaptureRequest

COMMAND = ["python", "train.py"]


@pytest.fixture(autouse=True)
def set_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_gives_rank_and_size(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, size = LAUNCHERS[launcher]
    monkeypatch.setenv(rank, "17")
    assert place_of(COMMAND, ()) == Place(17, None)
    monkeypatch.setenv(size, "32")
    assert place_of(COMMAND, ()) == Place(17, 32)


def test_the_launcher_that_is_nearest_to_the_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun, which srun started on each of two machines."""
    for name, value in {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "13", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    assert place_of(COMMAND, ()) == Place(13, 16)


def test_the_number_of_ranks_comes_from_the_launcher_that_gives_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"PMIX_RANK": "3", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert place_of(COMMAND, ()) == Place(3, 4)
    monkeypatch.setenv("SLURM_PROCID", "0")  # of the daemon that started the process
    assert place_of(COMMAND, ()) == Place(3, None)


@pytest.mark.parametrize("size", ["3", "0", "-4", "four", str(RANK_MAX + 2), "9" * 30])
def test_an_impossible_size_is_not_known(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", size)
    assert place_of(COMMAND, ()) == Place(3, None)


@pytest.mark.parametrize("rank", ["../1", "-1", "1.0", "٣", str(RANK_MAX + 1), "9" * 5000])
def test_a_rank_that_is_not_a_number_is_refused(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(TracepipeError, match=r"^RANK is '.*', which is not a rank\.$"):
        place_of(COMMAND, ())


def test_the_rank_on_one_machine_is_not_one_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(TracepipeError, match=r"not known: none of RANK, .*SLURM_PROCID is set\."):
        place_of(COMMAND, ())


def test_a_running_process_has_the_rank_of_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    own = {"RANK": "5", "WORLD_SIZE": "6"}
    with subprocess.Popen(["cat"], stdin=PIPE, stdout=PIPE, env=own) as running:
        assert running.stdin is not None and running.stdout is not None
        # A process has no environment for a moment while it becomes another program.
        running.stdin.write(b"x")
        running.stdin.flush()
        assert running.stdout.read(1) == b"x"
        assert place_of([], (running.pid,)) == Place(5, 6)
        running.communicate(b"")
    with pytest.raises(TracepipeError, match=f"^No such process: {running.pid}$"):
        place_of([], (running.pid,))
    assert place_of([], (os.getpid(),)) == Place(1, None)


@pytest.mark.parametrize("pids", [(), (1, 2)])
def test_several_processes_have_no_rank(pids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TracepipeError, match="The rank is not known"):
        place_of([], pids)


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("/opt/bin/torchrun --nproc-per-node 8 train.py", "torchrun"),
        ("python3 -u -m torch.distributed.run train.py", "torch.distributed.run"),
        ("mpirun -n 4 python train.py", "mpirun"),
        ("python train.py --launcher torchrun", ""),
        ("python -m train", ""),
        ("", ""),
    ],
)
def test_a_launcher_has_all_ranks_and_none(
    command: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launcher_in(command.split()) == launcher
    if launcher:
        monkeypatch.setenv("SLURM_PROCID", "1")  # the machine's number, not a rank
        with pytest.raises(TracepipeError, match=f"not known: {launcher} starts the ranks") as refused:
            place_of(command.split(), ())
        assert "--no-python tracepipe capture" in refused.value.hint


@pytest.mark.parametrize(
    ("set_to", "stated"),
    [
        ({}, {}),
        ({"SLURM_PROCID": "3"}, {"rank": 3}),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, {"rank": 3, "world_size": 4}),
        ({"SLURM_PROCID": "three"}, {}),
    ],
)
def test_the_header_states_it(
    set_to: dict[str, str], stated: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    header = header_of(CaptureRequest(COMMAND), "bcc 1", (), {}, None, instant())
    assert {key: header[key] for key in ("rank", "world_size") if key in header} == stated
    assert first_fault(header) is None
