"""The GPUs of a capture by one number each: a process may see other GPUs, and number them anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tracepipe.capture.gpu.build.driver import uuid_text
from tracepipe.capture.gpu.engines.transport import GPU, text
from tracepipe.capture.gpu.engines.untrusted import Crowded

GPUS_MAX: Final = 256


class GpuNumbers:
    """Numbers of the file by UUID. `known` are those that the header gives."""

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        self._numbers = dict(known or {})
        self._met: dict[int, dict[str, Any]] = {}

    @property
    def met(self) -> list[dict[str, Any]]:
        """The GPUs that a process reported, as a header has them: index, name, uuid, sm_count."""
        return [self._met[number] for number in sorted(self._met)]

    def meet(self, payload: memoryview) -> tuple[int, int]:
        """A GPU by its record: its number in its process, and that of the file. May raise Crowded."""
        index, sm_count, _, _, _, _, raw = GPU.unpack_from(payload)
        uuid = uuid_text(raw)
        if uuid not in self._numbers and len(self._numbers) >= GPUS_MAX:
            raise Crowded
        taken = set(self._numbers.values())
        number = self._numbers.setdefault(
            uuid, index if index < GPUS_MAX and index not in taken else max(taken, default=-1) + 1
        )
        name = text(payload, GPU.size)
        self._met[number] = {"index": number, "name": name, "uuid": uuid, "sm_count": sm_count}
        return index, number


def numbers_of(gpus: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """UUID → number, of GPUs as a header has them; without those whose UUID is not known."""
    return {gpu["uuid"]: gpu["index"] for gpu in gpus if "uuid" in gpu}
