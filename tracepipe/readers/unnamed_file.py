"""Files without a name, in which readers keep data that does not fit in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from tracepipe.errors import OutputError


def unnamed_file() -> BinaryIO:
    """Open a file that is removed when this process ends in any way. Raises OSError."""
    with tempfile.TemporaryFile(prefix="tracepipe-") as file:
        return os.fdopen(os.dup(file.fileno()), "r+b")


@contextmanager
def naming_the_folder() -> Iterator[None]:
    """Turn an OSError of such a file into an OutputError."""
    try:
        yield
    except OSError as e:
        raise OutputError(
            f"cannot keep the events of a trace in {tempfile.gettempdir()}: {e.strerror}",
            "Name a folder with room in TMPDIR.",
        ) from e
