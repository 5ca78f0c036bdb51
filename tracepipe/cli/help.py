"""The help of a command: how it is used, its arguments and options by panel, and examples.

    Options:
      --ranks N,N-N           With a dataset: convert the recordings of these ranks. Default: all.
      --format, -f <perfetto|chrome|text>
                              Write this format.

It is laid out here and not by Rich, whose import takes longer than that of everything else together.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import Any

from tracepipe.terminal.output import has_colours, put

_TEXT_COLUMN = 26
"""Where the text of an option begins. A longer name has a line of its own."""
_LISTED_COLUMN = 15
"""The same in a list of commands."""
_WIDTH_MAX = 110
_HEADING, _NAME, _VALUE, _RESET = "\x1b[1m", "\x1b[1;36m", "\x1b[33m", "\x1b[0m"

# Command lines that the help of each command ends with. Tests read all with the real parser, and run those on
# files.
_EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "sudo tracepipe capture -o run.jsonl -- ./app",
        "tracepipe summary run.jsonl",
        "tracepipe convert run.jsonl",
        "tracepipe open run.pftrace",
    ),
    "capture": (
        "sudo tracepipe capture -- python train.py",
        "tracepipe capture --layers none --gpu kernels -o run.jsonl.zst -- ./app",
        "sudo tracepipe capture --pid 4242 --duration 10s",
    ),
    "live": ("sudo tracepipe live -- ./app", "sudo tracepipe capture -o - -- ./app | tracepipe live -"),
    "convert": (
        "tracepipe convert run.jsonl",
        "tracepipe convert run.jsonl -o run.json",
        "tracepipe convert run.jsonl other.jsonl -o both.pftrace",
        "tracepipe convert ds --ranks 0,1 --from 1.2s --to 1.4s -o slow.pftrace",
    ),
    "open": ("tracepipe open run.pftrace",),
    "validate": ("tracepipe validate run.jsonl",),
    "cut": ("tracepipe cut run.jsonl --from 560ms --to 640ms -o part.jsonl",),
    "query": (
        "tracepipe query run.jsonl 'select name, dur from slice order by dur desc limit 5'",
        "tracepipe query run.jsonl --file slow.sql --format csv -o slow.csv",
        "tracepipe query ds 'select host, rank, sum(dur_ns) as ns from kernels group by all order by ns'",
    ),
    "dataset": ("tracepipe dataset build runs -o ds",),
    "dataset build": (
        "tracepipe dataset build runs -o ds",
        "tracepipe dataset build rank0.jsonl rank1.jsonl -o ds",
        "tracepipe dataset build s3://bucket/runs/ -o ds",
    ),
    "ranks": (
        "tracepipe ranks ds",
        "tracepipe ranks ds --step 12 --top 20",
        "tracepipe ranks ds --engine spark --master spark://head:7077 --json",
    ),
    "doctor": ("sudo tracepipe doctor",),
    "hooks": ("tracepipe hooks list", "sudo tracepipe hooks test uprobe:libc.so.6:malloc -- ls"),
    "hooks list": ("tracepipe hooks list", "sudo tracepipe hooks list 'nv*ioctl*'"),
    "hooks test": ("sudo tracepipe hooks test uprobe:libc.so.6:malloc -- ls",),
    "mcp": ("tracepipe mcp ~/runs",),
    "include": ('nvcc -I "$(tracepipe include)" app.cu',),
    "summary": (
        "tracepipe summary run.jsonl",
        "tracepipe summary runs/",
        "tracepipe summary run.jsonl --all --top 20 --sort p99",
    ),
    "whatif": ("tracepipe whatif run.jsonl", "tracepipe whatif run.jsonl --without 'data loading'"),
    "steps": ("tracepipe steps run.jsonl", "tracepipe steps run.jsonl --top 5"),
    "timeline": ("tracepipe timeline run.jsonl --start 560ms --end 640ms",),
    "layers": ("tracepipe layers run.jsonl", "tracepipe layers run.jsonl --call cudaMemcpy"),
    "gaps": ("tracepipe gaps run.jsonl --min 20us",),
    "diff": (
        "tracepipe diff run.jsonl other.jsonl",
        "tracepipe diff --a run.jsonl run2.jsonl --b other.jsonl other2.jsonl",
    ),
    "warps": ("tracepipe warps run.jsonl", "tracepipe warps run.jsonl --kernel vector"),
    "stalls": ("tracepipe stalls stalls.jsonl", "tracepipe stalls stalls.jsonl --warps run.jsonl"),
    "plot": ("tracepipe plot run.jsonl --what heatmap -o warps.png",),
    "report": ("tracepipe report run.jsonl -o run.html",),
    "export": ("tracepipe export run.jsonl --format csv -o tables",),
}


def examples_of(command: str) -> tuple[str, ...]:
    """Example lines of a command, which is named without the program. A report has at least the shortest."""
    return _EXAMPLES.get(command, (f"tracepipe {command} run.jsonl",))


def by_panel(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    """Heading → arguments or options, in the order in which both the help and the manual page have them."""
    panels: dict[str, list[Any]] = {"Arguments": [], "Options": []}
    for one in parameters:
        if not getattr(one, "hidden", False):
            kind = "Arguments" if one.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(one, "rich_help_panel", None) or kind, []).append(one)
    return {panel: those for panel, those in panels.items() if those}


def names_of(parameter: Any) -> str:
    """All names of an option, the long ones first: `--output, -o`."""
    names = (*parameter.opts, *parameter.secondary_opts)
    return ", ".join(sorted(names, key=lambda name: not name.startswith("--")))


def value_of(parameter: Any, context: Any) -> str:
    """The placeholder for the value of an argument or an option; empty for a flag."""
    if parameter.param_type_name == "argument":
        return str(parameter.make_metavar(context))
    return "" if parameter.is_flag else parameter.make_metavar(context).strip("<>[]")


def default_of(parameter: Any) -> str:
    """The default of an option, as the help states it; empty where the option's text states it."""
    default = getattr(parameter.default, "value", parameter.default)
    return "" if default in (None, "", False, True) or callable(default) else str(default)


