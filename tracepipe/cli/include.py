"""The command that prints where the header for CUDA programs is."""

from __future__ import annotations

from pathlib import Path

import typer

from tracepipe import marks
from tracepipe.terminal.output import put

app = typer.Typer()


@app.command()
def include() -> None:
    """Print the folder that has <tracepipe/mark.h>, for nvcc -I."""
    put(str(Path(marks.__file__).parent / "include"))
