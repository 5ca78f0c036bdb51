"""Libraries that no plain search finds: in Python's packages, in processes, behind others, in containers."""

from __future__ import annotations

import mmap
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tracepipe.errors import TracepipeError
from tracepipe.tracer.find import library
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.find.library import (
    LibrarySearch,
    find_versions,
    is_version,
    linked_libraries,
    package_folders,
    python_of,
)

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


@pytest.mark.parametrize(
    ("file_name", "wanted", "fits"),
    [
        ("libcudart.so", "libcudart.so", True),
        ("libcudart.so.12", "libcudart.so", True),
        ("libcudart.so.12.4.127", "libcudart.so.12", True),
        ("libcudart-d0da41ae.so.11.0", "libcudart.so", True),
        ("libcudart.so.12", "libcudart.so.11", False),
        ("libcudart.so.12", "libcudart.so.1", False),
        ("libcudart_static.so", "libcudart.so", False),
        ("libcuda.so.1", "libcudart.so", False),
        ("libcudart.so.bak~", "libcudart.so", False),
    ],
)
def test_versions_of_a_library(file_name: str, wanted: str, fits: bool) -> None:
    assert is_version(file_name, wanted) is fits


def test_each_version_that_the_linker_would_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("a/libodd.so.1.2", "a/libodd.so.2", "b/libodd.so.2", "b/libodd.so.3"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_bytes(b"")
    (tmp_path / "a" / "libodd.so.1").symlink_to("libodd.so.1.2")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/a:{tmp_path}/b:{tmp_path}/none")
    found = find_versions("/nowhere", "libodd.so")
    assert found == {
        "libodd.so.1": f"{tmp_path}/a/libodd.so.1.2",
        "libodd.so.1.2": f"{tmp_path}/a/libodd.so.1.2",
        "libodd.so.2": f"{tmp_path}/a/libodd.so.2",
        "libodd.so.3": f"{tmp_path}/b/libodd.so.3",
    }
    assert LibrarySearch().find("libodd.so") == [
        *(f"{tmp_path}/{place}" for place in ("a/libodd.so.1.2", "a/libodd.so.2", "b/libodd.so.3")),
    ]


@needs_gcc
def test_libraries_that_a_library_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    (tmp_path / "inner").mkdir()

    def gcc(text: str, *arguments: str) -> None:
        (tmp_path / "source.c").write_text(text)
        subprocess.run(["gcc", *arguments], check=True, cwd=tmp_path)

    shared = ("-shared", "-fPIC")
    gcc(
        "int odd(void) { return 0; }",
        *shared,
        "-o",
        "inner/libodd.so.1",
        "source.c",
        "-Wl,-soname,libodd.so.1",
    )
    gcc(
        "int odd(void); int even(void) { return odd(); }",
        *(*shared, "-o", "libeven.so", "source.c", "inner/libodd.so.1"),
        *("-Wl,-soname,libeven.so", "-Wl,--enable-new-dtags,-rpath,$ORIGIN/inner"),
    )
    # As built: the program's RUNPATH finds its own library, which alone knows where the inner one is.
    gcc(
        "int even(void); int main(void) { return even(); }",
        *("-o", "program", "source.c", "libeven.so", "-Wl,--enable-new-dtags,-rpath,$ORIGIN"),
        "-Wl,--allow-shlib-undefined",
    )
    program = str(tmp_path / "program")
    assert subprocess.run([program]).returncode == 0
    linked = linked_libraries(program)
    assert linked["libodd.so.1"] == str(tmp_path / "inner" / "libodd.so.1")
    search = LibrarySearch([program])
    assert search.find("libodd.so") == [linked["libodd.so.1"]]
    assert search.is_loaded("libodd.so")
    assert not search.is_loaded("libeven.so.4")


def environment(folder: Path) -> Path:
    """A virtual environment with NVIDIA's wheels, and a base with PyTorch."""
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "base/bin").mkdir(parents=True)
    (folder / "base/bin/python3.12").write_text("")
    (folder / "base/bin/python3.12").chmod(0o755)
    (folder / "venv/bin/python").symlink_to(folder / "base/bin/python3.12")
    (folder / "venv/pyvenv.cfg").write_text(f"home = {folder}/base/bin\nversion = 3.12\n")
    for place in (
        "venv/lib/python3.12/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
        "venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2",
        "base/lib/python3.12/site-packages/torch/lib/libcudart-d0da41ae.so.11.0",
    ):
        (folder / place).parent.mkdir(parents=True)
        (folder / place).write_bytes(b"")
    return folder / "venv/bin/python"


