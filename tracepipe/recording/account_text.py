"""Words for what a conversion found."""

from __future__ import annotations

from collections.abc import Iterator

from tracepipe.event.model import LAYERS
from tracepipe.recording.account import Account, fit_text

# The readings of two host clocks may be so far apart when a program is interrupted between them.
SETTING_NS = 1_000_000
_OUTCOMES = {
    "unclosed": "calls had no end: drawn to the end and marked unclosed",
    "no_begin": "ends had no begin: drawn as instants and marked no_begin",
    "overlaps": "slices overlap others on their track: drawn on an extra track beside it",
    "undrawn": "slices overlap too many others to be drawn",
    "beyond": "events are not drawn: there are too many threads, streams, GPUs or warps for a track each",
    "causality": "launches whose kernel starts before the call by more than the clocks' bound",
}


def account_lines(account: Account) -> Iterator[str]:
    """What a person should know of a conversion, most important last."""
    counts = ", ".join(f"{account.counts[layer]} {layer}" for layer in LAYERS if account.counts[layer])
    yield f"{account.path}: {account.source}, {counts or 'no events'}"
    yield from account.remarks(_OUTCOMES)
    for said in account.clocks:
        if said["method"] == "fit":
            yield f"clock {said['clock']}: {fit_text(said)}, within {said['bound_ns']} ns"
        elif said["method"] == "offset" and said["bound_ns"] > SETTING_NS:
            yield f"clock {said['clock']}: was set or slept while recording, within {said['bound_ns']} ns"
        elif said["method"] == "assumed":
            yield f"clock {said['clock']}: placed by an assumed offset, error unknown"
    for clock, count in account.unplaced.items():
        yield (
            f"not drawn: {count} events on {clock}, which has no clock pairs; "
            f"--assume-offset {clock}=NS places them"
        )
    for layer, count in account.losses.items():
        yield f"lost: {count} {layer} events were made and not recorded"
