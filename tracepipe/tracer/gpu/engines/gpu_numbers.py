"""Gives each GPU of a capture one number, as processes may see different GPUs and number them differently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tracepipe.tracer.gpu.build.driver import limits_of, uuid_text
from tracepipe.tracer.gpu.engines.transport import GPU, text
from tracepipe.tracer.gpu.engines.untrusted import Crowded

GPUS_MAX: Final = 256


class GpuNumbers:
    """UUID → number in the file. `known` are those of the header."""

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        self._numbers = dict(known or {})
        self._reported: dict[int, dict[str, Any]] = {}

    @property
    def reported(self) -> list[dict[str, Any]]:
        """The GPUs that processes reported, in the form of a header: index, name, uuid, sm_count, limits."""
        return [self._reported[number] for number in sorted(self._reported)]

    def add(self, payload: memoryview) -> tuple[int, int]:
        """Add a GPU by its record; its number in its process, and in the file. May raise Crowded."""
        index, sm_count, major, minor, _, *limits, raw = GPU.unpack_from(payload)
        uuid = uuid_text(raw)
        if uuid not in self._numbers and len(self._numbers) >= GPUS_MAX:
            raise Crowded
        taken = set(self._numbers.values())
        number = self._numbers.setdefault(
            uuid, index if index < GPUS_MAX and index not in taken else max(taken, default=-1) + 1
        )
        name = text(payload, GPU.size)
        about = {"index": number, "name": name, "uuid": uuid, "sm_count": sm_count}
        self._reported[number] = about | limits_of(major, minor, *limits)
        return index, number


def numbers_of(gpus: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """UUID → number, of GPUs in the form of a header; GPUs without a known UUID are left out."""
    return {gpu["uuid"]: gpu["index"] for gpu in gpus if "uuid" in gpu}
