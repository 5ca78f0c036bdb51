"""What `tracepipe hooks` shows: sets, functions that can be hooked, and what a hook has seen."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import orjson
import pytest

from tracepipe.hooks import sets
from tracepipe.hooks.sets import read_hooks
from tracepipe.tracer.find import kernel as find_kernel
from tracepipe.tracer.find.hook_list import hits, list_functions, list_sets
from tracepipe.tracer.find.library import LibrarySearch
from tracepipe.tracer.find.resolve import resolve

SETS = {
    "odd": """
about = "Odd calls"
target = "uprobe:libodd.so"
[[hook]]
functions = ["oddInit", "odd[A-Z]*"]
""",
    "kernel": """
about = "Odd kernel functions"
target = "kprobe:odd"
[[hook]]
functions = ["odd_*"]
""",
}
SYMBOLS = """\
ffffffff81000000 T odd_read
ffffffffc0a00000 t odd_ioctl\t[odd]
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two shipped sets, kprobes, the module odd, and no tracepoints but one."""
    (tmp_path / "sets").mkdir()
    for name, text in SETS.items():
        (tmp_path / "sets" / f"{name}.toml").write_text(text)
    (tmp_path / "kallsyms").write_text(SYMBOLS)
    (tmp_path / "module" / "odd").mkdir(parents=True)
    (tmp_path / "events" / "odd" / "odd_entry").mkdir(parents=True)
    monkeypatch.setattr(sets, "_FOLDER", tmp_path / "sets")
    monkeypatch.setattr(find_kernel, "KPROBE_PMU", tmp_path / "kallsyms")
    monkeypatch.setattr(find_kernel, "SYMBOLS", tmp_path / "kallsyms")
    monkeypatch.setattr(find_kernel, "_SYSTEM_MODULES", tmp_path / "module")
    monkeypatch.setattr("tracepipe.tracer.find.kernel.tracing_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def library(tmp_path: Path) -> str:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    (tmp_path / "odd.c").write_text("int oddInit(void) { return 0; } int oddFree(void) { return 1; }")
    path = str(tmp_path / "libodd.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, str(tmp_path / "odd.c")], check=True)
    return path


def test_shipped_sets(machine: Path, library: str) -> None:
    kernel, odd = list_sets(LibrarySearch(given=(library,)))
    assert (odd.name, odd.about, odd.function_count, odd.reason) == ("odd", "Odd calls", 2, "")
    assert (kernel.function_count, kernel.reason) == (1, "")
    without = list_sets(LibrarySearch())[1]
    assert without.function_count == 0
    assert "no libodd.so found" in without.reason


def test_functions_that_fit_a_pattern(machine: Path, library: str) -> None:
    listing = list_functions("odd*", LibrarySearch(given=(library,)))
    assert [(row.spec, row.place, row.sets) for row in listing.rows] == [
        ("uprobe:libodd.so:oddFree", library, ("odd",)),
        ("uprobe:libodd.so:oddInit", library, ("odd",)),
        ("kprobe:odd_read", "", ()),  # the set asks for the module's
        ("kprobe:odd_ioctl", "odd", ("kernel",)),
        ("tracepoint:odd:odd_entry", "odd", ()),
    ]
    assert listing.notes == []
    listing = list_functions("odd:*", LibrarySearch())
    assert [row.spec for row in listing.rows] == ["kprobe:odd:odd_ioctl", "tracepoint:odd:odd_entry"]
    assert listing.notes == ["no libodd.so: the dynamic linker would not find it"]


def test_every_hook_that_is_listed_finds_itself(machine: Path, library: str) -> None:
    libraries = LibrarySearch(given=(library,))
    listed = [*list_functions("odd*", libraries).rows, *list_functions("odd:*", libraries).rows]
    assert len(listed) == 7
    for row in listed:
        assert list_functions(row.spec, libraries).rows == [row]
        (probe,) = resolve(read_hooks([row.spec]), libraries, is_partial=True).probes
        assert probe.symbol == row.name


def test_a_hook_of_a_capture_can_be_listed(machine: Path, library: str) -> None:
    libraries = LibrarySearch(given=(library,))

    def specs(hook: str) -> list[str]:
        listing = list_functions(hook, libraries)
        assert listing.notes == []
        return [row.spec for row in listing.rows]

    assert specs("uprobe:libodd.so.1:odd*") == ["uprobe:libodd.so.1:oddFree", "uprobe:libodd.so.1:oddInit"]
    assert specs(f"uprobe:{library}:*Init(flags: u32) -> i32") == [f"uprobe:{library}:oddInit"]
    assert specs(f"uprobe:{machine}/*odd.so*:oddI*") == [f"uprobe:{library}:oddInit"]
    assert specs("kprobe:*dd_r*") == ["kprobe:odd_read"]
    assert specs("kprobe:odd:odd*") == ["kprobe:odd:odd_ioctl"]
    assert specs("tracepoint:odd:*") == ["tracepoint:odd:odd_entry"]
    assert specs("odd") == ["uprobe:libodd.so:oddFree", "uprobe:libodd.so:oddInit"]
    (of_version,) = list_functions("uprobe:libodd.so.1:oddInit", libraries).rows
    assert (of_version.place, of_version.sets) == (library, ("odd",))
    nothing = list_functions("tracepoint:od:*", libraries)
    assert (nothing.rows, nothing.reason) == ([], "no such tracepoint; near: odd:*")


def test_names_near_a_pattern_that_nothing_fits(machine: Path, library: str) -> None:
    listing = list_functions("odd_iotcl", LibrarySearch(given=(library,)))
    assert listing.rows == []
    assert listing.near[0] == "odd_ioctl"
    (machine / "kallsyms").unlink()  # which stands for the kprobes, too
    listing = list_functions("oddinit", LibrarySearch(given=(library,)))
    assert listing.near[0] == "oddInit"
    assert any("no kprobes" in note for note in listing.notes)


def test_what_a_hook_has_seen() -> None:
    def call(phase: str, ts_ns: int, tid: int = 1, **fields: object) -> dict[str, object]:
        event = {"type": "userspace", "name": "oddInit", "phase": phase, "ts_ns": ts_ns, "tid": tid}
        return event | fields

    records: list[dict[str, object]] = [
        {"type": "header", "schema": "tracepipe/1", "start": {"monotonic_ns": 10**9}},
        call("E", 5),  # its begin is older than the recording
        call("B", 10, args={"flags": 3}),
        call("B", 11, tid=2, args={"flags": 4}, grid=[1, 1, 1]),
        call("E", 12, args={"result": 0}),
        call("E", 13, tid=2, args={"result": 7}),
        *(call(phase, 20) for phase in "BEBEBE"),
        {"type": "scheduler", "name": "running", "phase": "B", "ts_ns": 30},
        {"type": "loss", "count": 2},
        {"type": "footer", "counts": {}, "losses": {"userspace": 2}, "end": {"monotonic_ns": 3 * 10**9}},
    ]
    report = hits(map(orjson.dumps, records), ["oddFree", "oddInit"])
    first, second = report.rows
    assert (first.name, first.count, first.rate_per_s) == ("oddInit", 5, 2.5)
    assert first.first == [{"flags": 3, "result": 0}, {"grid": [1, 1, 1], "flags": 4, "result": 7}, {}]
    assert (second.name, second.count, second.first) == ("oddFree", 0, [])
    assert (report.seconds, report.lost_count) == (2.0, 2)
