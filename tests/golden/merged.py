"""What becomes of several recordings as one."""

from __future__ import annotations

import io
from typing import Any

from tracepipe.converters import CONVERTERS
from tracepipe.recording.account import Account
from tracepipe.recording.convert import Conversion, ConvertOptions


def converted(paths: list[str], to: str = "text", **options: Any) -> tuple[bytes, Account]:
    """Recordings in a format, and what is said of them."""
    out = io.BytesIO()
    account = Conversion(paths, CONVERTERS[to], ConvertOptions(**options)).run(out)
    return out.getvalue(), account


def anchors_of(account: Account) -> list[tuple[int, int | None, str]]:
    """By how much each was moved, within what, and why."""
    said = [part.anchor or {} for part in account.parts]
    return [(one["offset_ns"], one.get("bound_ns"), one["by"]) for one in said]
