"""The functions of libraries and programs: file offset → names. Each file is read once."""

from __future__ import annotations

from tracepipe.errors import InputError
from tracepipe.hooks.names import HookIndex
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.find.library import LibrarySearch
from tracepipe.tracer.find.procaddress import VARIANTS, handed_out, hands_out
from tracepipe.tracer.find.python_packages import interpreter_of, python_of
from tracepipe.tracer.request import Notify

Functions = dict[int, list[str]]


class FunctionTables:
    """The tables of functions of files. A file that cannot be used is reported once, by `notify`, and has no
    functions.
    """

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._tables: dict[tuple[str, bool], Functions] = {}

    def of(self, library: str, libraries: LibrarySearch, index: HookIndex) -> dict[str, Functions]:
        """The functions of a library (a soname, a path, "" for the program) that hooks may match, by file.

        If the program has linked in a library statically, its functions replace those of the shared library.
        """
        if ".so" not in library or "/" in library:
            return {path: self.all_of(path) for path in libraries.find(library)}
        if not libraries.is_loaded(library):
            linked_in = {path: self._linked_into(path, index) for path in libraries.programs()}
            if any(linked_in.values()):
                return {path: functions for path, functions in linked_in.items() if functions}
        return {path: self._of_library(path, index) for path in libraries.find(library)}

    def all_of(self, path: str) -> Functions:
        """All functions that a file has symbols for, also local ones."""
        return self._table(path, local=True)

    def _of_library(self, path: str, index: HookIndex) -> Functions:
        """The functions that a library exports; for libcuda also those that cuGetProcAddress returns and a
        hook matches.
        """
        exported = self._table(path, local=False)
        names = {name for found in exported.values() for name in found}
        if not hands_out(names):
            return exported
        asked = {
            base
            for name in (*names, *index.literals)
            if (base := _base(name)).startswith("cu") and any(index.find(base + end) for end in ("", "_ptsz"))
        }
        functions = dict(exported)
        for name, offset in handed_out(path, asked, self._notify):
            if offset not in exported:
                functions.setdefault(offset, []).append(name)
        return functions

    def _linked_into(self, program: str, index: HookIndex) -> Functions:
        """The functions of a program that hooks on a library match, if the library seems to be linked into
        it.

        It does if it has a function that a hook names without wildcards; a pattern may match functions of the
        program itself.
        """
        if interpreter_of(program) or python_of(program):  # a script has no functions
            return {}
        fitting = {
            offset: names for offset, names in self.all_of(program).items() if any(map(index.find, names))
        }
        plain = set(index.literals)
        found = {_base(name) for names in fitting.values() for name in names}
        return fitting if not plain or plain & found else {}

    def _table(self, path: str, *, local: bool) -> Functions:
        if (path, local) not in self._tables:
            try:
                self._tables[path, local] = _by_offset(path, local)
            except InputError as error:
                self._notify(f"{error.message}: no function of it is recorded")
                self._tables[path, local] = {}
            except OSError as error:
                self._notify(f"{path} cannot be read: {error.strerror}")
                self._tables[path, local] = {}
        return self._tables[path, local]


def _by_offset(path: str, local: bool) -> Functions:
    by_address: dict[int, dict[str, None]] = {}
    with Elf(path) as elf:
        for name, address in elf.functions(local=local):
            by_address.setdefault(address, {})[name] = None
        return {elf.file_offset(address): list(names) for address, names in by_address.items()}


def _base(name: str) -> str:
    while name.endswith(VARIANTS):
        name = next(name.removesuffix(ending) for ending in VARIANTS if name.endswith(ending))
    return name