def test_libraries_in_pythons_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(tmp_path)
    monkeypatch.setattr(library, "_CACHE", tmp_path / "none")
    search = LibrarySearch([str(python), "train.py"])
    wheel = "venv/lib/python3.12/site-packages/nvidia"
    assert search.find("libcudart.so") == [
        str(tmp_path / wheel / "cuda_runtime/lib/libcudart.so.12"),
        str(tmp_path / "base/lib/python3.12/site-packages/torch/lib/libcudart-d0da41ae.so.11.0"),
    ]
    assert search.find("libnccl.so.2") == [str(tmp_path / wheel / "nccl/lib/libnccl.so.2")]
    assert "or in Python's packages" in search.where("libcublas.so")
    script = tmp_path / "torchrun"
    script.write_text(f"#!{python} -s\nimport sys\n")
    script.chmod(0o755)
    assert LibrarySearch([str(script)]).find("libcudart.so") == search.find("libcudart.so")
    behind = LibrarySearch(["env", "A=1", str(python)])
    assert behind.find("libcudart.so") == search.find("libcudart.so")


def test_interpreters_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(tmp_path)
    monkeypatch.setenv("PATH", str(python.parent))
    for number, (line, expected) in enumerate(
        [
            ("#!/usr/bin/env python", str(python)),
            ("#!/usr/bin/env -S python -u", str(python)),
            ("#!/bin/sh", ""),
            ("#!", ""),
            ("import os", ""),
        ]
    ):
        script = tmp_path / f"script{number}"
        script.write_text(f"{line}\n")
        assert python_of(str(script)) == expected, line
    assert python_of("/opt/bin/python3.13t") == "/opt/bin/python3.13t"
    assert python_of("/opt/bin/pythonista") == ""


def test_folders_that_cannot_be_looked_into_hold_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a home on NFS, which root may not see; here for its name."""
    closed = tmp_path / ("x" * 300)
    for name in ("HOME", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, str(closed))
    assert closed not in package_folders(sys.executable)
    assert not any(str(closed) in path for path in find_versions(sys.executable, "libcuda.so").values())
    assert not any(str(closed) in path for path in linked_libraries(sys.executable).values())
    with pytest.raises(TracepipeError, match="There is no program"):
        library.find_program([str(closed)])


def test_folders_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    own = home / ".local/lib/python3.12/site-packages"
    given = tmp_path / "given"
    for folder in (own, given, tmp_path / "pyenv/versions/3.12.1/lib/python3.12/site-packages"):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", f"{given}:")
    folders = package_folders(str(environment(tmp_path)))
    assert {own, given} <= set(folders)
    assert folders.index(given) == 0
    shims = package_folders(str(tmp_path / "pyenv/shims/python3"))
    assert tmp_path / "pyenv/versions/3.12.1/lib/python3.12/site-packages" in shims
    assert Path.cwd() not in shims


@pytest.fixture
def mapping(tmp_path: Path) -> Iterator[Path]:
    """A file that this process has mapped as a library."""
    path = tmp_path / "libodd.so.1.2"
    shutil.copy(sys.executable, path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC)
    yield path
    mapped.close()


def test_files_that_a_process_has_mapped(mapping: Path) -> None:
    assert ("libodd.so.1.2", str(mapping)) in library.mapped_files(os.getpid())
    search = LibrarySearch(pids=(os.getpid(),))
    assert search.find("libodd.so") == [str(mapping)]
    assert search.find("libodd.so.1") == [str(mapping)]
    assert search.find("libodd.so.2") == []
    assert search.is_loaded("libodd.so")
    assert search.programs() == [os.readlink("/proc/self/exe")]
    assert library.mapped_files(2**22 + 1) == []
    assert library.program_of(2**22 + 1) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="map_files wants CAP_CHECKPOINT_RESTORE")
@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_was_deleted_or_replaced_since(mapping: Path, replaced: bool) -> None:
    inode = mapping.stat().st_ino
    mapping.unlink()
    if replaced:
        mapping.write_text("a newer version")
    (opened,) = LibrarySearch(pids=(os.getpid(),)).find("libodd.so")
    assert opened.startswith(f"/proc/{os.getpid()}/map_files/")
    assert Path(opened).stat().st_ino == inode
    with Elf(opened) as elf:
        assert elf.dynamic().needed


def test_a_mapped_file_that_is_not_a_library(tmp_path: Path) -> None:
    path = tmp_path / "libodd.so.1"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC):
        assert LibrarySearch(pids=(os.getpid(),)).find("libodd.so.1") == [str(path)]
        assert LibrarySearch(pids=(os.getpid(),)).find("libodd.so.2") == []


def test_a_process_with_another_root(mapping: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"/proc/{os.getpid()}/root"
    monkeypatch.setattr(library, "_root", lambda pid: root)
    search = LibrarySearch(pids=(os.getpid(),))
    assert search.find("libodd.so") == [f"{root}{mapping}"]
    assert search.programs() == [f"/proc/{os.getpid()}/exe"]
    assert search.find("libnot-loaded.so") == []  # the folders of this side are not that side's


def test_under_sudo_the_callers_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_UID", str(os.getuid()))
    assert library._home() == Path(pwd.getpwuid(os.getuid()).pw_dir)
    monkeypatch.setenv("SUDO_UID", "4000000")
    assert library._home() == Path.home()
