"""The engine `kernels`: GPU kernels, copies and memsets with the API calls that requested them, from CUPTI.

The CUDA driver loads the library into the command (`native/kernels.cpp` describes how it works); the capture
process has the channel. `kernel_lines` turns its records into lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.toolchain import NATIVE, Toolchain
from tracepipe.tracer.gpu.engines import stall_records
from tracepipe.tracer.gpu.engines.call_choice import CALLS_VARIABLE, calls_text
from tracepipe.tracer.gpu.engines.channel import CHANNEL_BYTES
from tracepipe.tracer.gpu.engines.channel_engine import ChannelEngine
from tracepipe.tracer.gpu.engines.gpu_numbers import numbers_of
from tracepipe.tracer.gpu.engines.kernel_lines import KernelsRenderer
from tracepipe.tracer.gpu.engines.kernel_records import KIND_ANY, LAYERS
from tracepipe.tracer.gpu.engines.transport import INJECTION_VARIABLE
from tracepipe.tracer.gpu.sampling_lock import SamplingLock

STALLS_VARIABLE: Final = "TRACEPIPE_GPU_STALLS"
"""The variable that is set if the library is to sample stall reasons."""
ENTRY: Final = "tracepipe_attach"
"""The library's entry for a running process."""
# Results of the entry, `Attached` in native/kernels.cpp.
_NOT_ATTACHED: Final = {
    1: ("another capture is recording its GPU's work", "End that one first."),
    2: ("it could not connect to this capture", "Run the capture as the user of the process, or as root."),
    3: ("another profiler (such as torch.profiler) uses CUPTI there", "End that one, or start it later."),
    4: ("CUPTI refused", "Start the program with tracepipe: capture --gpu kernels -- COMMAND."),
}
_REASONS: Final = {KIND_ANY: "CUPTI had no buffer"}


class KernelsEngine(ChannelEngine):
    """Records the GPU work of a command that runs with `environment()`; nothing has to be attached to it."""

    name = "cupti"
    layers = frozenset({"userspace", "memory", "transfer", "gpu_kernel"})
    clocks: Sequence[str] = ("realtime",)
    """Clocks other than CLOCK_MONOTONIC that its times can be on: an older CUPTI uses its own."""

    def __init__(
        self,
        library: Path,
        *,
        calls: str = "all",
        stacks: str = "python",
        ring_bytes: int = CHANNEL_BYTES,
        owner: tuple[int, int] | None = None,
        gpus: Sequence[Mapping[str, Any]] = (),
        stalls: bool = False,
    ) -> None:
        """`calls`: which API calls are recorded, as `calls_text` takes it. `owner` (user, group): whom the
        command runs as. `gpus`: those of the machine, in the form of a header. With `stalls`, stall reasons
        are sampled on all of them, and no other process may sample them. Raises CaptureUnavailable.
        """
        self._calls = calls_text(calls)
        lock = SamplingLock(gpu["uuid"] for gpu in gpus if "uuid" in gpu) if stalls else None
        layers = LAYERS | stall_records.LAYERS
        try:
            super().__init__(
                owner, ring_bytes=ring_bytes, stacks=stacks, lost_layers=layers, lost_why=_REASONS
            )
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        self._library, self._lock = library, lock
        if stalls:  # CUPTI gives its callbacks to only one client
            self.layers = self.layers | {stall_records.LAYER}
        else:
            self.sees = {"kernel": library, "profiler": library}
        self.gpus = gpus
        self._renderer = KernelsRenderer(numbers_of(gpus))

    def environment(self) -> dict[str, str]:
        """Variables for the command's environment."""
        own = {INJECTION_VARIABLE: str(self._library), CALLS_VARIABLE: self._calls}
        sampled = {STALLS_VARIABLE: "1"} if self._lock is not None else {}
        return own | sampled | super().environment()

    def enter(self, pids: Sequence[int]) -> None:
        """Load the library into running processes. Raises CaptureUnavailable, TracepipeError."""
        from tracepipe.tracer.gpu.attach.loader import enter

        settings = {CALLS_VARIABLE: self._calls} | super().environment()
        text = "\n".join(f"{name}={value}" for name, value in settings.items())
        for pid in pids:
            result = enter(pid, self._library, ENTRY, text, self._channel.accept)
            if result:
                why, hint = _NOT_ATTACHED.get(
                    result,
                    (f"answers {result}", "Check whether it has another version of tracepipe's library."),
                )
                raise CaptureUnavailable(f"Process {pid} is not recorded: {why}.", hint)

    def close(self) -> None:
        """Close the channel, and release the right to sample."""
        super().close()
        if self._lock is not None:
            self._lock.close()

    def renderer(self) -> KernelsRenderer:
        """The decoder of what `collect` returns."""
        return self._renderer


def build_library(toolchain: Toolchain) -> Path:
    """The library that the command loads, built if it is not in the cache. Raises CaptureUnavailable."""
    return toolchain.build_host("kernels", [NATIVE / "kernels.cpp"], ["cupti"])
