"""The engine `stalls`: only the stall reasons of a GPU's warps, by CUPTI's PC sampling.

`native/stalls.cpp` is loaded into the command; `--gpu kernels` has the same sampler in its own library.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.toolchain import NATIVE, Toolchain
from tracepipe.tracer.gpu.engines.kernels import KernelsEngine
from tracepipe.tracer.gpu.engines.stall_records import LAYER

__all__ = ["StallsEngine", "build_library"]


class StallsEngine(KernelsEngine):
    """Records the stall reasons of a command that runs with `environment()`."""

    name = "cupti pc sampling"
    layers = frozenset({LAYER})
    clocks: Sequence[str] = ()

    def enter(self, pids: Sequence[int]) -> None:
        """Raises CaptureUnavailable, as sampling begins when a program's context is created."""
        raise CaptureUnavailable(f"Process {pids[0]} is already running.", "Give a command after --.")


_LIBRARY: Final = "stalls"


def build_library(toolchain: Toolchain) -> Path:
    """The library that the command loads, built if it is not in the cache. Raises CaptureUnavailable."""
    return toolchain.build_host(_LIBRARY, [NATIVE / "stalls.cpp"], ["cupti"])
