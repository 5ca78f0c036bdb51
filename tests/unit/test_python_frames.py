"""The frames that are read of a Python are those that it has, in each version that can be read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.compiled import compiled
from tests.support.pythons import VERSIONS, interpreter

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tracepipe/tracer/gpu/native"
SOURCES = ROOT / "tests/gpu"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader, without a header of Python."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    made = tmp_path_factory.mktemp("python") / "frames.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{NATIVE}"]
    source = str(SOURCES / "python_frames.cpp")
    return compiled([compiler, *flags, source, "-ldl"], made)


@pytest.mark.parametrize("version", VERSIONS)
def test_frames_are_those_that_python_has(library: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version}")
    done = subprocess.run(
        [python, str(SOURCES / "frames_of_python.py"), str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 500


def test_a_process_without_python_has_no_frames(library: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    source = tmp_path / "program.cpp"
    source.write_text(
        "#include <cstddef>\n"
        'extern "C" int frames(char *, size_t);\n'
        "int main() { char to[8]; return frames(to, sizeof to); }\n"
    )
    subprocess.run(
        ["g++", str(source), str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)], check=True
    )
    assert subprocess.run([str(program)], check=False).returncode == 0
