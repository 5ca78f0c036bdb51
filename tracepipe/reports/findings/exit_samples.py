"""Exits of warps and threads as what two runs are compared by: how far apart they are, kernel by kernel.

Skew is from the first warp of a block that leaves to the last, spread from the first lane of a warp to the
last. Where a finding in one of the runs says that some lanes or threads are late, by how much they are is
compared in both: a stride that was removed is about 0 in the other run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tracepipe.reports.findings import find_all
from tracepipe.reports.findings.finding import Finding, listed
from tracepipe.reports.findings.grouping import kernels_of
from tracepipe.reports.findings.kernel_warps import (
    LANES,
    NOT_RECORDED,
    Flags,
    Floats,
    Ints,
    KernelWarps,
)
from tracepipe.reports.findings.lane_order import without_order
from tracepipe.reports.findings.ranks import between
from tracepipe.reports.findings.sampling import sample
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.samples import EXITS, LATE, SKEW, SPREAD, Gathering, Key, Kind, Named
from tracepipe.reports.frames.stored import flagged, made, taken


class _Pattern(NamedTuple):
    """Positions that are late in one of the runs: lanes of a warp, threads or warps of a block."""

    kernel: str
    of: str
    modulus: int
    residues: tuple[int, ...]

    @property
    def name(self) -> str:
        if self.of == "lanes":
            lanes = listed(list(self.residues))
            return f"{self.kernel}: delay of lane{'s' * (len(self.residues) != 1)} {lanes}"
        letter = self.of[0]
        residues = " or ".join(map(str, self.residues))
        return f"{self.kernel}: delay of {self.of} with {letter} mod {self.modulus} = {residues}"


def exit_samples(a: Run, b: Run) -> tuple[dict[Kind, Named], dict[Kind, Named]]:
    """The samples of both runs, by kernel name: launches of several grids and processes are together."""
    # The warps of one run at a time are in memory, and are sorted again rather than kept.
    patterns: dict[str, dict[_Pattern, None]] = {}
    for run in (a, b):
        for finding in find_all(kernels_of(run, "", None)).findings:
            if (pattern := _pattern(finding)) is not None:
                patterns.setdefault(pattern.kernel, {})[pattern] = None
    return _samples(kernels_of(a, "", None), patterns), _samples(kernels_of(b, "", None), patterns)


def _pattern(finding: Finding) -> _Pattern | None:
    numbers = finding.numbers
    if finding.kind == "divergence":
        return _Pattern(finding.kernel, "lanes", LANES, tuple(numbers["late_lanes"]))
    if finding.kind == "stride":
        return _Pattern(finding.kernel, numbers["of"], numbers["modulus"], tuple(numbers["residues"]))
    return None


def _samples(kernels: Iterable[KernelWarps], patterns: Mapping[str, Iterable[_Pattern]]) -> dict[Kind, Named]:
    gathered = {what: Gathering() for what in EXITS}
    for kernel in kernels:
        if not kernel.has_exits:
            continue
        for (what, name), *both in (*_spreads(kernel), *_delays(kernel, patterns.get(kernel.kernel, ()))):
            if both[0].size:
                gathered[what].add(name, *both)
        kernel.forget()
    return {(what, ""): found for what, one in gathered.items() if len(found := one.named())}


def _spreads(kernel: KernelWarps) -> Iterator[tuple[Key, Ints, Ints]]:
    told = flagged(kernel.launch.size, lambda part: kernel.spread_ns[part] != NOT_RECORDED)
    yield (
        (SPREAD, f"{kernel.kernel}: spread of warps"),
        taken(kernel.first_exit_ns, told),
        taken(kernel.spread_ns, told),
    )
    if kernel.blocks_known and not kernel.rows_mixed:
        blocks = kernel.blocks
        several = flagged(kernel.block_starts.size, lambda part: kernel.warps_of_block[part] > 1)
        end_ns, skew_ns = taken(blocks.end_ns, several), taken(blocks.skew_ns, several)
        first_ns = made(len(several), np.int64, lambda part: end_ns[part] - skew_ns[part])
        yield (SKEW, f"{kernel.kernel}: skew of blocks"), first_ns, skew_ns


def _delays(kernel: KernelWarps, patterns: Iterable[_Pattern]) -> Iterator[tuple[Key, Ints, Ints]]:
    for pattern in patterns:
        if pattern.of != "warps":
            yield ((LATE, pattern.name), *_of_lanes(kernel, pattern))
        elif kernel.warps_of_a_block:
            yield ((LATE, pattern.name), *_of_blocks(kernel, pattern))


def _of_lanes(kernel: KernelWarps, pattern: _Pattern) -> tuple[Ints, Ints]:
    rows = sample(np.arange(kernel.launch.size))
    threads = np.arange(LANES) + np.where(pattern.of == "lanes", 0, kernel.warp[rows] * LANES)[:, None]
    times = without_order(kernel.lane_times(rows)).times
    return _known(kernel.first_exit_ns[rows], times, np.isin(threads % pattern.modulus, pattern.residues))


def _of_blocks(kernel: KernelWarps, pattern: _Pattern) -> tuple[Ints, Ints]:
    times = kernel.warp_times()
    members = np.isin(np.arange(times.shape[1]) % pattern.modulus, pattern.residues)
    rows = sample(np.arange(kernel.blocks.end_ns.size))
    starts_ns = (kernel.blocks.end_ns - kernel.blocks.skew_ns)[rows]
    return _known(starts_ns, times, np.broadcast_to(members, times.shape))


def _known(starts_ns: Ints, times: Floats, members: Flags) -> tuple[Ints, Ints]:
    delays = between(times, members)
    known = ~np.isnan(delays)
    return starts_ns[known], np.round(delays[known]).astype(np.int64)
