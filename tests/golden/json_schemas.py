"""Writes the schemas of what `--json` prints, one for each command that has it: `python -m
tests.golden.json_schemas`.

They describe what the commands give for all fixtures, and with the options and recordings of `forms`: of
tables by the units of their columns, of all else by the values themselves. A renewal that takes something
away, or gives it another type, needs a new JSON_VERSION in `tracepipe.printable`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.cli.conftest import FOUND
from tests.golden.cases import FIXTURES, Case, cases
from tests.support.recordings import span, write
from tests.support.synthetic_warps import SyntheticKernel, write_recording
from tests.unit.test_stalls_and_warps import SHORT, sampled
from tracepipe.analyses.gates import Gate
from tracepipe.api.dataset import build_dataset
from tracepipe.api.options import ReadOptions
from tracepipe.api.reports import (
    OF_JOBS,
    REPORTS,
    JobOptions,
    Made,
    make,
    make_of_job,
    with_all_rows,
)
from tracepipe.cli.dataset import built_json
from tracepipe.doctor import as_json
from tracepipe.errors import TracepipeError
from tracepipe.printable import JSON_VERSION, json_text
from tracepipe.reports.report import Table
from tracepipe.sql.answers import write_rows
from tracepipe.sql.tables import query_recording
from tracepipe.store.run import Run, load_run

FOLDER = FIXTURES.parent / "schemas"
JOBS = ("ddp-h200", "small-fsdp-h200", "collectives-h200")
OTHERS = ("query", "dataset-build", "doctor")
"""The commands that are no reports; a blank in a name is a hyphen."""
NAMES = [*REPORTS, "ranks", *OTHERS]
# Objects whose keys are names of layers, clocks, ….
_MAPS = {"counts", "losses", "unplaced", "args", "left_out", "bound_ns", "refused"}
_OF_UNITS = {
    "": ["string", "null"],
    **{unit: ["number", "null"] for unit in ("percent", "change_percent", "number", "p", "bytes_per_s")},
}
_MORE: dict[str, dict[str, Any]] = {"summary": {"all": True, "top": 0}}
AT = range(2_000, 4_000, 10)
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
        output = "" if report.output is None else f"run.{name}"
        yield Made(name, result, [run.facts] * max(len(result.sides), 1), output=output)


def of_jobs(name: str) -> Iterator[Made]:
    """A report of the jobs among the fixtures."""
    for job in JOBS:
        path, showing = str(FIXTURES / job), lambda what: nullcontext()
        try:
            if name == "ranks":
                made = make_of_job(path, "", JobOptions(top=0), force=False, showing=showing)
                yield from (made, replace(made, output="job.html"))  # the page of `-o`, and of `report`
            else:
                yield make(REPORTS[name], [[path]], REPORTS[name].options(), ReadOptions(), showing=showing)
        except TracepipeError:
            continue


def forms(folder: Path) -> Iterator[tuple[str, list[list[str]], dict[str, Any]]]:
    """The reports that have other parts by their options, or by what no case has: name, recordings, options.
    What no fixture has is written to the folder.
    """
    slow, fast = (str(FIXTURES / "resnet50-loader" / f"{name}.json.zst") for name in ("slow", "fast"))
    ranks = [[str(FIXTURES / job / f"{rank}.jsonl.zst") for rank in range(2)] for job in JOBS[:2]]
    late = SyntheticKernel(warps=8, late_warps=(3, 7), delay=0.2)
    warps = str(write_recording(folder / "warps.jsonl", late, 11, SHORT))
    stalls = str(sampled(folder / "stalls.jsonl", {"barrier": 300, "selected": 700}))
    tails = [
        [str(write(folder / f"{tail_ns}", *(span(at, at + 9 + tail_ns * (at % 100 == 0), "f") for at in AT)))]
        for tail_ns in (0, 50)
    ]
    yield "diff", [[slow], [fast]], {}
    yield "diff", ranks, {"gates": tuple(map(Gate.read, ("step<=+3%", "idle<=+2ms")))}
    yield "diff", [one * 2 for one in tails], {}
    yield "diff", [[warps], [warps]], {}
    yield "whatif", [[slow]], {}
    yield "whatif", [[slow]], {"launches": "free"}
    for call in ("5", "cudaMalloc"):
        yield "layers", [[str(FIXTURES / "capture-h200" / "input.jsonl")]], {"call": call}
    yield "stalls", [[stalls]], {"warps": warps}
    yield "warps", [[warps]], {"stalls": stalls}
    lengths_ns = (100, 100, 100, 100, 900)  # the last step is slow
    steps = [
        span(AT[10 * at], AT[10 * at] + ns, f"step {at}", "annotation") for at, ns in enumerate(lengths_ns)
    ]
    kernels = [
        span(AT[10 * at], AT[10 * at] + ns // 2, "k", "gpu_kernel", gpu=0) for at, ns in enumerate(lengths_ns)
    ]
    footer = {"type": "footer", "counts": {}, "losses": {}, "cuda_errors": ["an error"]}
    for name, records in (("host", steps), ("gpu", [*steps, *kernels, footer])):
        for report in ("steps", "summary"):
            yield report, [[str(write(folder / f"{name}.jsonl", *records))]], {}


def of_forms(folder: Path) -> Iterator[Made]:
    """What `forms` lists."""
    for name, inputs, given in forms(folder):
        options = replace(with_all_rows(REPORTS[name].options()), **given)
        yield make(REPORTS[name], inputs, options, ReadOptions(), showing=lambda what: nullcontext())


def answers_of(run: Run) -> Iterator[Any]:
    """What `query --json` prints of a recording, which answers nothing else afterwards."""
    values = "select 1 as i, 1.5 as f, 'a' as t, null as n, true as b, [1, 2] as l, '\\x00'::blob as x"
    for sql in (f"select * from calls, ({values}) limit 20",):
        with query_recording(run, sql) as rows:
            written = BytesIO()
            write_rows(rows, "json", written)
            yield json.loads(written.getvalue())


def builds(folder: Path) -> Iterator[Any]:
    """What `dataset build --json` prints of the jobs among the fixtures, together and one by one."""
    jobs = [str(FIXTURES / job) for job in JOBS]
    for inputs in (jobs, *([job] for job in jobs)):
        target = str(folder / str(len([*folder.iterdir()])))
        built = build_dataset(inputs, target, ReadOptions(), jobs=1)
        yield json.loads(json_text(built_json(target, built)))


def diagnoses() -> Iterator[Any]:
    """What `doctor --json` prints."""
    for found in (FOUND, FOUND[:1]):
        yield json.loads(json_text(as_json(found)))


def schema_of_value(value: Any) -> Schema:
    """The schema of what a command prints that is no report."""
    schema = _of(value)
    schema["properties"]["schema"] = {"const": value["schema"]}
    if "rows" in value:  # the keys are the columns of the question
        values = [_of(one) for row in value["rows"] for one in row.values()]
        items = {"type": "object", "additionalProperties": reduce(merged, values, {})}
        schema["properties"]["rows"] = {"type": "array", "items": items}
    return schema


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


def schemas_of(case: Case) -> dict[str, Schema]:
    """The schemas of all that is made of a case's recording."""
    found: dict[str, Schema] = {}
    for run in runs(case):
        for name in REPORTS:
            found[name] = reduce(merged, map(schema_of, made_of(run, name)), found.get(name, {}))
        found["query"] = reduce(merged, map(schema_of_value, answers_of(run)), found.get("query", {}))
    return found


