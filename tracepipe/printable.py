"""Makes untrusted text from a recording, a path or a machine safe to print.

A terminal obeys control characters: `ESC]0;…` sets its title, and others type for the user or hide lines.
U+202E reverses the text after it, and U+2028 ends a line for some programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

JSON_VERSION = 1
"""The version of what `--json` prints: a new one where something is taken away or has another type."""
# The number of items of a list whose text is in memory at a time.
_AT_ONCE = 1_000
# Pieces of this many characters are put together from shorter ones, as each piece is written by itself.
_PIECE = 1 << 14
_NOT_ASCII = re.compile(r"[^\x20-\x7e]")


def json_schema(name: str) -> str:
    """The name and version of the form of what a command prints as JSON; `schemas/NAME.schema.json` describes
    it.
    """
    return f"tracepipe-{name}/{JSON_VERSION}"


def is_unicode(text: str) -> bool:
    """Whether a text can be written in UTF-8: a path or an argument of other bytes cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def printable(text: str) -> str:
    r"""`text` in one line, with an escape for each invisible character: `\x1b`, `\u202e`, `\n`.

    These are Unicode's control, format, surrogate, private and unassigned characters, and its separators
    other than the blank.
    """
    return text if text.isprintable() else _NOT_ASCII.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    letter = found[0]
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()


def json_text(value: object, indent: bool = False) -> str:
    r"""JSON of one value, on several lines with `indent`; invisible characters are escaped: `\u009b`.

    It takes integers of any size, and text with surrogates, as in paths that are not UTF-8.
    """
    import orjson  # here, as most commands do not need it

    options = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        text = orjson.dumps(value, option=options).decode()
    except TypeError:
        text = orjson.dumps(_in_fragments(value), option=options).decode()
    # Outside of strings, JSON is only ASCII.
    return text if text.isprintable() else _NOT_ASCII.sub(_json_escape, text)


def json_pieces(value: object) -> Iterator[str]:
    """The text of `json_text` on several lines, piece by piece. An iterator's items are written as a list,
    which is never in memory as a whole.
    """
    some, length = list[str](), 0
    for text in _texts(value, ""):
        some.append(text)
        length += len(text)
        if length >= _PIECE:
            yield "".join(some)
            some, length = [], 0
    yield "".join(some)


def _texts(value: object, outer: str) -> Iterator[str]:
    """The same in short pieces. `outer` is the indentation of the surrounding lines."""
    inner, before = f"{outer}  ", ""
    if isinstance(value, Iterator):
        for items in _together(value):
            yield f"{before or '['}\n{inner}"
            if _is_lazy(items[0]):
                yield from _texts(items[0], inner)
            else:  # without the brackets, and the blanks before the first item
                yield json_text(items, indent=True)[4:-2].replace("\n", f"\n{outer}")
            before = ","
        yield f"\n{outer}]" if before else "[]"
    elif isinstance(value, dict) and _is_lazy(value):
        for key, item in value.items():
            yield f"{before or '{'}\n{inner}{json_text(key)}: "
            yield from _texts(item, inner)
            before = ","
        yield f"\n{outer}}}"
    else:
        yield json_text(value, indent=True).replace("\n", f"\n{outer}")


def _is_lazy(value: object) -> bool:
    """Whether a value contains an iterator."""
    return isinstance(value, Iterator) or (isinstance(value, dict) and any(map(_is_lazy, value.values())))


def _together(items: Iterator[Any]) -> Iterator[list[Any]]:
    """Lists of some items each; an item that contains an iterator is alone in its list."""
    some: list[Any] = []
    for item in items:
        is_lazy = _is_lazy(item)
        if some and (is_lazy or len(some) == _AT_ONCE):
            yield some
            some = []
        if is_lazy:
            yield [item]
        else:
            some.append(item)
    if some:
        yield some


def _in_fragments(value: object) -> object:
    """The value, in which parts that orjson refuses are JSON already."""
    from orjson import Fragment

    if isinstance(value, dict):
        return {key: _in_fragments(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_fragments(item) for item in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return Fragment(str(value))
    if isinstance(value, str) and not value.isprintable():
        return Fragment(json.dumps(value))
    return value


def _json_escape(found: re.Match[str]) -> str:
    letter = found[0]
    return letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1]
