"""Flame graphs: time by path of functions, as SVG for any browser, or for speedscope.

┌───────────────────────────────┐      a box is a function in its callers; its width is the time in it
│ main                          │
├───────────────────┬───────────┤
│ load              │ step      │
└───────────────────┴───────────┘
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from html import escape
from typing import Any, BinaryIO, Final, NamedTuple

from tracepipe.units import duration_text

_WIDTH, _ROW, _TOP, _LETTER = 1200, 17, 48, 6.6  # pixels; a letter of 11 pixels is about this wide
_NARROWEST: Final = 0.4  # narrower boxes are left out: they cannot be seen
_DEEPEST: Final = 400


class Kind(Enum):
    """What a box is, and its colour."""

    THREAD = "#cfd3d7"
    OWN = "#f28e2b"
    LIBRARY = "#f6c667"
    NATIVE = "#e4776b"
    INTERPRETER = "#d9b9b5"
    OFF = "#8fb3d9"


class Label(NamedTuple):
    """A function, or what stands in its place."""

    text: str
    kind: Kind


Times = Mapping[tuple[Label, ...], int]
"""Path, from the outermost function on, → its own time in ns."""


def write_svg(title: str, times: Times, out: BinaryIO) -> None:
    """Write a picture; each box has its text and time as a tooltip."""
    total_ns = max(sum(times.values()), 1)
    boxes, deepest = list[str](), 0
    # Paths in order: a box ends where a path begins that is not in it.
    opened = list[tuple[Label, int]]()
    at_ns = 0

    def close(depth: int) -> None:
        nonlocal deepest
        while len(opened) > depth:
            label, start_ns = opened.pop()
            width = (at_ns - start_ns) * _WIDTH / total_ns
            if width >= _NARROWEST and len(opened) < _DEEPEST:
                deepest = max(deepest, len(opened))
                x, y = start_ns * _WIDTH / total_ns, _TOP + _ROW * len(opened)
                boxes.append(_box(label, x, y, width, at_ns - start_ns, total_ns))

    for path, spent_ns in sorted(times.items(), key=lambda one: [label.text for label in one[0]]):
        same = 0
        while same < min(len(path), len(opened)) and opened[same][0] == path[same]:
            same += 1
        close(same)
        opened += [(label, at_ns) for label in path[same:]]
        at_ns += spent_ns
    close(0)
    height = _TOP + _ROW * (deepest + 1) + 8
    legend = "".join(
        f'<rect x="{8 + 170 * at}" y="26" width="12" height="12" fill="{kind.value}"/>'
        f'<text x="{24 + 170 * at}" y="36">{text}</text>'
        for at, (kind, text) in enumerate(
            (
                (Kind.OWN, "your Python code"),
                (Kind.LIBRARY, "libraries in Python"),
                (Kind.NATIVE, "native code"),
                (Kind.INTERPRETER, "the interpreter"),
                (Kind.OFF, "off-CPU"),
            )
        )
    )
    out.write(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="monospace" font-size="11">'
            f'<rect width="100%" height="100%" fill="white"/>'
            f'<text x="8" y="16" font-size="13">{_xml(title)}: {duration_text(total_ns)}</text>{legend}'
            f"{''.join(boxes)}</svg>\n"
        ).encode()
    )


def _box(label: Label, x: float, y: int, width: float, spent_ns: int, total_ns: int) -> str:
    letters = int((width - 6) / _LETTER)
    shown = label.text if len(label.text) <= letters else label.text[: max(letters - 1, 0)] + "…"
    text = f'<text x="{x + 3:.1f}" y="{y + 12}">{_xml(shown)}</text>' if letters >= 3 else ""
    tip = f"{label.text}: {duration_text(spent_ns)}, {100 * spent_ns / total_ns:.1f}%"
    return (
        f'<g><title>{_xml(tip)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 1}" '
        f'fill="{label.kind.value}" stroke="white" stroke-width="0.5"/>{text}</g>'
    )


def _xml(text: str) -> str:
    """Text as XML allows it: it has no control characters, not even as entities."""
    return escape("".join(letter if letter.isprintable() else "?" for letter in text))


def write_speedscope(title: str, times: Times, out: BinaryIO) -> None:
    """Write the file format of speedscope.app, version 0.0.1: a profile for each thread."""
    numbers, frames = dict[Label, int](), list[dict[str, str]]()
    profiles: dict[Label, dict[str, Any]] = {}
    for (thread, *path), spent_ns in times.items():
        for label in path:
            if label not in numbers:
                numbers[label] = len(frames)
                frames.append({"name": label.text})
        of = profiles.setdefault(
            thread,
            {"type": "sampled", "name": thread.text, "unit": "nanoseconds", "startValue": 0, "endValue": 0,
             "samples": [], "weights": []},
        )  # fmt: skip
        of["samples"].append([numbers[label] for label in path])
        of["weights"].append(spent_ns)
        of["endValue"] += spent_ns
    found = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": title,
        "exporter": "tracepipe",
        "shared": {"frames": frames},
        "profiles": list(profiles.values()),
    }
    out.write(json.dumps(found).encode())
