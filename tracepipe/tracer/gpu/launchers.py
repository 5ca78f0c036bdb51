"""Recognizes commands that interpret or start other programs, whose GPU work may take long."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

from tracepipe.tracer.find.library import find_program, interpreter_of

# Names of programs, also jupyter-lab, mpirun.openmpi and python3.13t. A script counts as its interpreter.
_LAUNCHERS: Final = re.compile(
    r"(python|pypy|ipython|jupyter(-\w+)?|torchrun|accelerate|deepspeed|horovodrun"
    r"|mpirun|mpiexec|orterun|prterun|srun|jsrun"
    r"|uv|uvx|conda|mamba|micromamba|pixi|poetry|pytest"
    r"|sh|bash|dash|zsh|ksh|fish|make|ninja|parallel|xargs"
    r"|julia|R|Rscript|node|deno|bun|java|ruby|perl|lua|luajit|octave|matlab)"
    r"([\d.]+t?|\.\w+)?"
)
# Programs that replace themselves with the program in their arguments, which follows their own options.
_WRAPPERS: Final = {
    "chrt", "env", "ionice", "nice", "nohup", "numactl", "prlimit", "setarch", "setsid", "stdbuf", "taskset",
    "time", "timeout",
}  # fmt: skip


def launcher_of(command: list[str]) -> str:
    """The name of the command's program if it interprets or starts others, also after `env` and similar.

    "" for any other program. Raises TracepipeError if the command is not a program.
    """
    program, rest = find_program(command), command[1:]
    while True:
        interpreter = interpreter_of(program)
        names = {Path(path).name for path in (program, Path(program).resolve(), interpreter)}
        if any(_LAUNCHERS.fullmatch(name) for name in names):
            return Path(program).name
        if Path(program).name not in _WRAPPERS:
            return ""
        while rest and not _is_program(rest[0]):
            rest = rest[1:]
        if not rest:
            return ""
        program, rest = shutil.which(rest[0]) or "", rest[1:]


def _is_program(word: str) -> bool:
    return not word.startswith("-") and shutil.which(word) is not None
