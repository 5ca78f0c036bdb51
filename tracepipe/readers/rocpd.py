"""Reads the databases of rocprofv3 and the other tools of ROCm, `rocpd`.

Each recording in a database has tables of its own, whose names end with its number. Times are nanoseconds of
CLOCK_BOOTTIME: columns of a row, or rows of a table that it names, as is its thread, GPU and stream in
`rocpd_track`.
"""

from __future__ import annotations

from contextlib import closing
from typing import BinaryIO

from tracepipe.readers.recording import Recording
from tracepipe.readers.rocpd_file import STRINGS, RocpdFile
from tracepipe.readers.sqlite_tables import Database


def holds(file: BinaryIO) -> bool:
    """Whether a database has tables of rocpd. Raises InputError."""
    with closing(Database(file)) as database:
        return any(name.startswith(STRINGS) for name in database.tables)


def read(stream: BinaryIO) -> Recording:
    """The recordings in a database, which is a file. Raises InputError."""
    return RocpdFile(Database(stream), []).recording()
