"""Reads `tracepipe/1`, the event file of `model.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import orjson

from tracepipe.errors import FormatError, InputError
from tracepipe.model import SCHEMA_VERSION, Batch, Header, Problem
from tracepipe.readers.lines import BOM, SHALLOW_BYTES, TOO_DEEP, Rejoined, chunks_of_lines, is_too_deep
from tracepipe.readers.recording import InputFormat, Recording
from tracepipe.validate import RecordFilter, first_fault

# Small enough that the parsed records of one chunk stay within a few MB.
CHUNK_BYTES = 1 << 19
_FAILED = object()


def _parse_one(line: int, text: bytes, problems: list[Problem]) -> Any:
    try:
        record = orjson.loads(text)
    except orjson.JSONDecodeError as e:
        problems.append(Problem(line, "", f"is not JSON: {e.msg} at column {e.colno}"))
        return _FAILED
    if is_too_deep(text, record):
        problems.append(Problem(line, "", TOO_DEEP))
        return _FAILED
    return record


def _any_too_deep(lines: list[bytes], records: list[Any]) -> bool:
    return max(map(len, lines)) > SHALLOW_BYTES and any(map(is_too_deep, lines, records))


def _parse(first: int, lines: list[bytes], keep: RecordFilter, batch: Batch) -> None:
    """Parse a chunk in one call, and line by line where that fails."""
    try:
        # One call for the chunk saves a fifth of the time of one call for each line.
        records = orjson.loads(b"[" + b",".join(lines) + b"]")
        whole = len(records) == len(lines) and not _any_too_deep(lines, records)
    except orjson.JSONDecodeError:
        whole = False
    if whole:
        batch.records = keep.keep(records, first, batch.problems)
        return
    for line, text in enumerate(lines, first):
        if text.strip() and (record := _parse_one(line, text, batch.problems)) is not _FAILED:
            batch.records += keep.keep((record,), line, batch.problems)


def _header(stream: BinaryIO) -> tuple[Header, bytes]:
    """The header, and what was read beyond it."""
    text = stream.read(CHUNK_BYTES)
    while b"\n" not in text and (more := stream.read(CHUNK_BYTES)):
        text += more
        if len(text) > 64 * CHUNK_BYTES:
            break
    line, _, rest = text.removeprefix(BOM).partition(b"\n")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as e:
        raise InputError(
            f"the header is not JSON: {e.msg}", "a tracepipe/1 file starts with its header", line=1
        ) from e
    if is_too_deep(line, record):
        raise InputError(TOO_DEEP, "a tracepipe/1 file starts with its header", line=1)
    if isinstance(record, dict) and record.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise FormatError(
            f"the file is {record['schema']!r}, and this program reads {SCHEMA_VERSION}",
            "use the version of tracepipe that wrote it, or a newer one",
        )
    if fault := first_fault(record):
        raise InputError(fault[1], "a tracepipe/1 file starts with its header", line=1, field=fault[0])
    if record["type"] != "header":
        raise InputError("is not a header", "a tracepipe/1 file starts with its header", line=1, field="type")
    return cast(Header, record), rest


def _batches(stream: BinaryIO, header_bytes: int) -> Iterator[Batch]:
    keep = RecordFilter()
    for first, lines, offset_bytes, cut in chunks_of_lines(stream, CHUNK_BYTES):
        batch = Batch(offset_bytes=header_bytes + offset_bytes)
        _parse(first + 1, lines, keep, batch)
        if cut and batch.problems and batch.problems[0].message.startswith("is not JSON"):
            # Half a line at the very end is what an interrupted writer leaves, and says so.
            batch.problems[0] = Problem(first + 1, "", "was cut off in the middle of the line")
        yield batch


def read(stream: BinaryIO) -> Recording:
    """Header and batches of a `tracepipe/1` stream. Raises InputError or FormatError on a bad header."""
    header, rest = _header(stream)
    return Recording(header, _batches(cast(BinaryIO, Rejoined(rest, stream)), 0))


def sniff(head: bytes) -> bool:
    """Whether the first line is a header, whatever its version."""
    line = head.removeprefix(BOM).lstrip().partition(b"\n")[0]
    return line.startswith(b"{") and b'"header"' in line and b'"schema"' in line


FORMAT = InputFormat("tracepipe", "tracepipe/1 event file (JSON Lines)", sniff, read)
