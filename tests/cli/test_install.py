"""What an installation gets: the core where C can be compiled, Python alone where it cannot."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools

import tracepipe
from tracepipe.native import build

ROOT = Path(__file__).parents[2]
BACKEND = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
CORE = f"tracepipe/native/{build.NAME}"
SOURCES = {f"tracepipe/native/{path.name}" for path in build.sources()}
SAMPLE = ROOT / "fixtures" / "capture-h200" / "input.jsonl"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        tuple(map(int, setuptools.__version__.split(".")[:2])) < (77, 0), reason="setuptools is older than 77"
    ),
]
compiles = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason="no C compiler (apt install gcc libc6-dev)"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout in which a core of other sources was left."""
    made = tmp_path / "checkout"
    made.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, made)
    shutil.copytree(ROOT / "man", made / "man")
    shutil.copytree(ROOT / "tracepipe", made / "tracepipe", ignore=shutil.ignore_patterns("__pycache__"))
    (made / CORE).write_bytes(b"old")
    return made


def packed(tree: Path, hook: str, **environment: str) -> Path:
    """What a hook of the build backend makes of a checkout."""
    out = tree.parent / "out"
    out.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("CC", "TRACEPIPE_PURE")}
    subprocess.run(
        [sys.executable, "-c", BACKEND, hook, str(out)],
        cwd=tree,
        env=clean | {"PYTHONPATH": ""} | environment,
        check=True,
        capture_output=True,
    )
    (made,) = out.iterdir()
    return made


def printed_by(folder: Path, *argv: str) -> str:
    """What an installed tracepipe prints."""
    clean = {name: value for name, value in os.environ.items() if name != "TRACEPIPE_PURE"}
    command = [sys.executable, "-m", "tracepipe", *argv]
    environment = clean | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def unpacked(wheel: Path, folder: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        return set(archive.namelist())


@compiles
def test_a_wheel_has_the_core_and_suits_every_python(tree: Path, tmp_path: Path) -> None:
    stale = tree / "build" / "lib" / "tracepipe" / "native" / "gone.c"
    stale.parent.mkdir(parents=True)
    stale.write_text("int gone;\n")
    wheel = packed(tree, "build_wheel")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    names = unpacked(wheel, tmp_path / "installed")
    assert {CORE, *SOURCES} <= names and f"tracepipe/native/{stale.name}" not in names
    assert "(native core, " in printed_by(tmp_path / "installed", "--version")


@pytest.mark.parametrize(
    "environment", [{"CC": "no-such-compiler"}, {"CC": "false"}, {"TRACEPIPE_PURE": "1"}]
)
def test_without_a_compiler_python_does_it(tree: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    wheel = packed(tree, "build_wheel", **environment)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert CORE not in unpacked(wheel, tmp_path / "installed")
    assert "(pure Python: no compiled core)" in printed_by(tmp_path / "installed", "--version")
    assert "cuLaunchKernel" in printed_by(
        tmp_path / "installed", "convert", str(SAMPLE), "--format", "text", "-o", "-"
    )


def test_a_wheel_states_what_an_index_shows(tree: Path, tmp_path: Path) -> None:
    names = unpacked(packed(tree, "build_wheel", TRACEPIPE_PURE="1"), tmp_path / "installed")
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    stated = email.message_from_string((tmp_path / "installed" / metadata).read_text(encoding="utf-8"))
    assert (stated["Version"], stated["License-Expression"]) == (tracepipe.__version__, "MIT")
    assert (stated["Author"], stated["Description-Content-Type"]) == ("tracepipe developers", "text/markdown")
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    page, readme = stated.get_payload(), (ROOT / "README.md").read_text(encoding="utf-8")
    # An index has no file to which a relative link could lead: there its name stands in its place.
    links = set(re.findall(r"\]\(([^)]+)\)", readme))
    assert set(re.findall(r"\]\(([^)]+)\)", page)) == {link for link in links if link.startswith("https:")}
    assert all(f"`{link}`" in page for link in links if not link.startswith("https:"))
    assert page.splitlines()[0] == "# tracepipe" and "![" not in page


def test_duckdb_comes_with_the_package_and_what_draws_with_an_extra(tree: Path, tmp_path: Path) -> None:
    names = unpacked(packed(tree, "build_wheel", TRACEPIPE_PURE="1"), tmp_path / "installed")
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    stated = email.message_from_string((tmp_path / "installed" / metadata).read_text(encoding="utf-8"))
    needed = stated.get_all("Requires-Dist", [])
    always = {re.split(r"[^\w.-]", need)[0] for need in needed if "extra ==" not in need}
    reports = {re.split(r"[^\w.-]", need)[0] for need in needed if need.endswith('extra == "reports"')}
    assert "duckdb" in always and "polars" not in always
    assert reports == {"jinja2", "matplotlib", "scipy"}
    assert not always & reports


def test_a_source_distribution_has_the_sources_and_no_core(tree: Path) -> None:
    for name in ("docs", "schemas", "scripts", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SAMPLE.parent, tree / SAMPLE.parent.relative_to(ROOT))
    for name in ("CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "Makefile"):
        shutil.copy(ROOT / name, tree)
    with tarfile.open(packed(tree, "build_sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "tracepipe/native/build.py", *SOURCES} <= names
    assert {"CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "LICENSE", "Makefile"} <= names
    assert {"docs/format.md", "docs/images/warps.png", "schemas/event.schema.json"} <= names
    assert {"tests/conftest.py", "tests/gpu/calls.cu", str(SAMPLE.relative_to(ROOT))} <= names
    assert {"scripts/wheels.py", "scripts/setup.sh"} <= names
    assert not any(name.endswith(".pyc") for name in names)
    assert CORE not in names


@compiles
def test_an_editable_installation_has_the_core_in_place(tree: Path) -> None:
    packed(tree, "build_editable")
    assert build.is_current(tree / CORE)
