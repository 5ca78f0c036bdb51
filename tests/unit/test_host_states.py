"""The states of threads in stretches of time: the native sweep and the one in Python, against the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracepipe.analyses import host_states
from tracepipe.analyses.breakdown import HOOKED, OFF_CPU
from tracepipe.analyses.host_states import ABSENT, IN_CALL, STATES, USER, _Spans
from tracepipe.native import library

LAST = 60
NONE = -1
_IS_IOCTL, _IS_OUTERMOST = 1, 2
Span = tuple[int, int, int, int]
"""Start, end, name, flags."""


def spans_of(flags: st.SearchStrategy[int]) -> st.SearchStrategy[list[Span]]:
    one = st.tuples(st.integers(0, LAST), st.integers(0, 20), st.integers(0, 3), flags)
    return st.lists(one.map(lambda of: (of[0], of[0] + of[1], *of[2:])), max_size=8).map(sorted)


def apart(spans: list[Span]) -> list[Span]:
    """The spans that begin in no other: those of one layer, without what is inside."""
    kept: list[Span] = []
    for one in spans:
        if not kept or one[0] >= max(end for _, end, *_ in kept):
            kept.append(one)
    return kept


def columns(spans: list[Span]) -> _Spans:
    start, end, name, flags = np.array(spans, np.int64).reshape(-1, 4).T
    return _Spans(start, end, name.astype(np.int32), flags.astype(np.uint8))


def truth(of: list[list[Span]], begin: int, until: int) -> dict[tuple[int, int, int], int]:
    """How long each state, call and system call lasts, ns by ns."""
    running, driver, syscalls, calls, hooks = of
    lasting = [one for one in running if one[1] > one[0]]
    found: dict[tuple[int, int, int], int] = {}
    outer_hooks = [
        one for at, one in enumerate(hooks) if one[0] >= max((end for _, end, *_ in hooks[:at]), default=-1)
    ]

    def named(spans: list[Span], ts: int) -> int | None:
        """The last that began, if it has not ended."""
        begun = [one for one in spans if one[0] <= ts]
        return begun[-1][2] if begun and ts < begun[-1][1] else None

    def inside(spans: list[Span], ts: int) -> bool:
        return any(start <= ts < end for start, end, *_ in spans)

    for ts in range(begin, until):
        call, hook = named(calls, ts), named(outer_hooks, ts)
        syscall = named([one for one in syscalls if one[3] & _IS_OUTERMOST], ts)
        state = IN_CALL if call is not None else HOOKED if hook is not None else USER
        if inside([one for one in syscalls if one[3] & _IS_IOCTL], ts):
            state = "ioctl"
        if inside([one for one in syscalls if not one[3] & _IS_IOCTL], ts):
            state = "other system calls"
        if inside(driver, ts):
            state = "driver"
        if running:
            first, last = min(one[0] for one in running), max(one[1] for one in running)
            begun = lasting and lasting[0][0] <= ts < max(one[1] for one in lasting)
            if begun and not inside(lasting, ts):
                state = OFF_CPU
            if not first <= ts < last:
                state = ABSENT
            if ts >= last and not call is hook is syscall is None:
                state = OFF_CPU
        name = hook if call is None else call
        key = (
            STATES.index(state),
            NONE if name is None else name,
            NONE if name is not None or syscall is None else syscall,
        )
        found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.parametrize("core", ["native", "pure"])
@given(
    of=st.tuples(
        spans_of(st.just(0)),
        spans_of(st.just(0)),
        spans_of(st.sampled_from([0, 1, 2, 3])),
        spans_of(st.just(2)).map(apart),
        spans_of(st.just(2)),
    ),
    edges=st.lists(st.integers(0, LAST + 30), min_size=2, max_size=8, unique=True).map(sorted),
)
def test_each_ns_counts_once_for_the_innermost_state(core: str, of: Any, edges: list[int]) -> None:
    if core == "native" and library() is None:
        pytest.skip("the native core is not compiled here")
    spans = [columns(one) for one in of]
    starts, ends = np.array(edges[:-1:2]), np.array(edges[1::2])
    starts = starts[: len(ends)]
    runs = host_states.runs_of(spans[0])
    if core == "native":
        native = library()
        assert native is not None
        rows = host_states._swept_by(native, spans, runs, starts, ends)
    else:
        rows = host_states._swept(spans, runs, starts, ends)
    for stretch, (begin, until) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        own = rows["stretch"] == stretch
        keys = zip(*(rows[name][own].tolist() for name in ("state", "call", "syscall")), strict=True)
        found = dict(zip(keys, rows["dur_ns"][own].tolist(), strict=True))
        assert found == truth(of, begin, until)
