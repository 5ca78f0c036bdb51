"""The GPUs of a recording."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracepipe.reports.frames.run import Run


def about_gpus(run: Run) -> dict[int, Mapping[str, Any]]:
    """The GPUs of a recording by number, in the form of a header."""
    gpus: dict[int, dict[str, Any]] = {}
    for record in (run.facts.header, run.facts.footer or {}):
        for gpu in record.get("gpus", []):
            if isinstance(gpu, dict) and isinstance(gpu.get("index"), int):
                gpus.setdefault(gpu["index"], {}).update(gpu)
    return {**gpus}
