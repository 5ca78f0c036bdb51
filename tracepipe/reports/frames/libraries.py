"""The libraries of the reports, imported when one is first used: `--help` needs none of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tracepipe.errors import LibraryMissing

__all__ = ["collections", "figure", "jinja2", "matplotlib", "np", "pl", "stats", "ticker"]


class Library:
    """Stands for a module until something of it is asked for. Raises LibraryMissing where there is none."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: Any = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            try:
                self._module = import_module(self._name)
            except ImportError as e:
                raise LibraryMissing(
                    f"reports need {self._name}, which cannot be imported: {e}",
                    "pip install 'tracepipe[reports]'",
                ) from e
        return getattr(self._module, attribute)


if TYPE_CHECKING:
    import jinja2
    import numpy as np
    import polars as pl

    # Untyped, or with types that every version has its own.
    collections: Any = None
    figure: Any = None
    matplotlib: Any = None
    stats: Any = None
    ticker: Any = None
else:
    np, pl, stats = Library("numpy"), Library("polars"), Library("scipy.stats")
    matplotlib, jinja2 = Library("matplotlib"), Library("jinja2")
    collections, figure = Library("matplotlib.collections"), Library("matplotlib.figure")
    ticker = Library("matplotlib.ticker")
