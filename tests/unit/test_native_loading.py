"""Which core is loaded and which is refused, and what `state()` says of it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tracepipe import native
from tracepipe.native import build

pytestmark = pytest.mark.slow

Place = Callable[[Path], None]
SOURCES = [path.name for path in build.sources()]
try:
    build.compiler()
    HAS_COMPILER = True
except build.NoCompiler:
    HAS_COMPILER = False
# What is tried of most cores does not depend on how fast they are. The last flags count.
QUICKLY = ["-O0", "-U_FORTIFY_SOURCE"]
compiles = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler (apt install gcc libc6-dev)")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Has the loader look for the core at a path, whatever the tests are run with."""
    monkeypatch.delenv(native.PURE, raising=False)
    return lambda path: monkeypatch.setattr(native, "CORE", path)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A core of the sources as they are."""
    return build.build(core=tmp_path_factory.mktemp("core") / build.NAME)


@compiles
def test_a_core_of_these_sources_runs(place: Place, compiled: Path) -> None:
    place(compiled)
    assert isinstance(native.library(), ctypes.CDLL)
    assert native.state().startswith("native core, ")
    assert native.how_to_build() == ""


@compiles
def test_threads_that_come_at_once_get_one_object(place: Place, compiled: Path, tmp_path: Path) -> None:
    place(Path(shutil.copy(compiled, tmp_path)))
    with ThreadPoolExecutor(8) as pool:
        cores = list(pool.map(lambda _: native.library(), range(64)))
    assert len({id(core) for core in cores}) == 1


@compiles
@pytest.mark.parametrize("value", ["1", "yes"])
def test_python_alone_can_be_asked_for(
    place: Place, compiled: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    place(compiled)
    monkeypatch.setenv(native.PURE, value)
    assert native.library() is None
    assert native.state() == f"pure Python: TRACEPIPE_PURE={value}"
    assert native.how_to_build() == "unset TRACEPIPE_PURE"
    monkeypatch.setenv(native.PURE, "0")
    assert native.library() is not None


def test_without_a_core_python_runs(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place(tmp_path / build.NAME)
    assert native.library() is None
    assert native.state() == "pure Python: no compiled core"
    command = f"{sys.executable} -m tracepipe.native"
    monkeypatch.setenv("CC", sys.executable)
    assert native.how_to_build() == command
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native.how_to_build() == f"apt install gcc libc6-dev && {command}"


def copied(folder: Path) -> Path:
    """The sources in a folder of their own."""
    folder.mkdir()
    for path in build.sources():
        shutil.copy(path, folder)
    return folder


@compiles
def test_a_core_of_other_sources_is_refused(place: Place, tmp_path: Path) -> None:
    changed = copied(tmp_path / "changed")
    (changed / "ops.h").write_text((changed / "ops.h").read_text() + "/* edited */\n")
    core = build.build(changed, flags=QUICKLY)
    assert build.is_current(core, changed) and not build.is_current(core)
    place(core)
    assert native.library() is None
    assert native.state() == f"pure Python: no compiled core: {core} was compiled from other sources"
    assert native.how_to_build().endswith("-m tracepipe.native")


@compiles
def test_a_library_that_is_not_a_core_is_refused(place: Place, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "other.c").write_text("int nothing(void) { return 0; }\n")
    place(build.build(tmp_path / "other"))
    assert native.library() is None
    assert native.state().endswith("does not state its sources")


@compiles
def test_a_core_that_lacks_a_function_is_refused(place: Place, tmp_path: Path) -> None:
    lacking = copied(tmp_path / "lacking")
    (lacking / "ranges.c").write_text((lacking / "ranges.c").read_text().replace("TP_EXPORT ", ""))
    place(build.build(lacking, flags=[*QUICKLY, "-UTP_DIGEST", f'-DTP_DIGEST="{build.digest()}"']))
    assert native.library() is None
    assert "tp_ranges_nest" in native.state()


@pytest.mark.parametrize("content", [b"", b"not an object", b"\x7fELF\x02\x01\x01" + bytes(57)])
def test_a_broken_object_is_refused(place: Place, tmp_path: Path, content: bytes) -> None:
    core = tmp_path / build.NAME
    core.write_bytes(content)
    place(core)
    assert native.library() is None
    assert native.state().startswith("pure Python: no compiled core: ")


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_counts(tmp_path: Path, name: str) -> None:
    changed = copied(tmp_path / "changed")
    assert build.digest(changed) == build.digest()
    with (changed / name).open("a") as file:
        file.write("\n")
    assert build.digest(changed) != build.digest()


def test_a_source_that_is_gone_or_new_counts(tmp_path: Path) -> None:
    changed = copied(tmp_path / "changed")
    (changed / "ops.h").rename(changed / "another.h")
    assert build.digest(changed) != build.digest()


@compiles
def test_what_does_not_compile_leaves_the_core_as_it_is(tmp_path: Path) -> None:
    broken = copied(tmp_path / "broken")
    core = build.build(broken, flags=QUICKLY)
    before = core.read_bytes()
    (broken / "ranges.c").write_text("this is no C\n")
    with pytest.raises(build.NotBuilt, match=r"exits 1:\n[^\n]*ranges.c:1:1: "):
        build.build(broken, flags=QUICKLY)
    assert core.read_bytes() == before
    assert {path.suffix for path in broken.iterdir()} == {".c", ".h", ".so"}


def test_a_compiler_that_is_not_there_is_named() -> None:
    with pytest.raises(build.NoCompiler, match=r"no C compiler found \(CC=no-such-cc\)"):
        build.compiler({"CC": "no-such-cc -m64", "PATH": os.environ["PATH"]})
    with pytest.raises(build.NoCompiler, match=r"\(cc, gcc, clang\)"):
        build.compiler({"PATH": ""})


@compiles
def test_the_core_needs_nothing_but_an_old_libc(compiled: Path) -> None:
    tool = shutil.which("objdump")
    if tool is None:
        pytest.skip("no objdump (apt install binutils)")
    shown = subprocess.run([tool, "-pT", str(compiled)], capture_output=True, text=True, check=True).stdout
    needed = {line.split()[1] for line in shown.splitlines() if line.split()[:1] == ["NEEDED"]}
    assert {name.partition(".")[0] for name in needed} <= {"libc", "libm", "ld-linux-x86-64"}
    versions = {tuple(map(int, word.strip("()").removeprefix("GLIBC_").split(".")))
                for line in shown.splitlines() for word in line.split() if "GLIBC_2" in word}  # fmt: skip
    assert max(versions, default=(2, 0)) <= (2, 17)  # of manylinux2014


def test_the_loader_is_cheap_to_import() -> None:
    code = "import sys, tracepipe.native; tracepipe.native.state(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "subprocess", "typer", "orjson"} & set(done.stdout.split())
