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
    from tracepipe.recording.files import Progress
    from tracepipe.recording.inputs import Member

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
    options = options or ConvertOptions()
    if not options.whatif:
        return convert_members(paths, out, format, options, (), force=force, progress=progress)
    if len(paths) > 1:
        raise FormatError("the replay is drawn of a single recording", "Convert each recording separately.")
    from tracepipe.recording.inputs import Member, line_map
    from tracepipe.recording.outputs import writing
    from tracepipe.reports.replayed import replayed
    from tracepipe.store.run import load_run

    run, target = load_run(paths[0], **options.as_read()), output_of(paths, format) if out is None else out
    line, how = line_map(0, 0, 0, 0), "the recording's own clock"
    # Without a host, the recording may be of the same one.
    host = {} if run.facts.header.host else {"host": "recorded"}
    members = [
        Member(name, header, run.facts.trace_clock, line, how, 0)
        for name, header in ((Path(paths[0]).name, host), ("replayed", {}))
    ]
    with tempfile.TemporaryDirectory(prefix="tracepipe-") as folder:
        more = str(Path(folder) / "replayed.jsonl")
        with writing(more), Path(more).open("w", encoding="utf-8") as file:
            file.writelines(f"{text}\n" for text in replayed(run, options.whatif))
        both = [paths[0], more]
        return convert_members(both, target, format, options, members, force=force, progress=progress)


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
    from tracepipe.recording.outputs import replacing

    form = _form(format, asked.compress)
    if asked.warp_tracks not in WARP_TRACKS:
        raise FormatError(
            f"warps cannot be drawn as {asked.warp_tracks!r}", f"Use one of: {', '.join(WARP_TRACKS)}."
        )
    how = ConversionOptions(
        **asked.as_read(),
        offsets=dict(asked.offset),
        members=members,
        compress=asked.compress,
        layout=LayoutOptions(asked.warp_tracks, asked.thread_exits),
    )
    if (len(paths) > 1 or how.offsets or members) and not form.takes_several:
        raise FormatError(f"{format} is made from a single recording", "Convert each recording separately.")
    files = [fspath(path) for path in paths]
    opened: AbstractContextManager[BinaryIO]
    if out is None or isinstance(out, (str, PathLike)):
        path = output_of(files, format) if out is None else fspath(out)
        ending = PurePath(path).suffix
        if out is not None and ending in (".gz", ".zst") and not form.by_suffix:
            raise OutputError(
                f"the format {format} cannot be compressed, but {path} ends with {ending}",
                f"Leave out {ending}, and compress the file.",
            )
        compressed_as = path if out is not None else ""
        opened = replacing(path, force=force, sources=files, on_terminal=form.on_terminal)
    else:  # a stream, which may compress by itself
        name = getattr(out, "name", "")
        path, compressed_as, opened = name if isinstance(name, str) else "", "", nullcontext(out)
    with opened as stream:
        written = compressing(stream, compressed_as, is_ours=False) if form.by_suffix else stream
        account = Conversion(files, form, how).run(written, progress)
    account.output = path
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


def open_trace(
    path: str,
    *,
    local: bool,
    browser: bool,
    notify: Callable[[str], None],
    showing: Callable[[str], AbstractContextManager[Progress | None]],
) -> None:
    """Open a trace in the Perfetto UI, which gets it from this process. A recording, a dataset and a folder
    of recordings are converted first. Raises InputError, and what `convert` raises.
    """
    from tracepipe.recording.remote import is_url
    from tracepipe.ui import serve

    if is_url(path):
        raise InputError("is a URL, and the UI gets a trace from a file", "Copy it here first.", path=path)
    with tempfile.TemporaryDirectory(prefix="tracepipe-") as folder:
        name = Path(path.rstrip("/")).name
        trace, converted = Path(path), Path(folder) / f"{name}.pftrace"
        if paths.is_folder(path):
            from tracepipe.api.dataset import dataset_of

            with (
                dataset_of(path, ReadOptions(), showing) as (dataset, notes),
                showing(f"convert {name}") as bar,
            ):
                for line in [*notes, *account_lines(convert_ranks(dataset, converted, progress=bar))]:
                    notify(line)
            trace = converted
        elif not serve.is_for_ui(trace):
            with showing(f"convert {name}") as bar:
                for line in account_lines(convert(path, converted, progress=bar)):
                    notify(line)
            trace = converted
        serve.open_trace(trace, local=local, browser=browser, notify=notify)


