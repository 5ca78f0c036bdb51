"""`tracepipe.convert`: makes a timeline of a recording, as the command `tracepipe convert` does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike, fspath
from pathlib import PurePath
from typing import TYPE_CHECKING, BinaryIO

from tracepipe.api.options import ConvertOptions
from tracepipe.errors import FormatError, OutputError

if TYPE_CHECKING:
    from tracepipe.converters import OutputFormat
    from tracepipe.recording.account import Account
    from tracepipe.recording.inputs import Member
    from tracepipe.recording.reading import Progress


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


def output_of(paths: Sequence[str], format: str) -> str:
    """The default output for a timeline of recordings; `-` is standard output. Raises FormatError, and
    OutputError where several recordings need a name.
    """
    return _default(paths, _form(format))


def _default(paths: Sequence[str], form: OutputFormat) -> str:
    from tracepipe.recording.files import STANDARD
    from tracepipe.recording.outputs import default_output

    if form.on_terminal:
        return STANDARD
    if len(paths) > 1:
        raise OutputError("the timeline of several recordings has no name", "Name it with -o.")
    return default_output(paths[0], form.suffix)


def _form(name: str, compress: bool = False) -> OutputFormat:
    from tracepipe.converters import CONVERTERS

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
