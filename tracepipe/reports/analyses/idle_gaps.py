"""The gaps of a GPU one by one: when, after and before which work, and what the CPU did in each."""

from __future__ import annotations

from typing import Any

from tracepipe.event.columns import NONE
from tracepipe.reports.analyses.gpu_work import Idle, outermost_rows
from tracepipe.reports.analyses.host_states import STATES, UNKNOWN, HostStates
from tracepipe.reports.frames.grouping import equal, grouped
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.shapes import where
from tracepipe.reports.frames.stored import Growing

BETWEEN, FIRST, LAST = "between work", "before the first work", "after the last work"
WHERE = (BETWEEN, FIRST, LAST)
_DOING = (("gap", "i4"), ("state", "u1"), ("call", "i4"), ("syscall", "i4"), ("dur_ns", "i8"))


def gaps_of(run: Run, idle: Idle) -> pl.DataFrame:
    """The gaps of one GPU, with the time before its first work and after its last, and who ended each.

    gpu, where, start_ns, end_ns, dur_ns; previous, following: rows of its work, null for none; call
    (the number of its name), pid, tid, call_end_ns: of the outermost call that asked for what came next
    (after the last work: for the last), told_by.
    """
    own, first_ns, last_ns = idle.work, int(idle.busy.start_ns[0]), int(idle.busy.end_ns[-1])
    last = int(np.argmax(own["end_ns"].to_numpy()))
    starts = np.concatenate(([min(run.facts.start_ns, first_ns)], idle.start_ns, [last_ns]))
    ends = np.concatenate(([first_ns], idle.end_ns, [max(run.facts.end_ns, last_ns)]))
    asked = pl.Series(np.concatenate(([0], idle.following, [last])))
    previous = np.concatenate(([NONE], idle.previous, [last]))
    following = np.concatenate(([0], idle.following, [NONE]))
    places = np.full(len(starts), WHERE.index(BETWEEN), np.uint8)
    places[[0, -1]] = WHERE.index(FIRST), WHERE.index(LAST)
    gaps = pl.DataFrame(
        {
            "gpu": pl.repeat(idle.gpu, len(starts), dtype=pl.Int64, eager=True),
            "where": pl.Series(WHERE, dtype=pl.Enum(WHERE)).gather(places),
            "start_ns": starts,
            "end_ns": ends,
            "dur_ns": ends - starts,
            "previous": where(previous != NONE, pl.Series(previous.astype(np.int32))),
            "following": where(following != NONE, pl.Series(following.astype(np.int32))),
            "told_by": own["told_by"][asked],
            **_outermost(run, own["call"][asked]),
        }
    )
    # Those between work have a length.
    lasts = ends > starts
    return gaps[int(not lasts[0]) : len(gaps) - int(not lasts[-1])]


def _outermost(run: Run, rows: pl.Series) -> dict[str, pl.Series]:
    """The outermost calls around some, null for null: call (number of its name), pid, tid, call_end_ns."""
    calls, tops = run.layer("userspace"), outermost_rows(run, rows)
    known = tops != NONE
    places = where(known, pl.Series(np.maximum(np.cumsum(known) - 1, 0)))
    shapes, end_ns = calls.shape[tops[known]], calls.end_ns[tops[known]]
    names = run.shapes.column("name", shapes)
    found = {
        "call": where(names != NONE, pl.Series(names)),
        "pid": run.shapes.series("pid", shapes),
        "tid": run.shapes.series("tid", shapes),
        "call_end_ns": pl.Series(end_ns),
    }
    return {key: values.gather(places) for key, values in found.items()}


def doing_in(states: HostStates, gaps: pl.DataFrame) -> dict[str, Any]:
    """What the thread that asked for what came next did in each gap: gap, and as `HostStates.of` has them
    state, call, syscall, dur_ns.
    """
    found = {key: Growing(dtype) for key, dtype in _DOING}
    nobody = np.flatnonzero((gaps["tid"].is_null() & gaps["call"].is_null()).to_numpy())
    unknown = {"state": STATES.index(UNKNOWN), "call": NONE, "syscall": NONE}
    for key, column in found.items():
        column.extend(unknown[key] if key in unknown else gaps[key].to_numpy()[nobody], len(nobody))
    asked = np.flatnonzero(gaps["call"].is_not_null().to_numpy())
    # Gaps of several GPUs overlap each other, those of one do not.
    of, _ = equal(*(gaps[key].fill_null(NONE).to_numpy()[asked] for key in ("gpu", "pid", "tid")))
    for _, places in sorted(grouped(of), key=lambda one: one[1][0]):
        own = asked[places]
        pid, tid = gaps["pid"][int(own[0])], gaps["tid"][int(own[0])]
        start_ns, end_ns = (gaps[key].to_numpy()[own] for key in ("start_ns", "end_ns"))
        for spent in states.of((pid, tid), start_ns, end_ns):
            spent["gap"] = own[spent["stretch"]]
            for key, column in found.items():
                column.extend(spent[key], len(spent["gap"]))
    return {key: column.whole() for key, column in found.items()}
