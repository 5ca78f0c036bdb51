"""The ELF reader and the search for a library, on libraries built here and by hand."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracepipe.errors import InputError, TracepipeError
from tracepipe.tracer.find import library
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.find.library import find_program, find_versions

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

LIBRARY = """
int cuMemAlloc_v2(int a) { return a; }
int cuMemAlloc_v2_longer(int a) __attribute__((alias("cuMemAlloc_v2")));
int cuInit(int a) { return a + 1; }
int custom(int a) { return a; }
int cudaMalloc(int a) { return a; }
__attribute__((visibility("hidden"))) int cuHidden(int a) { return a; }
int cuVariable = 3;
static int chosen(int a) { return a; }
static void *choose(void) { return (void *)chosen; }
int cuIndirect(int a) __attribute__((ifunc("choose")));
extern int cuElsewhere(int a);
int call(int a) { return cuElsewhere(a) + cuHidden(a); }
"""


def build(folder: Path, *options: str) -> Path:
    source = folder / "library.c"
    source.write_text(LIBRARY)
    built = folder / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(built), str(source), *options], check=True)
    return built


@needs_gcc
@pytest.mark.parametrize("options", [(), ("-s",)], ids=["plain", "stripped"])
def test_exported_functions_without_indirect_or_hidden_ones(tmp_path: Path, options: tuple[str, ...]) -> None:
    built = build(tmp_path, *options)
    with Elf(str(built)) as elf:
        functions = dict(elf.functions())
        offsets = {name: elf.file_offset(address) for name, address in functions.items()}
    own = {name for name in functions if name.startswith("cu") or name == "call"}
    assert own == {"cuInit", "cuMemAlloc_v2", "cuMemAlloc_v2_longer", "custom", "cudaMalloc", "call"}
    assert functions["cuMemAlloc_v2"] == functions["cuMemAlloc_v2_longer"]
    data = built.read_bytes()
    for name in own:  # each offset is the start of a function: its usual first instruction
        assert data[offsets[name] : offsets[name] + 1] != b"\0"
    assert len({offsets[name] for name in own}) == 5


@needs_gcc
def test_local_functions_where_they_are_asked_for(tmp_path: Path) -> None:
    with Elf(str(build(tmp_path))) as elf:
        local = {name for name, _ in elf.functions(local=True)}
        assert {"cuHidden", "chosen", "cuInit"} <= local
        assert "cuIndirect" not in local
    with Elf(str(build(tmp_path, "-s"))) as elf:
        assert {name for name, _ in elf.functions(local=True)} == {name for name, _ in elf.functions()}


@needs_gcc
def test_a_librarys_own_name(tmp_path: Path) -> None:
    with Elf(str(build(tmp_path, "-Wl,-soname,libother.so.7"))) as elf:
        assert elf.dynamic().soname == "libother.so.7"
    with Elf(str(build(tmp_path))) as elf:
        assert elf.dynamic().soname == ""


@needs_gcc
def test_the_dynamic_section(tmp_path: Path) -> None:
    program = tmp_path / "program"
    source = tmp_path / "main.c"
    source.write_text("int main(void) { return 0; }")
    paths = "-Wl,--enable-new-dtags,-rpath,$ORIGIN/lib:/opt/cuda"
    subprocess.run(["gcc", "-o", str(program), str(source), paths], check=True)
    with Elf(str(program)) as elf:
        dynamic = elf.dynamic()
    assert dynamic.runpath == ["$ORIGIN/lib", "/opt/cuda"]
    assert dynamic.rpath == []
    assert any(name.startswith("libc.so") for name in dynamic.needed)


@pytest.fixture(scope="module")
def library_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("library"))


@needs_gcc
def test_a_damaged_library_is_an_input_error(tmp_path: Path) -> None:
    data = build(tmp_path).read_bytes()
    for size_bytes in (0, 3, 4, 20, 63, 64, 100, len(data) // 2, len(data) - 1):
        cut = tmp_path / "cut.so"
        cut.write_bytes(data[:size_bytes])
        with pytest.raises(InputError), Elf(str(cut)) as elf:
            elf.dynamic()
            elf.functions(local=True)


@pytest.mark.slow
@needs_gcc
@settings(max_examples=200)
@given(st.data())
def test_a_hostile_library_is_an_input_error(library_file: Path, data: st.DataObject) -> None:
    changed = bytearray(library_file.read_bytes())
    # The header, the segments, or the sections at the end: what holds offsets and sizes.
    places = st.one_of(st.integers(16, 1024), st.integers(len(changed) - 2048, len(changed) - 8))
    for place in data.draw(st.lists(places, min_size=1, max_size=6)):
        changed[place : place + 8] = data.draw(st.binary(min_size=8, max_size=8))
    path = library_file.with_name("hostile.so")
    path.write_bytes(changed)
    try:
        with Elf(str(path)) as elf:
            dynamic, functions = elf.dynamic(), elf.functions(local=True)
    except InputError as error:
        assert str(path) in error.message
    else:
        assert all(isinstance(name, str) for name in dynamic.needed)
        assert all(address > 0 for _, address in functions)


@pytest.mark.parametrize(
    "start", [b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(60), b"\x7fELF\x02\x02" + bytes(60)]
)
def test_other_files_are_input_errors(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(start)
    with pytest.raises(InputError, match="not a"):
        Elf(str(path))


@needs_gcc
def test_a_library_is_found_as_the_linker_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libodd.so.1").write_bytes(b"")
    program = tmp_path / "program"
    (tmp_path / "main.c").write_text("int main(void) { return 0; }")
    command = ["gcc", "-o", str(program), str(tmp_path / "main.c")]
    there = str(tmp_path / "there" / "libodd.so.1")
    here = str(tmp_path / "here" / "libodd.so.1")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)

    subprocess.run([*command, "-Wl,--enable-new-dtags,-rpath,$ORIGIN/here"], check=True)
    assert find_versions(str(program), "libodd.so.1") == {"libodd.so.1": here}
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "there"))
    assert find_versions(str(program), "libodd.so.1") == {"libodd.so.1": there}  # before RUNPATH
    subprocess.run([*command, "-Wl,--disable-new-dtags,-rpath,$ORIGIN/here"], check=True)
    assert find_versions(str(program), "libodd.so.1") == {"libodd.so.1": here}  # after RPATH
    assert find_versions(str(program), "libnowhere.so.1") == {}


def test_the_linkers_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "libodd.so.1"
    found.write_bytes(b"")
    strings = b"libodd.so.1\0/lib32/libodd.so.1\0" + str(found).encode() + b"\0"
    start = 48 + 2 * 24
    head = b"glibc-ld.so.cache1.1" + struct.pack("<II", 2, len(strings)) + bytes(20)
    wide = start + strings.index(str(found).encode())
    entries = struct.pack("<iIIIQ", 0x0001, start, start + 12, 0, 0)  # 32-bit x86
    entries += struct.pack("<iIIIQ", 0x0301, start, wide, 0, 0)
    cache = tmp_path / "ld.so.cache"
    cache.write_bytes(b"ld.so-1.7.0 and an older table" + head + entries + strings)
    monkeypatch.setattr(library, "_CACHE", cache)
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    assert find_versions(str(script), "libodd.so.1") == {"libodd.so.1": str(found)}


def test_programs_are_found_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "app"
    program.write_text("#!/bin/sh\n")
    with pytest.raises(TracepipeError, match="cannot be executed"):
        find_program([str(program)])
    program.chmod(0o755)
    assert find_program([str(program)]) == str(program)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TracepipeError, match="There is no program app") as caught:
        find_program(["app"])
    assert "./app" in caught.value.hint
    with pytest.raises(TracepipeError, match="is a folder"):
        find_program([str(tmp_path)])
