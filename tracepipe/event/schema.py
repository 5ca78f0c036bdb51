"""The JSON Schema of `tracepipe/1`, generated from the classes in `model.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints, is_typeddict

from tracepipe.event.model import LAYERS, RECORDS, SCHEMA_VERSION, Doc, Event

_SCALARS: dict[object, dict[str, Any]] = {
    int: {"type": "integer"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    Any: {},
}


@cache
def fields_of(record: type) -> Mapping[str, tuple[Any, Doc]]:
    """Field name → (bare type, documentation) of a record class."""
    out: dict[str, tuple[Any, Doc]] = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        if get_origin(hint) is Annotated:
            bare, doc = get_args(hint)[:2]
            # A field that may be None is absent then.
            out[name] = (get_args(bare)[0] if type(None) in get_args(bare) else bare, doc)
    return out


def is_record(hint: object) -> bool:
    """Whether a type has fields of its own."""
    return is_typeddict(hint) or is_dataclass(hint)


def required_of(record: type) -> frozenset[str]:
    """Names of the fields without which a record is invalid."""
    return frozenset(name for name, (_, doc) in fields_of(record).items() if doc.is_required)


def _of_type(hint: object, doc: Doc) -> dict[str, Any]:
    if is_record(hint):
        return _of_record(cast(type, hint))
    if hint in _SCALARS:
        out = dict(_SCALARS[hint])
        if hint is int:
            out |= {k: v for k, v in (("minimum", doc.minimum), ("maximum", doc.maximum)) if v is not None}
        if doc.enum:
            out["enum"] = list(doc.enum)
        return out
    origin, args = get_origin(hint), get_args(hint)
    if origin is list:
        out = {"type": "array", "items": _of_type(args[0], Doc("", minimum=doc.minimum, maximum=doc.maximum))}
        if doc.length is not None:
            out |= {"minItems": doc.length, "maxItems": doc.length}
        return out
    if origin is dict:
        value = _of_type(args[1], Doc("", minimum=doc.minimum, maximum=doc.maximum))
        return {"type": "object"} | ({"additionalProperties": value} if value else {})
    raise TypeError(f"model.py uses {hint!r}, which has no JSON Schema here")


def _of_record(record: type) -> dict[str, Any]:
    properties = {}
    for name, (hint, doc) in fields_of(record).items():
        properties[name] = _of_type(hint, doc) | ({"description": doc.text} if doc.text else {})
    summary = (record.__doc__ or "").split("\n")[0]
    out = {"type": "object", "description": summary, "properties": properties}
    if required_of(record):
        out["required"] = [name for name in properties if name in required_of(record)]
    return out


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of one line of a `tracepipe/1` file; unknown fields are allowed."""
    kinds = [record for record in dict.fromkeys(RECORDS.values()) if record is not Event]
    defs = {record.__name__: _of_record(record) for record in (*kinds, Event)}
    # An X without its duration cannot be drawn. The types do not express this rule.
    defs["Event"]["if"] = {"properties": {"phase": {"const": "X"}}, "required": ["phase"]}
    defs["Event"]["then"] = {"required": ["dur_ns"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"One line of a {SCHEMA_VERSION} file; layers: {', '.join(LAYERS)}",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in defs],
        "$defs": defs,
    }


if __name__ == "__main__":  # python -m tracepipe.event.schema > schemas/event.schema.json
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
