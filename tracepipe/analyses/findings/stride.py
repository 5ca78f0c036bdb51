"""Strides: threads t ≡ r mod m of a block that are later than the rest.

The exits of lanes are ranked within each warp, and the lifetimes of warps within each block. A pattern across
both, such as every 48th thread, is only found within warps. Moduli up to 32 are tried for lanes, and up to
the number of warps in a block for warps.

Where each thread reads the clock, as in kernelretsnoop, the lanes of a warp run the probe in turn, some
nanoseconds apart. This order is an effect of the probe, and is subtracted before a lane is called late.
"""

from __future__ import annotations

from typing import NamedTuple

from tracepipe.analyses.findings.block_times import block_life_ns, first_wave
from tracepipe.analyses.findings.finding import MIN_SHARE, Finding, confidence, percent
from tracepipe.analyses.findings.kernel_warps import LANES, KernelWarps, sample
from tracepipe.analyses.findings.statistics import LateClass, between, late_class, median_with_interval
from tracepipe.event.columns import Floats
from tracepipe.libraries import np
from tracepipe.units import agree, duration_text

APART = 8
"""The distance of the lanes between which the step is measured. Over 8 lanes, a clock of 32 ns shows steps of
4 ns too, and lanes are compared with lanes of the same residue mod 8."""
MIN_PAIRS = 8
MOST_LEFT = 0.5
"""The largest share of the lanes' spread that may remain without the order. Where there is no order, nearly
all of it remains."""


class InTurn(NamedTuple):
    """Times of lanes, shape `(warps, 32)`, less the order of the probe: `step_ns` for each lane, 0 where the
    lanes do not read the clock in turn."""

    times: Floats
    step_ns: float


def without_order(times: Floats) -> InTurn:
    """Lane times, shape `(warps, 32)`, less the probe's order, where that explains most of the spread."""
    pairs = times[:, APART:] - times[:, :-APART]
    known = pairs[~np.isnan(pairs)]
    if known.size < MIN_PAIRS:
        return InTurn(times, 0.0)
    step = float(np.median(known)) / APART
    straight = times - step * np.arange(LANES)
    if not step or _spread(straight) > MOST_LEFT * _spread(times):
        return InTurn(times, 0.0)
    return InTurn(straight, step)


def _spread(times: Floats) -> float:
    """The median distance of all lanes from the median of their warp."""
    timed = ~np.isnan(times).all(axis=1)
    middle = np.nanmedian(times[timed], axis=1, keepdims=True)
    return float(np.nanmedian(np.abs(times[timed] - middle)))


MIN_WARPS = 4
"""A block with fewer warps has no classes of warps."""

MIN_FIRST = 64
"""The least number of blocks that started with a launch for only their warps to be compared."""

LANES_CAUSE = (
    "the array index that these threads use: shared-memory bank conflicts, uncoalesced or misaligned access, "
    "or a branch on the thread index"
)
WARPS_CAUSE = (
    "work that only these warps do, such as the last step of a reduction or the loads of a tile, or a larger "
    "share of the data"
)


def lacks(kernel: KernelWarps) -> str | None:
    """Why strides cannot be looked for; None where they can."""
    if not bool((kernel.exits > 1).any()) and kernel.warps_of_a_block < MIN_WARPS:
        return "the lanes of each warp exit together, and a block has fewer than 4 warps"
    return None


def find(kernel: KernelWarps, alpha: float) -> list[Finding]:
    """Return at most one finding within warps and one within blocks, each tried at half of `alpha`."""
    return [*_lanes(kernel, alpha / 2), *_warps(kernel, alpha / 2)]


def _lanes(kernel: KernelWarps, alpha: float) -> list[Finding]:
    # In warps whose lanes exited together no lane was late: where most warps are such, the median is 0.
    if kernel.diverges.mean() < 0.5 or kernel.exits_by_patches:
        return []
    rows = sample(np.flatnonzero(kernel.diverges))
    times = kernel.lane_times(rows)
    usable = (~np.isnan(times)).sum(axis=1) > 1
    if not usable.any():
        return []
    rows, times = rows[usable], without_order(times[usable]).times
    threads = kernel.warp[rows][:, None] * LANES + np.arange(LANES)
    late = late_class(times, threads, range(2, LANES + 1))
    if late is None or late.p_value > alpha:
        return []
    if np.unique(np.nonzero(late.members)[1]).size == 1:
        return []  # one lane of each warp is late: divergence reports that
    return _finding(kernel, late, times, 1, "warp|warps", LANES_CAUSE)


def _warps(kernel: KernelWarps, alpha: float) -> list[Finding]:
    count = kernel.warps_of_a_block
    if count < MIN_WARPS:
        return []
    # Warps of a later block share their schedulers with what earlier blocks have left there: on an H200, of
    # eight warps with every fourth late, every second one was, as blocks took the places of halves of others.
    rows = first_wave(kernel)
    times = kernel.warp_times(rows if rows.size >= MIN_FIRST else None)
    times = times[(~np.isnan(times)).sum(axis=1) >= MIN_WARPS]
    if not times.size:
        return []
    positions = np.broadcast_to(np.arange(count), times.shape)
    late = late_class(times, positions, range(2, count + 1))
    if late is None or late.p_value > alpha:
        return []
    return _finding(kernel, late, times, LANES, "block|blocks", WARPS_CAUSE)


def _finding(
    kernel: KernelWarps, late: LateClass, times: Floats, unit: int, rows: str, cause: str
) -> list[Finding]:
    """The finding from times of shape `(rows, positions)`; a position is of `unit` threads."""
    delays = between(times, late.members, np.nanmean)
    delays = delays[~np.isnan(delays)]
    delay, low, high = median_with_interval(delays)
    scale = kernel.warp_scale_ns
    if delay < max(MIN_SHARE * scale, kernel.least_ns):
        return []
    residues = " or ".join(str(r) for r in late.residues)
    what, letter, of = ("Threads t", "t", "threads") if unit == 1 else ("Warps w of a block", "w", "warps")
    known = np.isfinite(low) and np.isfinite(high)
    interval = f" (95% interval: {duration_text(low)} to {duration_text(high)})" if known else ""
    evidence = (
        f"{what} with {letter} mod {late.modulus} = {residues} exit {duration_text(delay)}{interval} after "
        f"the others, {percent(delay / max(scale, 1.0))} of {kernel.scale_name}: seen in {delays.size:,} "
        f"{agree(delays.size, rows)} of {times.shape[1]} {of} ({confidence(late.p_value)})"
    )
    numbers = {
        "of": of,
        "modulus_threads": late.modulus * unit,
        "modulus": late.modulus,
        "residues": late.residues,
        "delay_p50_ns": delay,
        "delay_low_ns": low if known else None,
        "delay_high_ns": high if known else None,
        "delay_share": delay / max(scale, 1.0),
        "rows": int(delays.size),
    }
    # A block lasts as long as its late warps.
    of_block = block_life_ns(kernel) if unit != 1 else 0.0
    saves = delay / max(scale, of_block, 1.0)
    return [Finding("stride", kernel.kernel, evidence, cause, late.p_value, numbers, saves)]
