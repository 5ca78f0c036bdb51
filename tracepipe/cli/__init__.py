"""The command line: its commands, each loaded when it is needed, and the exit of the program."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tracepipe import __version__, paths
from tracepipe.api import described_reports
from tracepipe.cli.ending import exit_code_of
from tracepipe.cli.help import put_help
from tracepipe.terminal.output import guard, put

# Command → the module whose `app` has it, and what the command does, in the order of the help. All other
# commands are reports.
_COMMANDS = {
    "capture": (
        "capture",
        "Run a command, or attach to running processes, and record what they, the driver, the kernel and the "
        "GPUs do.",
    ),
    "live": (
        "live",
        "Run a command, or attach to running processes, and show live counts, rates, latencies and losses.",
    ),
    "convert": (
        "convert", "Convert a recording, several recordings, or ranks of a dataset to one timeline.",
    ),
    "open": (
        "convert",
        "Open a trace, a recording or a folder of recordings in the Perfetto UI, which gets it from this "
        "machine.",
    ),
    "validate": ("convert", "Check every line of a recording, and name the line and field of each error."),
    "cut": ("convert", "Write the events of a stretch of time as a separate recording."),
    "query": ("dataset", "Query a recording in SQL, with Perfetto's tables and functions, or a dataset."),
    "dataset": ("dataset", "Gather the recordings of all ranks of a job in one folder of Parquet files."),
    "ranks": (
        "dataset",
        "Find the slow ranks of a job: who is slow, at what, and what it costs the others.\n\n"
        "Also shows when each rank computes, communicates, waits and idles, who came last to which "
        "collectives, and the critical path of a step across ranks.",
    ),
    "doctor": (
        "machine",
        "Test what capture needs on this machine: what works, what does not and why, and how to fix it.",
    ),
    "hooks": (
        "machine", "List the functions and tracepoints that can be hooked on this machine, and test hooks.",
    ),
    "mcp": (
        "dataset",
        "Answer agents: a server of the Model Context Protocol for the recordings below some folders, "
        "read-only.",
    ),
    "include": ("machine", "Print the folder that has <tracepipe/mark.h>, for nvcc -I."),
}  # fmt: skip


class _Commands(TyperGroup):
    """Loads only the command that is used: loading all takes as long as converting a small file."""

    _is_listing = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._listing():
            put_help(self, ctx)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self._listing():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _listing(self) -> Iterator[None]:
        """While the context is open, commands have a name and a help, and nothing is loaded for them."""
        self._is_listing = True
        try:
            yield
        finally:
            self._is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_COMMANDS, *described_reports()]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # `tracepipe run.jsonl` says what it is, and what to ask.
        if args[0] not in _COMMANDS and paths.is_there(args[0]) and args[0] not in described_reports():
            args = ["summary", *args]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        place, about = _COMMANDS.get(cmd_name) or ("reports", described_reports().get(cmd_name, ""))
        if not about:
            with self._listing():  # so that similar names can be suggested
                self.commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
            return None
        if self._is_listing:
            panel = "Reports" if place == "reports" else None
            return TyperCommand(cmd_name, help=about, rich_help_panel=panel)
        module = import_module(f"tracepipe.cli.{place}")
        app = module.app_of(cmd_name) if place == "reports" else module.app
        command: Any = typer.main.get_group(app).commands[cmd_name]
        command.help = about
        _prepare(command)
        self.commands[cmd_name] = command
        return command


def _prepare(command: Any) -> None:
    """Make a command, and those of a group, treat `--` and help as all commands do.

    No option takes the `--` that ends options as its value.
    """
    for inner in getattr(command, "commands", {}).values():
        _prepare(inner)
    parse, pieces = command.parse_args, command.collect_usage_pieces

    def parse_args(ctx: Any, args: list[str]) -> Any:
        given, _, _ = command.make_parser(ctx).parse_args(list(args))
        for option in command.params if not ctx.resilient_parsing else ():
            value = given.get(option.name)
            if option.param_type_name == "option" and "--" in (value if isinstance(value, list) else [value]):
                ctx.fail(f"Option {max(option.opts, key=len)} requires an argument before --.")
        return parse(ctx, args)

    def usage_pieces(ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in pieces(ctx)]  # Typer marks required arguments with braces

    command.parse_args, command.collect_usage_pieces = parse_args, usage_pieces
    command.format_help = lambda ctx, formatter: put_help(command, ctx)


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


def _leave_cycles() -> None:
    """Let the interpreter end without a search for cycles, a fifth of the time of a small conversion. DuckDB
    would report them.
    """
    if "duckdb" not in sys.modules:
        gc.freeze()


def main() -> None:
    """Run the command line and exit with its code."""
    # NumPy's linear algebra, which is hardly used here, would start a thread for each processor when it is
    # loaded. Only C's environment is changed: a captured command gets `os.environ`, which stays as it is.
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        os.putenv("OPENBLAS_NUM_THREADS", "1")
    # Closed standard streams become /dev/null. Else other files get their numbers, and what a library or the
    # interpreter writes to standard error could go into a recording.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    atexit.register(_leave_cycles)
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Incomplete output is removed, as at Ctrl-C. Signals that nohup ignores stay ignored.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    if "_TRACEPIPE_COMPLETE" in os.environ:  # a shell completes a command line
        app(prog_name="tracepipe")  # prints tabs and line ends for the shell, unguarded, and exits
    streams = sys.stdout, sys.stderr
    out, err = guard()

    def run() -> Any:
        code = app(prog_name="tracepipe", standalone_mode=False)
        out.flush()
        return code

    code = exit_code_of(run)
    exit_code_of(out.flush, quietly=True)
    err.flush()
    # A bug does not come here, and leaves the guards for the interpreter's traceback.
    sys.stdout, sys.stderr = streams
    sys.exit(code)
