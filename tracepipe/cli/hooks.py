"""The commands about hooks: what can be hooked, and whether a hook sees anything."""

from __future__ import annotations

import tempfile
from typing import Annotated

import typer

from tracepipe.cli.completion import complete_sets
from tracepipe.cli.groups import with_groups
from tracepipe.cli.options import COMMAND_LAST, Libraries, MethodOption, Until, Which, Whose, request_of
from tracepipe.errors import TracepipeError
from tracepipe.hooks.calls import CALL_RULES, CALL_SETS
from tracepipe.terminal.output import put, say
from tracepipe.units import counted

hooks_app = typer.Typer(
    name="hooks",
    help="List the functions and tracepoints that can be hooked on this machine, and test hooks.",
    no_args_is_help=True,
)
app = typer.Typer()
app.add_typer(hooks_app)


@hooks_app.command("list")
def list_command(
    pattern: Annotated[
        str,
        typer.Argument(
            help="A shell pattern of names, such as nv*ioctl*; PLACE:NAME; or any form that --hook accepts.",
            metavar="PATTERN",
            autocompletion=complete_sets,
        ),
    ] = "",
    library: Libraries = None,
    kernels: Annotated[
        list[str] | None,
        typer.Option(
            "--kernels",
            metavar="PATH",
            help="List GPU kernels instead: those of a program, a library, a .cubin file or a folder of "
            "them. Repeat for more.",
        ),
    ] = None,
) -> None:
    """List the shipped sets, or the functions and tracepoints of this machine that fit a pattern."""
    if kernels:
        _list_kernels(pattern, kernels)
        return
    from tracepipe.tracer.find.hook_list import list_functions, list_sets
    from tracepipe.tracer.find.library import LibrarySearch

    libraries = LibrarySearch(given=tuple(library or ()))
    if not pattern:
        for row in list_sets(libraries, say):
            found = f"{row.function_count} here" if row.function_count else f"none here: {row.reason}"
            put(f"{row.name:<16} {row.about} ({found})")
        return
    listing = list_functions(pattern, libraries)
    width = max((len(row.spec) for row in listing.rows), default=0)
    for function in listing.rows:
        sets = f"in {', '.join(function.sets)}" if function.sets else "in no set"
        if not CALL_RULES["default"].takes(function.name) and not set(function.sets).isdisjoint(CALL_SETS):
            sets += " (--calls all)"
        put(f"{function.spec:<{width}}  {sets}  {function.place}".rstrip())
    for note in listing.notes:
        say(f"note: {note}")
    if not listing.rows:
        hint = (
            f"Near: {', '.join(listing.near)}." if listing.near else "Patterns are shell patterns: nv*ioctl*."
        )
        if listing.reason:
            hint = f"{listing.reason[0].upper()}{listing.reason[1:]}."
        raise TracepipeError(f"Nothing here that can be hooked fits {pattern}.", hint)


def _list_kernels(pattern: str, paths: list[str]) -> None:
    from tracepipe.tracer.find.kernels import list_kernels

    listing = list_kernels(pattern, paths)
    rows = [
        (
            row.name,
            row.kernel.architecture,
            "registers not known"
            if row.kernel.registers is None
            else counted(row.kernel.registers, "register|registers"),
            f"{row.kernel.shared_bytes} B shared",
            f"{row.kernel.stack_bytes} B stack" if row.kernel.stack_bytes else "",
            row.kernel.source,
            row.place,
        )
        for row in listing.rows
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        shown = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True) if width]
        put("  ".join(shown).rstrip())
    for note in listing.notes:
        say(f"note: {note}")
    if not rows:
        fits = f" that fits {pattern}" if pattern else ""
        near = f"Near: {', '.join(listing.near)}." if listing.near else ""
        hint = near or "--kernels takes programs, libraries, .cubin files, and folders of them."
        raise TracepipeError(f"There is no GPU kernel{fits} in {', '.join(paths)}.", hint)


@hooks_app.command("test", context_settings=COMMAND_LAST)
@with_groups
def test_command(
    *,
    hook: Annotated[
        list[str],
        typer.Argument(
            help="Hooks in any form that --hook accepts, then -- and the command.",
            metavar="HOOK… -- COMMAND",
        ),
    ],
    library: Libraries = None,
    whose: Whose,
    until: Until,
    method: MethodOption = "auto",
) -> None:
    """Record only some hooks, and print how often they were hit, with the arguments of the first hits."""
    from tracepipe.hooks.sets import read_hooks
    from tracepipe.tracer import capture
    from tracepipe.tracer.find.hook_list import hits
    from tracepipe.tracer.find.library import LibrarySearch
    from tracepipe.tracer.find.resolve import resolve

    hooks, command = _divided(hook)
    which = Which("none", hooks, library=library)
    request = request_of(command, which, whose, until, method=method)
    libraries = LibrarySearch(command or None, request.pids, request.libraries)
    names = {probe.name for probe in resolve(read_hooks(hooks), libraries).probes}
    with tempfile.TemporaryFile(prefix="tracepipe-") as recording:
        summary = capture(request, recording, notify=say)
        summary.check()
        recording.seek(0)
        report = hits(recording, names)
    for row in report.rows:
        put(f"{row.count:>10} × {row.name}, {row.rate_per_s:.0f} a second")
        for arguments in filter(None, row.first):
            put("             " + ", ".join(f"{name}={value}" for name, value in arguments.items()))
    total = counted(sum(row.count for row in report.rows), "hit|hits")
    put(f"{total} in {report.seconds:.2f} s, {report.lost_count} lost")
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)


def _divided(words: list[str]) -> tuple[list[str], list[str]]:
    """Split hooks and command at the first `--`."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]
