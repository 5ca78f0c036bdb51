"""What is known of a traced process whose GPU work CUPTI records: names, functions, GPUs, launches."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tracepipe.capture.gpu.engines.launch_arguments import LaunchArguments
from tracepipe.capture.gpu.engines.launches import Launches

_ALLOCATES: Final = re.compile(r"[Aa]lloc|Free")
_COPIES: Final = re.compile(r"(?:cu|cuda)Mem(?:cpy|set)")
_ALLOCATING_MAX: Final = 4096
_VERSION: Final = re.compile(r"_v\d{4,5}$")  # CUPTI's own ending of a runtime function: cudaMalloc_v3020


class Function(NamedTuple):
    """A function of CUDA's; whether it launches kernels, copies or sets memory, takes it or gives it back."""

    name: str = ""
    is_launch: bool = False
    copies: bool = False
    allocates: bool = False


def function_of(text: str) -> Function:
    """What a function does, by its name as CUPTI has it."""
    name = _VERSION.sub("", text)
    return Function(name, "Launch" in name, bool(_COPIES.match(name)), bool(_ALLOCATES.search(name)))


@dataclass(slots=True)
class Process:
    """What is known of a traced process: names, functions, GPUs, launches."""

    number: int
    names: dict[int, str] = field(default_factory=dict)
    stall_reasons: dict[int, str] = field(default_factory=dict)
    functions: dict[tuple[int, int], Function] = field(default_factory=dict)
    allocating: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Correlation of a call that takes or gives back memory → its function and thread: the last ones."""
    gpus: dict[int, int] = field(default_factory=dict)
    launches: Launches = field(default_factory=Launches)
    arguments: LaunchArguments = field(default_factory=LaunchArguments)
    now_ns: int = 0
    """Until when its records have come."""
    is_realtime: bool = False

    def meet_allocation(self, correlation: int, name: str, tid: int) -> None:
        if len(self.allocating) >= _ALLOCATING_MAX:
            del self.allocating[next(iter(self.allocating))]
        self.allocating[correlation] = name, tid
