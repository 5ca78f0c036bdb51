"""Finds libraries in the packages of a Python interpreter, which the dynamic linker does not search.

PyTorch, JAX and CuPy load CUDA's libraries by path, from wheels: nvidia/cuda_runtime/lib, nvidia/cu13/lib,
torch/lib. The folders of packages are found from files alone: the interpreter is not run, as it belongs to
the target. Source: Python's documentation of the modules `site` and `venv`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tracepipe import paths
from tracepipe.sudo import sudo_user

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*t?")
_LIBRARY_FOLDERS = ("nvidia/*/lib", "torch/lib", "*.libs")


def python_of(program: str) -> str:
    """The interpreter if `program` is a Python or a Python script (such as torchrun); otherwise ""."""
    if _INTERPRETER.fullmatch(Path(program).name):
        return program
    interpreter = interpreter_of(program)
    return interpreter if _INTERPRETER.fullmatch(Path(interpreter).name) else ""


def interpreter_of(script: str) -> str:
    """The program that a script's first line names, also after `env`; "" if the file is not a script."""
    try:
        with Path(script).open("rb") as file:
            head = os.fsdecode(file.readline(256))
    except OSError:
        return ""
    words = head[2:].split() if head.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        names = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        words = [shutil.which(names[0]) or ""] if names else []
    return words[0] if words else ""


def package_libraries(python: str, is_wanted: Callable[[str], bool]) -> list[str]:
    """The files in the interpreter's packages with wanted names, with links resolved."""
    found: dict[str, None] = {}
    for folder in package_folders(python):
        for pattern in _LIBRARY_FOLDERS:
            for libraries in paths.fitting(folder, pattern):
                found.update(dict.fromkeys(_wanted(libraries, is_wanted)))
    for prefix in _prefixes(python):  # conda's own libraries
        if paths.is_folder(prefix / "conda-meta"):
            found.update(dict.fromkeys(_wanted(prefix / "lib", is_wanted)))
    return list(found)


def package_folders(python: str) -> list[Path]:
    """The existing folders from which the interpreter imports packages."""
    folders = [Path(part) for part in os.environ.get("PYTHONPATH", "").split(":") if part]
    bases = list(_prefixes(python))
    if os.environ.get("VIRTUAL_ENV"):
        bases.append(Path(os.environ["VIRTUAL_ENV"]))
    bases += [_home() / ".local", Path("/usr/local"), Path("/usr")]
    for base in bases:
        for kind in ("site-packages", "dist-packages"):
            folders += paths.fitting(base, f"lib*/python3*/{kind}")
    folders.append(Path("/usr/lib/python3/dist-packages"))
    existing = {folder.resolve(): None for folder in folders if paths.is_folder(folder)}
    return list(existing)


def _wanted(folder: Path, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return
    for name in names:
        if is_wanted(name) and paths.is_file(folder / name):
            yield str((folder / name).resolve())


def _prefixes(python: str) -> Iterator[Path]:
    """The folders above bin of the interpreter, of a virtual environment's base, and of the file that it
    links to.
    """
    path = Path(python).absolute()
    prefix = path.parent.parent
    yield prefix
    if path.parent.name == "shims":  # pyenv: it may be any of its versions
        yield from paths.fitting(prefix, "versions/*")
    try:
        settings = (prefix / "pyvenv.cfg").read_text(errors="replace")
    except OSError:
        settings = ""
    for line in settings.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home" and value.strip().startswith("/"):
            yield Path(value.strip()).parent
    yield path.resolve().parent.parent


def _home() -> Path:
    """The home of the user who runs the target: under sudo, of the user who called it."""
    user = sudo_user()
    return Path(user.pw_dir) if user else Path.home()
