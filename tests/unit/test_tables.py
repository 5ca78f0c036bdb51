"""Shapes and arguments by number: each once, in the order in which they are met, and those in use alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cores import new_tables
from tracepipe.event import tables as tables_module
from tracepipe.event.columns import NONE, SPECIAL
from tracepipe.event.shape import Shape

pytestmark = pytest.mark.usefixtures("core")

F, G, H = (Shape("kernel", name, "X" if name == "g" else "I") for name in "fgh")


def numbers(*of: int) -> Any:
    return np.array(of, np.int32)


def test_shapes_are_numbered_in_order_of_appearance() -> None:
    tables = new_tables()
    assert [tables.number_of(shape) for shape in (F, G, F, H, G)] == [0, 1, 0, 2, 1]
    assert tables.shapes == [F, G, H]
    whole = {
        "type": "kernel",
        "name": "g",
        "phase": "X",
        "ts_ns": 5,
        "dur_ns": 7,
        "launch": 3,
        "args": {"a": 1},
    }
    assert tables.shape_number(whole) == 3
    assert tables.shapes[3] == replace(G, has_dur=True, has_launch=True)
    assert tables.shape_number(whole | {"ts_ns": 6, "dur_ns": 8, "launch": 4, "args": {}}) == 3
    assert tables.shape_number({"type": "kernel", "name": "h", "phase": "I", "ts_ns": 5}) == 2


def test_arguments_are_numbered_by_their_text() -> None:
    tables = new_tables()
    given = [{"a": 1}, {"a": 2}, {"a": 1}, {}, None, {"a": 1.0}, {"a": True}, {"b": [{"c": None}]}]
    assert [tables.args_number(args) for args in given] == [0, 1, 0, NONE, NONE, 2, 3, 4]
    assert tables.args_count == 5
    assert tables.text(4) == b'{"b":[{"c":null}]}'
    assert [tables.args(number) for number in range(5)] == [
        {"a": 1},
        {"a": 2},
        {"a": 1.0},
        {"a": True},
        given[-1],
    ]
    assert tables.args(NONE) == {}


def test_arguments_that_are_given_out_may_be_changed() -> None:
    tables = new_tables()
    for args in ({"a": 1}, {"a": 1 << 70}):
        number = tables.args_number(args)
        tables.args(number)["b"] = 2
        assert tables.args(number) == args


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, 10**40, "lone \ud800"])
def test_arguments_that_json_of_64_bits_cannot_hold_are_kept_as_they_are(value: Any) -> None:
    tables = new_tables()
    number = tables.args_number({"a": value})
    assert tables.is_odd(number)
    assert tables.args(number) == {"a": value}
    assert tables.args_number({"a": value}) == number
    # The text that stands for them is that of nothing else.
    plain = tables.args_number({"a": 5})
    assert not tables.is_odd(plain)
    assert tables.text_number(tables.text(number).strip()) != number


def test_numbers_that_json_does_not_have_become_null() -> None:
    tables = new_tables()
    assert tables.args(tables.args_number({"a": math.nan, "b": math.inf})) == {"a": None, "b": None}


def test_what_is_in_use_gets_new_numbers_and_the_rest_is_forgotten() -> None:
    tables = new_tables()
    for shape in (F, G, H):
        tables.number_of(shape)
    for args in ({"a": 0}, {"a": 1 << 64}, {"a": 2}, {"a": 1 << 65}):
        tables.args_number(args)
    to_shapes, to_args = tables.keep(numbers(2, SPECIAL, 1, 2), numbers(3, NONE, 2))
    assert tables.rounds == 1
    assert tables.shapes == [G, H]
    assert to_shapes[numbers(1, 2, SPECIAL, NONE, 0)].tolist() == [0, 1, SPECIAL, NONE, NONE]
    assert to_args[numbers(2, 3, NONE, 0)].tolist() == [0, 1, NONE, NONE]
    assert [tables.args(number) for number in range(2)] == [{"a": 2}, {"a": 1 << 65}]
    assert [tables.is_odd(number) for number in range(2)] == [False, True]
    assert (tables.args_count, tables.number_of(F), tables.number_of(H)) == (2, 2, 1)
    assert tables.args_number({"a": 2}) == 0
    assert tables.args_number({"a": 0}) == 2
    assert tables.are_whole()[numbers(0, 1, 2, SPECIAL, NONE)].tolist() == [True, False, False, False, False]


def test_few_shapes_keep_their_numbers_when_arguments_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = new_tables()
    for shape in (F, G):
        tables.number_of(shape)
    for at in range(3):
        tables.args_number({"a": at})
    to_shapes, to_args = tables.relieve(numbers(1), numbers(2))
    assert (tables.rounds, tables.shape_rounds, tables.shapes) == (1, 0, [F, G])
    assert (to_shapes[numbers(0, 1)].tolist(), to_args[numbers(0, 2)].tolist()) == ([0, 1], [NONE, 0])
    assert (tables.args(0), tables.args_count) == ({"a": 2}, 1)
    monkeypatch.setattr(tables_module, "KEPT_MAX", 1)
    tables.relieve(numbers(1), numbers(0))
    assert (tables.rounds, tables.shape_rounds, tables.shapes) == (2, 1, [G])


def test_tables_are_crowded_by_number_and_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = new_tables()
    monkeypatch.setattr(tables_module, "KEPT_MAX", 3)
    for at in range(6):
        tables.args_number({"a": at})
        assert not tables.crowded()
    tables.args_number({"a": 6})
    assert tables.crowded()
    tables.keep(numbers(), numbers(1))
    assert not tables.crowded()
    for name in "abcd":
        tables.number_of(Shape("kernel", name, "B"))
    assert tables.crowded()
    monkeypatch.setattr(tables_module, "KEPT_MAX", 1 << 14)
    monkeypatch.setattr(tables_module, "KEPT_BYTES_MAX", 4_000)
    assert not tables.crowded()
    tables.args_number({"a": "x" * 4_000})
    assert tables.crowded()
    tables.keep(numbers(), numbers())
    assert not tables.crowded()
    tables.number_of(Shape("kernel", "x" * 4_001, "B"))
    assert tables.crowded()
    tables.keep(numbers(len(tables.shapes) - 1), numbers())
    assert tables.crowded()


keeps = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=9), st.sets(st.integers(0, 9))), max_size=5)


@given(keeps)
def test_numbers_mean_what_they_meant_however_often_they_are_given_anew(plan: list[Any]) -> None:
    tables = new_tables()
    shapes: dict[int, int] = {}
    args: dict[int, int] = {}
    for met, kept in plan:
        for at in met:
            value = at if at % 3 else (1 << 64) + at
            shapes[at] = tables.number_of(Shape("kernel", f"f{at}", "XI"[at % 2]))
            args[at] = tables.args_number({"n": value})
        left = sorted(kept & shapes.keys())
        old = [numbers(*(table[at] for at in left)) for table in (shapes, args)]
        turned = tables.keep(*old)
        shapes, args = (
            dict(zip(left, turn[was].tolist(), strict=True)) for turn, was in zip(turned, old, strict=True)
        )
        whole = tables.are_whole()
        for at in left:
            shape = tables.shapes[shapes[at]]
            assert shape is not None
            assert shape.name == f"f{at}"
            assert whole[shapes[at]] == (at % 2 == 0)
            assert tables.args(args[at]) == {"n": at if at % 3 else (1 << 64) + at}
        assert len(tables.shapes) == tables.args_count == len(left)
