"""Input formats. A new one is a file here and a line in `READERS`."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from tracepipe.errors import FormatError
from tracepipe.event.model import Problem

if TYPE_CHECKING:  # a command that reads nothing needs no columns
    from tracepipe.event.columns import SourceBatch
    from tracepipe.readers.recording import Recording

__all__ = ["READERS", "UNDATED", "InputFormat", "is_known", "naming_others", "recognise"]

UNDATED: Final = ("skip", "between")
"""What may become of lines without a time: they are skipped, or placed between their neighbours."""


@dataclass(frozen=True, slots=True)
class InputFormat:
    """An input format, which is the `module` of that name here, loaded when it is asked.

    `has_undated`: some of its lines may have no time among others that do. `needs_file`: it reads a file that
    has a name and can be read at any place, not a stream. `database`: what such files start with where it
    looks into one to say whether it is its own.
    """

    name: str
    title: str
    module: str
    has_undated: bool = False
    needs_file: bool = False
    database: bytes = b""

    def _functions(self) -> Any:
        return import_module(f"{__name__}.{self.module}")

    def sniff(self, head: bytes) -> bool:
        """Whether content is this format's; `head` is the first 64 KiB, decompressed."""
        if self.database:
            return head.startswith(self.database)
        found: bool = self._functions().sniff(head)
        return found

    def holds(self, file: BinaryIO) -> bool:
        """Whether a file that starts as those of this format has what it reads; of formats that need one."""
        found: bool = self._functions().holds(file)
        return found

    def read(self, stream: BinaryIO, undated: str = UNDATED[0]) -> Recording:
        """The recording in a stream, which is read as its batches are asked for.

        `undated`, one of `UNDATED`: what becomes of lines without a time among others.
        """
        how = {"between": True} if undated == "between" and self.has_undated else {}
        recording: Recording = self._functions().read(stream, **how)
        return recording


# What files are that people mistake for recordings, by their first bytes.
_OTHERS: Final = {
    b"\x7fELF": (
        "the file is a program or a library (ELF)",
        "record it first: tracepipe capture -- ./program, then give the recording",
    ),
    b"<!DOCTYPE html": (
        "the file is an HTML page",
        "give the recording that it was made of; a browser shows the page",
    ),
    b"PAR1": ("the file is a table of Parquet", "give the recording that it was exported from"),
}
_SQLITE: Final = b"SQLite format 3\0"
# In the order in which they are asked whether the content is theirs: the strictest first.
READERS: dict[str, InputFormat] = {
    reader.name: reader
    for reader in (
        InputFormat("tracepipe", "tracepipe/1 event file (JSON Lines)", "tracepipe1"),
        InputFormat("nsys", "Nsight Systems, exported to SQLite", "nsys", needs_file=True, database=_SQLITE),
        InputFormat("rocpd", "rocpd database of rocprofv3", "rocpd", needs_file=True, database=_SQLITE),
        InputFormat("xplane", "profile of XLA (JAX, TensorFlow), xplane.pb", "xplane", needs_file=True),
        InputFormat("perfetto", "protobuf trace of Perfetto, .pftrace", "perfetto"),
        InputFormat("rocprof", "JSON of rocprofv3", "rocprof_json"),
        InputFormat("bpftime", "text output of bpftime's GPU examples", "bpftime"),
        InputFormat(
            "cuda-table", "tables of CUDA runtime calls, of cuda_events and cuda_events.bt", "cuda_tables"
        ),
        InputFormat("wprof", "JSON Lines of wprof", "wprof"),
        InputFormat("proton", "what Triton's Proton records inside of kernels", "proton"),
        InputFormat(
            "chrome", "Chrome's trace JSON, and that of PyTorch's profiler (Kineto) and VizTracer", "chrome"
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

    `file` gives the whole of it, for formats that need to look into it.
    """
    if name:
        if name not in READERS:
            raise FormatError(f"no input format is called {name!r}", f"use one of: {', '.join(READERS)}")
        return READERS[name]
    databases = []
    for reader in READERS.values():  # those after the one that it is are not loaded
        if not reader.sniff(head):
            continue
        if not reader.database or (file is not None and reader.holds(file())):
            return reader
        databases.append(reader)
    if databases:
        titles = "; ".join(reader.title for reader in databases)
        raise FormatError(
            "the file is a database with none of the tables that are read", f"read are: {titles}"
        )
    from tracepipe.readers.bpftrace_records import is_of_bpftrace

    if is_of_bpftrace(head):  # of a script that printed no event, or none yet
        return READERS["bpftrace"]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise FormatError("the text is UTF-16", "make it UTF-8: iconv -f UTF-16 -t UTF-8 FILE")
    from tracepipe.readers.proton import is_tree

    if is_tree(head):
        raise FormatError(
            "a tree of Triton Proton has sums alone, without times",
            'record a timeline: proton.start(data="trace"), or proton --data trace',
        )
    if what := next((said for begins, said in _OTHERS.items() if head.startswith(begins)), None):
        raise FormatError(*what)
    if head[:1] in (b"{", b"["):
        raise FormatError(
            "the file is JSON, and no trace or recording that is known",
            f"name it with --from, one of: {', '.join(READERS)}",
        )
    raise FormatError(
        "the content is of no known input format",
        f"name it with --from, one of: {', '.join(READERS)}",
    )


def is_known(head: bytes) -> bool:
    """Whether whole lines at the start of an input, of which more may come, are of a known format."""
    lines = head[: head.rfind(b"\n") + 1]
    return bool(lines.strip()) and any(reader.sniff(lines) for reader in READERS.values())


def naming_others(batches: Iterable[SourceBatch], source: InputFormat) -> Iterator[SourceBatch]:
    """Batches that `source` read, with a problem for each line that it passed over and another would read,
    and one for all that was printed between the events.
    """
    from tracepipe.readers.printed import Printed

    others = [reader for reader in READERS.values() if reader is not source]
    printed = Printed()
    for batch in batches:
        problems = []
        for lines, count in ((batch.passed_over, None), (batch.printed, printed.add)):
            for number, text in lines:
                other = next((reader for reader in others if reader.sniff(text)), None)
                if other:
                    problems.append(
                        Problem(number, "", f"is not {source.name}'s: --from {other.name} reads it")
                    )
                elif count:
                    count(number, text)
        batch.passed_over, batch.printed = [], []
        if problems:
            batch.problems = sorted(batch.problems + problems, key=lambda problem: problem.line)
        yield batch
    yield from printed.said()
