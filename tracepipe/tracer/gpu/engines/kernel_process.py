"""Keeps the state of a traced process whose GPU work CUPTI records: names, functions, GPUs, launches."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tracepipe.tracer.gpu.engines.launch_arguments import LaunchArguments
from tracepipe.tracer.gpu.engines.launches import Launches

_ALLOCATES: Final = re.compile(r"[Aa]lloc|Free")
_COPIES: Final = re.compile(r"(?:cu|cuda)Mem(?:cpy|set)")
_ALLOCATING_MAX: Final = 4096
_VERSION: Final = re.compile(r"_v\d{4,5}$")  # CUPTI appends it to a runtime function: cudaMalloc_v3020


class Function(NamedTuple):
    """A CUDA function; whether it launches kernels, copies or sets memory, allocates or frees it."""

    name: str = ""
    is_launch: bool = False
    copies: bool = False
    allocates: bool = False


def function_of(text: str) -> Function:
    """The function of a name in CUPTI, with what it does."""
    name = _VERSION.sub("", text)
    return Function(name, "Launch" in name, bool(_COPIES.match(name)), bool(_ALLOCATES.search(name)))


@dataclass(slots=True)
class Process:
    """The state of a traced process: names, functions, GPUs, launches."""

    number: int
    names: dict[int, str] = field(default_factory=dict)
    stall_reasons: dict[int, str] = field(default_factory=dict)
    functions: dict[tuple[int, int], Function] = field(default_factory=dict)
    allocating: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Correlation of a call that allocates or frees memory → its function and thread; the last calls only."""
    gpus: dict[int, int] = field(default_factory=dict)
    launches: Launches = field(default_factory=Launches)
    arguments: LaunchArguments = field(default_factory=LaunchArguments)
    now_ns: int = 0
    """The latest time of its records."""
    is_realtime: bool = False

    def add_allocation(self, correlation: int, name: str, tid: int) -> None:
        if len(self.allocating) >= _ALLOCATING_MAX:
            del self.allocating[next(iter(self.allocating))]
        self.allocating[correlation] = name, tid
