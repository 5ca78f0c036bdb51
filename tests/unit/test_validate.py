"""The checks say the field and the fault, and agree with the JSON Schema."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tracepipe.event.checks import first_fault, long_texts, shown
from tracepipe.event.model import HOST_CLOCKS, LAYERS, PHASES, RECORDS, SCHEMA_VERSION, TIME_LIMIT_NS
from tracepipe.event.schema import fields_of, json_schema

EVENT = {"type": "syscall", "name": "ioctl", "phase": "I", "ts_ns": 1, "pid": 1, "tid": 1}
SCHEMA = Draft202012Validator(json_schema())

_INTEGERS = st.one_of(st.integers(-2, 3), st.sampled_from([TIME_LIMIT_NS, TIME_LIMIT_NS + 1, (1 << 64) - 1]))
_WORDS = st.sampled_from([*RECORDS, *PHASES, *HOST_CLOCKS, SCHEMA_VERSION, "gpu", ""])
# 1.5 stands for every float: JSON Schema takes 1.0 for an integer, and the checks do not.
_SCALARS = st.one_of(_INTEGERS, _WORDS, st.booleans(), st.none(), st.just(1.5))
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "monotonic_ns"]), inner)
    ),
    max_leaves=6,
)
_FIELD_NAMES = sorted({name for record in RECORDS.values() for name in fields_of(record)})


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """Records near the good ones: of a known kind with most of its fields, and any values in some."""
    kind = draw(st.sampled_from(sorted(RECORDS)))
    good: dict[str, Any] = {"type": kind, "schema": SCHEMA_VERSION, "name": "f", "phase": "I", "ts_ns": 1}
    good |= {"dur_ns": 1, "count": 1, "clock": "gpu", "source_ns": 1, "host_lo_ns": 1, "host_hi_ns": 1}
    good |= {"warp": [0], "entry_ns": [0], "exit_ns": [1], "counts": {}, "losses": {}}
    good |= {"grid": [1, 1, 1], "args": {}, "layers": {"got": ["syscall"]}, "start": {"monotonic_ns": 1}}
    for name in draw(st.lists(st.sampled_from(sorted(good)), max_size=3)):
        good.pop(name, None)
    return good | draw(st.dictionaries(st.sampled_from(_FIELD_NAMES), _VALUES, max_size=2))


def beyond_the_schema(record: dict[str, Any]) -> bool:
    """Whether only a rule over several values is broken, which JSON Schema cannot say."""
    fault = first_fault(record)
    return fault is not None and (
        re.search(r" values? for ", fault[1]) is not None
        or "before host_lo_ns" in fault[1]
        or "is monotonic" in fault[1]
    )


@pytest.mark.slow
@settings(max_examples=600)
@given(records())
@example({**EVENT, "phase": "X"})
@example({"type": "clock", "clock": "gpu", "source_ns": 1, "host_lo_ns": 2, "host_hi_ns": 1})
def test_checks_and_schema_agree(record: dict[str, Any]) -> None:
    if beyond_the_schema(record):
        assert SCHEMA.is_valid(record)
    else:
        assert SCHEMA.is_valid(record) == (first_fault(record) is None)


@given(_VALUES)
def test_any_json_value_has_a_verdict(value: Any) -> None:
    assert SCHEMA.is_valid(value) == (first_fault(value) is None)


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer != "gpu_warp"])
def test_an_event_of_each_layer_is_good(layer: str) -> None:
    assert first_fault({**EVENT, "type": layer}) is None


@pytest.mark.parametrize("name", ["type", "name", "phase", "ts_ns"])
def test_each_required_field_is_missed_by_name(name: str) -> None:
    assert first_fault({key: value for key, value in EVENT.items() if key != name}) == (name, "is missing")


def test_unknown_fields_are_allowed() -> None:
    assert first_fault({**EVENT, "colour": "red"}) is None


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"ts_ns": "1"}, ("ts_ns", "must be an integer, not '1'")),
        ({"ts_ns": False}, ("ts_ns", "must be an integer, not False")),
        ({"ts_ns": -1}, ("ts_ns", "must be at least 0, not -1")),
        ({"ts_ns": TIME_LIMIT_NS + 1}, ("ts_ns", f"must be at most {TIME_LIMIT_NS}")),
        ({"phase": "b"}, ("phase", "must be one of B, E, I, X, C, s, t, f, not 'b'")),
        ({"phase": "X"}, ("dur_ns", "is missing: an X has no length without it")),
        ({"grid": [1, 2]}, ("grid", "must have 3 elements, not 2")),
        ({"grid": [1, 2, None]}, ("grid[2]", "must be an integer, not None")),
        ({"args": 3}, ("args", "must be an object, not 3")),
    ],
)
def test_a_fault_names_field_and_value(fields: dict[str, Any], fault: tuple[str, str]) -> None:
    assert first_fault({**EVENT, **fields}) == fault


def test_a_fault_inside_an_object_names_the_path_to_it() -> None:
    header = {"type": "header", "schema": SCHEMA_VERSION, "start": {"monotonic_ns": "now"}}
    assert first_fault(header) == ("start.monotonic_ns", "must be an integer, not 'now'")
    assert first_fault({**header, "start": 3}) == ("start", "must be an object, not 3")


def test_the_monotonic_clock_is_not_paired_with_itself() -> None:
    record = {"type": "clock", "clock": "monotonic", "source_ns": 1, "host_lo_ns": 1, "host_hi_ns": 1}
    assert first_fault(record) == ("clock", "is monotonic, with which the other clocks are paired")


def test_values_are_shown_short_however_long_or_deep() -> None:
    deep: Any = 1
    for _ in range(200_000):  # Python 3.14 shows some ten thousand levels
        deep = [deep]
    assert shown(deep) == "a deeply nested list"
    assert len(shown("x" * 1000)) == 40


@pytest.mark.parametrize(
    ("second", "field"),
    [
        ({**EVENT, "ts_ns": -1}, "ts_ns"),
        ({**EVENT, "ts_ns": True}, "ts_ns"),
        ({**EVENT, "ts_ns": 1.5}, "ts_ns"),
        ({**EVENT, "args": []}, "args"),
        ({**EVENT, "cpu": "0"}, "cpu"),
        ({**EVENT, "comm": 3}, "comm"),
        ({**EVENT, "pid": True}, "pid"),
        ({**EVENT, "pid": 1.0}, "pid"),
        ({**EVENT, "cpu": -1}, "cpu"),
        ({**EVENT, "dur_ns": "1"}, "dur_ns"),
        ({**EVENT, "clock": 3}, "clock"),
    ],
)
def test_the_check_names_the_field_of_a_fault(second: dict[str, Any], field: str) -> None:
    assert first_fault(EVENT) is None
    fault = first_fault(second)
    assert fault is not None and fault[0] == field


def test_each_x_needs_a_length() -> None:
    assert first_fault({**EVENT, "phase": "X", "dur_ns": 1}) is None
    fault = first_fault({**EVENT, "phase": "X", "args": {}})
    assert fault is not None and fault[0] == "dur_ns"


def test_an_unknown_field_may_have_the_name_of_a_text_of_another_type() -> None:
    clock = {"type": "clock", "clock": "gpu", "source_ns": 1, "host_lo_ns": 1, "host_hi_ns": 1}
    record = {**clock, "reason": 1, "comm": [1]}
    assert first_fault(record) is None
    assert long_texts(record) == []
