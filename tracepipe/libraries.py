"""The libraries of the reports, imported when one is first used: `--help` needs none of them.

An installation has numpy. The others come with the extra `reports`.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tracepipe.errors import LibraryMissing, TracepipeError

__all__ = ["agg", "collections", "figure", "jinja2", "matplotlib", "np", "require", "special", "ticker"]

_OPTIONAL = ("jinja2", "matplotlib", "scipy")
_INSTALL = "pip install 'tracepipe[reports]'"

# What scipy and matplotlib, or DuckDB, take before they have read anything: addresses (stacks of threads,
# most of which are never used) and data. With a little less each of them ends the process.
_LIMITS = ((resource.RLIMIT_AS, "v"), (resource.RLIMIT_DATA, "d"))
_REPORTS_MB = 1_200, 400
_TABLES_MB = 1_000, 250


class Library:
    """Stands for a module until something of it is asked for. Raises LibraryMissing where there is none."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: Any = None

    def __getattr__(self, attribute: str) -> object:
        if self._module is None:
            if self._name != "numpy":  # which says so itself
                check_room("reports", _REPORTS_MB)
            try:
                self._module = import_module(self._name)
            except ImportError as e:
                package = self._name.partition(".")[0]
                raise LibraryMissing(
                    f"reports need {self._name}, which cannot be imported: {e}",
                    _INSTALL if package in _OPTIONAL else f"pip install {package}",
                ) from e
        return getattr(self._module, attribute)


def require(report: str, packages: Iterable[str]) -> None:
    """Raise LibraryMissing where a report needs what is not installed, before it has read anything."""
    missing = [package for package in packages if not _is_installed(package)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        names = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        raise LibraryMissing(f"{report} needs {names}, which {verb} not installed", _INSTALL)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError of a name for which None stands in sys.modules
        return False


def check_room(who: str = "tables", needed_mb: tuple[int, int] = _TABLES_MB) -> None:
    """Raise TracepipeError where the libraries would abort the process, or wait forever, for want of memory.

    Those in Fortran, and DuckDB, do that instead of raising MemoryError. `needed_mb` are addresses and data.
    """
    for (limit, option), needed in zip(_LIMITS, needed_mb, strict=True):
        allowed = resource.getrlimit(limit)[0] >> 20  # -1 without a limit
        if 0 <= allowed < needed:
            raise TracepipeError(
                f"Not enough memory: {who} need {needed} MiB, and the limit is {allowed} MiB.",
                f"Raise the limit of this shell: ulimit -{option} unlimited.",
            )


if TYPE_CHECKING:
    import jinja2
    import numpy as np

    # Untyped, or with types that every version has its own.
    agg: Any = None
    collections: Any = None
    figure: Any = None
    matplotlib: Any = None
    special: Any = None
    ticker: Any = None
else:
    np, special = Library("numpy"), Library("scipy.special")
    matplotlib, jinja2 = Library("matplotlib"), Library("jinja2")
    agg = Library("matplotlib.backends.backend_agg")
    collections, figure = Library("matplotlib.collections"), Library("matplotlib.figure")
    ticker = Library("matplotlib.ticker")
