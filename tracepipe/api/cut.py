"""`tracepipe.cut`: a part of a recording, as the command `tracepipe cut` writes it."""

from __future__ import annotations

from os import PathLike, fspath
from typing import TYPE_CHECKING

from tracepipe.api.options import ReadOptions
from tracepipe.errors import TracepipeError

if TYPE_CHECKING:
    from tracepipe.recording.account import Account
    from tracepipe.recording.reading import Progress


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
