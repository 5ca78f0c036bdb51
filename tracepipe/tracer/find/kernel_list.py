"""Lists the kernels of an application, as its cubins describe them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tracepipe.errors import InputError
from tracepipe.hooks.names import near_names
from tracepipe.kernel_names import short_kernel_name
from tracepipe.tracer.find.cubin import Kernel, kernels
from tracepipe.tracer.find.demangle import demangled
from tracepipe.tracer.find.fatbin import cubins, files_with_kernels


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel by its demangled name, and the file that has it."""

    name: str
    kernel: Kernel
    place: str


@dataclass(slots=True)
class KernelListing:
    """The kernels that match a pattern, similar names if none does, and notes about what could not be
    read.
    """

    rows: list[KernelRow] = field(default_factory=list)
    near: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def list_kernels(pattern: str, paths: Iterable[str]) -> KernelListing:
    """The kernels of programs, libraries, cubins or folders of cubins whose names, mangled or not, match a
    shell pattern; all kernels if it is "". Raises InputError.
    """
    listing = KernelListing()
    known: dict[str, None] = {}
    for path in paths:
        files = files_with_kernels(path)
        for file in files:
            try:
                found = [
                    kernel for cubin in cubins(file, listing.notes.append) for kernel in kernels(cubin, file)
                ]
            except InputError as error:
                if len(files) == 1:
                    raise
                listing.notes.append(error.message)
                continue
            for kernel in found:
                name = demangled(kernel.name)
                known[name] = None
                if not pattern or _fits(pattern, name, kernel.name):
                    listing.rows.append(KernelRow(name, kernel, file))
    listing.rows.sort(key=lambda row: (row.name, row.kernel.architecture, row.place))
    if not listing.rows:
        listing.near = near_names(pattern, list(known))
    return listing


def _fits(pattern: str, name: str, mangled: str) -> bool:
    """Whether the pattern matches the whole name, the name without return type and parameters, or the name
    without template parameters.
    """
    short = short_kernel_name(name)
    return any(fnmatchcase(one, pattern) for one in (mangled, name, short, short.partition("<")[0]))
