"""Files without a name, in which readers keep what is more than fits in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from tracepipe.errors import OutputError


def unnamed_file() -> BinaryIO:
    """A file that is gone with this process however that ends. Raises OSError."""
    with tempfile.TemporaryFile(prefix="tracepipe-") as file:
        return os.fdopen(os.dup(file.fileno()), "r+b")


@contextmanager
def naming_the_folder() -> Iterator[None]:
    """Raises an OSError of such a file as OutputError."""
    try:
        yield
    except OSError as e:
        raise OutputError(
            f"cannot keep the events of a trace in {tempfile.gettempdir()}: {e.strerror}",
            "name a folder with room in TMPDIR",
        ) from e
