"""What the warps of kernels show: divergence, strides, stragglers, waves, imbalance.

One kind is one file and one line in FINDERS. A finder gets the warps of one kernel and the false-alarm rate
that it may spend. It imports numpy: import this package when a report runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tracepipe.reports.findings import divergence, imbalance, stragglers, stride, waves
from tracepipe.reports.findings.finding import FALSE_ALARM_RATE, Finding
from tracepipe.reports.findings.kernel_warps import KernelWarps


class Finder(NamedTuple):
    """How one kind is looked for."""

    lacks: Callable[[KernelWarps], str | None]
    find: Callable[[KernelWarps, float], list[Finding]]


FINDERS = {
    "divergence": Finder(divergence.lacks, divergence.find),
    "stride": Finder(stride.lacks, stride.find),
    "straggler": Finder(stragglers.lacks, stragglers.find),
    "wave": Finder(waves.lacks, waves.find),
    "imbalance": Finder(imbalance.lacks, imbalance.find),
}


class Searched(NamedTuple):
    """What was found, and for each kind the kernels that could not be looked at, with the reason."""

    findings: list[Finding]
    skipped: dict[str, list[tuple[str, str]]]


def find_all(kernels: Iterable[KernelWarps]) -> Searched:
    """Findings of all kernels. FALSE_ALARM_RATE holds for each kind over all of them together."""
    kernels = list(kernels)
    of_kernel: list[list[Finding]] = [[] for _ in kernels]
    skipped: dict[str, list[tuple[str, str]]] = {}
    for kind, finder in FINDERS.items():
        reasons = [finder.lacks(kernel) for kernel in kernels]
        alpha = FALSE_ALARM_RATE / max(reasons.count(None), 1)
        for kernel, reason, findings in zip(kernels, reasons, of_kernel, strict=True):
            if reason is None:
                findings += finder.find(kernel, alpha)
        missing = [(k.kernel, reason) for k, reason in zip(kernels, reasons, strict=True) if reason]
        if missing:
            skipped[kind] = missing
    told = [finding for findings in of_kernel for finding in _once(findings)]
    order = list(FINDERS)
    return Searched(sorted(told, key=lambda finding: order.index(finding.kind)), skipped)


def _once(findings: list[Finding]) -> list[Finding]:
    """What is left where one thing was found twice: threads at a stride leave apart by their times, too."""
    strides = {finding.numbers["modulus_threads"] for finding in findings if finding.kind == "stride"}
    return [
        finding
        for finding in findings
        if finding.kind != "divergence" or finding.numbers["stride"] not in strides
    ]
