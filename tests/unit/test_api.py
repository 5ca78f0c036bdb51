"""The library: its names, what it loads, its types, and that it does what the commands do."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import tracepipe
from tests.support.program import PYTHONPATH
from tracepipe.cli import capture as capture_commands
from tracepipe.cli import convert as convert_commands

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": PYTHONPATH}


def python(code: str) -> str:
    """What a program of its own prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout


# Names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tracepipe.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    found = getattr(tracepipe, name)
    assert found is getattr(tracepipe, name)
    documented = inspect.getdoc(found)
    assert documented
    assert not documented.startswith(f"{name}(")  # what a dataclass without a docstring says
    for member, value in vars(found).items() if inspect.isclass(found) else ():
        if not member.startswith("_") and (callable(value) or isinstance(value, property)):
            assert inspect.getdoc(value), f"{name}.{member}"


def test_the_list_of_names_is_complete() -> None:
    assert sorted(dir(tracepipe)) == sorted([*tracepipe.__all__, "__version__"])
    assert tracepipe.__all__ == sorted(tracepipe.__all__)
    rooms = {path.stem for path in (ROOT / "tracepipe").iterdir() if path.suffix in ("", ".py")}
    public = {name for name in vars(tracepipe) if not name.startswith("_")}
    assert public - {*tracepipe.__all__, *rooms} <= {"TYPE_CHECKING"}
    with pytest.raises(AttributeError, match="'tracepipe' has no attribute 'nothing'"):
        _ = tracepipe.nothing  # type: ignore[attr-defined]


@pytest.mark.slow
def test_capture_is_a_function_whatever_is_imported_first() -> None:
    first = "import tracepipe; one = tracepipe.capture"
    then = "from tracepipe.tracer.request import CaptureRequest; import tracepipe.tracer.plan as plan"
    made = "options = tracepipe.CaptureOptions(layers=('syscall',)); "
    made += "print(repr(tracepipe.capture(['./app'], output='x.jsonl', options=options)))"
    for code in (f"{first}; {then}; {made}", f"{then}; {first}; {made}", f"import tracepipe; {made}"):
        assert python(code) == "<Capture x.jsonl: not recorded>\n"


# What it loads -----------------------------------------------------------------------------------------


def loaded_by(code: str) -> set[str]:
    """The modules that some code loads and an empty program does not."""
    return set(
        python(f"import sys; before = set(sys.modules); {code}; print(*set(sys.modules) - before)").split()
    )


def test_importing_it_loads_next_to_nothing() -> None:
    loaded = loaded_by("import tracepipe")
    assert {name for name in loaded if name.startswith("tracepipe")} == {"tracepipe", "tracepipe.errors"}
    # The standard library's typing at most, with what that needs.
    assert {name.partition(".")[0] for name in loaded} <= {
        "tracepipe", "typing", "collections", "contextlib", "copyreg", "functools", "operator", "re", "types",
        "enum", "keyword", "reprlib", "itertools", "warnings", "__future__",
        "_collections", "_functools", "_operator", "_typing", "_types", "_sre", "_thread",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["convert", "open", "load", "capture"])
def test_a_name_loads_nothing_native(name: str) -> None:
    loaded = loaded_by(f"import tracepipe; tracepipe.{name}")
    assert not loaded & {"numpy", "polars", "scipy", "matplotlib", "perfetto", "zstandard", "bcc", "typer"}


# Types -------------------------------------------------------------------------------------------------

TYPED = """
import tracepipe
from tracepipe import capture

reading = tracepipe.ReadOptions(assume_offset={"globaltimer:0": "realtime"})
account: tracepipe.Account = tracepipe.convert("run.jsonl", "x", "chrome", force=True)
lost: int = account.losses["userspace"]
with tracepipe.open("run.jsonl", reading) as events:
    for event in events:
        end_ns: int | None = event.end_ns
        if isinstance(event, tracepipe.Warp):
            left: list[int] = [one.ts_ns for one in event.exits]
with capture(["./app"], tracepipe.CaptureOptions(duration="10s"), output="x") as recording:
    reveal_type(recording)
wall_ns: int = recording.summary.wall_ns
reveal_type(tracepipe.load("run.jsonl").calls)

tracepipe.nothing
tracepipe.ConvertOptions(commpress=True)
event.ts_ns = "soon"
"""


@pytest.mark.slow
def test_a_type_checker_sees_the_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(TYPED)
    # With the options and the cache of the project's own run, which knows the modules of the library.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(tmp_path / "user.py")]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    # mypy adds where a name is defined, unless it has that module in its cache.
    messages = [line.partition(": ")[2] for line in done.stdout.splitlines() if '" defined in "' not in line]
    assert messages == [
        'note: Revealed type is "tracepipe.api.capture_block.Capture"',
        'note: Revealed type is "Any"',
        'error: Module has no attribute "nothing"  [attr-defined]',
        'error: Unexpected keyword argument "commpress" for "ConvertOptions"; did you mean "compress"?  '
        "[call-arg]",
        "error: Incompatible types in assignment "
        '(expression has type "str", variable has type "int")  [assignment]',
    ], done.stderr


# The commands ------------------------------------------------------------------------------------------


def options_of(command: Callable[..., object], options: type | None = None) -> set[str]:
    """The names of a function's parameters, with the fields of its options instead of those."""
    names = set(inspect.signature(command).parameters)
    if options is None:
        return names
    return names - {"options"} | {one.name for one in fields(options)}


def test_converting_has_the_options_of_the_command() -> None:
    names = {"files": "path", "to": "format", "output": "out"}
    own = {"progress"}  # which the command shows
    # `--archive FILE` is `-o FILE --format archive`.
    of_command = {names.get(name, name) for name in options_of(convert_commands.convert)} - {"archive"}
    of_recordings = options_of(tracepipe.convert, tracepipe.ConvertOptions)
    of_ranks = options_of(tracepipe.convert_ranks, tracepipe.RankOptions)
    assert (of_recordings | of_ranks) - own == of_command
    assert of_recordings - of_ranks == {"offset", "whatif"}


def test_cutting_has_the_options_of_the_command() -> None:
    names = {"file": "path", "output": "out"}
    of_command = {names.get(name, name) for name in options_of(convert_commands.cut)}
    assert options_of(tracepipe.cut, tracepipe.ReadOptions) - {"progress"} == of_command


def test_capturing_has_the_options_of_the_command() -> None:
    names = {"pid": "pids"}
    of_command = {names.get(name, name) for name in options_of(capture_commands.capture)}
    from tracepipe.api.capture import capture

    of_terminals = {"then_open", "local", "exit_code"}
    assert options_of(capture, tracepipe.CaptureOptions) - {"notify"} == of_command - of_terminals
