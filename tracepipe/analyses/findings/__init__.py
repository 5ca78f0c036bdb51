"""Findings in the warps of kernels: divergence, strides, stragglers, waves, imbalance.

Each kind is one file and one line in FINDERS. A finder gets the warps of one kernel and the false-alarm rate
that it may spend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from tracepipe.analyses.findings import divergence, imbalance, stragglers, stride, waves
from tracepipe.analyses.findings.finding import FALSE_ALARM_RATE, MIN_SAVED, Finding, Saving
from tracepipe.analyses.findings.kernel_warps import KernelWarps
from tracepipe.libraries import np

FINDERS = {
    "divergence": divergence,
    "stride": stride,
    "straggler": stragglers,
    "wave": waves,
    "imbalance": imbalance,
}
"""Kind → its module. For a kernel with exits, `lacks` returns why the kind cannot be looked for, and `find`
returns the findings."""


class Searched(NamedTuple):
    """The findings, and for each kind the kernels that could not be tested, with the reasons."""

    findings: list[Finding]
    skipped: dict[str, list[tuple[str, str]]]


def find_all(
    kernels: Iterable[KernelWarps], measure: Callable[[KernelWarps], object] = lambda kernel: None
) -> Searched:
    """Return the findings of all kernels, those that could save most time first.

    `kernels` is iterated over twice: sorting the warps of a kernel takes more time than all findings in them,
    so `measure` is called with each in the first iteration. FALSE_ALARM_RATE holds for each kind over all
    kernels together.
    """
    lacking: list[tuple[str, dict[str, str | None]]] = []
    for kernel in kernels:
        measure(kernel)
        no_exits = None if kernel.has_exits else "no exits were recorded"
        reasons = {kind: no_exits or finder.lacks(kernel) for kind, finder in FINDERS.items()}
        lacking.append((kernel.kernel, reasons))
    shares = {kind: max(sum(reasons[kind] is None for _, reasons in lacking), 1) for kind in FINDERS}
    found: list[Finding] = []
    for kernel, (_, reasons) in zip(kernels, lacking, strict=True):
        findings: list[Finding] = []
        for kind, finder in FINDERS.items():
            if reasons[kind] is None:
                findings += finder.find(kernel, FALSE_ALARM_RATE / shares[kind])
        # Threads at a stride also look divergent, and some blocks of a period can look like stragglers.
        strides = {one.numbers["modulus_threads"] for one in findings if one.kind == "stride"}
        has_periods = any(one.numbers.get("across") == "block period" for one in findings)
        for one in findings:
            is_repeated = (
                one.numbers["stride"] in strides
                if one.kind == "divergence"
                else has_periods and one.kind == "straggler" and "launch" not in one.numbers
            )
            costed = _costed(kernel, one)
            if not is_repeated and (costed.saves is None or costed.saves.share >= MIN_SAVED):
                found.append(costed)
    skipped: dict[str, list[tuple[str, str]]] = {}
    for kind in FINDERS:
        for name, reasons in lacking:
            if reason := reasons[kind]:
                skipped.setdefault(kind, []).append((name, reason))
    # Those that could save equally much are in the order of their kinds.
    found.sort(key=lambda one: list(FINDERS).index(one.kind))
    return Searched(sorted(found, key=lambda one: -one.saves.run_ns if one.saves else 0.0), skipped)


def _costed(kernel: KernelWarps, finding: Finding) -> Finding:
    """The finding with the kernel's grid, and with the possible saving where entries were recorded."""
    if finding.saves_share is None or not kernel.has_entries:
        return replace(finding, grid=kernel.grid)
    lengths_ns, launch = kernel.launch_ns, finding.numbers.get("launch")
    if launch is not None:
        lengths_ns = lengths_ns[[kernel.launch_id(own) == launch for own in kernel.launches.tolist()]]
    share = min(finding.saves_share, 1.0)
    saving = Saving(share * float(np.median(lengths_ns)), share * float(lengths_ns.sum()), share)
    return replace(finding, grid=kernel.grid, saves=saving)
