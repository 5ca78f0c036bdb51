"""The variables of the programs that start the ranks of a job."""

from __future__ import annotations

from typing import Final

LAUNCHERS: Final = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpirun of Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MVAPICH2": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "mpirun of MPICH": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS"),
}
VARIABLES: Final = ("PMIX_RANK", "LOCAL_RANK", *(name for names in LAUNCHERS.values() for name in names))
