"""A real pair: ten steps of JAX, as eBPF probes and as XLA's own profiler recorded them."""

from __future__ import annotations

import re

from tests.golden.cases import FIXTURES
from tests.golden.merged import anchors_of, converted
from tests.support.trace_processor import RealTraceProcessor

PAIR = [str(FIXTURES / "merged-jax" / name) for name in ("probes.jsonl.zst", "vm.xplane.pb.zst")]
# XLA calls a launch by its kernel, which the probes have as an argument of the driver's call.
LAUNCHES = """
    select count(*) as launches, count(distinct flow.id) as flows,
        sum(kernel.name = extract_arg(call.arg_set_id, 'debug.kernel')) as of_the_kernel,
        count(extract_arg(call.arg_set_id, 'debug.correlation_id')) as with_both_arguments
    from slice as call join thread_track on thread_track.id = call.track_id
    left join flow on flow.slice_out = call.id left join slice as kernel on kernel.id = flow.slice_in
    where call.name = 'cuLaunchKernelEx'
"""
ALONE = """
    select count(*) as count from slice join thread_track on thread_track.id = track_id
    where extract_arg(arg_set_id, 'debug.correlation_id') is not null and slice.name != 'cuLaunchKernelEx'
"""


def test_launches_by_their_kernels_put_the_clocks_together() -> None:
    _, account = converted(PAIR)
    probes, (_, bound_ns, by) = anchors_of(account)
    assert probes == (0, 0, "its clock is the common one")
    assert re.fullmatch(
        r"29 launches by kernel that probes\.jsonl\.zst recorded too, 546 ns from where "
        r"CLOCK_REALTIME of a host that is not named puts it",
        by,
    )
    assert bound_ns == 715


def test_each_launch_of_xla_is_that_of_the_probes_and_leads_to_its_kernel() -> None:
    with RealTraceProcessor(converted(PAIR, "perfetto")[0]) as asked:
        assert asked.rows(LAUNCHES) == [
            {"launches": 30, "flows": 30, "of_the_kernel": 30, "with_both_arguments": 30}
        ]
        assert asked.rows(ALONE) == [{"count": 0}]
        assert asked.problems() == []
