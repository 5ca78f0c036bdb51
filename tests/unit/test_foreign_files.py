"""Files of other users: they change while they are read, and state sizes that nothing has."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from tests.fuzz.programs import CHANGES, Changing
from tests.support.elf_files import (
    DYNSYM,
    STRTAB,
    Part,
    cubin,
    elf_of,
    entry,
    fat_binary,
    library,
    program,
    symbols,
)
from tracepipe.errors import InputError
from tracepipe.tracer.find import elf, foreign, functions, kernels
from tracepipe.tracer.find.functions import FunctionTables
from tracepipe.tracer.find.kernels import list_kernels
from tracepipe.tracer.find.library import interpreter_of, linked_libraries, package_folders
from tracepipe.tracer.gpu.choice import has_marks


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_at_any_read_is_a_message(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, at = tmp_path / "libcuda.so.1", 0
    is_done = True
    while is_done:
        at += 1
        path.unlink(missing_ok=True)
        path.write_bytes(library(["cuInit", "cuLaunchKernel"]))
        changing = Changing(path, change, at)
        monkeypatch.setattr(foreign, "_pread", changing)
        notes: list[str] = []
        found = FunctionTables(notes.append).all_of(str(path))
        if is_done := changing.is_done:
            assert found == {}
            (note,) = notes
            assert note.startswith(f"{path}: it was changed while it was read")
    assert at > 5 and [*found.values()] == [["cuInit"], ["cuLaunchKernel"]] and not notes


def test_a_file_that_another_one_replaces_between_two_reads_gives_no_functions(tmp_path: Path) -> None:
    path, notes = tmp_path / "libcuda.so.1", list[str]()
    path.write_bytes(library(["cuInit"]))
    tables = FunctionTables(notes.append)
    assert tables.all_of(str(path), local=False)
    CHANGES["replace"](path)
    assert tables.all_of(str(path)) == {}
    assert notes == [f"{path}: it was replaced while it was read: no function of it is recorded"]


@pytest.mark.timeout(20)  # the open of a pipe without a writer waits for ever
def test_pipes_and_devices_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "python3"
    os.mkfifo(pipe)
    for path in (str(pipe), "/dev/zero", str(tmp_path)):
        with pytest.raises(InputError, match="not a file"):
            elf.Elf(path)
        assert interpreter_of(path) == ""
        assert linked_libraries(path) == {}
        assert not has_marks([path])
    (tmp_path / "bin").mkdir()
    os.mkfifo(tmp_path / "pyvenv.cfg")
    assert package_folders(str(tmp_path / "bin/python")) is not None
    # It is another file by the time of the open: what was looked at is opened.
    regular = tmp_path / "regular"
    regular.write_bytes(library(["cuInit"]))
    real_open = os.open

    def swapped(path: str, flags: int) -> int:
        file = real_open(path, flags)
        if flags & os.O_PATH:
            CHANGES["pipe"](regular)
        return file

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(InputError, match="changed while it was read"), elf.Elf(str(regular)) as opened:
        opened.functions()


NAMES = Part(".names", STRTAB, b"\0cuInit\0")
ONE = Part(".dynsym", DYNSYM, symbols([1]), 1)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([Part(".names", STRTAB, b"c" * 4096), ONE], id="names without an end"),
        pytest.param([NAMES, Part(".dynsym", DYNSYM, symbols([500]), 1)], id="a name behind the names"),
        pytest.param([NAMES, Part(".dynsym", DYNSYM, symbols([1]), 9)], id="names of no section"),
        pytest.param([NAMES, ONE, ONE], id="two tables"),
        pytest.param([NAMES, Part(".dynsym", DYNSYM, b"", 1, size=1 << 62)], id="a table without end"),
        pytest.param([NAMES, Part(".dynsym", DYNSYM, b"", 1, 1 << 63, 240)], id="a table behind the file"),
        pytest.param([NAMES, Part(".dynsym", DYNSYM, symbols([1] * 101), 1)], id="too many functions"),
        pytest.param([Part(".names", STRTAB, b"c" * 3000 + b"\0"), ONE], id="too long names"),
    ],
)
def test_tables_that_no_file_has_are_damage(
    parts: list[Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elf, "_FUNCTIONS_MAX", 100)
    monkeypatch.setattr(elf, "_NAMES_BYTES", 2000)
    path, notes = tmp_path / "libcuda.so.1", list[str]()
    path.write_bytes(elf_of(parts))
    assert FunctionTables(notes.append).all_of(str(path)) == {}
    assert notes == [f"{path}: the symbol table is damaged: no function of it is recorded"]


@pytest.mark.parametrize("window", [1 << 25, 5000])
def test_a_large_table_of_names_is_read_in_windows_and_long_names_are_cut(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elf, "_WINDOW_BYTES", window)
    names = [f"f{n:04}" * (1 + n % 7) for n in range(1500, 0, -1)] + ["x" * 4096, "y" * 9000, "z"]
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(library(names))
    with elf.Elf(str(path)) as opened:
        assert [name for name, _ in opened.functions()] == [name[:4096] for name in names]


def test_all_files_together_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_TABLES_BYTES", 3 * 256)
    notes, found = list[str](), []
    tables = FunctionTables(notes.append)
    for number in range(3):
        path = tmp_path / f"libcuda.so.{number}"
        path.write_bytes(library(["cuInit", "cuLaunch"]))
        found.append(len(tables.all_of(str(path), local=False)))
    assert found == [2, 0, 0]
    assert (
        all("the files up to this one have too many functions" in note for note in notes) and len(notes) == 2
    )


def listed(path: Path, data: bytes) -> tuple[int, list[str]]:
    """How many kernels a file has, and the notes about it."""
    path.write_bytes(data)
    listing = list_kernels("", [str(path)])
    return len(listing.rows), listing.notes


def test_fat_binaries_that_state_what_they_do_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, good = tmp_path / "code", cubin(["add"])
    damaged = [f"{path}: 1 cubin is damaged, or its compression is unknown"]
    for bad in (
        entry(good, packing="zstd", size=1 << 40),
        entry(good, packing="zstd", size=len(good) - 1),
        entry(bytes(1 << 20), packing="zstd", size=1000),
        entry(good, packing="lz4", size=1 << 40),
        entry(good, packing="lz4", size=len(good) - 1),
        bytes(64),
    ):
        assert listed(path, program(fat_binary(entry(good)), fat_binary(bad))) == (1, damaged)
    # The header's own size, too, may be 0: the next one is looked for behind it.
    empty = struct.pack("<IHHQ", 0xBA55ED50, 1, 0, 0)
    assert listed(path, empty + empty + fat_binary(entry(good))) == (1, [])
    assert listed(path, program(fat_binary(entry(good)) + bytes(3 << 20) + fat_binary(entry(good)))) == (
        2,
        [],
    )
    monkeypatch.setattr(kernels, "_BYTES_MAX", len(good))
    assert listed(path, fat_binary(entry(cubin(["x" * 9000]), packing="zstd"))) == (0, damaged)
    monkeypatch.setattr(kernels, "_ENTRIES_MAX", 50)
    with pytest.raises(InputError, match="more GPU code than any file"):
        listed(path, fat_binary(*[entry(good)] * 60))
    with pytest.raises(InputError, match="more GPU code than any file"):
        listed(path, fat_binary() * 60)
    monkeypatch.setattr(kernels, "_ENTRIES_MAX", 1 << 20)
    monkeypatch.setattr(kernels, "_TIMES_MAX", 0)  # all cubins together
    with pytest.raises(InputError, match="more GPU code than any file"):
        listed(path, fat_binary(*[entry(good)] * 60))


ADDRESS = b"\0\x09\2" + bytes(8)
HEADER = struct.pack("<HIBBbBB", 2, 0, 4, 1, -5, 14, 10) + bytes([0, 1, 1, 1, 1, 0, 0, 0, 1])


def unit(body: bytes) -> bytes:
    """A line number program with this after its header."""
    return struct.pack("<I", len(HEADER) + len(body)) + HEADER + body


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(unit(b"\0f\0\1\0\0\0" + (ADDRESS + b"\x09ab") * 30_000), id="programs without a row"),
        pytest.param(unit(b"\0") * 2 + HEADER * 30_000, id="units without a length"),
        pytest.param(unit(b"\0f\0" + b"\x80" * 400_000), id="a number without an end"),
        pytest.param(
            unit(b"d" * 400_000 + b"\0\0" + b"f\0\1\0\0" * 60_000 + b"\0" + (ADDRESS + b"\1") * 9),
            id="a long folder",
        ),
        pytest.param(unit(b"\0" + b"f\0\0\0\0" * 90_000), id="files without an end"),
    ],
)
@pytest.mark.timeout(60)  # time that depends on the square of the size would be minutes
def test_line_tables_take_linear_time(data: bytes) -> None:
    places = {at: 1 for at in range(len(data)) if data.startswith(ADDRESS[:3], at - 3)}
    try:
        found = list(kernels._first_lines(data, places))
    except (IndexError, ValueError):
        found = []
    assert all(len(source) <= 1024 for _, source in found)
