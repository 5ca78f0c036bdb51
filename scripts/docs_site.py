"""Makes the parts of the documentation's site that are not in docs/: a hook of MkDocs, named in mkdocs.yml.

Pages are generated from the command line and the library, and the files at the top of the repository are
pages too.
Links to those, which work where the pages are read as files, are made to work on the site.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

import tracepipe
from tracepipe import cli
from tracepipe.options import options_of

ROOT = Path(__file__).parents[1]
AT_THE_TOP = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    pages = {"commands.md": commands_page(), "python.md": python_page()}
    pages |= {name: (ROOT / name).read_text(encoding="utf-8") for name in AT_THE_TOP}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A page's text with the links that the site needs."""
    return site_tables(site_links(markdown))


def site_links(text: str) -> str:
    """The text with links to pages as on the site; other files are named, not linked."""
    for name in AT_THE_TOP:
        text = text.replace(f"](../{name}", f"]({name}")
    text = re.sub(r"\]\(docs/([\w-]+\.md)", r"](\1", text)
    elsewhere = r"(?:\.\./|tests/|fixtures/|scripts/|tracepipe/|LICENSE|README)[^)]*"
    return re.sub(rf"(?<!!)\[([^\]]+)\]\({elsewhere}\)", r"\1", text)


def site_tables(text: str) -> str:
    """The text without the backslash before a `|` in the code of a table's cell, which only files need."""
    rows = re.compile(r"^\|.*$", re.MULTILINE)
    code = re.compile(r"`[^`]+`")
    return rows.sub(lambda row: code.sub(lambda span: span[0].replace("\\|", "|"), row[0]), text)


def commands_page() -> str:
    """Every command with its arguments and options, from the command line."""
    group: Any = typer.main.get_command(cli.app)
    context = group.make_context("tracepipe", ["doctor"])
    parts = [
        "# Commands",
        "Generated from the command line: `tracepipe COMMAND --help` says the same.",
        _options_table(group, context),
    ]
    for name in group.list_commands(context):
        parts += _command("tracepipe", group.get_command(context, name), name, 2)
    return "\n\n".join(part for part in parts if part) + "\n"


def _command(outer: str, command: Any, name: str, level: int) -> Iterator[str]:
    path = f"{outer} {name}"
    yield f"{'#' * level} {path}"
    yield inspect.cleandoc(command.help or "")
    context = command.make_context(name, [], resilient_parsing=True)
    if hasattr(command, "list_commands"):
        for inner in command.list_commands(context):
            yield from _command(path, command.get_command(context, inner), inner, level + 1)
        return
    arguments = [one.make_metavar(context) for one in command.params if one.param_type_name == "argument"]
    yield "```text\n" + " ".join([path, "[OPTIONS]", *arguments]) + "\n```"
    yield _options_table(command, context)


def _options_table(command: Any, context: Any) -> str:
    rows = []
    for one in command.params:
        if one.param_type_name != "option" or one.hidden:
            continue
        names = ", ".join(f"`{name}`" for name in [*one.opts, *one.secondary_opts])
        values = "" if one.is_flag else f" `{one.make_metavar(context).strip('<>')}`"
        shown = one.show_default and one.default not in (None, "", False, True)
        default = f" Default: `{one.default}`." if shown else ""
        text = ((one.help or "") + default).replace("<", "&lt;")
        rows.append(f"| {_cell(names + values)} | {_cell(text)} |")
    return "\n".join(["| option | |", "|---|---|", *rows]) if rows else ""


def _cell(text: str) -> str:
    """A text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def python_page() -> str:
    """Every public name of the library, with signature and docstring."""
    parts = [
        "# Python, by name",
        "Generated from `tracepipe.__all__`. [The library](api.md) explains how these are used.",
    ]
    for name in sorted(tracepipe.__all__, key=lambda name: (name[0].isupper(), name)):
        parts += _name(name, getattr(tracepipe, name))
    return "\n\n".join(part for part in parts if part) + "\n"


def _name(name: str, one: Any) -> Iterator[str]:
    yield f"## `{name}`"
    if not (inspect.isclass(one) and issubclass(one, Exception)):
        yield "```text\n" + _signature(name, one) + "\n```"
    yield _prose(inspect.getdoc(one) or "")
    if inspect.isclass(one):
        yield "\n".join(_members(one))


def _signature(name: str, call: Any) -> str:
    signature = inspect.signature(call)
    values = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    made = {one.name: one.default_factory() for one in _fields_with_factories(call)}
    values = [
        one.replace(default=made.get(one.name, one.default), annotation=_plain(one.annotation))
        for one in values
    ]
    text = _unquoted(str(signature.replace(parameters=values)))
    if len(name + text) <= 100:
        return name + text
    inner = ",\n".join(textwrap.indent(line, "    ") for line in _parameters(values))
    _, arrow, result = text.rpartition(" -> ")
    return f"{name}(\n{inner},\n){arrow}{result}"


def _plain(annotation: Any) -> Any:
    """The annotation of a parameter without its option."""
    if not isinstance(annotation, str) or not annotation.startswith("Annotated["):
        return annotation
    inner = ast.parse(annotation, mode="eval").body.slice  # type: ignore[attr-defined]
    return ast.unparse(inner.elts[0])


def _fields_with_factories(call: Any) -> list[Any]:
    """The fields of a dataclass with a default factory."""
    every = dataclasses.fields(call) if dataclasses.is_dataclass(call) else ()
    return [one for one in every if one.default_factory is not dataclasses.MISSING]


def _parameters(values: list[inspect.Parameter]) -> Iterator[str]:
    starred = False
    for one in values:
        if one.kind is one.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield _unquoted(str(one))


def _unquoted(text: str) -> str:
    """Remove the quotes around annotations, which are texts if they are evaluated late."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def _members(one: type) -> Iterator[str]:
    """A line for each public field, method and property with a docstring."""
    for kind in reversed(one.__mro__):
        if dataclasses.is_dataclass(kind):
            yield from _fields(kind)
    for name, member in inspect.getmembers(one):
        if name.startswith("_") or issubclass(one, BaseException):
            continue
        documented = inspect.getdoc(member) if callable(member) or isinstance(member, property) else None
        if documented and not isinstance(member, type):
            yield f"- `{name}`: {' '.join(documented.partition(chr(10) * 2)[0].split())}"


def _fields(kind: type) -> Iterator[str]:
    """A line for each field of a dataclass with the text of its option, and with its docstring, which is only
    in the source. Options that the text names are fields here.
    """
    options = options_of(kind)
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    for field, after in pairwise([*body, None]):
        if not isinstance(field, ast.AnnAssign):
            continue
        name = ast.unparse(field.target)
        text = options[name][1].help if name in options else ""
        text = re.sub(r"--([a-z][a-z-]+)", lambda flag: f"`{flag[1].replace('-', '_')}`", text)
        more = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
        if text or more:
            yield f"- `{name}`: {' '.join(f'{text} {more}'.split())}"


def _prose(text: str) -> str:
    """A docstring as Markdown: indented lines are a block."""
    return re.sub(
        r"(?:^    .*\n?)+",
        lambda match: f"\n```text\n{textwrap.dedent(match[0])}```\n",
        text + "\n",
        flags=re.M,
    )
