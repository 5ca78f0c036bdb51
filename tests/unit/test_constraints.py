"""`constraints.txt` has a version for whatever pyproject.toml asks for, and one that it allows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))


def wanted() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    asked = [Requirement(one) for some in (PROJECT["dependencies"], *extras) for one in some]
    return [one for one in asked if one.name != "tracepipe"]


@pytest.mark.parametrize("python", PYTHONS)
def test_each_python_has_one_version_of_whatever_is_asked_for(python: str) -> None:
    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    for asked in wanted():
        if asked.marker and not asked.marker.evaluate(here):
            continue
        pins = [
            pin for pin in PINNED if pin.name == asked.name and (not pin.marker or pin.marker.evaluate(here))
        ]
        assert len(pins) == 1, f"{asked} on Python {python}: {pins}"
        (version,) = (exact.version for exact in pins[0].specifier)
        assert asked.specifier.contains(version), f"{asked}, and {pins[0]}"