def output_of(paths: Sequence[str], format: str) -> str:
    """The default output for a timeline of recordings; `-` is standard output. Raises FormatError, and
    OutputError where several recordings need a name.
    """
    from tracepipe.recording.outputs import default_output

    form = _form(format)
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
    from tracepipe.event.model import TIME_LIMIT_NS
    from tracepipe.part.stretch import Stretch, moment_of

    asked = options or RankOptions()
    found = chosen(Dataset.opened(fspath(path)), asked.ranks)
    window: Stretch | None = None
    if asked.start or asked.end:
        whole = Stretch()
        start_ns = moment_of(asked.start).on_trace(found.start_ns) if asked.start else whole.start_ns
        end_ns = moment_of(asked.end).on_trace(found.start_ns) if asked.end else whole.end_ns
        if start_ns >= end_ns:
            raise TracepipeError("The window is empty.", "Give an end after its start.")
        window = Stretch(start_ns, end_ns)
    for one in found.ranks:
        if paths.is_same(fspath(out), one.row.source):
            raise OutputError(
                f"{fspath(out)} is the recording of rank {one.row.rank}", "Name another file with -o."
            )
    members = [_member(one, found, window) for one in found.ranks]
    how = ConvertOptions(**{one.name: getattr(asked, one.name) for one in fields(DrawOptions)})
    if window is None:
        sources = [one.row.source for one in found.ranks]
        return convert_members(sources, out, format, how, members, force=force, progress=progress)
    cuts = []
    with tempfile.TemporaryDirectory(prefix="tracepipe-") as folder:
        files = [str(Path(folder) / f"rank{one.row.rank}.jsonl") for one in found.ranks]
        for one, file in zip(found.ranks, files, strict=True):
            first, last = (
                min(max(0, one.place.line.first_at(ns)), TIME_LIMIT_NS)  # on the recording's own clock
                for ns in (window.start_ns, window.end_ns)
            )
            reading = replace(how, source_format=how.source_format or one.row.source_format)
            cuts.append(
                cut(one.row.source, file, reading, start=f"@{first}", end=f"@{last}", progress=progress)
            )
        of_parts = replace(how, source_format="", assume_offset={}, undated="skip")
        account = convert_members(files, out, format, of_parts, members, force=force, progress=progress)
    for part, of_cut in zip(account.parts or [account], cuts, strict=True):
        part.take_problems(of_cut)
    return account


def _member(one: ChosenRank, found: Chosen, window: Stretch | None) -> Member:
    """The recording with its place on the common clock."""
    from tracepipe.recording.inputs import Member, line_map

    row, place, line = one.row, one.place, one.place.line
    start_ns, end_ns = line.place(row.start_ns), line.place(row.end_ns)
    if window is not None:
        start_ns, end_ns = max(start_ns, window.start_ns), min(end_ns, window.end_ns)
    is_bound, limit = place.limit(start_ns, end_ns)
    how = f"{row.clock}, by the header or footer of a capture on its host"
    if row.clock == found.reference:
        how = f"{row.clock}, which is the common clock"
    elif place.shared:
        how = f"{row.clock}, by {counted(place.shared, 'collective|collectives')}"
    return Member(
        name=f"rank {row.rank} ({Path(row.source).name})",
        header=one.header,
        clock=found.clock,
        drift=line_map(line.at_ns, line.offset_ns, line.drift_ppb, place.bound_ns),
        how=how,
        bound_ns=place.bound_ns if is_bound else None,
        bound=limit,
    )


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
    from tracepipe.part.cut import write_part
    from tracepipe.part.stretch import moment_of
    from tracepipe.recording.compression import compressing
    from tracepipe.recording.inputs import InputOptions
    from tracepipe.recording.outputs import replacing

    if not start and not end:
        raise TracepipeError("no stretch of time is given", "Give its start, its end or both.")
    first, last = (moment_of(text) if text else None for text in (start, end))
    wanted = InputOptions(**(options or ReadOptions()).as_read())
    name = fspath(out)
    with replacing(name, force=force, sources=[fspath(path)], on_terminal=True) as stream:
        into = compressing(stream, name, is_ours=False)
        account = write_part(fspath(path), into, wanted, first, last, progress)
    account.output = name
    return account
