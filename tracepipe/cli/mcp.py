"""The command that serves agents."""

from __future__ import annotations

from typing import Annotated

import typer

from tracepipe.api.mcp import serve

app = typer.Typer()


@app.command()
def mcp(
    folders: Annotated[
        list[str], typer.Argument(help="Folders with recordings and datasets.", metavar="FOLDER...")
    ],
) -> None:
    """Serve."""
    serve(folders)
