"""Options: fields of dataclasses, which commands have which, and what durations and sizes they take."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer

from tracepipe import CaptureOptions, TracepipeError
from tracepipe.cli.options import Changed, with_options
from tracepipe.options import SIZE, TIME, Option, about, flags_of, options_of, quantities


@dataclass(frozen=True)
class Options:
    least: Annotated[str, Option("Wait.", TIME, least=1, also=("other",))] = ""
    size: Annotated[str, Option("Keep.", SIZE)] = ""
    names: Annotated[tuple[str, ...], Option("Name.", repeats=True, flags=("--name",))] = ()
    kind: Annotated[str, Option("Choose.", choices=("a", "b-c"))] = "a"
    is_on: Annotated[bool, Option("Do.")] = True
    plain: int = 0


@dataclass(frozen=True)
class More(Options):
    more: Annotated[str, Option("More.")] = ""


def test_a_field_with_an_option_is_one() -> None:
    found = options_of(Options)
    assert [*found] == ["least", "size", "names", "kind", "is_on"]
    assert [*options_of(Options, "other")] == ["least"]
    assert found["names"][1].text == "Name. Repeat for more."
    assert [flags_of(name, option)[0] for name, (_, option) in found.items()] == [
        "--least", "--size", "--name", "--kind", "--is-on",
    ]  # fmt: skip


def test_durations_and_sizes_are_read_together() -> None:
    assert quantities(Options("1.5ms", "2K")) == {"least": 1_500_000, "size": 2048}
    assert quantities(Options()) == {"least": None, "size": None}
    assert quantities(Options(size="0")) == {"least": None, "size": 0}


@pytest.mark.parametrize(
    ("given", "message"),
    [({"least": "soon"}, "'soon' is not a duration"), ({"least": "0"}, "0 is too little: give more than 0")],
)
def test_an_error_names_the_field(given: dict[str, str], message: str) -> None:
    with pytest.raises(TracepipeError, match=message) as error:
        quantities(Options(**given))
    assert error.value.option == "least"


def test_the_innermost_option_is_named() -> None:
    with pytest.raises(TracepipeError) as error, about("outer"), about("inner"):
        raise TracepipeError("x")
    assert error.value.option == "inner"


def run(command: Any, *argv: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return typer.main.get_command(app)([*argv], standalone_mode=False)


def test_a_command_gets_the_dataclass() -> None:
    @with_options
    def command(*, other: Annotated[int, Option("Count.", least=2)] = 2, options: Options) -> Any:
        return other, options

    assert run(command) == (2, Options())
    given = ["--least", "5s", "--name", "x", "--name", "y", "--kind", "b-c", "--no-is-on", "--other", "3"]
    assert run(command, *given) == (3, Options("5s", "", ("x", "y"), "b-c", False))


def test_a_command_may_have_some_options_under_other_names() -> None:
    @with_options
    def command(*, options: Annotated[Options, Changed("other", {"least": ("--from",)})]) -> Any:
        return options

    assert [*inspect.signature(command).parameters] == ["least"]
    assert run(command, "--from", "5s") == Options("5s")


def test_an_option_of_two_dataclasses_is_one() -> None:
    @with_options
    def command(*, options: Options, more: More) -> Any:
        return options, more

    assert run(command, "--size", "1K", "--more", "x") == (Options(size="1K"), More(size="1K", more="x"))


def test_what_other_commands_have_of_a_capture_exists() -> None:
    every = {command for _, option in options_of(CaptureOptions).values() for command in option.also}
    assert every == {"live", "hooks test", "hooks list"}
