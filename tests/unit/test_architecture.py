"""The shape of the package: which way imports go, who makes times, who prints."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tracepipe.converters import CONVERTERS
from tracepipe.readers import READERS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tracepipe"
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Events go one way: tracer and readers → event → clocks → layout → converters, reports. What each room may
# import of the package, itself aside; a name stands for the rooms in it too.
ROOMS: dict[str, set[str]] = {
    "event": {"native", "event.bounded", "event.model", "event.vocabulary"},
    "event.bounded": set(),
    "event.counters": set(),
    "event.model": set(),
    "event.vocabulary": set(),
    "hooks": set(),
    "tracer.request": {"hooks"},
    "tracer.summary": {"event"},
    "tracer.records": {"event", "hooks", "native"},
    "tracer.machine": {"tracer.request"},
    "tracer.bpf": {"hooks", "tracer.request", "tracer.records"},
    "tracer.find": {"hooks", "tracer.request", "tracer.bpf"},
    "tracer.live": {
        "event", "hooks", "tracer.request", "tracer.records", "tracer.machine", "tracer.engines",
    },
    "tracer.engines": {
        "event.model", "event.vocabulary", "hooks", "tracer.request", "tracer.summary", "tracer.records",
        "tracer.machine", "tracer.bpf", "tracer.find", "native",
    },
    "tracer.gpu": {
        "event.bounded", "event.counters", "event.model", "hooks", "tracer.request", "tracer.records",
        "tracer.find", "tracer.engines",
    },
    "tracer": {"event", "hooks", "tracer"},
    "readers": {"event", "hooks", "native"},
    "clocks": {"event", "native"},
    "layout": {"event", "native"},
    "converters": {"event", "layout", "native"},
    "recording.compression": set(),
    "recording.remote": set(),
    "recording.convert": {"event", "clocks", "layout", "readers", "converters", "recording"},
    "recording": {"event", "clocks", "readers", "recording.compression", "recording.remote"},
    "part": {"event", "clocks", "readers", "converters", "recording", "native"},
    "reports.report": set(),
    "store": {"event", "recording"},
    "analyses": {
        "native", "analyses.findings", "store", "event", "hooks", "reports.report",
    },
    "analyses.findings": {"store", "event"},
    "present": set(),
    "present.writing": {"store", "event", "recording", "reports.report", "analyses"},
    "present.figures": {
        "store", "event", "analyses", "analyses.findings", "present.writing",
    },
    "present.page": {
        "store", "event", "reports.report", "present.writing", "present.figures",
    },
    "reports": {"store", "event", "hooks", "analyses", "present", "reports"},
    "dataset": {"store", "event", "recording", "analyses", "present", "reports"},
    "ranks": {"event", "store", "dataset", "analyses", "present", "reports"},
    "doctor": {"tracer", "hooks", "native"},
    "native": set(),
    "marks": set(),
    "sql": {"store", "dataset", "ui", "present.writing"},
    "ui": {"event", "recording.compression"},
    # The library composes the rooms, and prints nothing; the command line calls it, and nothing below.
    "api": {"store",
        "event", "hooks", "tracer", "readers", "layout", "converters", "recording", "part", "reports",
        "present", "dataset", "ranks", "sql", "doctor", "ui", "marks",
    },
    "cli": {"api", "terminal", "native"},
    "terminal": {"tracer"},
}  # fmt: skip
COMPOSING = {"__main__"}
# Which everything may import: the version, errors, options, who called sudo, which rank this is, room on a
# disk, what is under a path, how numbers and names are written.
GROUND = {
    "", "__version__", "disk_space", "errors", "kernel_names", "launchers", "libraries", "mangled_names",
    "options", "paths", "printable", "sudo", "units",
}  # fmt: skip
# Rooms that reckon with columns. They are loaded by the commands that read a recording, and by no --help.
OF_COLUMNS = {
    "event",
    "readers",
    "clocks",
    "layout",
    "converters",
    "native",
    "recording",
    "part",
    "store",
    "analyses",
    "reports",
    "dataset",
    "ranks",
}
# Native or slow to import: only inside functions, so that --help works anywhere and at once.
SLOW = {
    "bcc",
    "numpy",
    "duckdb",
    "scipy",
    "matplotlib",
    "jinja2",
    "markupsafe",
    "zstandard",
    "wasmtime",
    "rich",
    "perfetto",
    "google",
    "pyspark",
    "py4j",
    "fsspec",
}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


@cache
def nodes(module: str) -> list[ast.AST]:
    """All that stands in a module; several tests go through it."""
    return [*ast.walk(tree(module))]


def top(module: str) -> str:
    """`tracepipe.layout.rows` → `layout`; the package itself is ""."""
    return module.partition(".")[2].partition(".")[0]


@cache
def room(module: str) -> str:
    """The innermost room of a module: `tracepipe.tracer.gpu.build.driver` → `capture.gpu`."""
    place = module.partition(".")[2]
    return next((name for name in sorted(ROOMS, key=len, reverse=True) if is_in(place, name)), top(module))


def is_in(place: str, name: str) -> bool:
    return place == name or place.startswith(f"{name}.")


def imports(below: ast.AST) -> Iterator[str]:
    for node in ast.walk(below):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from tracepipe import clocks` is an import of tracepipe.clocks too.
            names = ((f"{node.module}.{alias.name}", node.module or "") for alias in node.names)
            yield from (
                name if name in SOURCES or module == "tracepipe" else module for name, module in names
            )


def calls(module: str, name: str) -> int:
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in nodes(module)
    )


def makes_report(module: str) -> bool:
    """Whether a module is the file of a report: it has a constant REPORT, or makes one from others."""
    return any(
        (
            isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == "REPORT" for t in node.targets)
        )
        or (isinstance(node, ast.FunctionDef) and node.name == "report_of")
        for node in tree(module).body
    )


@pytest.mark.slow
def test_imports_go_one_way() -> None:
    against = {module: not_allowed(module) for module in SOURCES if module != "tracepipe"}
    assert {module: others for module, others in against.items() if others} == {}


def not_allowed(module: str) -> set[str]:
    """The rooms that a module imports and may not."""
    here = room(module)
    if here in COMPOSING:
        return set()
    used = {name for name in imports(tree(module)) if name.partition(".")[0] == "tracepipe"}
    if here in GROUND:
        return {top(name) for name in used} - GROUND
    assert here in ROOMS, f"say in this test what {here} may import"
    others = {room(name) for name in used if top(name) not in GROUND} - {here}
    return {other for other in others if not any(is_in(other, name) for name in ROOMS[here])}


def test_no_room_is_reached_from_itself() -> None:
    arrows = {
        here: {
            other for other in ROOMS if other != here for name in may
            # Of a room that has rooms, `tracer` means those in it.
            if is_in(other, name) and not (other == name and is_in(here, name))
        }
        for here, may in ROOMS.items()
    }  # fmt: skip
    TopologicalSorter(arrows).prepare()  # raises CycleError


@pytest.mark.parametrize("folder", ["readers", "converters", "reports"])
def test_a_format_does_not_know_the_others(folder: str) -> None:
    registry = f"tracepipe.{folder}"
    formats = {module for module in SOURCES if top(module) == folder and is_format(module)}
    assert len(formats) > 2
    for module in SOURCES:
        if top(module) == folder and module != registry:
            assert formats & set(imports(tree(module))) - {module} == set(), module


def is_format(module: str) -> bool:
    """Whether a module is the file of an input format, of an output format or of a report."""
    readers = {f"tracepipe.readers.{reader.module}" for reader in READERS.values()}
    writers = {output.writer.partition(":")[0] for output in CONVERTERS.values()}
    return module in readers | writers or (top(module) == "reports" and makes_report(module))


@pytest.mark.slow
def test_no_room_reaches_the_library_by_a_name_in_a_text() -> None:
    named = {
        module
        for module in SOURCES
        for node in nodes(module)
        if isinstance(node, ast.Constant) and str(node.value).startswith("tracepipe.api.")
    }
    # The package has the library's names.
    assert named == {"tracepipe"}


def test_only_clocks_makes_trace_times() -> None:
    makers = {module for module in SOURCES if calls(module, "TraceNs")}
    assert {top(module) for module in makers} == {"clocks"}


def test_one_module_prints_and_one_exits() -> None:
    printers = {module for module in SOURCES if calls(module, "print")}
    generators = {"tracepipe.event.schema", "tracepipe.tracer.bpf.bytecode"}  # when they are run as modules
    assert printers - generators == {"tracepipe.terminal.output"}
    exits = {
        module
        for module in SOURCES
        for node in nodes(module)
        if isinstance(node, ast.Attribute)
        and node.attr == "exit"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    }
    assert exits == {"tracepipe.cli"}


def test_paths_of_other_users_are_examined_in_one_module() -> None:
    """A `Path` raises an error where it may not look."""
    rooms = ("api", "cli", "recording", "sql", "ui", "tracer.find")
    looking = {
        f"{module}:{node.lineno}"
        for module in SOURCES
        if room(module) in rooms
        for node in nodes(module)
        if isinstance(node, ast.Attribute) and node.attr in ("exists", "is_dir", "is_file", "glob")
        if ast.unparse(node.value) != "paths"
    }
    assert looking == set()


def test_native_libraries_are_imported_when_they_are_needed() -> None:
    # The trace processor's module is itself imported when it is asked.
    own = {"tracepipe.sql.wasm": {"perfetto", "wasmtime"}}
    too_early = {}
    for module in SOURCES:
        top = [node for node in tree(module).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        used = {name.partition(".")[0] for node in top for name in imports(node)} & SLOW
        may = own.get(module, {"numpy"} if room(module).partition(".")[0] in OF_COLUMNS else set())
        too_early[module] = used - may
    assert {module: names for module, names in too_early.items() if names} == {}


def test_native_sources_state_their_licence() -> None:
    ours = [
        path for path in (ROOT / "tracepipe").rglob("*") if path.suffix in (".c", ".cpp", ".cu", ".h", ".S")
    ]
    lacking = [path for path in ours if "SPDX-License-Identifier: " not in path.open().readline()]
    assert ours
    assert lacking == []


def test_every_module_states_what_it_is() -> None:
    assert [module for module in SOURCES if not ast.get_docstring(tree(module))] == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    empty = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "base"}
    assert {module.rpartition(".")[2] for module in SOURCES} & empty == set()


def test_files_of_tests_have_names_of_their_own() -> None:
    """`pytest` imports those of folders without `__init__.py` by their names alone."""
    files = [
        path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()
    ]
    assert len(files) > 200
    assert [name for name, count in Counter(path.name for path in files).items() if count > 1] == []


@pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="a source distribution has no links")
def test_the_folder_of_the_converters_is_seen_at_the_top() -> None:
    link = ROOT / "converters"
    assert link.is_symlink()
    assert link.resolve() == PACKAGE / "converters"
