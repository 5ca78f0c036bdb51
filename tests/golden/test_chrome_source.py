"""What stands in a trace of PyTorch is in the one that is made of it, by the real trace processor: every
whole slice with its name, start and length, and every flow, to the nanosecond.
"""

from __future__ import annotations

import json
from collections import Counter
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.golden.both import converted
from tests.golden.cases import FIXTURES
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.event.model import NAME_BYTES_MAX
from tracepipe.kernel_names import kernel_title

_CALLS = ("cuda_runtime", "cuda_driver")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_FLOWS = """
select f.ts as start_ns, t.ts as end_ns from flow
join slice f on f.id = slice_out join slice t on t.id = slice_in"""


class Source:
    """A trace as it stands in its file."""

    def __init__(self, path: Path) -> None:
        whole = json.loads(path.read_text(), parse_float=Decimal)
        self.base_ns = whole.get("baseTimeNanoseconds", 0)
        self.events: list[dict[str, Any]] = whole["traceEvents"]

    def ns(self, us: Any) -> int:
        return int((Decimal(us) * 1000).to_integral_value(ROUND_HALF_UP))

    def slices(self) -> Counter[tuple[str, int, int]]:
        return Counter(
            (_name(event), self.base_ns + self.ns(event["ts"]), self.ns(event["dur"]))
            for event in self.events
            if event["ph"] == "X"
        )

    def flows(self) -> Counter[tuple[int, int]]:
        """Those of events, and those from calls to what they launched."""
        starts = {(event["cat"], event["id"]): event for event in self.events if event["ph"] == "s"}
        pairs = [
            (starts[event["cat"], event["id"]], event)
            for event in self.events
            if event["ph"] == "f" and event["cat"] == "fwdbwd" and (event["cat"], event["id"]) in starts
        ]
        calls = {self._correlation(event): event for event in self.events if event.get("cat") in _CALLS}
        pairs += [
            (calls[self._correlation(event)], event)
            for event in self.events
            if event.get("cat") in _WORK and self._correlation(event) in calls
        ]
        return Counter(
            (self.base_ns + self.ns(one["ts"]), self.base_ns + self.ns(two["ts"])) for one, two in pairs
        )

    @staticmethod
    def _correlation(event: dict[str, Any]) -> int:
        correlation: int = event["args"]["correlation"]
        return correlation


def _name(event: dict[str, Any]) -> str:
    name: str = event["name"]
    if event.get("cat") == "gpu_memcpy":
        return name.split()[1]
    if event.get("cat") == "kernel":
        return kernel_title(name[:NAME_BYTES_MAX])
    return "memset" if event.get("cat") == "gpu_memset" else name[:NAME_BYTES_MAX]


@pytest.mark.parametrize(
    ("case", "flows_there"),
    [("kineto-mi250", 16), ("kineto-b200-overlaps", 0), ("kineto-integer-times", 0)],
)
def test_every_slice_and_flow_is_there_at_its_nanosecond(case: str, flows_there: int) -> None:
    path = FIXTURES / case / "input.json"
    source = Source(path)
    output, account = converted(path, "perfetto")
    assert account.skipped == 0
    with RealTraceProcessor(output) as tp:
        assert tp.problems() == []
        slices = Counter((row["name"], row["ts"], row["dur"]) for row in tp.rows("select * from slice"))
        flows = Counter((row["start_ns"], row["end_ns"]) for row in tp.rows(_FLOWS))
    assert source.slices() - slices == Counter()
    assert source.flows() - flows == Counter()
    assert source.flows().total() == flows_there
