"""The kernels of applications, of cubins that nvcc makes here, and of files that are damaged."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tests.support.compiled import compiled
from tests.support.gpu_libraries import ROOT, nvcc
from tracepipe.errors import InputError
from tracepipe.tracer.find import kernels
from tracepipe.tracer.find.kernels import cubins, kernels_in, list_kernels, lz4_block

SOURCE = ROOT / "tests/support/listed.cu"
ADD, SCALE = "add(float const*, float*)", "void ns::scale<double>(double*, double)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source as fat binaries that are compressed in each way, as a cubin, and in a program's object."""
    folder = tmp_path_factory.mktemp("kernels")
    command = nvcc()
    codes = ["-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=[sm_90,compute_90]"]
    for mode in ("none", "speed", "size"):
        made = [command, "-fatbin", f"--compress-mode={mode}", *codes, str(SOURCE)]
        compiled(made, folder / f"{mode}.fatbin")
    for what, name in ((["-cubin", "-lineinfo"], "k.cubin"), (["-c"], "k.o")):
        compiled([command, "-arch=sm_90", *what, str(SOURCE)], folder / name)
    return folder


@pytest.mark.parametrize("mode", ["none", "size"])
def test_kernels_of_a_fat_binary_however_it_is_compressed(built: Path, mode: str) -> None:
    listing = list_kernels("", [str(built / f"{mode}.fatbin")])
    assert listing.notes == []
    rows = [(row.name, row.architecture, row.shared_bytes) for row in listing.rows]
    assert rows == [(ADD, "sm_80", 256), (ADD, "sm_90", 256), (SCALE, "sm_80", 0), (SCALE, "sm_90", 0)]
    assert all(6 <= (row.registers or 0) <= 40 for row in listing.rows)
    assert all(row.stack_bytes == 0 for row in listing.rows)


def test_sources_stand_where_the_compiler_wrote_lines(built: Path) -> None:
    rows = list_kernels("", [str(built / "k.cubin")]).rows
    assert [(row.name, row.source) for row in rows] == [
        (ADD, f"{SOURCE}:1"),
        (SCALE, f"{SOURCE}:7"),
    ]
    assert {row.source for row in list_kernels("", [str(built / "k.o")]).rows} == {""}


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("add", ADD),
        ("_Z3addPKfPf", ADD),
        ("ns::scale", SCALE),
        ("ns::scale<*>", SCALE),
        ("*double*", SCALE),
        ("*N2ns5scale*", SCALE),
    ],
)
def test_names_fit_mangled_or_not_with_parameters_or_without(built: Path, pattern: str, name: str) -> None:
    assert [row.name for row in list_kernels(pattern, [str(built / "k.o")]).rows] == [name]


def test_a_name_that_nothing_fits_has_those_near_it(built: Path) -> None:
    listing = list_kernels("Scale", [str(built / "k.o")])
    assert (listing.rows, listing.near) == ([], [SCALE])


def test_a_folder_is_searched_for_cubins(built: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache/XYZ"
    cache.mkdir(parents=True)
    (cache / "add.cubin").write_bytes((built / "k.cubin").read_bytes())
    (cache / "bad.cubin").write_text("none")
    listing = list_kernels("add", [str(tmp_path)])
    assert [row.place for row in listing.rows] == [str(cache / "add.cubin")]
    assert listing.notes == [f"{cache}/bad.cubin: not an ELF file"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="a folder without cubins"):
        list_kernels("", [str(tmp_path / "empty")])


def test_ptx_and_what_cannot_be_decompressed_is_reported(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    path = str(built / "size.fatbin")
    data = bytearray((built / "size.fatbin").read_bytes())
    at = data.index(kernels._ZSTD_MAGIC, data.index(kernels._ZSTD_MAGIC) + 4)
    data[at + 8 : at + 40] = bytes(32)
    (built / "damaged.fatbin").write_bytes(data)
    assert len(list(cubins(str(built / "damaged.fatbin"), notes.append))) < len(
        list(cubins(path, notes.append))
    )
    assert notes == [f"{built}/damaged.fatbin: 1 cubin is damaged, or its compression is unknown"]
    monkeypatch.setattr(kernels, "_CUBIN", 99)
    notes.clear()
    assert list(cubins(path, notes.append)) == []
    assert notes == [
        f"{path}: 1 part is PTX, which the driver compiles at run time: its kernels are not listed"
    ]


def _first_ptx(path: Path) -> tuple[bytes, int]:
    """The PTX in a fat binary as it is compressed, and its size when it is not."""
    data, at = path.read_bytes(), 16
    while True:
        kind, _, head, size, packed, *_, whole = struct.unpack_from("<HHIQIIHHIIIQQQ", data, at)
        if kind == 1:
            return data[at + head : at + head + (packed or size)], whole
        at += head + size


def test_lz4_as_nvcc_writes_it(built: Path) -> None:
    packed, size = _first_ptx(built / "speed.fatbin")
    plain, _ = _first_ptx(built / "none.fatbin")
    assert lz4_block(packed, size).strip(b"\n\0") == plain.strip(b"\n\0")
    for wrong in (packed[:-40], packed[:20], b"\x0f\xff", b"\x10a\xff\xff\x00", b""):
        with pytest.raises(IndexError):
            lz4_block(wrong, size)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_cubins_are_errors_of_their_file(built: Path, seed: int) -> None:
    data = bytearray((built / "k.cubin").read_bytes())
    start, step = seed * 97 % len(data), 11 + seed
    for at in range(start, len(data), step * 40):
        data[at] = seed * 37 + at & 0xFF
    try:
        assert isinstance(kernels_in(bytes(data[: len(data) - seed * 50]), "k.cubin"), list)
    except InputError as error:
        assert error.message.startswith("k.cubin: ")


def test_the_library_of_warps_reads_the_same_needs(built: Path, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    source, native = ROOT / "tests/gpu/needs.cpp", ROOT / "tracepipe/tracer/gpu/native"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{native}"]
    program = compiled([compiler, *flags, str(source)], tmp_path / "needs")
    known = kernels_in((built / "k.cubin").read_bytes(), "k.cubin")
    assert {kernel.shared_bytes for kernel in known} == {0, 256}
    command = [str(program), str(built / "k.cubin"), *(kernel.mangled for kernel in known), "none"]
    seen = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert seen == [f"{one.mangled} {one.registers} {one.shared_bytes}" for one in known] + ["none 0 0"]
    (tmp_path / "none").write_bytes(b"no cubin")
    command[1] = str(tmp_path / "none")
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.endswith("none 0 0\n")


def test_files_without_gpu_code() -> None:
    listing = list_kernels("", ["/bin/true"])
    assert (listing.rows, listing.near, listing.notes) == ([], [], [])
    with pytest.raises(InputError, match="cannot be read"):
        list_kernels("", ["/nowhere"])
