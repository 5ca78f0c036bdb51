"""Exits of warps and threads, by which runs are compared: how far apart they are, kernel by kernel.

Skew is the time from the exit of a block's first warp to that of its last. Spread is the time from the exit
of a warp's first lane to that of its last. Where a finding in one run states that some lanes or threads are
late, their delay is compared in all runs: a stride that was removed has a delay of about 0 in the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tracepipe.analyses.findings import find_all
from tracepipe.analyses.findings.finding import Finding, listed
from tracepipe.analyses.findings.kernel_warps import LANES, NOT_RECORDED, Flags, KernelWarps, sample
from tracepipe.analyses.findings.kernels import kernels_of
from tracepipe.analyses.findings.ranks import between
from tracepipe.analyses.findings.stride import without_order
from tracepipe.reports.frames.arrays import Floats, Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.samples import LATE, SKEW, SPREAD, Gathering, Key, Kind, Measured
from tracepipe.store.run import Run
from tracepipe.units import agree


class Pattern(NamedTuple):
    """Positions that are late in one of the runs: lanes of a warp, threads or warps of a block."""

    kernel: str
    of: str
    modulus: int
    residues: tuple[int, ...]

    @property
    def name(self) -> str:
        if self.of == "lanes":
            lanes = listed(list(self.residues))
            return f"{self.kernel}: delay of {agree(len(self.residues), 'lane|lanes')} {lanes}"
        letter = self.of[0]
        residues = " or ".join(map(str, self.residues))
        return f"{self.kernel}: delay of {self.of} with {letter} mod {self.modulus} = {residues}"


Patterns = dict[str, dict[Pattern, None]]
"""The patterns of each kernel, by its name, in the order in which they were found."""


def exits(run: Run) -> tuple[dict[Kind, Measured], Patterns]:
    """Return skew and spread by kernel name, with the launches of all grids and processes together, and the
    patterns of late threads.
    """
    patterns: Patterns = {}
    kernels = _Measuring(kernels_of(run, "", None))
    for finding in find_all(kernels).findings:
        if (pattern := _pattern(finding)) is not None:
            patterns.setdefault(pattern.kernel, {})[pattern] = None
    return kernels.found.measured(), patterns


def delays(run: Run, patterns: Patterns) -> dict[Kind, Measured]:
    """Return the delays of the threads of patterns, which may have been found in another recording."""
    wanted = "|".join(f"^{re.escape(kernel)}$" for kernel in patterns)
    found = _Lengths()
    for kernel in kernels_of(run, wanted, None):
        found.add(kernel, _delays(kernel, patterns[kernel.kernel]))
        kernel.forget()
    return found.measured()


class _Lengths:
    """Collects lengths by kind, and makes measures of them."""

    def __init__(self) -> None:
        self._gathered: dict[str, Gathering] = {}

    def add(self, kernel: KernelWarps, lengths: Iterable[tuple[Key, Ints]]) -> None:
        """Add the lengths of a kernel, if it has exits."""
        for (what, name), lengths_ns in lengths if kernel.has_exits else ():
            if lengths_ns.size:
                self._gathered.setdefault(what, Gathering()).add(name, lengths_ns)

    def measured(self) -> dict[Kind, Measured]:
        """Return the measures of all lengths. Nothing may be added afterwards."""
        return {(what, ""): one.measured() for what, one in self._gathered.items()}


class _Measuring:
    """Kernels whose skew and spread are measured during the first iteration over them: sorting the warps of a
    kernel takes more time than all findings in them.
    """

    def __init__(self, kernels: Iterable[KernelWarps]) -> None:
        self._kernels, self._is_measured = kernels, False
        self.found = _Lengths()

    def __iter__(self) -> Iterator[KernelWarps]:
        is_measured, self._is_measured = self._is_measured, True
        for kernel in self._kernels:
            if not is_measured:
                self.found.add(kernel, _spreads(kernel))
            yield kernel


def _pattern(finding: Finding) -> Pattern | None:
    numbers = finding.numbers
    if finding.kind == "divergence":
        return Pattern(finding.kernel, "lanes", LANES, tuple(numbers["late_lanes"]))
    if finding.kind == "stride":
        return Pattern(finding.kernel, numbers["of"], numbers["modulus"], tuple(numbers["residues"]))
    return None


def _spreads(kernel: KernelWarps) -> Iterator[tuple[Key, Ints]]:
    known_ns = kernel.spread_ns[kernel.spread_ns != NOT_RECORDED]
    yield (SPREAD, f"{kernel.kernel}: spread of warps"), known_ns
    if kernel.blocks_known and not kernel.rows_mixed:
        skew_ns = kernel.blocks.skew_ns[kernel.warps_of_block > 1]
        yield (SKEW, f"{kernel.kernel}: skew of blocks"), skew_ns


def _delays(kernel: KernelWarps, patterns: Iterable[Pattern]) -> Iterator[tuple[Key, Ints]]:
    for pattern in patterns:
        if pattern.of != "warps":
            yield (LATE, pattern.name), _of_lanes(kernel, pattern)
        elif kernel.warps_of_a_block:
            yield (LATE, pattern.name), _of_blocks(kernel, pattern)


def _of_lanes(kernel: KernelWarps, pattern: Pattern) -> Ints:
    rows = sample(np.arange(kernel.launch.size))
    threads = np.arange(LANES) + np.where(pattern.of == "lanes", 0, kernel.warp[rows] * LANES)[:, None]
    times = without_order(kernel.lane_times(rows)).times
    return _known(times, np.isin(threads % pattern.modulus, pattern.residues))


def _of_blocks(kernel: KernelWarps, pattern: Pattern) -> Ints:
    times = kernel.warp_times()
    members = np.isin(np.arange(times.shape[1]) % pattern.modulus, pattern.residues)
    return _known(times, np.broadcast_to(members, times.shape))


def _known(times: Floats, members: Flags) -> Ints:
    delays_ns = between(times, members)
    return np.round(delays_ns[~np.isnan(delays_ns)]).astype(np.int64)
