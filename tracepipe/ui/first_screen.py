"""Makes the UI show a trace's work first, if the trace states where that is.

    &visStart=NS&visEnd=NS                       the visible time
    &startupCommands=[{"id":…,"args":[…]}]       commands that run when the trace is loaded

Source: docs of ui.perfetto.dev, deep linking to the Perfetto UI.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from pathlib import Path
from typing import Final

from tracepipe.event.vocabulary import FIRST_SCREEN

# The last packet of a trace has it, after the key.
_TAIL_BYTES: Final = 4096
_PINS_MAX, _NAME_MAX = 32, 128
_TIME_LIMIT_NS: Final = 1 << 63
# The visible time before and after the work, as a share of its length.
_MARGIN: Final = 0.02
_SPECIAL = re.compile(r"[.*+?^${}()|\[\]\\/]")


def first_screen(trace: Path) -> str:
    """Parameters for a link to the UI, each after a `&`; none if the trace has no such packet."""
    stated = _stated(trace)
    if stated is None:
        return ""
    start_ns, end_ns, pins = stated
    margin_ns = int((end_ns - start_ns) * _MARGIN) + 1
    # Pinned one by one, they are in this order.
    names = [_SPECIAL.sub(r"\\\g<0>", name) for name in pins]
    commands = [{"id": "dev.perfetto.PinTracksByRegex", "args": [f"^{name}$"]} for name in names]
    # One row for each processor, and they come first.
    commands.append({"id": "dev.perfetto.CollapseTracksByRegex", "args": ["^CPU Scheduling$"]})
    parameters = {
        "visStart": max(0, start_ns - margin_ns),
        "visEnd": end_ns + margin_ns,
        "startupCommands": json.dumps(commands, separators=(",", ":")),
    }
    return "&" + urllib.parse.urlencode(parameters, quote_via=urllib.parse.quote)


def _stated(trace: Path) -> tuple[int, int, list[str]] | None:
    """Start and end of the work, and names of tracks to be pinned."""
    try:
        with trace.open("rb") as file:
            file.seek(max(0, trace.stat().st_size - _TAIL_BYTES))
            _, key, rest = file.read().rpartition(FIRST_SCREEN.encode())
        text = rest[rest.index(b"{") :].decode()
        stated, _ = json.JSONDecoder().raw_decode(text)
        start_ns, end_ns, pins = stated["start_ns"], stated["end_ns"], stated["pins"]
        good = 0 <= start_ns <= end_ns < _TIME_LIMIT_NS and type(start_ns) is type(end_ns) is int
        good = good and all(type(name) is str and len(name) <= _NAME_MAX for name in pins[:_PINS_MAX])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return (start_ns, end_ns, pins[:_PINS_MAX]) if key and good else None
