"""The text of what a conversion found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tracepipe.event.model import LAYERS
from tracepipe.recording.account import Account, fit_text
from tracepipe.units import agree, counted

# Readings of two host clocks may be this far apart when a program is interrupted between them.
SETTING_NS = 1_000_000
LOST = "lost: "
"""How a line about lost events begins."""
_OUTCOMES = {
    "unclosed": "call|calls had no end: drawn to the end and marked unclosed",
    "no_begin": "end|ends had no begin: drawn as an_instant|instants and marked no_begin",
    "overlaps": "slice|slices overlaps|overlap others on its|their track: drawn on an overlap track",
    "undrawn": "slice|slices overlaps|overlap too many others to be drawn",
    "beyond": "event|events is|are not drawn: there are too many threads, streams, GPUs or warps for a track "
    "each",
    "causality": "launch|launches whose kernel starts before the call by more than the clocks' bound",
}


def account_lines(account: Account) -> Iterator[str]:
    """The lines that a person should know about a conversion, the most important last."""
    for part in account.parts:
        yield from _of_one(part)
    if not account.parts:
        yield from _of_one(account)
        return
    yield from account.outcome_lines(_OUTCOMES)
    for note in account.notes:
        yield f"note: {note}"


def _of_one(account: Account) -> Iterator[str]:
    counts = ", ".join(f"{account.counts[layer]} {layer}" for layer in LAYERS if account.counts[layer])
    yield f"{account.path}: {account.source}, {counts or 'no events'}"
    yield from account.remarks(_OUTCOMES)
    for stated in account.clocks:
        if stated["method"] == "fit":
            yield f"clock {stated['clock']}: {fit_text(stated)}, within {stated['bound_ns']} ns"
        elif stated["method"] == "offset" and stated["bound_ns"] > SETTING_NS:
            yield f"clock {stated['clock']}: was set or slept while recording, within {stated['bound_ns']} ns"
        elif stated["method"] == "assumed":
            yield f"clock {stated['clock']}: placed by an assumed offset, error unknown"
    for clock, count in account.unplaced.items():
        yield (
            f"not drawn: {counted(count, 'event|events')} on {clock}, which has no clock pairs; "
            f"--assume-offset {clock}=NS places {agree(count, 'it|them')}"
        )
    for layer, count in account.losses.items():
        yield f"{LOST}{count} {layer} {agree(count, 'event|events happened and was|were not recorded')}"
    if account.anchor:
        yield f"placed: {account.path} by {anchor_text(account.anchor)}"


def anchor_text(stated: Mapping[str, Any]) -> str:
    """The text of how a recording was placed on the common clock, and how precisely."""
    within = f"within {stated['bound_ns']} ns" if "bound_ns" in stated else stated["bound"]
    drift = f", drift {stated['drift_ppm']:+.3f} ppm" if "drift_ppm" in stated else ""
    return f"{stated['by']}: {stated['offset_ns']:+d} ns{drift}, {within}"
