"""A real pair: ten steps of JAX, as eBPF probes and as XLA's own profiler recorded them."""

from __future__ import annotations

import re

from tests.golden.cases import FIXTURES
from tests.golden.merged import anchors_of, converted
from tests.support.trace_processor import RealTraceProcessor

PAIR = [str(FIXTURES / "merged-jax" / name) for name in ("probes.jsonl.zst", "vm.xplane.pb.zst")]
# XLA calls a launch by its kernel, which the probes have as an argument of the driver's call.
INSIDE = """
    with calls as (
        select slice.*, extract_arg(slice.arg_set_id, 'debug.kernel') as kernel,
            extract_arg(slice.arg_set_id, 'debug.correlation_id') as correlation
        from slice join thread_track on thread_track.id = track_id
    )
    select count(distinct inner.id) as launches from calls as inner
    join calls as outer on outer.name = 'cuLaunchKernelEx' and outer.kernel = inner.name
    where inner.correlation is not null
      and inner.ts >= outer.ts and inner.ts + inner.dur <= outer.ts + outer.dur
"""
ARROWS = """
    select count(*) as arrows from flow join slice as call on call.id = slice_out
    join slice as kernel on kernel.id = slice_in where call.name = kernel.name
"""


def test_launches_by_their_kernels_put_the_clocks_together() -> None:
    _, account = converted(PAIR)
    probes, (_, bound_ns, by) = anchors_of(account)
    assert probes == (0, 0, "its clock is that of all")
    assert re.fullmatch(
        r"29 launches by kernel that probes\.jsonl\.zst recorded too, 546 ns from where "
        r"CLOCK_REALTIME of a host that is not named puts it",
        by,
    )
    assert bound_ns == 715


def test_each_launch_of_xla_lies_in_that_of_the_probes_and_leads_to_its_kernel() -> None:
    with RealTraceProcessor(converted(PAIR, "perfetto")[0]) as asked:
        assert asked.rows(INSIDE) == [{"launches": 30}]
        assert asked.rows(ARROWS) == [{"arrows": 30}]
        assert asked.problems() == []
