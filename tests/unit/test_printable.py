"""Text in a form that can be printed: what a terminal obeys is shown as its escape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tracepipe.printable import json_pieces, json_text, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größe 日本語 😀 \\x", "größe 日本語 😀 \\x"),
        ("\x1b]0;t\x07", "\\x1b]0;t\\x07"),
        ("a\nb\r\tc\x00\x7f", "a\\nb\\r\\tc\\x00\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202egnp.exe\u2066\u200f", "\\u202egnp.exe\\u2066\\u200f"),
        ("a\u2028b\u2029c\xa0d", "a\\u2028b\\u2029c\\xa0d"),
        ("not UTF-8: \udcff", "not UTF-8: \\udcff"),
    ],
)
def test_characters_without_a_shape_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


@pytest.mark.parametrize(
    "value",
    [
        {"a": ["\x1b\x7f\x9b\u202e\u2028 größe 😀 \U000e0041", 1.5, None, True], "\x9b": {}},
        [(1 << 64) - 1, 1 << 64, -(1 << 63) - 1, {"deep": [10**30]}],
        "not UTF-8: \udcff",
        {1: "a key that is a number", "n": -(10**30)},
    ],
)
@pytest.mark.parametrize("indent", [False, True])
def test_json_means_the_same_with_escapes(value: object, indent: bool) -> None:
    text = json_text(value, indent)
    assert all(line.isprintable() for line in text.split("\n"))
    assert json.loads(text) == json.loads(json.dumps(value))
    assert ("\n" in text) == (indent and not isinstance(value, str))


def test_json_comes_in_pieces_with_the_same_bytes() -> None:
    def lazy(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: lazy(item) for key, item in value.items()}
        return map(lazy, value) if isinstance(value, list) else value

    rows = [{"name": f"f\x1b{at}", "at": None if at % 7 else 1 << 60} for at in range(2_500)]
    value = {"none": [], "deep": [{"rows": rows, "empty": {}}, [1, [2]], 3], "rows": rows, "text": "é\n"}
    pieces = [*json_pieces(lazy(value))]
    assert "".join(pieces) == json_text(value, indent=True)
    assert max(map(len, pieces)) < 100_000
    # Pieces are written one by one: short texts are put together.
    short = [*json_pieces(lazy([[at] for at in range(20_000)]))]
    assert min(map(len, short[:-1])) > 10_000
    assert "".join(json_pieces(iter([]))) == "[]"
