"""The figures by which runs are compared: counts and lengths of every function, kernel and copy, and how far
apart warps and threads exit.

Skew is the time from the exit of a block's first warp to that of its last. Spread is the time from the exit
of a warp's first lane to that of its last. Where a finding in one run states that some lanes or threads are
late, their delay is compared in all runs: a stride that was removed has a delay of about 0 in the others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from tracepipe.analyses.findings import find_all
from tracepipe.analyses.findings.finding import listed
from tracepipe.analyses.findings.kernel_warps import LANES, NOT_RECORDED, KernelWarps, sample
from tracepipe.analyses.findings.kernels import kernels_of
from tracepipe.analyses.findings.statistics import between
from tracepipe.analyses.findings.stride import without_order
from tracepipe.analyses.parts import Part
from tracepipe.event.columns import NONE, Floats, Int64s, Ints
from tracepipe.event.groups import number_rows, sorted_rows
from tracepipe.event.vocabulary import RUNNING
from tracepipe.libraries import np
from tracepipe.store.run import Facts, Run
from tracepipe.units import agree

CALL, KERNEL, COPY = "call", "GPU kernel", "copy"
SKEW, SPREAD, LATE = "warp skew", "warp spread", "late threads"
EXITS = (SKEW, SPREAD, LATE)
"""The layers for how far apart threads and warps exit, which is not time that the program takes."""
SYSCALL, DRIVER, EVENT = "system call", "driver function", "scheduler"
DECIDED_BY_PROGRAM = (CALL, KERNEL, COPY)
"""The layers whose counts the program decides; those of the others also depend on chance."""
LAYER_OF = {
    CALL: "userspace",
    SYSCALL: "syscall",
    DRIVER: "kernel",
    EVENT: "scheduler",
    KERNEL: "gpu_kernel",
    COPY: "transfer",
    **dict.fromkeys(EXITS, "gpu_warp"),
}
"""The layer of records of each; exits are also from `gpu_thread`."""
Key = tuple[str, str]
"""Layer (one of the above) and name."""
Kind = tuple[str, str]
"""Layer, and a suffix of the names of a part of it."""
KINDS: tuple[Kind, ...] = (*((what, "") for what in LAYER_OF), (COPY, " (GPU)"))
"""All kinds: copies with the times of their calls, and copies with the GPU's times, are two kinds."""


MEASURES = ("count", "total_ns", "p50_ns", "p95_ns")
"""The figures of each name: count, sum of the lengths, median, and tail."""
# The least number of lengths that have a tail: 5% of fewer are hardly any.
TAIL_MIN = 100


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of a kind in one recording. `values` has a column for each of `MEASURES`, shape `(names,)`,
    with NaN where a figure is not known: medians without lengths, tails of fewer than `TAIL_MIN` lengths.
    """

    names: list[str]
    values: dict[str, Floats]


def _measured(names: list[str], counts: Ints, of: Ints, lengths_ns: Int64s) -> Measured:
    """The figures of names. `of` has the index of the name of each length, shapes `(lengths,)`."""
    known = np.bincount(of, minlength=len(names))
    totals_ns = np.bincount(of, lengths_ns, len(names)).astype(np.float64)
    values: dict[str, Floats] = {"count": counts.astype(np.float64), "total_ns": totals_ns}
    ordered = lengths_ns[sorted_rows(of, lengths_ns)]
    first = np.cumsum(known) - known
    for name, percent, least in (("p50_ns", 50, 1), ("p95_ns", 95, TAIL_MIN)):
        # The nearest rank: the least length that this share of the lengths does not exceed.
        at = first + (known * percent + 99) // 100 - 1
        enough = known >= least
        values[name] = np.full(len(names), np.nan)
        values[name][enough] = ordered[at[enough]]
    return Measured(names, values)


Lengths = dict[Key, list[Ints]]
"""The lengths of names, each in several parts of the shape `(n,)`."""


def figures_of(lengths_ns: Lengths) -> dict[Kind, Measured]:
    """The figures of all names that have lengths."""
    found = {}
    for layer in dict.fromkeys(layer for layer, _ in lengths_ns):
        parts = {name: np.concatenate(of) for (what, name), of in lengths_ns.items() if what == layer}
        parts = {name: of for name, of in parts.items() if len(of)}
        if parts:
            counts = np.array([*map(len, parts.values())])
            of = np.repeat(np.arange(len(counts)), counts)
            found[layer, ""] = _measured([*parts], counts, of, np.concatenate([*parts.values()]))
    return found


def is_recorded(facts: Facts, layer: str) -> bool:
    """Whether a recording has events of a layer, or states in its header that it recorded the layer."""
    got = facts.header.layers.got
    names = (LAYER_OF[layer], "gpu_thread") if layer in EXITS else (LAYER_OF[layer],)
    return any(facts.counts[name] or name in got for name in names)


def measures(run: Run, part: Part | None = None) -> dict[Kind, Measured]:
    """Return the figures of all names of a part of a run, without exits. A call inside another counts in
    both.
    """
    found: dict[Kind, Measured] = {}
    for what, suffix in KINDS:
        if what in EXITS:
            continue
        is_wanted = np.ones(len(run.shapes), np.bool_)
        if what == EVENT:
            is_wanted = run.shapes.column("name") != run.shapes.number_of("name", RUNNING)
        if what == COPY:
            is_wanted = (run.shapes.column("gpu") != NONE) == bool(suffix)
        layer = run.layer(LAYER_OF[what])
        rows = np.flatnonzero(layer.is_call & is_wanted[layer.shape])
        rows = rows if part is None else rows[part.holds(LAYER_OF[what], rows)]
        if not len(rows):
            continue
        numbers = run.shapes.column("name", layer.shape[rows])
        of, first = number_rows(numbers)
        names = [run.shapes.encoded[number].decode("utf-8", "surrogatepass") for number in numbers[first]]
        timed = layer.has_length[rows]
        lengths_ns = layer.end_ns[rows[timed]] - layer.start_ns[rows[timed]]
        found[what, suffix] = _measured(names, np.bincount(of), of[timed], lengths_ns)
    return found


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
    found: Lengths = defaultdict(list)

    def measure(kernel: KernelWarps) -> None:
        if kernel.has_exits:
            known_ns = kernel.spread_ns[kernel.spread_ns != NOT_RECORDED]
            found[SPREAD, f"{kernel.kernel}: spread of warps"].append(known_ns)
            if kernel.blocks_known and not kernel.rows_mixed:
                skew_ns = kernel.blocks.skew_ns[kernel.warps_of_block > 1]
                found[SKEW, f"{kernel.kernel}: skew of blocks"].append(skew_ns)

    for finding in find_all(kernels_of(run, "", None), measure).findings:
        name, numbers = finding.kernel, finding.numbers
        if finding.kind == "divergence":
            pattern = Pattern(name, "lanes", LANES, tuple(numbers["late_lanes"]))
        elif finding.kind == "stride":
            pattern = Pattern(name, numbers["of"], numbers["modulus"], tuple(numbers["residues"]))
        else:
            continue
        patterns.setdefault(name, {})[pattern] = None
    return figures_of(found), patterns


def delays(run: Run, patterns: Patterns) -> dict[Kind, Measured]:
    """Return the delays of the threads of patterns, which may have been found in another recording."""
    wanted = "|".join(f"^{re.escape(kernel)}$" for kernel in patterns)
    found: Lengths = defaultdict(list)
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
            found[LATE, pattern.name].append(known_ns)
    return figures_of(found)
