"""The JSON Schema in the repository is the one that the model makes, and it holds the model's own records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tracepipe.event.model import RECORDS, SCHEMA_VERSION, Header
from tracepipe.event.schema import fields_of, json_schema, required_of

FILE = Path(__file__).parents[2] / "schemas" / "event.schema.json"
REMEDY = "run: python -m tracepipe.event.schema > schemas/event.schema.json"


def test_the_file_is_the_generated_one() -> None:
    want = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    assert FILE.read_text(encoding="utf-8") == want, REMEDY


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(json_schema())


def test_each_kind_of_record_is_described_with_all_its_fields() -> None:
    defs = json_schema()["$defs"]
    for record in RECORDS.values():
        stated = defs[record.__name__]
        assert set(stated["properties"]) == set(fields_of(record))
        assert set(stated.get("required", ())) == required_of(record)
        assert all(field["description"] for field in stated["properties"].values())


@pytest.mark.parametrize(
    ("line", "good"),
    [
        (Header(clock="monotonic").to_record(), True),
        ({"type": "header", "schema": "tracepipe/0"}, False),
        ({"type": "loss", "count": 3}, True),
        ({"type": "loss", "count": -3}, False),
        ({"type": "kernel", "name": "f", "phase": "X", "ts_ns": 1}, False),
        ({"type": "kernel", "name": "f", "phase": "X", "ts_ns": 1, "dur_ns": 0}, True),
        ({"type": "gpu_warp", "name": "f", "phase": "I", "ts_ns": 1}, False),
        ([SCHEMA_VERSION], False),
    ],
)
def test_lines_are_judged(line: Any, good: bool) -> None:
    assert Draft202012Validator(json_schema()).is_valid(line) is good
