"""The error for an option that chooses no kernel of a recording, with the names of those that it has."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tracepipe.errors import TracepipeError
from tracepipe.hooks.names import near_names
from tracepipe.kernel_names import kernel_title
from tracepipe.store.run import Run

_LISTED = 5


def check_kernel(run: Run, pattern: str) -> None:
    """Raise TracepipeError where a recording has warps, and `pattern` finds no kernel of them."""
    names = {one["name"] for one in run.warp_table.kernels()[0] if one["name"] is not None}
    if pattern and names and not any(map(re.compile(pattern).search, names)):
        raise no_such_kernel("warps", pattern, names)


def no_such_kernel(of_kernels: str, pattern: str, names: Iterable[str]) -> TracepipeError:
    """The error where `pattern` finds none of the kernels `names`; `of_kernels` is what they have."""
    # A name without its template arguments is what people type.
    known = sorted({kernel_title(name).partition("<")[0] for name in names})
    if near := near_names(pattern, known):
        hint = f"Did you mean {' or '.join(near)}?"
    else:
        more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
        hint = f"Kernels with {of_kernels}: {', '.join(known[:_LISTED])}{more}."
    return TracepipeError(f"No kernel with {of_kernels} in this recording has {pattern!r} in its name.", hint)
