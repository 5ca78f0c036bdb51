"""The command line: its commands, each loaded when it is needed, and the exit of the program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tracepipe import __version__
from tracepipe.cli.completion import is_asked
from tracepipe.cli.ending import ended
from tracepipe.terminal.output import guard, has_colours, put

# Command → the module whose `app` has it, in the order of the help. All other commands are reports.
_PLACES = {
    "capture": "tracepipe.cli.capture",
    "live": "tracepipe.cli.live",
    "convert": "tracepipe.cli.convert",
    "open": "tracepipe.cli.convert",
    "validate": "tracepipe.cli.convert",
    "cut": "tracepipe.cli.part",
    "query": "tracepipe.cli.query",
    "dataset": "tracepipe.cli.dataset",
    "ranks": "tracepipe.cli.ranks",
    "doctor": "tracepipe.cli.capture",
    "hooks": "tracepipe.cli.hooks",
    "include": "tracepipe.cli.include",
}
_REPORTS = "tracepipe.cli.reports"


class _Commands(TyperGroup):
    """Loads only the used command: loading all takes as long as converting a small file."""

    _listed: dict[str, Any] | None = None
    """The reports while the help lists them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _choose_colours()
        with self._listing():
            super().format_help(ctx, formatter)
        _put_examples(ctx)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self._listing():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _listing(self) -> Iterator[None]:
        """While the context is open, commands are only listed, and reports are not loaded."""
        self._listed = dict(typer.main.get_group(import_module(_REPORTS).listing()).commands)
        try:
            yield
        finally:
            self._listed = None

    def list_commands(self, ctx: Any) -> list[str]:
        for place in dict.fromkeys(_PLACES.values()):
            self._load(place)
        if self._listed is None:
            self._load(_REPORTS)
        # In the order of _PLACES, whatever was loaded first.
        return list(dict.fromkeys((*_PLACES, *(self._listed or self.commands))))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._listed is not None:
            return self._listed.get(cmd_name) or self.commands.get(cmd_name)
        if cmd_name not in self.commands:
            self._load(_PLACES.get(cmd_name, _REPORTS), cmd_name)
        if cmd_name not in self.commands:
            self.list_commands(ctx)  # so that similar names can be suggested
        return self.commands.get(cmd_name)

    def _load(self, place: str, name: str = "") -> None:
        """Load the commands of a module. If they are reports, load only the one with that name, if any."""
        module = import_module(place)
        loaded = typer.main.get_group(module.app_of(name) if place == _REPORTS else module.app).commands
        for command in loaded.values():
            _prepare(command)
        self.commands.update({name: one for name, one in loaded.items() if name not in self.commands})


def _prepare(command: Any) -> None:
    """Make a command, and those of a group, treat `--`, colours and help as all commands do.

    No option takes the `--` that ends options as its value. Help has colours where `has_colours`
    allows them, and examples at its end.
    """
    for inner in getattr(command, "commands", {}).values():
        _prepare(inner)
    parse, format_help, pieces = command.parse_args, command.format_help, command.collect_usage_pieces

    def parse_args(ctx: Any, args: list[str]) -> Any:
        given, _, _ = command.make_parser(ctx).parse_args(list(args))
        for option in command.params if not ctx.resilient_parsing else ():
            value = given.get(option.name)
            if option.param_type_name == "option" and "--" in (value if isinstance(value, list) else [value]):
                ctx.fail(f"Option {max(option.opts, key=len)} requires an argument before --.")
        return parse(ctx, args)

    def show_help(ctx: Any, formatter: Any) -> None:
        _choose_colours()
        format_help(ctx, formatter)
        _put_examples(ctx)

    def usage_pieces(ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in pieces(ctx)]  # Typer marks required arguments with braces

    command.parse_args, command.format_help = parse_args, show_help
    command.collect_usage_pieces = usage_pieces


def _put_examples(context: Any) -> None:
    """Print the examples at the end of a command's help."""
    from tracepipe.cli.examples import example_lines

    for line in example_lines(context.command_path.partition(" ")[2]):
        put(line)


def _choose_colours() -> None:
    """Make Typer colour help only if wanted; by itself it decides by the terminal and GITHUB_ACTIONS."""
    from typer import rich_utils

    rich_utils.FORCE_TERMINAL = has_colours(sys.stdout)


app = typer.Typer(
    name="tracepipe",
    cls=_Commands,
    help="One timeline from the CUDA call to the warp.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        from tracepipe.native import state

        put(f"tracepipe {__version__} ({state()})")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """One timeline from the CUDA call to the warp."""


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _keep_numpy_small() -> None:
    """Keep NumPy's linear algebra, which is hardly used here, from starting a thread for each processor.

    It does so when it is loaded, unless C's environment forbids it. Only that is changed: `os.environ`, which
    a captured command gets, stays as it is.
    """
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        os.putenv("OPENBLAS_NUM_THREADS", "1")


def _fill_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams, whose numbers other files would get.

    Otherwise what a library or the interpreter writes to standard error could go into a recording.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def main() -> None:
    """Run the command line and exit with its code."""
    _keep_numpy_small()
    _fill_closed_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Incomplete output is removed, as at Ctrl-C. Signals that nohup ignores stay ignored.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    if is_asked():
        app(prog_name="tracepipe")  # prints tabs and line ends for the shell, unguarded, and exits
    streams = sys.stdout, sys.stderr
    out, err = guard()

    def run() -> Any:
        code = app(prog_name="tracepipe", standalone_mode=False)
        out.flush()
        return code

    code = ended(run)
    ended(out.flush, quietly=True)
    err.flush()
    # A bug does not come here, and leaves the guards for the interpreter's traceback.
    sys.stdout, sys.stderr = streams
    sys.exit(code)
