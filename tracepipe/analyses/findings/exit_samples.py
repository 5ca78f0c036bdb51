"""Exits of warps and threads, by which runs are compared: how far apart they are, kernel by kernel.

Skew is the time from the exit of a block's first warp to that of its last. Spread is the time from the exit
of a warp's first lane to that of its last. Where a finding in one run states that some lanes or threads are
late, their delay is compared in all runs: a stride that was removed has a delay of about 0 in the others.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tracepipe.analyses.findings import find_all
from tracepipe.analyses.findings.finding import listed
from tracepipe.analyses.findings.kernel_warps import LANES, NOT_RECORDED, KernelWarps, sample
from tracepipe.analyses.findings.kernels import kernels_of
from tracepipe.analyses.findings.ranks import between
from tracepipe.analyses.findings.stride import without_order
from tracepipe.reports.frames.arrays import Ints
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
    found = _Lengths()

    def measure(kernel: KernelWarps) -> None:
        if kernel.has_exits:
            known_ns = kernel.spread_ns[kernel.spread_ns != NOT_RECORDED]
            found.add((SPREAD, f"{kernel.kernel}: spread of warps"), known_ns)
            if kernel.blocks_known and not kernel.rows_mixed:
                skew_ns = kernel.blocks.skew_ns[kernel.warps_of_block > 1]
                found.add((SKEW, f"{kernel.kernel}: skew of blocks"), skew_ns)

    for finding in find_all(kernels_of(run, "", None), measure).findings:
        name, numbers = finding.kernel, finding.numbers
        if finding.kind == "divergence":
            pattern = Pattern(name, "lanes", LANES, tuple(numbers["late_lanes"]))
        elif finding.kind == "stride":
            pattern = Pattern(name, numbers["of"], numbers["modulus"], tuple(numbers["residues"]))
        else:
            continue
        patterns.setdefault(name, {})[pattern] = None
    return found.measured(), patterns


def delays(run: Run, patterns: Patterns) -> dict[Kind, Measured]:
    """Return the delays of the threads of patterns, which may have been found in another recording."""
    wanted = "|".join(f"^{re.escape(kernel)}$" for kernel in patterns)
    found = _Lengths()
    for kernel in kernels_of(run, wanted, None):
        for pattern in patterns[kernel.kernel] if kernel.has_exits else ():
            if pattern.of != "warps":
                rows = sample(np.arange(kernel.launch.size))
                times = without_order(kernel.lane_times(rows)).times
                first = np.where(pattern.of == "lanes", 0, kernel.warp[rows] * LANES)
                positions = first[:, None] + np.arange(LANES)
            elif kernel.warps_of_a_block:
                times = kernel.warp_times()
                positions = np.broadcast_to(np.arange(times.shape[1]), times.shape)
            else:
                continue
            delays_ns = between(times, np.isin(positions % pattern.modulus, pattern.residues))
            known_ns = np.round(delays_ns[~np.isnan(delays_ns)]).astype(np.int64)
            found.add((LATE, pattern.name), known_ns)
        kernel.forget()
    return found.measured()


class _Lengths:
    """Collects lengths by kind, and makes measures of them."""

    def __init__(self) -> None:
        self._gathered: dict[str, Gathering] = {}

    def add(self, key: Key, lengths_ns: Ints) -> None:
        """Add lengths, shape `(n,)`."""
        what, name = key
        if lengths_ns.size:
            self._gathered.setdefault(what, Gathering()).add(name, lengths_ns)

    def measured(self) -> dict[Kind, Measured]:
        """Return the measures of all lengths. Nothing may be added afterwards."""
        return {(what, ""): one.measured() for what, one in self._gathered.items()}
