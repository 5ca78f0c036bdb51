"""Checks of `tracepipe/1` records, compiled from the classes in `model.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, get_args, get_origin

import numpy as np

from tracepipe.event.columns import NONE
from tracepipe.event.model import (
    MONOTONIC,
    NAME_BYTES_MAX,
    RECORDS,
    STALLS,
    TIME_LIMIT_NS,
    Doc,
    Record,
    cut_text,
)
from tracepipe.event.schema import fields_of, is_record, required_of
from tracepipe.event.warps import EACH_EXIT, EACH_RANGE, EACH_WARP, WarpColumns, warps_of
from tracepipe.units import agree, counted

Fault = tuple[str, str]
"""A field and what is wrong with it."""
Check = Callable[[Any], "str | Fault | None"]
"""Return None for a good value, else what is wrong, with the inner field where there is one."""

_NAMES = {int: "an integer", str: "a string", dict: "an object", list: "an array"}


def shown(value: object) -> str:
    """`value` as an error message shows it: 40 characters at most."""
    try:
        text = repr(value)
    except RecursionError:  # a parser nests deeper than Python's repr
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "..."


def _check_of(hint: Any, doc: Doc) -> Check:
    if is_record(hint):
        record = _check_record(hint)

        def nested(value: Any) -> Fault | None:
            fault = record(value)
            return (f".{fault[0]}", fault[1]) if fault and fault[0] else fault

        return nested
    if hint is Any:
        return lambda value: None
    bare = get_origin(hint) or hint
    low = doc.minimum if doc.minimum is not None else -TIME_LIMIT_NS
    high = doc.maximum if doc.maximum is not None else (1 << 64) - 1

    def scalar(value: Any) -> str | None:
        if type(value) is not bare:
            return f"must be {_NAMES[bare]}, not {shown(value)}"
        if bare is int and not low <= value <= high:
            return f"must be at least {low}, not {value}" if value < low else f"must be at most {high}"
        if doc.enum and value not in doc.enum:
            return f"must be one of {', '.join(doc.enum)}, not {shown(value)}"
        return None

    if bare not in (list, dict):
        return scalar
    inner = _check_of(get_args(hint)[-1], Doc("", minimum=doc.minimum, maximum=doc.maximum))

    ints = get_args(hint) == (int,)

    def container(value: Any) -> str | Fault | None:
        if type(value) is not bare:
            return f"must be {_NAMES[bare]}, not {shown(value)}"
        if doc.length is not None and len(value) != doc.length:
            return f"must have {doc.length} elements, not {len(value)}"
        # A good column of thousands of integers is checked as a whole, not value by value.
        if ints and (
            not value or (set(map(type, value)) == {int} and low <= min(value) and max(value) <= high)
        ):
            return None
        for at, item in enumerate(value) if bare is list else value.items():
            if wrong := inner(item):
                return f"[{at}]", wrong if isinstance(wrong, str) else " ".join(wrong)
        return None

    return container


def _check_record(record: type) -> Callable[[Any], Fault | None]:
    checks = [(name, _check_of(hint, doc)) for name, (hint, doc) in fields_of(record).items()]
    required = [name for name, _ in checks if name in required_of(record)]

    def check(value: Any) -> Fault | None:
        if type(value) is not dict:
            return "", f"must be an object, not {shown(value)}"
        for name in required:
            if name not in value:
                return name, "is missing"
        for name, inner in checks:
            if name in value and (wrong := inner(value[name])):
                return (name, wrong) if isinstance(wrong, str) else (name + wrong[0], wrong[1])
        return None

    return check


_CHECKS = {kind: _check_record(record) for kind, record in RECORDS.items()}


def _of_wrong_length(values: int, count: int, noun: str) -> str:
    return f"has {counted(values, 'value|values')} for {counted(count, noun)}"


def _beyond(number: int, count: int, names: str) -> str:
    return f"has {number}, but there {agree(count, 'is|are')} {counted(count, 'name|names')} in {names}"


OF_RANGES: Final = frozenset({"ranges", "range_count", *EACH_RANGE})
"""The columns of ranges."""


def ranges_fault(warps: WarpColumns) -> Fault | None:
    """The fault of columns of ranges that disagree or have an impossible range, or None."""
    count = 0 if warps.range_count is None else int(warps.range_count.sum())
    for name in EACH_RANGE:
        if (column := getattr(warps, name)) is not None and len(column) != count:
            return name, _of_wrong_length(len(column), count, "range|ranges")
    if fault := _names_fault({"ranges": warps.ranges}, "ranges"):
        return fault
    if not count:
        return None
    needed = ("range_name", "range_clk", "range_dur_clk", "exit_clk")
    columns: list[Any] = [getattr(warps, name) for name in needed]
    for name, column in zip(needed, columns, strict=True):
        if column is None:
            return name, "is missing, but there are ranges"
    number, clk, dur_clk, exit_clk = columns
    if (last := int(number.max())) >= len(warps.ranges):
        return "range_name", _beyond(last, len(warps.ranges), "ranges")
    of = warps.of_ranges()
    last_clk = warps.last_of_exits(exit_clk)[of]
    ends_late = (clk > last_clk) | (dur_clk > last_clk - clk)
    is_early = (np.diff(clk, prepend=0) < 0) & (np.diff(of, prepend=NONE) == 0)
    for at in np.flatnonzero(ends_late | is_early)[:1].tolist():
        if ends_late[at]:
            return "range_dur_clk", f"has a range that ends after its warp's last exit (warp {of[at]})"
        return "range_clk", f"is not in the order of begins (warp {of[at]})"
    return None


def _stalls_fault(record: Record) -> Fault | None:
    """The fault of columns of samples that disagree or refer to names that are not there, or None."""
    count = len(record["samples"])
    for name in ("function", "reason", "offset", "line"):
        if name in record and len(record[name]) != count:
            return name, _of_wrong_length(len(record[name]), count, "count|counts of samples")
    if "modules" in record and len(record["modules"]) != len(record["functions"]):
        return "modules", _of_wrong_length(
            len(record["modules"]), len(record["functions"]), "function|functions"
        )
    for column, names, first in (
        ("function", "functions", 0),
        ("reason", "reasons", 0),
        ("line", "lines", 1),
    ):
        there = len(record.get(names, ()))
        if (last := max(record.get(column, ()), default=-1)) >= there + first:
            return column, _beyond(last, there, names)
    return _names_fault(record, "functions", "reasons", "lines", "modules")


def _names_fault(record: Record, *lists: str) -> Fault | None:
    """The fault of a name that is too long in one of these lists, or None."""
    for name in lists:
        for at, text in enumerate(record.get(name, ())):
            if cut_text(text) != text:
                return f"{name}[{at}]", f"is longer than {NAME_BYTES_MAX} bytes"
    return None


def first_fault(record: Any) -> Fault | None:
    """The first thing wrong with a parsed line, as (field, message), or None."""
    if type(record) is not dict:
        return "", f"must be an object, not {shown(record)}"
    if "type" not in record:
        return "type", "is missing"
    kind = record["type"]
    if type(kind) is not str or kind not in _CHECKS:
        return "type", f"must be one of {', '.join(_CHECKS)}, not {shown(kind)}"
    if fault := _CHECKS[kind](record):
        return fault
    if kind == "gpu_warp":
        warps = len(record["warp"])
        for name in EACH_WARP:
            if name in record and len(record[name]) != warps:
                return name, _of_wrong_length(len(record[name]), warps, "warp|warps")
        exits = sum(record["exit_count"]) if "exit_count" in record else warps
        for name in EACH_EXIT:
            if name in record and len(record[name]) != exits:
                return name, _of_wrong_length(len(record[name]), exits, "exit|exits")
        return None if record.keys().isdisjoint(OF_RANGES) else ranges_fault(warps_of(dict(record)))
    if kind in STALLS:
        return _stalls_fault(record)
    if kind == "clock" and record["host_hi_ns"] < record["host_lo_ns"]:
        return "host_hi_ns", "is before host_lo_ns"
    if kind == "clock" and record["clock"] == MONOTONIC:
        return "clock", "is monotonic, with which the other clocks are paired"
    if record.get("phase") == "X" and "dur_ns" not in record:
        return "dur_ns", "is missing: an X has no length without it"
    return None


_TEXTS = ("name", "comm", "domain", "layer", "clock", "reason")


def long_texts(record: Record) -> list[str]:
    """The fields of a good record whose texts are longer than what is kept of them.

    A field that a record's type does not know may hold anything.
    """
    return [field for field in _TEXTS if type(text := record.get(field)) is str and cut_text(text) != text]
