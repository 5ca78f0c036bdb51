"""Words for what a conversion found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tracepipe.event.model import LAYERS
from tracepipe.recording.account import Account, fit_text

if TYPE_CHECKING:  # what a capture loads takes longer than a small conversion
    from tracepipe.capture import CaptureSummary

# The readings of two host clocks may be so far apart when a program is interrupted between them.
SETTING_NS = 1_000_000
_OUTCOMES = {
    "unclosed": "calls had no end: drawn to the end and marked unclosed",
    "no_begin": "ends had no begin: drawn as instants and marked no_begin",
    "overlaps": "slices overlap others on their track: drawn on an extra track beside it",
    "undrawn": "slices overlap too many others to be drawn",
    "causality": "launches whose kernel starts before the call by more than the clocks' bound",
}


def lines(report: Account) -> Iterator[str]:
    """What a person should know of a conversion, most important last."""
    counts = ", ".join(f"{report.counts[layer]} {layer}" for layer in LAYERS if report.counts[layer])
    yield f"{report.path}: {report.source}, {counts or 'no events'}"
    yield from report.remarks(_OUTCOMES)
    for said in report.clocks:
        if said["method"] == "fit":
            yield f"clock {said['clock']}: {fit_text(said)}, within {said['bound_ns']} ns"
        elif said["method"] == "offset" and said["bound_ns"] > SETTING_NS:
            yield f"clock {said['clock']}: was set or slept while recording, within {said['bound_ns']} ns"
        elif said["method"] == "assumed":
            yield f"clock {said['clock']}: placed by an assumed offset, error unknown"
    for clock, count in report.unplaced.items():
        yield (
            f"not drawn: {count} events on {clock}, which has no clock pairs; "
            f"--assume-offset {clock}=NS places them"
        )
    for layer, count in report.losses.items():
        yield f"lost: {count} {layer} events were made and not recorded"


def captured_lines(path: str, summary: CaptureSummary) -> Iterator[str]:
    """What a person should know of a capture, most important last."""
    counts = ", ".join(f"{summary.counts[layer]} {layer}" for layer in LAYERS if summary.counts.get(layer))
    seconds = summary.wall_ns / 1e9
    yield f"{path}: {counts or 'no events'} in {seconds:.2f} s, by {summary.engine}"
    if summary.ended_by != "exit 0":
        yield f"note: the recording ended by {summary.ended_by}"
    for layer, count in summary.filtered.items():
        yield f"note: {count} {layer} events were left out by the filters"
    for layer, count in summary.losses.items():
        if count:
            by_cpu = summary.cpu_losses.get(layer, {})
            where = ", ".join(f"{lost} on processor {cpu}" for cpu, lost in sorted(by_cpu.items()))
            hint = f" ({where}); --ring-bytes makes more room" if where else ""
            yield f"lost: {count} {layer} events were made and not recorded{hint}"
