"""The parts of a figure: panels, whose titles state what they show, and the scope that they are
drawn from.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tracepipe.errors import TracepipeError
from tracepipe.present.writing.rendering import shown
from tracepipe.store.run import Run
from tracepipe.units import duration_ns, duration_text

GPUS_MAX = 16
_NAME_LETTERS = 60


@dataclass(slots=True)
class Panel:
    """One picture. `title` states what it shows, `how` explains how it was computed.

    `draw` draws into a matplotlib (sub)figure that is `height_in` inches high, without a title. It is None
    where there is nothing to draw; the title then states why.
    """

    title: str
    how: str = ""
    height_in: float = 0.0
    draw: Callable[[Any], None] | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """What is drawn: a run, a window of it on the trace clock, and the kernels whose names match `kernel`.

    `is_cut`: the window was given by options, and is not the whole run.
    """

    run: Run
    start_ns: int
    end_ns: int
    kernel: str = ""
    is_cut: bool = False

    def place(self) -> str:
        """The window as a phrase; empty for the whole run."""
        if not self.is_cut:
            return ""
        base_ns = self.run.facts.start_ns
        return f" from {duration_text(self.start_ns - base_ns)} to {duration_text(self.end_ns - base_ns)}"


def scope_of(run: Run, start: str, end: str, kernel: str) -> Scope:
    """Return the scope of options: times after the start of the run, and a regular expression; "" means all.

    Raises TracepipeError.
    """
    base_ns, last_ns = run.facts.start_ns, run.facts.end_ns
    start_ns = base_ns + duration_ns(start) if start else base_ns
    end_ns = base_ns + duration_ns(end) if end else last_ns
    if (start or end) and start_ns >= end_ns:
        raise empty_stretch(start_ns - base_ns, end_ns - base_ns, last_ns - base_ns)
    try:
        re.compile(kernel)
    except re.error as e:
        raise TracepipeError(
            f"{kernel!r} is not a regular expression: {e}.", "Try a part of the name."
        ) from e
    return Scope(run, start_ns, max(end_ns, start_ns + 1), kernel, bool(start or end))


def empty_stretch(start_ns: int, end_ns: int, length_ns: int) -> TracepipeError:
    """The error for a stretch of time with nothing in it, of a run of this length."""
    return TracepipeError(
        f"The stretch from {duration_text(start_ns)} to {duration_text(end_ns)} of the run is empty.",
        f"The run lasts {duration_text(length_ns)}; a number without a unit is in seconds.",
    )


def gpu_name(run: Run, gpu: int) -> str:
    """A GPU's number, with its name where that was recorded."""
    return f"GPU {gpu} {short(str(_about_gpu(run, gpu).get('name', '')))}".rstrip()


def gpus_of(counts: dict[int, int]) -> tuple[list[int], list[Panel]]:
    """The GPUs that are drawn, those with the highest counts, and a panel that states that others are not."""
    most = sorted(counts, key=lambda gpu: (-counts[gpu], gpu))
    more = len(most) - GPUS_MAX
    left_out = [Panel(f"{more} more GPUs, with less work, are not drawn")] if more > 0 else []
    return sorted(most[:GPUS_MAX]), left_out


def sm_count(run: Run, gpu: int) -> int | None:
    """How many SMs a GPU has; None where that was not recorded."""
    about = _about_gpu(run, gpu)
    count = about.get("sms", about.get("sm_count"))
    return count if isinstance(count, int) else None


def _about_gpu(run: Run, gpu: int) -> dict[str, Any]:
    for record in (run.facts.header, run.facts.footer or {}):
        for about in record.get("gpus", []):
            if isinstance(about, dict) and about.get("index") == gpu:
                return about
    return {}


def short(name: str, letters: int = _NAME_LETTERS) -> str:
    """A name that fits a label and can be drawn: a long one loses its middle."""
    name = shown(name)
    if len(name) <= letters:
        return name
    tail = (letters - 1) // 3
    return f"{name[: letters - 1 - tail]}…{name[-tail:]}"
