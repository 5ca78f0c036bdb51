"""What `--json` prints has the form that its schema states, for all fixtures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.golden.cases import Case, cases, with_sample
from tests.golden.json_schemas import (
    NAMES,
    answers_of,
    builds,
    made_of,
    of_forms,
    of_jobs,
    path_of,
    printed,
    runs,
)
from tests.support.commands import json_commands
from tests.unit.test_doctor import GOOD, FakeTrials
from tracepipe.api.reports import OF_JOBS, REPORTS
from tracepipe.doctor import as_json, examine
from tracepipe.printable import JSON_VERSION

REMEDY = "run: python -m tests.golden.json_schemas"


@pytest.fixture(scope="module")
def validators() -> dict[str, Draft202012Validator]:
    return {name: Draft202012Validator(json.loads(path_of(name).read_text())) for name in NAMES}


def check(validator: Draft202012Validator, value: Any) -> None:
    errors = [f"{error.json_path}: {error.message}"[:300] for error in validator.iter_errors(value)]
    assert errors == [], REMEDY


@pytest.mark.parametrize("name", NAMES)
def test_each_output_states_its_schema(validators: dict[str, Draft202012Validator], name: str) -> None:
    schema = validators[name].schema
    assert isinstance(schema, dict)
    Draft202012Validator.check_schema(schema)
    assert schema["properties"]["schema"] == {"const": f"tracepipe-{name}/{JSON_VERSION}"}
    expected = {"schema", "report", "notes"} if name in (*REPORTS, "ranks") else {"schema"}
    assert expected <= {*schema["required"]}


def test_each_command_that_prints_json_has_a_schema() -> None:
    assert {command.replace(" ", "-") for command in json_commands()} == {*NAMES}


@pytest.mark.parametrize("case", with_sample(cases()), ids=str)
def test_reports_of_fixtures_fit(validators: dict[str, Draft202012Validator], case: Case) -> None:
    for run in runs(case):
        for name in REPORTS:
            for made in made_of(run, name):
                check(validators[name], printed(made))
        for value in answers_of(run):
            check(validators["query"], value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ranks", *OF_JOBS])
def test_reports_of_jobs_fit(validators: dict[str, Draft202012Validator], name: str) -> None:
    found = [*of_jobs(name)]
    assert found
    for made in found:
        check(validators[name], printed(made))


@pytest.mark.slow
def test_forms_of_reports_fit(validators: dict[str, Draft202012Validator], tmp_path: Path) -> None:
    for made in of_forms(tmp_path):
        check(validators[made.name], printed(made))


@pytest.mark.slow
def test_datasets_of_jobs_fit(validators: dict[str, Draft202012Validator], tmp_path: Path) -> None:
    found = [*builds(tmp_path)]
    assert found
    for value in found:
        check(validators["dataset-build"], value)


def test_findings_of_doctor_fit(validators: dict[str, Draft202012Validator]) -> None:
    check(validators["doctor"], as_json(examine(GOOD, FakeTrials())))
