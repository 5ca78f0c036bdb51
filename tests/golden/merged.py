"""What becomes of several recordings as one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from tracepipe.converters import CONVERTERS
from tracepipe.recording.account import Account
from tracepipe.recording.convert import Conversion, ConversionOptions


def written(path: Path, records: list[dict[str, Any]]) -> str:
    """The path of a recording of these, of which the first is the header."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def converted(
    paths: list[str], to: str = "text", *, out: io.BytesIO | None = None, **options: Any
) -> tuple[bytes, Account]:
    """Recordings in a format, and what is stated of them."""
    out = out or io.BytesIO()
    account = Conversion(paths, CONVERTERS[to], ConversionOptions(**options)).run(out)
    return out.getvalue(), account


def anchors_of(account: Account) -> list[tuple[int, int | None, str]]:
    """By how much each was moved, within what, and why."""
    messages = [part.anchor or {} for part in account.parts]
    return [(one["offset_ns"], one.get("bound_ns"), one["by"]) for one in messages]
