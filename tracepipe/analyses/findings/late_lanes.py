"""The finding about lanes that exit later than their warp: which threads they are, how late, and why."""

from __future__ import annotations

from typing import NamedTuple

from tracepipe.analyses.findings.finding import MIN_SAVED, Finding, confidence, listed, percent
from tracepipe.analyses.findings.kernel_warps import LANES, KernelWarps
from tracepipe.analyses.findings.stride import LANES_CAUSE
from tracepipe.reports.frames.arrays import Floats, Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.units import agree, duration_text

STRIDES = (2, 4, 8, 16)
"""Moduli of lanes that are tried: banks, sectors and vector widths are powers of two."""
MOST_AT_EDGE = LANES // 4
"""The most lanes at an end of the warp that a boundary affects; more of them are a part of the warp."""

BRANCH_CAUSE = (
    "a branch that the lanes of a warp take differently, or loops whose length differs from lane to lane; "
    "the warp runs each path in turn, while lanes that have exited stay idle"
)
BOUNDARY_CAUSE = (
    "a boundary that only {these}, such as the first or last element of a chunk or of the data (bounds "
    "checks, a remainder, an unaligned access), or another branch on the thread index; the warp runs each "
    "path in turn, while lanes that have exited stay idle"
)


class Parted(NamedTuple):
    """Warps whose lanes exit at different times. `rows` are some of them, `warps_apart` is their number;
    `delays` has a value for each of `rows`, or for all of them. `share` is the share of the warps in which
    exactly the lanes of `mask` are late."""

    rows: Ints
    warps_apart: int
    delays: Floats
    idle_share: float
    mask: int
    share: float
    p_value: float | None = None
    step_ns: float = 0.0
    """The time between two neighbouring lanes that read the clock in turn; the delays do not contain it."""


def finding_of(kernel: KernelWarps, parted: Parted, place: str) -> Finding:
    """Return the finding. `place` is "first" or "last" where only that warp of the grid is affected."""
    lanes = [lane for lane in range(LANES) if parted.mask >> lane & 1]
    seen = _seen_lanes(kernel, parted.rows)
    stride = stride_of(lanes, seen) if kernel.lanes_timed else None
    delay = float(np.median(parted.delays))
    share = delay / max(kernel.warp_scale_ns, 1.0)
    # Where most lanes exit last, the few that exit first are named.
    is_early = not kernel.lanes_timed and len(lanes) > len(seen) / 2
    named = [lane for lane in seen if lane not in lanes] if is_early else lanes
    order, than = ("first", "before") if is_early else ("last", "after")
    which = (
        f"{agree(len(named), 'lane|lanes')} {listed(named)} ({_which(kernel, parted, named, stride, seen)})"
    )
    evidence = (
        f"{_where(kernel, parted, place)} the lanes exit at different times: {which} {order}{_most(parted)}, "
        f"{duration_text(delay)} {than} the others{_in_turn(parted)}{_worth(kernel, share)}"
        f"{_rest(kernel, parted)}"
    )
    numbers = {
        "of": f"{place} warp of the grid" if place else "warps",
        "warps": int(kernel.launch.size),
        "warps_apart": parted.warps_apart,
        "late_lanes_mask": parted.mask,
        "late_lanes": lanes,
        "late_mask_share": parted.share,
        "stride": stride[0] if stride else None,
        "delay_p50_ns": delay,
        "delay_p95_ns": float(np.quantile(parted.delays, 0.95)),
        "delay_share": share,
        "lane_step_ns": parted.step_ns,
        "idle_lane_share": parted.idle_share if kernel.has_entries else None,
    }
    cause = LANES_CAUSE if stride else _cause(named, seen)
    # With fewer idle lanes, only the time between the exits is stated, not the possible saving.
    saves = None if place or parted.idle_share < MIN_SAVED else parted.idle_share
    return Finding("divergence", kernel.kernel, evidence, cause, parted.p_value, numbers, saves)


def stride_of(lanes: list[int], seen: list[int]) -> tuple[int, int] | None:
    """The modulus and residue where `lanes` are all lanes of `seen` with that residue, and not all of `seen`;
    else None.
    """
    if not 1 < len(lanes) < len(seen):
        return None
    for modulus in STRIDES:
        residue = lanes[0] % modulus
        if [lane for lane in seen if lane % modulus == residue] == lanes:
            return modulus, residue
    return None


def _seen_lanes(kernel: KernelWarps, rows: Ints) -> list[int]:
    """Lanes whose exits were recorded in these warps."""
    is_seen = np.zeros(kernel.launch.size, np.bool_)
    is_seen[rows] = True
    mask = int(np.bitwise_or.reduce(kernel.exit_mask[is_seen[kernel.exit_warp]]))
    return [lane for lane in range(LANES) if mask >> lane & 1]


def _where(kernel: KernelWarps, parted: Parted, place: str) -> str:
    total = int(kernel.launch.size)
    if place:
        of = f" of {parted.warps_apart:,} launches" if parted.warps_apart > 1 else ""
        return f"In the {place} warp of the grid{of}"
    if total == 1:
        return "In the one warp that was recorded"
    return f"In {parted.warps_apart:,} of {total:,} warps"


def _which(
    kernel: KernelWarps, parted: Parted, lanes: list[int], stride: tuple[int, int] | None, seen: list[int]
) -> str:
    words = [f"mask {sum(1 << lane for lane in lanes):#010x}"]
    if stride:
        words.append(f"t mod {stride[0]} = {stride[1]}")
    if len(seen) < LANES and kernel.lanes_timed:
        words.append(f"of {len(seen)} that were recorded")
    warp = np.unique(kernel.warp[parted.rows])
    if len(lanes) == 1 and warp.size == 1 and kernel.blocks_known:
        thread = int(warp[0]) * LANES + lanes[0]
        edge = "first" * (thread == 0) or "last" * (thread == kernel.last_thread)
        words.append(f"thread {thread}" + (f", the {edge} of its block" if edge else ""))
    return "; ".join(words)


def _most(parted: Parted) -> str:
    return "" if parted.share > 0.99 else f" in {percent(parted.share)} of them"


def _in_turn(parted: Parted) -> str:
    median = " (median)" if parted.warps_apart > 1 else ""
    return median + (
        f", which exit {duration_text(parted.step_ns)} apart, lane by lane" if parted.step_ns else ""
    )


def _worth(kernel: KernelWarps, share: float) -> str:
    """The delay as a share of `scale_name`, as text; empty for a single warp without an entry."""
    alone = kernel.launch.size == 1 and not kernel.has_entries
    return "" if alone else f", {percent(share)} of {kernel.scale_name}"


def _rest(kernel: KernelWarps, parted: Parted) -> str:
    idle = f"; {percent(parted.idle_share)} of the lanes' time is idle" if kernel.has_entries else ""
    once = "; seen in one warp" if parted.warps_apart == 1 else ""
    return idle + once + ("" if parted.p_value is None else f" ({confidence(parted.p_value)})")


def _cause(lanes: list[int], seen: list[int]) -> str:
    at_edge = lanes in (seen[: len(lanes)], seen[-len(lanes) :])
    if not at_edge or len(lanes) > MOST_AT_EDGE:
        return BRANCH_CAUSE
    return BOUNDARY_CAUSE.format(these="this lane meets" if len(lanes) == 1 else "these lanes meet")
