"""The engine `kernels`: GPU kernels, copies and memsets with the API calls that asked for them, by CUPTI.

The CUDA driver loads the library into the command (`native/kernels.cpp` says how it works); this side keeps
the channel. `kernel_lines` makes lines of what comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tracepipe.capture.gpu.build.toolchain import NATIVE, Toolchain
from tracepipe.capture.gpu.engines.call_choice import CALLS_VARIABLE, calls_text
from tracepipe.capture.gpu.engines.channel import CHANNEL_BYTES, Channel
from tracepipe.capture.gpu.engines.gpu_numbers import numbers_of
from tracepipe.capture.gpu.engines.kernel_lines import KernelsRenderer
from tracepipe.capture.gpu.engines.kernel_records import KIND_ANY, LAYERS
from tracepipe.capture.gpu.engines.transport import INJECTION_VARIABLE
from tracepipe.capture.records.loss import Loss

_REASONS: Final = {KIND_ANY: "CUPTI had no buffer"}


class KernelsEngine:
    """A command's GPU work while it runs with `environment()`; nothing has to be attached to it."""

    name = "cupti"
    layers = frozenset({"userspace", "memory", "transfer", "gpu_kernel"})
    clocks: Sequence[str] = ("realtime",)
    """What its times can be on beside CLOCK_MONOTONIC: an older CUPTI has its own."""

    def __init__(
        self,
        library: Path,
        *,
        calls: str = "all",
        ring_bytes: int = CHANNEL_BYTES,
        owner: tuple[int, int] | None = None,
        gpus: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`calls`: which API calls are recorded, as `calls_text` takes it. `owner` (user, group): who the
        command runs as. `gpus`: those that there are, as a header has them. Raises CaptureUnavailable.
        """
        self._calls = calls_text(calls)
        self._channel = Channel(ring_bytes, owner=owner)
        self._library = library
        self.gpus = gpus
        self._renderer = KernelsRenderer(numbers_of(gpus))

    def environment(self) -> dict[str, str]:
        """What the command's environment needs."""
        told = {INJECTION_VARIABLE: str(self._library), CALLS_VARIABLE: self._calls}
        return told | self._channel.environment()

    def collect(self, *, is_final: bool = False) -> bytes:
        """Whole records since the last call; never waits. `is_final`: the command has ended."""
        return self._channel.collect(is_final=is_final)

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        return self._channel.losses(LAYERS, _REASONS)

    def renderer(self) -> KernelsRenderer:
        """The decoder of what `collect` gives."""
        return self._renderer

    def stop(self) -> None:
        """Ask the processes to send what they have yet, and to record no more; `collect` gives it."""
        self._channel.stop()

    def is_over(self) -> bool:
        """Whether they have."""
        return self._channel.is_over()

    def close(self) -> None:
        """Give the memory back."""
        self._channel.close()


def build_library(toolchain: Toolchain) -> Path:
    """The library that the command loads, built if it has to be. Raises CaptureUnavailable."""
    return toolchain.build_host("kernels", [NATIVE / "kernels.cpp"], ["cupti"])
