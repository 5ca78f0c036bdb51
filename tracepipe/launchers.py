"""Which rank of a job a process is, as the program that started the job says in its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Final

from tracepipe.errors import TracepipeError

RANK_MAX: Final = (1 << 20) - 1
"""The numbers of launches have the rank in their upper bits."""
# The variables with the rank and the number of ranks. A launcher may be started by another one, so those of
# the program that is nearest to the rank come first. LOCAL_RANK is the same on all hosts: it names no rank.
_VARIABLES: Final = (
    ("RANK", "WORLD_SIZE"),  # torchrun, and DeepSpeed and Accelerate like it
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun of Open MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH2
    ("PMI_RANK", "PMI_SIZE"),  # mpirun of MPICH and Intel MPI
    ("PMIX_RANK", ""),  # what has PMIx, which says the size to those who call it alone
    ("SLURM_PROCID", "SLURM_NTASKS"),  # srun
)
_LAUNCHERS: Final = frozenset(
    {
        "accelerate", "deepspeed", "horovodrun", "mpiexec", "mpiexec.hydra", "mpirun", "orterun", "prterun",
        "srun", "torchrun",
    }
)  # fmt: skip
_MODULES: Final = frozenset(
    {"accelerate.commands.launch", "torch.distributed.launch", "torch.distributed.run"}
)
IN_EACH_RANK: Final = (
    "Capture in each rank: srun tracepipe capture … -- python train.py, or "
    "torchrun … --no-python tracepipe capture … -- python train.py."
)


@dataclass(frozen=True, slots=True)
class Place:
    """A process among the ranks of its job. `world_size` is the number of ranks, if it is known."""

    rank: int
    world_size: int | None


def launcher_in(command: Sequence[str]) -> str:
    """The program that starts the ranks, if the command runs one; otherwise ""."""
    if not command:
        return ""
    name = PurePath(command[0]).name
    if name in _LAUNCHERS:
        return name
    return next((module for flag, module in pairwise(command) if flag == "-m" and module in _MODULES), "")


def place_of(command: Sequence[str], pids: Sequence[int]) -> Place:
    """The place of the command that this process runs, or of the process `pids`, in its job. Raises
    TracepipeError where that is not known.
    """
    if launcher := launcher_in(command):
        raise TracepipeError(f"The rank is not known: {launcher} starts the ranks.", IN_EACH_RANK)
    if not command and len(pids) != 1:
        raise TracepipeError("The rank is not known: these are not the processes of one.", IN_EACH_RANK)
    environment = os.environ if command or pids[0] == os.getpid() else _environment_of(pids[0])
    name = next((name for name, _ in _VARIABLES if environment.get(name)), "")
    if not name:
        names = ", ".join(name for name, _ in _VARIABLES)
        hint = "Start it with torchrun, mpirun or srun. With sudo, use sudo -E or sudo RANK=$RANK."
        raise TracepipeError(f"The rank is not known: none of {names} is set.", hint)
    rank = _number(environment[name])
    if rank is None or rank > RANK_MAX:
        raise TracepipeError(
            f"{name} is {environment[name]!r}, which is not a rank.", f"Set {name} to a number, or unset it."
        )
    return Place(rank, _world_size(environment, rank))


def _world_size(environment: Mapping[str, str], rank: int) -> int | None:
    """The number of ranks that a launcher states together with this rank."""
    sizes = (
        _number(environment.get(size, "")) for name, size in _VARIABLES if environment.get(name) == str(rank)
    )
    return next((size for size in sizes if size is not None and rank < size <= RANK_MAX + 1), None)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _environment_of(pid: int) -> dict[str, str]:
    """The variables that a process began with. Raises TracepipeError."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except FileNotFoundError:
        raise TracepipeError(f"No such process: {pid}", "Look for it with ps or pgrep.") from None
    except OSError as error:
        raise TracepipeError(f"The rank is not known: process {pid}: {error.strerror}.") from None
    return dict(variable.split("=", 1) for variable in text.split("\0") if "=" in variable)