def share_recordings(found: dict[str, Schema]) -> None:
    """Let all reports have one form of recordings, as some are made of few fixtures. Only `diff` has another,
    with a side.
    """
    several = [
        schema["properties"]
        for name, schema in found.items()
        if name != "diff" and "recordings" in schema["properties"]
    ]
    shared = reduce(merged, [one["recordings"] for one in several])
    for one in several:
        one["recordings"] = shared


def main() -> None:
    """Write all schemas."""
    found: dict[str, Schema] = {name: {} for name in NAMES}
    with ProcessPoolExecutor() as processes:
        for own in processes.map(schemas_of, cases()):
            found |= {name: merged(found[name], schema) for name, schema in own.items()}
    for name in ("ranks", *OF_JOBS):
        found[name] = reduce(merged, map(schema_of, of_jobs(name)), found[name])
    with tempfile.TemporaryDirectory() as folder:
        for made in of_forms(Path(folder)):
            found[made.name] = merged(found[made.name], schema_of(made))
    with tempfile.TemporaryDirectory() as folder:
        found["dataset-build"] = reduce(merged, map(schema_of_value, builds(Path(folder))))
    found["doctor"] = reduce(merged, map(schema_of_value, diagnoses()))
    share_recordings(found)
    for name, schema in found.items():
        head = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": f"tracepipe {name.replace('-', ' ')} --json, version {JSON_VERSION}",
        }
        path_of(name).write_text(json_text({**head, **schema}, indent=True) + "\n")


if __name__ == "__main__":
    main()
