"""Reads the databases of rocprofv3 and the other tools of ROCm, `rocpd`.

Each recording in a database has its own tables, whose names end with its number. Times are nanoseconds of
CLOCK_BOOTTIME. They are in columns of a row, or in another table to which it refers; thread, GPU and stream
may be in `rocpd_track` in the same way.
"""

from __future__ import annotations

from contextlib import closing
from typing import BinaryIO

from tracepipe.readers.recording import Recording
from tracepipe.readers.rocpd_file import STRINGS, recording_in
from tracepipe.readers.sqlite_tables import Database


def holds(file: BinaryIO) -> bool:
    """Whether a database has tables of rocpd. Raises InputError."""
    with closing(Database(file)) as database:
        return any(name.startswith(STRINGS) for name in database.tables)


def read(stream: BinaryIO) -> Recording:
    """The recordings in a database, which is a file. Raises InputError."""
    return recording_in(Database(stream), [])
