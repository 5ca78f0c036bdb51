"""The options of the `warps` engine, checked before anything runs: which warps, with how much memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tracepipe.errors import TracepipeError
from tracepipe.tracer.gpu.engines.call_choice import CALLS_VARIABLE, calls_text

LAST: Final = (1 << 63) - 1
"""The end of a range without an end: no grid has so many blocks, and it fits into C++'s integer."""
MEMORY_LEAST_BYTES: Final = 1 << 20
_COLON: Final = re.compile(r"(?<![:?\[]):(?![:\]])")
_RANGE: Final = re.compile(r"([0-9]+)(?:(-)([0-9]*))?")


@dataclass(frozen=True, slots=True)
class WarpOptions:
    """Which warps are recorded.

    `kernels` is a regular expression (ECMAScript's), searched in demangled names with their parameters;
    `launches` counts those that fit, from 1: `10`, `10-20`, `10-`. `blocks` are linear indices in the grid,
    from 0, in the same form. `memory_bytes` is the memory on each GPU for records that have not been read;
    None: the library decides. After `budget_warps` warps no further launch is recorded; None: all are.
    `launches_per_kernel`: only the first launches of each kernel are recorded; 0 or None: all. `calls`: which
    API calls are recorded. `stacks`: of STACKS. `thread_exits`: a line for each thread's exit is written,
    after its warp's record. `marks` is `KERNEL:FUNCTION`, two patterns: such kernels are recorded, with their
    calls of such functions.
    """

    kernels: str = ""
    launches: str = ""
    blocks: str = ""
    memory_bytes: int | None = None
    budget_warps: int | None = None
    launches_per_kernel: int | None = None
    calls: str = "all"
    stacks: str = "python"
    thread_exits: bool = False
    marks: str = ""

    def check(self) -> None:
        """Raise TracepipeError for what the library could not use."""
        kernels, called = self.marked()
        if self.kernels and kernels:
            raise TracepipeError(
                f"--kernel {self.kernels!r} and --warp-marks {self.marks!r} both name kernels.",
                f"Name them once: --warp-marks ':{called}' uses those of --kernel.",
            )
        _check_pattern(self.kernels, "--kernel", "attn.*fwd")
        for pattern in (kernels, called):
            _check_pattern(pattern, "--warp-marks", "attn.*fwd:softmax")
        if self.launches:
            read_range(self.launches, "--launches", "launches", 1)
        if self.blocks:
            read_range(self.blocks, "--blocks", "blocks", 0)
        if self.memory_bytes is not None and self.memory_bytes < MEMORY_LEAST_BYTES:
            raise TracepipeError(
                f"--gpu-memory of {self.memory_bytes} bytes has no room for a launch's records.",
                "Give at least 1M, or leave it out: the size is then chosen for the GPU.",
            )
        if self.budget_warps is not None and self.budget_warps < 1:
            raise TracepipeError(f"--gpu-warps {self.budget_warps} leaves no warp.", "Give 1 or more.")
        if (self.launches_per_kernel or 0) < 0:
            raise TracepipeError(
                f"--launches-per-kernel {self.launches_per_kernel} leaves no launch.",
                "Give 1 or more, or 0 for all.",
            )
        calls_text(self.calls)

    def marked(self) -> tuple[str, str]:
        """The patterns of kernels and of functions in `marks`, "" for none. Raises TracepipeError."""
        if not self.marks:
            return "", ""
        kernels, colon, called = _divided(self.marks)
        if not colon or not called:
            raise TracepipeError(
                f"--warp-marks {self.marks!r} names no device function.",
                "Give two regular expressions, KERNEL:FUNCTION: 'attn.*fwd:softmax', or only ':softmax'.",
            )
        return kernels, called

    def selected(self) -> str:
        """The pattern of the kernels that are recorded, from either option; "" for all."""
        return self.kernels or self.marked()[0]

    def environment(self) -> dict[str, str]:
        """The variables that the library reads."""
        first, last = self._blocks()
        asked = {
            "TRACEPIPE_GPU_KERNELS": self.selected(),
            "TRACEPIPE_GPU_CALLED": self.marked()[1],
            "TRACEPIPE_GPU_LAUNCHES": self.launches,
            "TRACEPIPE_GPU_BLOCKS": f"{first}-{last}" if self.blocks else "",
            "TRACEPIPE_GPU_MEMORY": str(self.memory_bytes or ""),
            "TRACEPIPE_GPU_BUDGET": str(self.budget_warps or ""),
            "TRACEPIPE_GPU_PER_KERNEL": str(self.launches_per_kernel or ""),
            CALLS_VARIABLE: calls_text(self.calls),
        }
        return {name: value for name, value in asked.items() if value}

    def defines(self) -> dict[str, int]:
        """The macros with which the device code is compiled."""
        first, last = self._blocks()
        return {"TRACEPIPE_FIRST_BLOCK": first, "TRACEPIPE_LAST_BLOCK": last} if self.blocks else {}

    def _blocks(self) -> tuple[int, int]:
        return read_range(self.blocks, "--blocks", "blocks", 0) if self.blocks else (0, LAST)


def _divided(marks: str) -> tuple[str, str, str]:
    """Split as `str.partition` at the first colon that is not part of `::`, `(?:` or `[[:`."""
    at = _COLON.search(marks)
    return (marks[: at.start()], ":", marks[at.end() :]) if at else (marks, "", "")


def _check_pattern(pattern: str, option: str, example: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise TracepipeError(
            f"{option} {pattern!r} is not a regular expression: {error}.", f"Example: '{example}'."
        ) from None


def read_range(text: str, option: str, what: str, least: int) -> tuple[int, int]:
    """First and last, both included, of `10`, `10-20` or `10-`, at least `least`. Raises TracepipeError."""
    match = _RANGE.fullmatch(text)
    if match:
        first = int(match[1])
        last = int(match[3]) if match[3] else LAST if match[2] else first
        if least <= first <= last <= LAST:
            return first, last
    raise TracepipeError(
        f"{option} {text!r} is not a range of {what}.",
        f"Count from {least}, both ends included: {least + 9}, {least + 9}-{least + 19} or {least + 9}-.",
    )
