"""Writes the schemas of what `--json` prints, one for each report and for `ranks`: `python -m
tests.golden.json_schemas`.

They describe what the reports give for all fixtures: of tables by the units of their columns, of all else by
the values themselves. A renewal that takes something away, or gives it another type, needs a new VERSION in
`tracepipe.api.reports`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from tests.golden.cases import FIXTURES, Case, cases
from tracepipe.analyses.gates import Gate
from tracepipe.api.options import ReadOptions
from tracepipe.api.reports import (
    OF_JOBS,
    REPORTS,
    VERSION,
    JobOptions,
    Made,
    make,
    make_of_job,
    with_all_rows,
)
from tracepipe.errors import TracepipeError
from tracepipe.printable import json_text
from tracepipe.reports.report import Table
from tracepipe.store.run import Run, load_run

FOLDER = FIXTURES.parent / "schemas"
JOBS = ("ddp-h200", "small-fsdp-h200", "collectives-h200")
NAMES = [*(name for name in REPORTS if name not in ("plot", "report", "export")), "ranks"]
# Objects whose keys are names of layers, clocks, ….
_MAPS = {"counts", "losses", "unplaced", "args"}
_OF_UNITS = {
    "": ["string", "null"],
    **{unit: ["number", "null"] for unit in ("percent", "change_percent", "number", "p", "bytes_per_s")},
}
_MORE: dict[str, dict[str, Any]] = {
    "diff": {"gates": (Gate.read("wall<=+3%"),)},
    "summary": {"all": True, "top": 0},
}
Schema = dict[str, Any]


def path_of(name: str) -> Path:
    """The file of a schema."""
    return FOLDER / f"{name}.schema.json"


def runs(case: Case) -> Iterator[Run]:
    """The recording of a case, unless reports cannot be made of it."""
    options = case.options()
    try:
        yield load_run(str(case.input), assumed=options.assumed, undated=options.undated)
    except TracepipeError:
        return


def made_of(run: Run, name: str) -> Iterator[Made]:
    """A report of a recording, with all rows, and with the options that add parts; none where it refuses."""
    report = REPORTS[name]
    options = with_all_rows(report.options())
    for given in ({}, _MORE[name]) if name in _MORE else ({},):
        asked = replace(options, **given)
        try:
            if report.takes_several:
                result = report.run([lambda: run], [lambda: run] * 3, asked)
            else:
                result = report.run(run, asked)
        except TracepipeError:
            continue
        result.sides = []
        yield Made(name, result, [run.facts] * len(report.inputs))


def of_jobs(name: str) -> Iterator[Made]:
    """A report of the jobs among the fixtures."""
    for job in JOBS:
        path, showing = str(FIXTURES / job), lambda what: nullcontext()
        try:
            if name == "ranks":
                yield make_of_job(path, "", JobOptions(top=0), force=False, showing=showing)
            else:
                yield make(REPORTS[name], [[path]], REPORTS[name].options(), ReadOptions(), showing=showing)
        except TracepipeError:
            continue


def printed(made: Made) -> Any:
    """What `--json` prints."""
    from tracepipe.printable import json_pieces

    return json.loads("".join(json_pieces(made.lazily())))


def schema_of(made: Made) -> Schema:
    """The schema of one output."""
    schema = _of(printed(made))
    schema["properties"]["schema"] = {"const": made.schema}
    for part in made.result.parts:
        if isinstance(part, Table):
            columns = {
                column.key: {
                    "type": _OF_UNITS.get(column.unit, ["integer", "null"]),
                    **({"description": column.title} if column.title else {}),
                }
                for column in part.columns
            }
            items = {
                "type": "object",
                "properties": columns,
                "required": [*columns],
                "additionalProperties": False,
            }
            schema["properties"][part.name] = {"type": "array", "description": part.title, "items": items}
    return schema


def _of(value: Any, key: str = "") -> Schema:
    if isinstance(value, dict):
        if key in _MAPS:
            items = [_of(one) for one in value.values()]
            return {"type": "object", "additionalProperties": reduce(merged, items) if items else {}}
        of = {name: _of(one, name) for name, one in value.items()}
        return {"type": "object", "properties": of, "required": [*of], "additionalProperties": False}
    if isinstance(value, list):
        items = [_of(one, key) for one in value]
        return {"type": "array", "items": reduce(merged, items) if items else {}}
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return {"type": names[type(value)]}


def merged(a: Schema, b: Schema) -> Schema:
    """The schema of what either describes."""
    if not a or not b or a == b:
        return a or b
    kinds = _kinds(a) | _kinds(b)
    found: Schema = {"type": sorted(kinds - ({"integer"} if "number" in kinds else set()))}
    if len(found["type"]) == 1:
        found["type"] = found["type"][0]
    if text := a.get("description") or b.get("description"):
        found["description"] = text
    if "const" in a:
        found["const"] = a["const"]
    if "array" in kinds:
        found["items"] = merged(a.get("items", {}), b.get("items", {}))
    if "object" in kinds:
        ours, theirs = a.get("properties", {}), b.get("properties", {})
        if "properties" in a or "properties" in b:
            found["properties"] = {
                name: merged(ours.get(name, {}), theirs.get(name, {})) for name in {**ours, **theirs}
            }
            needed = [set(one["required"]) for one in (a, b) if "required" in one]
            found["required"] = [name for name in found["properties"] if all(name in some for some in needed)]
            found["additionalProperties"] = False
        else:
            found["additionalProperties"] = merged(
                a.get("additionalProperties") or {}, b.get("additionalProperties") or {}
            )
    return found


def _kinds(schema: Schema) -> set[str]:
    kind = schema.get("type", [])
    return {kind} if isinstance(kind, str) else {*kind}


def main() -> None:
    """Write all schemas."""
    found: dict[str, Schema] = {name: {} for name in NAMES}
    for case in cases():
        for run in runs(case):
            for name in NAMES[:-1]:
                found[name] = reduce(merged, map(schema_of, made_of(run, name)), found[name])
        print(case.name)
    for name in ("ranks", *OF_JOBS):
        found[name] = reduce(merged, map(schema_of, of_jobs(name)), found[name])
    for name, schema in found.items():
        head = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": f"tracepipe {name} --json, version {VERSION}",
        }
        path_of(name).write_text(json_text({**head, **schema}, indent=True) + "\n")


if __name__ == "__main__":
    main()
