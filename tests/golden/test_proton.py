"""What Triton Proton's timelines say is in the traces made of them, by the real trace processor."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from typing import Any

from tests.golden.both import converted
from tests.golden.cases import FIXTURES
from tests.support.trace_processor import RealTraceProcessor

_SLICES = "select name, ts, dur from slice where category not in ('tracepipe')"
_FLOWS = """
select f.ts as start_ns, t.ts as end_ns, t.name from flow
join slice f on f.id = slice_out join slice t on t.id = slice_in"""


def events(case: str) -> list[dict[str, Any]]:
    text = (FIXTURES / case / "input.json").read_text()
    found: list[dict[str, Any]] = json.loads(text, parse_float=Decimal)["traceEvents"]
    return found


def ns(us: Decimal | int) -> int:
    return int(us * 1000)


def test_every_scope_kernel_and_flow_is_there() -> None:
    output, account = converted(FIXTURES / "proton-kernels" / "input.json", "perfetto")
    assert account.skipped == 0
    source = events("proton-kernels")
    wanted = Counter((one["name"], ns(one["ts"]), ns(one["dur"])) for one in source if one["ph"] == "X")
    ends = [ns(one["ts"]) for one in source if one["ph"] in "sf"]
    with RealTraceProcessor(output) as tp:
        assert tp.problems() == []
        found = Counter((row["name"], row["ts"], row["dur"]) for row in tp.rows(_SLICES))
        flows = [(row["start_ns"], row["end_ns"]) for row in tp.rows(_FLOWS)]
    # The row of a closed GPU shows its kernels too.
    assert wanted - found == Counter()
    assert found.keys() == wanted.keys()
    assert sorted(flows) == sorted(zip(ends[::2], ends[1::2], strict=True))


def test_every_scope_of_a_warp_is_there_at_its_cycle() -> None:
    output, account = converted(FIXTURES / "proton-warps" / "input.json", "perfetto")
    assert account.skipped == 0
    wanted = Counter((one["name"], ns(one["ts"]), ns(one["dur"])) for one in events("proton-warps"))
    with RealTraceProcessor(output) as tp:
        assert tp.problems() == []
        found = Counter((row["name"], row["ts"], row["dur"]) for row in tp.rows(_SLICES))
    assert wanted - found == Counter()
    # Beyond them each warp has a slice for its life.
    assert sum((found - wanted).values()) == 24
    assert all(name.startswith("matmul block ") for name, _, _ in found - wanted)
