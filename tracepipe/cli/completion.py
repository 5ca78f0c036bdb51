"""What a shell completes: values of options that Typer does not know. It asks by `_TRACEPIPE_COMPLETE`."""

from __future__ import annotations

import os
from typing import Final

_VARIABLE: Final = "_TRACEPIPE_COMPLETE"


def is_asked() -> bool:
    """Whether this process was started by a shell that completes a command line."""
    return _VARIABLE in os.environ


def complete_layers(incomplete: str) -> list[str]:
    """Lists of layers that go on from an incomplete one, with no layer twice."""
    from tracepipe.capture.request import LAYER_NAMES

    given, comma, last = incomplete.rpartition(",")
    others = set(given.split(","))
    words = LAYER_NAMES if comma else ("all", "none", *LAYER_NAMES)
    return [f"{given}{comma}{word}" for word in words if word.startswith(last) and word not in others]


def complete_sets(incomplete: str) -> list[str]:
    """The shipped sets of hooks whose names begin so."""
    from tracepipe.hooks.sets import shipped_sets

    return [name for name in shipped_sets() if name.startswith(incomplete)]
