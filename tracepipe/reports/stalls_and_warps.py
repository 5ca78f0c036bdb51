"""The stall samples and the warps of the same kernels side by side, from two recordings.

A process can record only one of the two, so the kernels are matched by name, and by grid and block where both
recordings have these. Warps wait at a barrier for others of their block, for memory where too few other warps
are there, and so on: what belongs together becomes a sentence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tracepipe.analyses.findings import find_all
from tracepipe.analyses.findings.finding import Finding
from tracepipe.analyses.findings.kernels import kernels_of
from tracepipe.analyses.findings.waves import mean_active_warps
from tracepipe.analyses.occupancy import Achieved, achieved_table
from tracepipe.event.counters import SELECTED, stall_group
from tracepipe.kernel_names import kernel_title, short_kernel_name
from tracepipe.libraries import np
from tracepipe.reports.report import Column, Drawing, Table, sentences
from tracepipe.store.run import Run
from tracepipe.units import counted, duration_text

FEW_SAMPLES: Final = 400
"""With fewer samples, chance dominates the shares: with 400, a share of 25% varies from 21% to 29% in 19 of
20 runs."""
# The least shares of the samples, in percent, that are related to a finding.
_BARRIER, _MEMORY, _BRANCHES, _ISSUE = 10, 30, 5, 20
# The largest share of the warps that an SM can hold which counts as few, in percent, and the least skew of a
# block's warps by their life which counts as much.
_FEW_WARPS, _MUCH_SKEW = 50, 5
_KERNELS_MOST: Final = 20
_Shape = tuple[tuple[int, ...] | None, tuple[int, ...] | None]
_COLUMNS: Final = (
    Column("kernel", "kernel"),
    Column("grid", "grid", spare=True),
    Column("samples", "samples", "count"),
    Column("reason", "main reason"),
    Column("reason_percent", "share", "percent"),
    Column("active_warps_per_sm", "warps/SM", "number"),
    Column("theoretical_warps_per_sm", "allowed", "number"),
    Column("skew_p50_ns", "skew", "ns"),
    Column("findings", "findings"),
)


@dataclass(slots=True)
class _Kernel:
    """A kernel of both recordings: its samples by reason, and what its warps show."""

    name: str
    grid: tuple[int, int, int] | None
    same_launch: bool | None
    samples: Counter[str]
    skew_ns: int | None = None
    skew_percent: float | None = None
    findings: list[Finding] = field(default_factory=list)
    occupancy: dict[str, Any] = field(default_factory=dict)

    def percent(self, *reasons: str) -> float:
        """The share of some reasons in the samples."""
        return 100 * sum(self.samples[reason] for reason in reasons) / max(self.samples.total(), 1)

    def group_percent(self, group: str) -> float:
        """The share of a group of reasons."""
        return self.percent(*(reason for reason in self.samples if stall_group(reason) == group))

    @property
    def reason(self) -> str | None:
        """The main reason for which its warps wait; None where none waits."""
        waiting = [reason for reason, count in self.samples.items() if reason != SELECTED and count]
        return min(waiting, key=lambda why: (-self.samples[why], why), default=None)

    def found(self, kind: str, of: str | None = None) -> Finding | None:
        """The first finding of a kind, of warps or blocks (`of`)."""
        fits = (one for one in self.findings if one.kind == kind and of in (None, one.numbers.get("of")))
        return next(fits, None)


def side_by_side(stalls: Run, warps: Run, names: Iterable[str]) -> tuple[list[Table | Drawing], list[str]]:
    """Tables and sentences about kernels of both recordings, and notes. `names` are those of the kernels that
    are wanted, in short or in full.
    """
    wanted = {short_kernel_name(name) for name in names}
    kernels, left_out = _kernels(stalls, warps, wanted)
    if not kernels:
        return [], [_nothing_common(stalls, warps)]
    rows = [_row(kernel) for kernel in kernels]
    note = (
        "Samples and main reason: of the recording of stall reasons. The rest: of the recording of warps. "
        "Warps/SM: the mean number of active warps of an SM; allowed: the most that the launch allows. Skew: "
        "the median skew of the warps of a block."
    )
    table = Table("beside", "Stall reasons and what warps show", _COLUMNS, rows, note)
    return [table, _together(kernels)], [*_notes(kernels, left_out)]


def _nothing_common(stalls: Run, warps: Run) -> str:
    if not len(stalls.stall_table):
        return (
            "the recording for stall reasons has none: tracepipe capture --gpu-stalls -- COMMAND samples them"
        )
    if not len(warps.warp_table) and not len(warps.layer("gpu_thread")):
        return "the recording for warps has none: tracepipe capture --gpu warps -- COMMAND records them"
    return "the recordings of stall reasons and of warps have none of these kernels in common"


def _kernels(stalls: Run, warps: Run, wanted: set[str]) -> tuple[list[_Kernel], int]:
    """The kernels of both recordings with the most warps, and how many others there are."""
    samples: dict[str, Counter[str]] = {}
    for name, counts in stalls.stall_table.functions.items():
        samples.setdefault(short_kernel_name(name), Counter()).update(counts)
    common = wanted & samples.keys()
    if not common:
        return [], 0
    every = kernels_of(warps, f"^(?:{'|'.join(map(re.escape, sorted(common)))})$", None)
    shown = every.first(_KERNELS_MOST)
    if not len(shown):
        return [], 0
    launched, achieved, made = _launched(stalls, common), list[Achieved](), list[_Kernel]()
    for kernel in shown:
        shapes = launched.get(kernel.kernel)
        same = None if not shapes else (kernel.grid, kernel.block_size) in shapes
        one = _Kernel(kernel.kernel, kernel.grid, same, samples[kernel.kernel])
        made.append(one)
        if kernel.has_exits and kernel.blocks_known and kernel.warps_of_a_block >= 2:
            skew_ns = float(np.median(kernel.blocks.skew_ns))
            one.skew_ns = round(skew_ns)
            if kernel.has_entries and kernel.warp_scale_ns:
                one.skew_percent = 100 * skew_ns / kernel.warp_scale_ns
        if (active := mean_active_warps(kernel)) is not None:
            title = str(len(made))
            achieved.append(Achieved(kernel.kernel, title, kernel.gpu, kernel.block_size, None, active))
    for row in achieved_table(warps, achieved, stalls).lazily():
        made[int(row["kernel"]) - 1].occupancy = row
    for active_of in achieved:
        about = made[int(active_of.title) - 1].occupancy
        about.setdefault("active_warps_per_sm", active_of.active_warps_per_sm)
    for finding in find_all(shown).findings:
        for one in made:
            if (one.name, one.grid) == (finding.kernel, finding.grid):
                one.findings.append(finding)
    # Where some launches are those that were sampled, others of the kernel are left out.
    sampled = {one.name for one in made if one.same_launch}
    return [one for one in made if one.same_launch or one.name not in sampled], len(every) - len(shown)


def _launched(run: Run, names: set[str]) -> dict[str, set[_Shape]]:
    """The grids and blocks of the launches of some kernels."""
    numbers = {run.shapes.number_of("name", name): name for name in names}
    shapes = np.flatnonzero(run.used_shapes("gpu_kernel")).astype(np.int32)
    of = run.shapes.column("name", shapes)
    shapes, of = (column[np.isin(of, list(numbers))] for column in (shapes, of))
    found: dict[str, set[_Shape]] = {}
    for name, grid, block in zip(of.tolist(), *run.shapes.sizes(shapes), strict=True):
        if grid and block:
            found.setdefault(numbers[name], set()).add((grid, block))
    return found


def _row(one: _Kernel) -> tuple[Any, ...]:
    reason, about = one.reason, one.occupancy
    return (
        kernel_title(one.name),
        "×".join(map(str, one.grid)) if one.grid else None,
        one.samples.total(),
        reason,
        one.percent(reason) if reason else None,
        about.get("active_warps_per_sm"),
        about.get("theoretical_warps_per_sm"),
        one.skew_ns,
        ", ".join(dict.fromkeys(finding.kind for finding in one.findings)) or None,
    )


def _together(kernels: list[_Kernel]) -> Drawing:
    data = [
        {
            "kernel": kernel_title(one.name),
            "grid": one.grid,
            "reasons": reasons,
            "share_percent": one.percent(*reasons),
            "finding": finding,
            "sentence": sentence,
        }
        for one in kernels
        if one.samples.total() >= FEW_SAMPLES
        for reasons, finding, sentence in filter(
            None, (_at_barriers(one), _of_branches(one), _of_few_warps(one))
        )
    ]

    nothing = "Nothing: in no kernel do a stall reason and a finding explain each other."
    text = "{0[kernel]}: {0[sentence]}".format
    return sentences("together", "How they are related", data, text, nothing)


_Sentence = tuple[tuple[str, ...], str | None, str]
"""Stall reasons, the kind of a finding, and the sentence about both."""


def _at_barriers(one: _Kernel) -> _Sentence | None:
    """Why warps wait at barriers: others of their block are late."""
    share = one.percent("barrier")
    if share < _BARRIER:
        return None
    begin = f"{share:.0f}% of the samples are barrier, and"
    late = one.found("stride", "warps") or one.found("wave", "warps")
    diverging, block = one.found("divergence"), one.found("straggler") or one.found("imbalance")
    if late:
        text = (
            f"some warps of a block are late. {late.evidence}. The others wait for them at __syncthreads(), "
            "so both have one cause. Divide the work of a block evenly among its warps."
        )
        return ("barrier",), late.kind, f"{begin} {text}"
    if diverging:
        text = (
            f"the lanes of a warp exit apart. {diverging.evidence}. A warp reaches a barrier when its "
            "slowest lane does, and the other warps of the block wait for it."
        )
        return ("barrier",), diverging.kind, f"{begin} {text}"
    if one.skew_ns and one.skew_percent and one.skew_percent >= _MUCH_SKEW:
        text = (
            f"the warps of a block exit {duration_text(one.skew_ns)} apart (median), "
            f"{one.skew_percent:.0f}% of a warp's lifetime. Some may have more to do than others, which then "
            "wait for them at __syncthreads()."
        )
        return ("barrier",), None, f"{begin} {text}"
    if block:
        text = (
            f"some blocks take longer. {block.evidence}. A barrier holds only the warps of one block, so "
            "both have one cause if a few warps of such a block do its additional work."
        )
        return ("barrier",), block.kind, f"{begin} {text}"
    return None


def _of_branches(one: _Kernel) -> _Sentence | None:
    """The effect of divergence on the instructions that are issued."""
    diverging = one.found("divergence") or one.found("stride", "threads")
    if diverging is None:
        return None
    evidence = diverging.evidence
    branches = one.percent("branch_resolving")
    if branches >= _BRANCHES:
        text = (
            f"{branches:.0f}% of the samples are branch_resolving, and the lanes of a warp exit apart. "
            f"{evidence}. A branch that differs between lanes causes both: warps wait for its target, and "
            "its two sides run one after the other."
        )
        return ("branch_resolving",), diverging.kind, text
    share = one.group_percent("issue")
    if share < _ISSUE:
        return None
    reasons = tuple(sorted(reason for reason in one.samples if stall_group(reason) == "issue"))
    text = (
        f"{share:.0f}% of the samples are of warps that issue or could issue, and the lanes of a warp exit "
        f"apart. {evidence}. Then an instruction runs for some of the lanes only: less work is done than "
        "that share suggests."
    )
    return reasons, diverging.kind, text


def _of_few_warps(one: _Kernel) -> _Sentence | None:
    """Why waiting for memory is not hidden: an SM has few warps."""
    share = one.group_percent("memory")
    if share < _MEMORY:
        return None
    reasons = tuple(sorted(reason for reason in one.samples if stall_group(reason) == "memory"))
    begin = f"{share:.0f}% of the samples wait for memory, and"
    if (wave := one.found("wave", "blocks")) is not None:
        text = f"the last wave is small. {wave.evidence}. It has too few warps to hide the waiting."
        return reasons, wave.kind, f"{begin} {text}"
    achieved = one.occupancy.get("achieved_percent")
    if achieved is None or achieved > _FEW_WARPS:
        return None
    active, allowed = (one.occupancy[f"{of}_warps_per_sm"] for of in ("active", "theoretical"))
    limited = one.occupancy["limited_by"]
    of_launch = (
        ""
        if allowed is None
        else f"; the launch allows {allowed:.4g}" + (f", limited by {limited}" if limited else "")
    )
    text = (
        f"an SM has {active:.3g} active warps on average, {achieved:.0f}% of those that it can hold"
        f"{of_launch}. More warps at a time would hide more of the waiting."
    )
    return reasons, None, f"{begin} {text}"


def _notes(kernels: list[_Kernel], left_out: int) -> Iterator[str]:
    other = sorted({kernel_title(one.name) for one in kernels if one.same_launch is False})
    if other:
        some = ", ".join(other[:3]) + (", …" if len(other) > 3 else "")
        yield f"the samples are of launches with other grids or blocks than the warps: {some}"
    if left_out:
        words = "more kernel|kernels of the recording of warps, with the fewest warps, is|are left out"
        yield counted(left_out, words)
    yield (
        "stalls and warps are of two recordings: recording warps slows a kernel, so its times are not those "
        "of the samples"
    )