def put_help(command: Any, context: Any) -> None:
    """Print the help of a command; that of a group lists its commands."""
    width = min(shutil.get_terminal_size().columns, _WIDTH_MAX)
    colours = has_colours(sys.stdout)

    def coloured(text: str, colour: str) -> str:
        return f"{colour}{text}{_RESET}" if colours and text else text

    def wrapped(text: str, columns: int) -> list[str]:
        return wrap(text, max(columns, 20), break_on_hyphens=False)

    def section(heading: str, entries: Iterable[tuple[str, str, str]], column: int) -> Iterator[str]:
        """Names, values and texts of options or commands; a text is beside its name or below that."""
        yield ""
        yield coloured(f"{heading}:", _HEADING)
        for name, value, text in entries:
            shown = " ".join(filter(None, (coloured(name, _NAME), coloured(value, _VALUE))))
            lines, beside = wrapped(text, width - column), ""
            spare = column - 2 - len(" ".join(filter(None, (name, value))))
            if spare >= 2 and lines:
                beside = " " * spare + lines.pop(0)
            yield f"  {shown}{beside}"
            yield from (" " * column + line for line in lines)

    def page() -> Iterator[str]:
        usage = " ".join((context.command_path, *command.collect_usage_pieces(context)))
        yield f"{coloured('Usage:', _HEADING)} {usage}"
        for paragraph in (command.help or "").split("\n\n"):
            yield ""
            yield from wrapped(" ".join(paragraph.split()), width)
        for panel, parameters in by_panel(command.get_params(context)).items():
            entries = []
            for one in parameters:
                is_option, default = one.param_type_name == "option", default_of(one)
                note = f" [default: {default}]" if default and one.show_default else ""
                note = " [required]" if one.required and is_option else note
                name = names_of(one) if is_option else ""
                entries.append((name, value_of(one, context), f"{one.help or ''}{note}"))
            yield from section(panel, entries, _TEXT_COLUMN)
        listed: dict[str, list[tuple[str, str, str]]] = {}
        for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
            inner = command.get_command(context, name)
            about = " ".join((inner.help or "").partition("\n\n")[0].split())
            listed.setdefault(inner.rich_help_panel or "Commands", []).append((name, "", about))
        for panel, commands in listed.items():
            yield from section(panel, commands, _LISTED_COLUMN)
        yield ""
        yield coloured("Examples:", _HEADING)
        for line in examples_of(context.command_path.partition(" ")[2]):
            yield f"  {line}"

    for line in page():
        put(line, colours)
    sys.stdout.flush()  # an error of writing is then reported though the command line is one too
