"""Reads the members around the events of Chrome's trace format: who wrote the file, and on which clock.

PyTorch's profiler (Kineto)   CLOCK_REALTIME, often after `baseTimeNanoseconds`
VizTracer                     CLOCK_MONOTONIC; its `baseTimeNanoseconds` is how far CLOCK_REALTIME is ahead
others                        CLOCK_REALTIME where they state a base, else their own clock
"""

from __future__ import annotations

import re
from typing import Any, Final

from tracepipe.event.model import ID_LIMIT, MONOTONIC, TIME_LIMIT_NS, Header, new_header
from tracepipe.launchers import RANK_MAX
from tracepipe.readers.chrome_events import ChromeEvents
from tracepipe.readers.chrome_kinds import Kinds
from tracepipe.readers.chrome_numbers import Ids, ns_of_text
from tracepipe.readers.chrome_proton import ProtonKinds
from tracepipe.readers.json_elements import JsonElements

CLOCK: Final = "trace"
BASE: Final = "baseTimeNanoseconds"
OF_KINETO: Final = frozenset({"schemaVersion", "deviceProperties", "distributedInfo"})
VIZTRACER: Final = "viztracer_metadata"
_KINETO_EVENT = re.compile(
    rb'"cat"\s*:\s*"(?:cpu_op|cuda_runtime|gpu_memcpy|user_annotation|python_function)"'
)
_VIZTRACER_EVENT = re.compile(rb'"cat"\s*:\s*"(?:FEE|fee)"')
_PROTON_EVENT = re.compile(rb'"call_stack"\s*:\s*\[\s*"ROOT"')
_OF_AMD = re.compile(r"AMD|Radeon|Instinct|gfx", re.IGNORECASE)
_OF_SM: Final = {
    "regsPerMultiprocessor": "registers_per_sm",
    "sharedMemPerMultiprocessor": "shared_bytes_per_sm",
}
_SHOWN = (
    "schemaVersion",
    "traceName",
    "trace_id",
    "cuda_runtime_version",
    "cuda_driver_version",
)


class ChromeHeader:
    """The meaning of the members around the events, as far as they were read."""

    def __init__(self, elements: JsonElements) -> None:
        self._members = elements.members
        has_members = not OF_KINETO.isdisjoint(self._members)
        self.is_kineto = has_members or elements.sees(_KINETO_EVENT)
        self._sees_viztracer = VIZTRACER in self._members or elements.sees(_VIZTRACER_EVENT)
        self.is_proton = not self.is_kineto and elements.sees(_PROTON_EVENT)
        self.is_after_events = self._sees_viztracer or (self.is_kineto and not has_members)
        """Whether the clock is known only when all events are read. VizTracer writes its members after them,
        and may have PyTorch's events before its own, with times on its clock."""

    @property
    def is_viztracer(self) -> bool:
        """Whether VizTracer wrote it."""
        return self._sees_viztracer or VIZTRACER in self._members

    def kinds(self, ids: Ids) -> Kinds:
        """The kinds of its events."""
        if self.is_proton:
            return ProtonKinds(ids)
        return Kinds(
            ids, is_kineto=self.is_kineto, is_viztracer=self.is_viztracer, rank=self._place().get("rank", 0)
        )

    def _of_viztracer(self) -> dict[str, Any]:
        stated = self._members.get(VIZTRACER)
        return stated if type(stated) is dict else {}

    @property
    def is_overflown(self) -> bool:
        """Whether VizTracer's buffer was full, so that it has only the last events."""
        return self._of_viztracer().get("overflow") is True

    @property
    def marker_ns(self) -> int | None:
        """When the program set VizTracer's marker."""
        marker = self._of_viztracer().get("sync_marker")
        return ns_of_text(repr(marker)) if type(marker) in (int, float) else None

    def _base_ns(self) -> int:
        base = self._members.get(BASE, self._of_viztracer().get(BASE))
        return base if type(base) is int and 0 < base < 1 << 62 else 0

    def clock(self, events: ChromeEvents) -> str:
        """The clock of the times."""
        if self.is_viztracer:
            # In files that were combined by their starts or markers, times count from there.
            is_aligned = events.least_ns <= 0 or events.last_ns < (self.marker_ns or 0) // 2
            return CLOCK if is_aligned else MONOTONIC
        return "realtime" if self.is_kineto or self._base_ns() else CLOCK

    def ahead_ns(self, events: ChromeEvents, clock: str) -> int:
        """The offset to add to each time, ns."""
        if clock == CLOCK:
            return max(0, -events.least_ns)
        base_ns = 0 if clock == MONOTONIC else self._base_ns()
        # Times that count from the base are far below it. These are absolute.
        return 0 if base_ns // 2 <= events.first_ns < TIME_LIMIT_NS else base_ns

    def header(self, events: ChromeEvents, clock: str) -> Header:
        """The header of the recording."""
        members = self._members
        fields: dict[str, Any] = {"clock": clock, "clocks": [clock]}
        first_ns, base_ns = events.first_ns, self._base_ns()
        if clock == MONOTONIC and base_ns and first_ns + base_ns < TIME_LIMIT_NS:
            fields["start"] = {"monotonic_ns": first_ns, "realtime_ns": first_ns + base_ns}
        if type(members.get("host_name")) is str:
            fields["host"] = members["host_name"]
        gpus = members.get("deviceProperties")
        if type(gpus) is list and gpus:
            fields["gpus"] = [
                _gpu(gpu)
                for gpu in gpus
                if type(gpu) is dict and type(gpu.get("id")) is int and 0 <= gpu["id"] <= ID_LIMIT
            ]
        fields |= self._place()
        if options := self._options():
            fields["options"] = options
        if self.is_viztracer:
            fields["engine"] = f"VizTracer {self._of_viztracer().get('version', '')}".rstrip()
        elif self.is_kineto or self.is_proton:
            fields["engine"] = "PyTorch's profiler (Kineto)" if self.is_kineto else "Triton Proton"
        return new_header(**fields)

    def _options(self) -> dict[str, Any]:
        members = self._members
        options = {key: members[key] for key in _SHOWN if type(members.get(key)) in (str, int)}
        if "backend" in (info := self._distributed()):
            options["backend"] = info["backend"]
        return options

    def _place(self) -> dict[str, int]:
        """The rank of the process among those that train together, and how many they are."""
        info = self._distributed()
        bounds = (("rank", 0, RANK_MAX), ("world_size", 1, RANK_MAX + 1))
        return {
            key: info[key]
            for key, low, high in bounds
            if type(info.get(key)) is int and low <= info[key] <= high
        }

    def _distributed(self) -> dict[str, Any]:
        info = self._members.get("distributedInfo")
        return info if type(info) is dict else {}


def _gpu(stated: dict[str, Any]) -> dict[str, Any]:
    """A GPU in the form of a header. Of AMD's, the numbers of compute capabilities mean something else."""
    gpu = {"index": stated["id"], "name": str(stated.get("name", "")), "sm_count": stated.get("numSms")}
    if not gpu["name"] or _OF_AMD.search(gpu["name"]):
        return gpu
    capability = stated.get("computeMajor"), stated.get("computeMinor")
    if all(type(number) is int for number in capability):
        gpu["compute_capability"] = "{}.{}".format(*capability)
    return gpu | {new: stated[old] for old, new in _OF_SM.items() if type(stated.get(old)) is int}
