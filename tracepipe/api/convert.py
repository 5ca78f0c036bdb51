"""`tracepipe.convert`, `convert_ranks` and `cut`: a timeline of recordings or of ranks of a dataset, and a
part of a recording, as the commands make them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from os import PathLike, fspath
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO, Final

from tracepipe import paths
from tracepipe.api.options import ConvertOptions, DrawOptions, RankOptions, ReadOptions
from tracepipe.converters import CONVERTERS
from tracepipe.errors import FormatError, InputError, OutputError, TracepipeError
from tracepipe.options import STANDARD
from tracepipe.units import counted

if TYPE_CHECKING:
    from tracepipe.converters import OutputFormat
    from tracepipe.dataset.chosen import Chosen, ChosenRank
    from tracepipe.part.stretch import Stretch
    from tracepipe.recording.account import Account
    from tracepipe.recording.inputs import Member
    from tracepipe.recording.reading import Progress

FORMATS: Final = tuple(CONVERTERS)


def convert(
    path: str | PathLike[str] | Sequence[str | PathLike[str]],
    out: str | PathLike[str] | BinaryIO | None = None,
    format: str = "perfetto",
    options: ConvertOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Account:
    """Convert a recording and return the account of what was found in it. `account.output` is the file of the
    timeline. Several recordings become one timeline, on one clock.

    `format` is perfetto, chrome, archive (of a Perfetto trace of each recording), tracepipe, text, threads,
    layered or cuda-events. `out` is a path, or a binary stream, which stays open; by default it is the
    recording's path with the format's suffix, and standard output for the last four. The file gets its name
    when it is complete, and replaces another only with `force`. `progress` is called with bytes read and
    bytes in all. Raises InputError, FormatError, ClockError, OutputError.
    """
    paths = [fspath(path)] if isinstance(path, (str, PathLike)) else [fspath(one) for one in path]
    return convert_members(
        paths, out, format, options or ConvertOptions(), (), force=force, progress=progress
    )


def convert_members(
    paths: Sequence[str | PathLike[str]],
    out: str | PathLike[str] | BinaryIO | None,
    format: str,
    asked: ConvertOptions,
    members: Sequence[Member],
    *,
    force: bool,
    progress: Progress | None,
) -> Account:
    """As `convert`, of recordings whose places on a common clock may be known: one of `members` for each."""
    from tracepipe.layout import WARP_TRACKS, LayoutOptions
    from tracepipe.recording.compression import compressing
    from tracepipe.recording.convert import Conversion, ConversionOptions

    form = _form(format, asked.compress)
    if asked.warp_tracks not in WARP_TRACKS:
        raise FormatError(
            f"warps cannot be drawn as {asked.warp_tracks!r}", f"Use one of: {', '.join(WARP_TRACKS)}."
        )
    how = ConversionOptions(
        asked.source_format,
        asked.strict,
        asked.compress,
        dict(asked.assume_offset),
        LayoutOptions(asked.warp_tracks, asked.thread_exits),
        asked.undated,
        dict(asked.offset),
        members,
    )
    if (len(paths) > 1 or how.offsets or members) and not form.takes_several:
        raise FormatError(f"{format} is made from a single recording", "Convert each recording separately.")
    files = [fspath(path) for path in paths]
    compressed_as = _compressed_as(out, format, form)
    name, opened = _opened(files, out, form, force)
    with opened as stream:
        written = compressing(stream, compressed_as, is_ours=False) if form.by_suffix else stream
        account = Conversion(files, form, how).run(written, progress)
    account.output = name
    return account


def account_lines(account: Account, *, states_losses: bool = True) -> Iterator[str]:
    """The lines that a person should know about a conversion, the most important last."""
    from tracepipe.recording import account as accounts

    for line in accounts.account_lines(account):
        if states_losses or not line.startswith(accounts.LOST):
            yield line


def validate(
    path: str, source_format: str, put: Callable[[str], None], progress: Progress | None = None
) -> Account:
    """Read a recording without drawing it, calling `put` with each problem: `path:line: field: message`."""
    from tracepipe.recording.convert import check

    return check(path, source_format, put, progress)


def format_of(asked: str, output: str) -> str:
    """The requested format, or the one of the output's name. Raises OutputError if the name is of another
    format.
    """
    name = Path(output)
    ending = (name.with_suffix("") if name.suffix in (".gz", ".zst") else name).suffix
    fitting = [kind for kind, of in CONVERTERS.items() if of.suffix == ending]
    if asked and fitting and asked not in fitting:
        raise OutputError(
            f"{output} has the ending of {' and '.join(fitting)}, but --format is {asked}",
            f"Name it {name.name.removesuffix(ending)}{CONVERTERS[asked].suffix}, or leave out --format.",
        )
    return asked or (fitting[0] if fitting else "perfetto")


def can_compress(format: str) -> bool:
    """Whether a format has a compressed form."""
    return CONVERTERS[format].can_compress


def where_to_open(output: str, format: str) -> str:
    """The programs that show a timeline; empty where it has to be copied first, or is text."""
    from tracepipe.recording.remote import is_url

    if not CONVERTERS[format].takes_several or CONVERTERS[format].on_terminal or is_url(output):
        return ""
    return "ui.perfetto.dev" if format != "chrome" else "ui.perfetto.dev, chrome://tracing or speedscope.app"


def open_trace(path: str, *, local: bool, browser: bool, notify: Callable[[str], None]) -> None:
    """Open a converted trace in the Perfetto UI, which gets it from this process. Raises InputError."""
    from tracepipe.recording.remote import is_url
    from tracepipe.ui import serve

    if is_url(path):
        raise InputError("is a URL, and the UI gets a trace from a file", "Copy it here first.", path=path)
    serve.open_trace(Path(path), local=local, browser=browser, notify=notify)


def output_of(paths: Sequence[str], format: str) -> str:
    """The default output for a timeline of recordings; `-` is standard output. Raises FormatError, and
    OutputError where several recordings need a name.
    """
    return _default(paths, _form(format))


def _default(paths: Sequence[str], form: OutputFormat) -> str:
    from tracepipe.recording.outputs import default_output

    if form.on_terminal:
        return STANDARD
    if len(paths) > 1:
        raise OutputError("the timeline of several recordings has no name", "Name it with -o.")
    return default_output(paths[0], form.suffix)


def _form(name: str, compress: bool = False) -> OutputFormat:
    form = CONVERTERS.get(name)
    if form is None:
        raise FormatError(f"no output format is called {name!r}", f"Use one of: {', '.join(CONVERTERS)}.")
    if compress and not form.can_compress:
        raise FormatError(f"{name} has no compressed form", "Pipe it through gzip.")
    return form


def _compressed_as(out: str | PathLike[str] | BinaryIO | None, format: str, form: OutputFormat) -> str:
    """The path whose ending decides how the output is compressed, "" for a stream, which may compress by
    itself. Raises OutputError where the format cannot be compressed like that.
    """
    path = fspath(out) if isinstance(out, (str, PathLike)) else ""
    ending = PurePath(path).suffix
    if ending in (".gz", ".zst") and not form.by_suffix:
        raise OutputError(
            f"the format {format} cannot be compressed, but {path} ends with {ending}",
            f"Leave out {ending}, and compress the file.",
        )
    return path


def _opened(
    paths: list[str], out: str | PathLike[str] | BinaryIO | None, form: OutputFormat, force: bool
) -> tuple[str, AbstractContextManager[BinaryIO]]:
    """The name of the output, "" for a stream without one, and the context that opens it."""
    from tracepipe.recording.outputs import replacing

    if out is None:
        name = _default(paths, form)
    elif isinstance(out, (str, PathLike)):
        name = fspath(out)
    else:
        name = getattr(out, "name", "")
        return name if isinstance(name, str) else "", nullcontext(out)
    return name, replacing(name, force=force, sources=paths, on_terminal=form.on_terminal)


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
    how = ConvertOptions(**{one.name: getattr(asked, one.name) for one in fields(DrawOptions)})
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


def cut(
    path: str | PathLike[str],
    out: str | PathLike[str],
    options: ReadOptions | None = None,
    *,
    start: str = "",
    end: str = "",
    force: bool = False,
    progress: Progress | None = None,
) -> Account:
    """Write the part of a recording from `start` on and before `end` as an event file. The recording may have
    any input format.

    Both times are as on the command line: `"1.2s"` after the start of the recording, or `"@22137070527"`,
    nanoseconds on the trace's clock. Without one, the part begins or ends with the recording. `out` is `-`
    for standard output; the file is compressed where its name ends with .gz or .zst, and replaces another
    only with `force`. The account counts what is in the part. Raises InputError, FormatError, ClockError,
    OutputError, and TracepipeError for a text that is not a time and for an empty part.
    """
    from tracepipe.part.cut import Cut, CutOptions
    from tracepipe.part.stretch import moment_of
    from tracepipe.recording.compression import compressing
    from tracepipe.recording.outputs import replacing

    if not start and not end:
        raise TracepipeError("no stretch of time is given", "Give its start, its end or both.")
    first, last = (moment_of(text) if text else None for text in (start, end))
    how = options or ReadOptions()
    wanted = CutOptions(first, last, how.source_format, how.strict, dict(how.assume_offset), how.undated)
    name = fspath(out)
    with replacing(name, force=force, sources=[fspath(path)], on_terminal=True) as stream:
        account = Cut(fspath(path), wanted).run(compressing(stream, name, is_ours=False), progress)
    account.output = name
    return account
