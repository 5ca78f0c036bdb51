"""The options for reading recordings and drawing them: the fields of the library's functions, and the options
of the commands. `CaptureOptions` is in `api/capture.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from tracepipe.errors import TracepipeError
from tracepipe.launchers import RANK_MAX
from tracepipe.layout import WARP_TRACKS
from tracepipe.options import SECONDS, TIME, Option
from tracepipe.readers import READERS, UNDATED

READING: Final = "Reading"
OUTPUT: Final = "Output"
SOURCES: Final = tuple(READERS)
"""The names of the input formats."""
_RANKS: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def clock_offset(text: str) -> tuple[str, int | str]:
    """Read `CLOCK=NS`: a clock, and the ns to add or the name of a host clock. Raises TracepipeError."""
    clock, _, offset = text.partition("=")
    if not clock or not offset:
        raise TracepipeError(f"takes CLOCK=NANOSECONDS or CLOCK=realtime, not {text!r}.")
    try:
        return clock, int(offset)
    except ValueError:
        return clock, offset


def file_offset(text: str) -> tuple[str, int]:
    """Read `FILE=NS`: a file, whose name may contain the sign, and ns. Raises TracepipeError."""
    file, _, offset = text.rpartition("=")
    try:
        ns = int(offset)
    except ValueError:
        file = ""
    if not file:
        raise TracepipeError(f"takes FILE=NANOSECONDS, not {text!r}.")
    return file, ns


def rank_numbers(text: str) -> tuple[int, ...]:
    """Read numbers and ranges of ranks, as in `0-7,17`. Raises TracepipeError."""
    numbers: dict[int, None] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        found = _RANKS.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last or last > RANK_MAX:
            raise TracepipeError(f"takes ranks as in 0-7,17, not {part!r}.")
        numbers |= dict.fromkeys(range(first, last + 1))
    return tuple(numbers)


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a recording is read, by `tracepipe.open`, `load` and `cut`."""

    source_format: Annotated[str, Option(
        f"Read the input as this format: {', '.join(SOURCES)}. Default: recognised by its content.",
        "FORMAT", choices=SOURCES, flags=("--from",), panel=READING, also=("validate",))] = ""
    """FormatError for a name that is none."""
    strict: Annotated[bool, Option(
        "Fail at the first line that cannot be used. Otherwise such lines are skipped and counted.",
        panel=READING)] = False
    """The failure is an InputError."""
    assume_offset: Annotated[Mapping[str, int | str], Option(
        "Place a clock that has no clock pairs: CLOCK=NS adds nanoseconds to its times; "
        "globaltimer:0=realtime takes it as equal to that clock of the host.",
        "CLOCK=NS", repeats=True, read=clock_offset, panel=READING)] = field(default_factory=dict)
    """A mapping of clocks. ClockError where one cannot be placed so."""
    undated: Annotated[str, Option(
        "Treat lines without a time, among lines with one, like this: skip and count them, or place them "
        "between their neighbours.",
        choices=UNDATED, panel=READING)] = UNDATED[0]

    def as_read(self) -> dict[str, Any]:
        """These options under the names that `recording/` and the store have for them."""
        return {
            "source_format": self.source_format, "strict": self.strict,
            "assumed": dict(self.assume_offset), "undated": self.undated,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions(ReadOptions):
    """How recordings are read and drawn."""

    compress: Annotated[bool, Option("Compress the packets (perfetto only).", panel=OUTPUT)] = False
    """FormatError for another format."""
    warp_tracks: Annotated[str, Option(
        "Draw a track for each hardware slot (slot) or each warp of the grid (logical), a count for each "
        "SM (sm), or no warps (off).",
        choices=WARP_TRACKS)] = "auto"
    """"auto" chooses by the kernel. FormatError for another text."""
    thread_exits: Annotated[bool, Option("Draw the exits of a warp's threads as instants.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(DrawOptions):
    """How `tracepipe.convert` reads recordings, and how it draws them."""

    offset: Annotated[Mapping[str, int], Option(
        "With several recordings: add this many nanoseconds to the times of one.",
        "FILE=NS", repeats=True, read=file_offset)] = field(default_factory=dict)
    """A mapping of the recordings' names."""
    whatif: Annotated[Sequence[str], Option(
        "Add a second host to the timeline: the program as it would run with this change. Changes are those "
        "of whatif: without=NAME, faster=KERNEL=N, fuse=CHAIN, overlap=COMM or launches=free.",
        "CHANGE", repeats=True)] = ()
    """TracepipeError where the steps cannot be replayed, or nothing has such a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions(DrawOptions):
    """Which ranks of a dataset are converted, of which time, and how they are drawn."""

    ranks: Annotated[Sequence[int], Option(
        "With a dataset: convert the recordings of these ranks. Default: all.",
        "N,N-N", read=rank_numbers)] = ()
    """InputError for one that is not there."""
    start: Annotated[str, Option(
        "With a dataset: begin at this time, 1.5ms or 2s after the start of the first rank, or @NS on "
        f"the clock of the dataset. {SECONDS} With a recording: the same as --source.",
        TIME, flags=("--from",), complete=lambda incomplete: SOURCES, read=str)] = ""
    end: Annotated[str, Option(
        "With a dataset: end before this time, in the same forms.", TIME, flags=("--to",), read=str)] = ""
# fmt: on
