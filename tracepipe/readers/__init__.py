"""Input formats. A new one is a file here and a line in `READERS`."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, BinaryIO, Final

from tracepipe.errors import FormatError
from tracepipe.event.model import Problem

if TYPE_CHECKING:  # commands that read nothing must not import numpy
    from types import ModuleType

    from tracepipe.event.columns import SourceBatch
    from tracepipe.readers.recording import Recording

__all__ = ["READERS", "UNDATED", "InputFormat", "is_known", "naming_others", "recognise"]

UNDATED: Final = ("skip", "between")
"""Lines without a time are skipped, or placed between their neighbours."""


@dataclass(frozen=True, slots=True)
class InputFormat:
    """An input format. Its `module` in this package is loaded at its first use.

    `form`: a pattern that the start of all such content has. Without it, the module is not loaded.
    `has_undated`: some of its lines may have no time. `needs_file`: it reads a file with a name at any place,
    not a stream. `database`: the first bytes of such files, if the reader must look into one to recognize it.
    """

    name: str
    title: str
    module: str
    form: bytes = b""
    has_undated: bool = False
    needs_file: bool = False
    database: bytes = b""

    def _functions(self) -> ModuleType:
        return import_module(f"{__name__}.{self.module}")

    def sniff(self, head: bytes) -> bool:
        """Whether content is this format's; `head` is the first 64 KiB, decompressed."""
        if self.database:
            return head.startswith(self.database)
        if not re.search(self.form, head):
            return False
        found: bool = self._functions().sniff(head)
        return found

    def holds(self, file: BinaryIO) -> bool:
        """Whether a file that starts like those of this format has what it reads, for formats that need a
        file.
        """
        found: bool = self._functions().holds(file)
        return found

    def read(self, stream: BinaryIO, undated: str = UNDATED[0]) -> Recording:
        """The recording in a stream, which is read when its batches are requested.

        `undated`, one of `UNDATED`, is what is done with lines without a time.
        """
        how = {"between": True} if undated == "between" and self.has_undated else {}
        recording: Recording = self._functions().read(stream, **how)
        return recording


# Files that people mistake for recordings, by their first bytes.
_OTHERS: Final = {
    b"\x7fELF": (
        "the file is a program or a library (ELF)",
        "Record it first: tracepipe capture -- ./program; then give the recording.",
    ),
    b"<!DOCTYPE html": (
        "the file is an HTML page",
        "Give the recording that it was made from; a browser shows the page.",
    ),
    b"PAR1": ("the file is a table of Parquet", "Give the recording that it was exported from."),
}
_SQLITE: Final = b"SQLite format 3\0"
# In the order in which they are tried: the strictest first.
READERS: dict[str, InputFormat] = {
    reader.name: reader
    for reader in (
        InputFormat("tracepipe", "tracepipe/1 event file (JSON Lines)", "tracepipe1", rb'"schema"'),
        InputFormat("nsys", "Nsight Systems, exported to SQLite", "nsys", needs_file=True, database=_SQLITE),
        InputFormat("rocpd", "rocpd database of rocprofv3", "rocpd", needs_file=True, database=_SQLITE),
        InputFormat(
            "xplane", "profile of XLA (JAX, TensorFlow), xplane.pb", "xplane", rb"\A\n", needs_file=True
        ),
        InputFormat("perfetto", "protobuf trace of Perfetto, .pftrace", "perfetto", rb"\A\n"),
        InputFormat("rocprof", "JSON of rocprofv3", "rocprof_json", rb'"rocprofiler-sdk-tool"'),
        InputFormat("bpftime", "text output of bpftime's GPU examples", "bpftime"),
        InputFormat(
            "cuda-table", "tables of CUDA runtime calls, of cuda_events and cuda_events.bt", "cuda_tables"
        ),
        InputFormat("wprof", "JSON Lines of wprof", "wprof", rb'"timer_freq_hz"'),
        InputFormat("proton", "what Triton's Proton records inside of kernels", "proton", rb'"traceEvents"'),
        InputFormat(
            "chrome",
            "Chrome's trace JSON, and that of PyTorch's profiler (Kineto) and VizTracer",
            "chrome",
            rb'\A(?:\xef\xbb\xbf)?\s*\[|"(?:traceEvents|schemaVersion|deviceProperties|distributedInfo)"',
        ),
        InputFormat(
            "layered", "JSON Lines of layered bpftrace and BCC CUDA tracers", "layered", has_undated=True
        ),
        InputFormat(
            "bpftrace", "lines of bpftrace's one-liners for a probe", "bpftrace_probes", has_undated=True
        ),
    )
}


def recognise(head: bytes, name: str = "", file: Callable[[], BinaryIO] | None = None) -> InputFormat:
    """The format of an input that starts with `head`, or the one called `name`. Raises FormatError.

    `file` opens the whole input, for formats that must look into it.
    """
    if name:
        if name not in READERS:
            raise FormatError(f"no input format is called {name!r}", f"Use one of: {', '.join(READERS)}.")
        return READERS[name]
    databases = []
    for reader in READERS.values():  # formats after the right one are not loaded
        if not reader.sniff(head):
            continue
        if not reader.database or (file is not None and reader.holds(file())):
            return reader
        databases.append(reader)
    if databases:
        titles = "; ".join(reader.title for reader in databases)
        raise FormatError(
            "the file is a database without the tables of a known format", f"Give a file of: {titles}."
        )
    from tracepipe.readers.bpftrace_records import is_of_bpftrace

    if is_of_bpftrace(head):  # its script printed no event, or none yet
        return READERS["bpftrace"]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise FormatError("the text is UTF-16", "Make it UTF-8: iconv -f UTF-16 -t UTF-8 FILE")
    from tracepipe.readers.proton import is_tree

    if is_tree(head):
        raise FormatError(
            "a tree of Triton Proton has only sums, without times",
            'Record a timeline: proton.start(data="trace"), or proton --data trace.',
        )
    if what := next((stated for begins, stated in _OTHERS.items() if head.startswith(begins)), None):
        raise FormatError(*what)
    if head[:1] in (b"{", b"["):
        raise FormatError(
            "the file is JSON, but not a known kind of trace or recording",
            f"Name it with --from, one of: {', '.join(READERS)}.",
        )
    raise FormatError(
        "the content is not of a known input format",
        f"Name it with --from, one of: {', '.join(READERS)}.",
    )


def is_known(head: bytes) -> bool:
    """Whether whole lines at the start of an input that is still growing are of a known format."""
    lines = head[: head.rfind(b"\n") + 1]
    return bool(lines.strip()) and any(reader.sniff(lines) for reader in READERS.values())


def naming_others(batches: Iterable[SourceBatch], source: InputFormat) -> Iterator[SourceBatch]:
    """The batches of `source`, with a problem for each line that it skipped and another format would read,
    and one problem for all text that was printed between the events.
    """
    from tracepipe.readers.recording import Printed

    others = [reader for reader in READERS.values() if reader is not source]
    printed = Printed()
    for batch in batches:
        problems = []
        for lines, count in ((batch.foreign_lines, None), (batch.printed, printed.add)):
            for number, text in lines:
                other = next((reader for reader in others if reader.sniff(text)), None)
                if other:
                    problems.append(
                        Problem(number, "", f"is not {source.name}'s: --from {other.name} reads it")
                    )
                elif count:
                    count(number, text)
        batch.foreign_lines, batch.printed = [], []
        if problems:
            batch.problems = sorted(batch.problems + problems, key=lambda problem: problem.line)
        yield batch
    yield from printed.batches()
