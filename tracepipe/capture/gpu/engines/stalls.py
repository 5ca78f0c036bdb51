"""The engine `stalls`: what the warps of a GPU wait for, and nothing else, by CUPTI's PC sampling.

`native/stalls.cpp` is loaded into the command; `--gpu kernels` has the same sampler in its own library.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tracepipe.capture.gpu.build.toolchain import NATIVE, Toolchain
from tracepipe.capture.gpu.engines.kernels import KernelsEngine
from tracepipe.capture.gpu.engines.stall_records import LAYER
from tracepipe.errors import CaptureUnavailable

__all__ = ["StallsEngine", "build_library"]


class StallsEngine(KernelsEngine):
    """A command's stall reasons while it runs with `environment()`."""

    name = "cupti pc sampling"
    layers = frozenset({LAYER})
    clocks: Sequence[str] = ()

    def enter(self, pids: Sequence[int]) -> None:
        """Raises CaptureUnavailable: sampling begins when a program's context is made."""
        raise CaptureUnavailable(f"Process {pids[0]} is already running.", "Give a command after --.")


_LIBRARY: Final = "stalls"


def build_library(toolchain: Toolchain) -> Path:
    """The library that the command loads, built if it has to be. Raises CaptureUnavailable."""
    return toolchain.build_host(_LIBRARY, [NATIVE / "stalls.cpp"], ["cupti"])
