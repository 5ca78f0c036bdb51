"""Makes a timeline of some ranks of a dataset, from their recordings, as `tracepipe convert` does."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from tracepipe import paths
from tracepipe.api.convert import convert_members
from tracepipe.api.options import ConvertOptions, RankOptions
from tracepipe.errors import OutputError, TracepipeError
from tracepipe.units import counted

if TYPE_CHECKING:
    from tracepipe.dataset.chosen import Chosen, ChosenRank
    from tracepipe.part.stretch import Stretch
    from tracepipe.recording.account import Account
    from tracepipe.recording.inputs import Member
    from tracepipe.recording.reading import Progress


def convert_ranks(
    path: str | PathLike[str],
    out: str | PathLike[str],
    format: str = "perfetto",
    options: RankOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Account:
    """Convert recordings that a dataset was made of to one timeline, on the clock of the dataset, and return
    the account of what was found.

    Raises InputError, also for a recording that is gone or has changed, FormatError, ClockError, OutputError,
    and TracepipeError for a text that is not a time and for an empty window.
    """
    from tracepipe.dataset.chosen import chosen
    from tracepipe.dataset.places import Dataset

    asked = options or RankOptions()
    found = chosen(Dataset.opened(fspath(path)), asked.ranks)
    window = _window(asked, found.start_ns)
    _refuse_sources(fspath(out), found.ranks)
    members = [_member(one, found, window) for one in found.ranks]
    how = ConvertOptions(
        source_format=asked.source_format, strict=asked.strict, assume_offset=asked.assume_offset,
        undated=asked.undated, compress=asked.compress, warp_tracks=asked.warp_tracks,
        thread_exits=asked.thread_exits,
    )  # fmt: skip
    if window is None:
        paths = [one.source.path for one in found.ranks]
        return convert_members(paths, out, format, how, members, force=force, progress=progress)
    with tempfile.TemporaryDirectory(prefix="tracepipe-") as folder:
        files = [Path(folder) / f"rank{one.rank}.jsonl" for one in found.ranks]
        cuts = [_cut(one, file, window, how, progress) for one, file in zip(found.ranks, files, strict=True)]
        of_parts = replace(how, source_format="", assume_offset={}, undated="skip")
        account = convert_members(files, out, format, of_parts, members, force=force, progress=progress)
    for part, cut in zip(account.parts or [account], cuts, strict=True):
        part.take_problems(cut)
    return account


def _window(asked: RankOptions, base_ns: int) -> Stretch | None:
    """The window on the reference clock, where one was asked for."""
    from tracepipe.part.stretch import Stretch, moment_of

    if not asked.start and not asked.end:
        return None
    whole = Stretch()
    start_ns = moment_of(asked.start).on_trace(base_ns) if asked.start else whole.start_ns
    end_ns = moment_of(asked.end).on_trace(base_ns) if asked.end else whole.end_ns
    if start_ns >= end_ns:
        raise TracepipeError("The window is empty.", "Give an end after its start.")
    return Stretch(start_ns, end_ns)


def _refuse_sources(out: str, ranks: Sequence[ChosenRank]) -> None:
    """Raise OutputError where the output is one of the recordings."""
    target = Path(out)
    for one in ranks:
        if paths.is_same(target, one.source.path):
            raise OutputError(f"{out} is the recording of rank {one.rank}", "Name another file with -o.")


def _member(one: ChosenRank, found: Chosen, window: Stretch | None) -> Member:
    """The recording with its place on the common clock."""
    from tracepipe.recording.inputs import Member, line_map

    place, line = one.place, one.place.line
    start_ns, end_ns = line.place(one.start_ns), line.place(one.end_ns)
    if window is not None:
        start_ns, end_ns = max(start_ns, window.start_ns), min(end_ns, window.end_ns)
    is_bound, limit = place.limit(start_ns, end_ns)
    is_reference = one.clock == found.reference
    how = (
        f"{one.clock}, which is the common clock"
        if is_reference
        else f"{one.clock}, by {counted(place.shared, 'collective|collectives')}"
        if place.shared
        else f"{one.clock}, by the header or footer of a capture on its host"
    )
    return Member(
        name=f"rank {one.rank} ({Path(one.source.path).name})",
        header=one.header,
        clock=found.clock,
        drift=line_map(line.at_ns, line.offset_ns, line.drift_ppb, place.bound_ns),
        how=how,
        bound_ns=place.bound_ns if is_bound else None,
        bound=limit,
    )


def _cut(
    one: ChosenRank, file: Path, window: Stretch, how: ConvertOptions, progress: Progress | None
) -> Account:
    """Write the window of one recording, which is on its own clock there."""
    from tracepipe.event.model import TIME_LIMIT_NS
    from tracepipe.part.cut import Cut, CutOptions
    from tracepipe.part.stretch import Moment
    from tracepipe.recording.outputs import replacing

    first, last = (
        Moment(min(max(0, one.place.line.first_at(ns)), TIME_LIMIT_NS), is_absolute=True)
        for ns in (window.start_ns, window.end_ns)
    )
    wanted = CutOptions(
        first, last, how.source_format or one.source_format, how.strict, dict(how.assume_offset), how.undated
    )
    with replacing(str(file), force=False) as out:
        return Cut(one.source.path, wanted).run(out, progress)
