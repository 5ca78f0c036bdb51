"""Attaches the programs for functions: uprobes on files, kprobes on the kernel.

One link for all functions of a file, or of the kernel, where the kernel can (uprobes from 6.6, kprobes from
5.18 with CONFIG_FPROBE), one link a probe elsewhere. Which probe fired is the link's cookie: its index in the
plan.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tracepipe.capture.bpf import bpf
from tracepipe.capture.bpf.misses import Misses
from tracepipe.capture.request import Cause, TriggerPlace
from tracepipe.errors import CaptureUnavailable
from tracepipe.hooks.hook import FilePlace, KernelPlace, Probe

# What the kernel answers for a function that it will not probe: blacklisted, ambiguous by name, gone since.
_UNPROBEABLE = {errno.EINVAL, errno.ENOENT, errno.EADDRNOTAVAIL, errno.EILSEQ, bpf.ENOTSUPP}

_DRIVER = "kernel"  # the layer of functions of the kernel, but for a few of the scheduler's
_BEGINS, _ENDS = 1, 2  # enum trigger of probes.bpf.c


class Opened:
    """What one capture has open to attach with: programs, each loaded once, as the verifier takes some
    milliseconds for each, and files, which are attached to again whatever becomes of their names.
    """

    def __init__(self) -> None:
        self._programs: dict[tuple[bytes, int, int, int], int] = {}
        self._files: dict[str, int] = {}

    def program(self, name: str, code: bytes, program_type: int, attach_type: int = 0, flags: int = 0) -> int:
        """The descriptor of a program. Raises OSError."""
        key = code, program_type, attach_type, flags
        if key not in self._programs:
            self._programs[key] = bpf.load_program(name, code, program_type, attach_type, flags)
        return self._programs[key]

    def path(self, path: str) -> str:
        """A path of the file that had this one first. Raises OSError."""
        if path not in self._files:
            self._files[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._files[path]}"

    def close(self) -> None:
        """Give all back; links hold the programs that are attached."""
        for descriptor in (*self._programs.values(), *self._files.values()):
            os.close(descriptor)
        self._programs, self._files = {}, {}


class Links:
    """What holds probes in place: closing it detaches them. `refused` are the probes that the kernel would
    not set, `misses` what programs miss of the kernel's own.

    `multi` links hold all probes of a file, `single` ones a probe, `events` a tracepoint. Every close waits
    for the kernel, up to 0.1 s.
    """

    def __init__(self, refused: set[int]) -> None:
        self.multi: list[int] = []
        self.single: list[int] = []
        self.events: list[int] = []
        self.refused = refused
        self.misses = Misses()


def attach_uprobes(
    links: Links, opened: Opened, probes: Mapping[int, Probe], code: dict[bool, bytes], patient: bytes
) -> None:
    """Attach to those of `probes`, by their numbers, that are in a file. `code` is the program for returns
    (True) and entries; texts are read by `patient`, that for entries which may sleep, where the kernel has
    such. Raises OSError.

    Returns come first: where probes are attached singly, all returns are there before any entry.
    """
    by_path: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, probe in probes.items():
        if isinstance(probe.place, FilePlace):
            by_path[probe.place.path].append((index, probe.place.offset))
    for returns in (True, False):
        attacher = _Uprobes(links, opened, code[returns], returns)
        reader = _Uprobes(links, opened, patient, returns)
        for path, places in by_path.items():
            # A return without its entry would be an end without a begin.
            wanted = [place for place in places if _is_wanted(probes, place[0], returns, links)]
            texts = [] if returns else [place for place in wanted if _has_text(probes[place[0]])]
            if texts and reader.attach_sleeping(path, texts):
                wanted = [place for place in wanted if place not in texts]
            attacher.attach(path, wanted)


def attach_triggers(
    links: Links, opened: Opened, triggers: Sequence[TriggerPlace], code: bytes, *, holds: bool = False
) -> None:
    """Attach the program `trigger` to functions that begin or end windows, `holds`: one that may sleep.
    Raises OSError.

    A cookie is what the function does, and above 16 bits its cause: enum trigger of probes.bpf.c. Raises
    CaptureUnavailable where the kernel lets none of them be probed.
    """
    own = Links(set())
    for begins in (True, False):
        attacher = _Uprobes(own, opened, code, returns=not begins)
        cookie = _BEGINS if begins else Cause.STOP << 16 | _ENDS
        for one in triggers:
            if one.begins == begins:
                places = [(cookie, one.place.offset)]
                if not (holds and attacher.attach_sleeping(one.place.path, places)):
                    attacher.attach(one.place.path, places)
    links.multi += own.multi
    links.single += own.single
    if triggers and not (own.multi or own.single):
        raise CaptureUnavailable(
            "The function that begins or ends windows cannot be probed: its first instruction does not allow it.",
            "Name another function with --start-on or --stop-on.",
        )


def has_sleeping(opened: Opened, code: bytes) -> bool:
    """Whether the kernel has this program of uprobes that may sleep. Raises OSError for what else fails."""
    try:
        opened.program("trigger", code, bpf.PROG_TYPE_KPROBE, bpf.UPROBE_MULTI, bpf.SLEEPABLE)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EMFILE):
            raise
        return False
    return True


def _has_text(probe: Probe) -> bool:
    return any(argument.kind == "str" for argument in probe.signature.arguments)


def attach_kprobes(
    links: Links, opened: Opened, probes: Mapping[int, Probe], code: dict[bool, bytes]
) -> None:
    """Attach to those of `probes` that are in the kernel. The rest as for `attach_uprobes`."""
    places = [(index, probe.place) for index, probe in probes.items() if isinstance(probe.place, KernelPlace)]
    for returns in (True, False):
        wanted = [place for place in places if _is_wanted(probes, place[0], returns, links)]
        name = "driver_return" if returns else "driver_enter"
        if not wanted or _link_kprobes_at_once(links, opened, name, code[returns], wanted, returns):
            continue
        loaded = opened.program(name, code[returns], bpf.PROG_TYPE_KPROBE)
        links.misses.watch(loaded, _DRIVER)
        for index, place in wanted:
            try:
                links.single.append(bpf.link_one_kprobe(loaded, place.symbol, place.address, index, returns))
            except OSError as error:
                if error.errno not in _UNPROBEABLE:
                    raise
                links.refused.add(index)


def _is_wanted(probes: Mapping[int, Probe], index: int, returns: bool, links: Links) -> bool:
    return index not in links.refused and (probes[index].hook.returns or not returns)


def _link_kprobes_at_once(
    links: Links,
    opened: Opened,
    name: str,
    code: bytes,
    places: list[tuple[int, KernelPlace]],
    returns: bool,
) -> bool:
    """Whether one link took them all: no, where the kernel has none or refuses one of the functions."""
    if not all(place.address for _, place in places):
        return False
    try:
        loaded = opened.program(name, code, bpf.PROG_TYPE_KPROBE, bpf.KPROBE_MULTI)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise
        return False
    try:
        addresses, cookies = [place.address for _, place in places], [index for index, _ in places]
        links.multi.append(bpf.link_kprobes(loaded, addresses, cookies, returns))
        links.misses.watch(loaded, _DRIVER)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EMFILE):
            raise
        return False
    return True


class _Uprobes:
    """One program, for entries or for returns, and the links that it is attached with."""

    def __init__(self, links: Links, opened: Opened, code: bytes, returns: bool) -> None:
        self._links, self._opened, self._code, self._returns = links, opened, code, returns
        self._single = False  # the kernel has no multi link: one link a probe

    def attach(self, path: str, places: list[tuple[int, int]]) -> None:
        """Attach to (probe, offset) in a file. Raises OSError."""
        if not places:
            return
        if not self._single:
            try:
                self._link(path, places)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._single = True
        program = self._program(0)
        for index, offset in places:
            try:
                link = bpf.link_one_uprobe(program, self._opened.path(path), offset, index, self._returns)
            except OSError as error:
                if error.errno not in (bpf.ENOTSUPP, errno.EINVAL):  # EINVAL: not in the file's code
                    raise
                self._links.refused.add(index)
            else:
                self._links.single.append(link)

    def attach_sleeping(self, path: str, places: list[tuple[int, int]]) -> bool:
        """Attach a program that may sleep, by one link; whether the kernel has that. Raises OSError."""
        try:
            self._link(path, places, bpf.SLEEPABLE)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EMFILE):
                raise
            return False
        return True

    def _program(self, attach_type: int, flags: int = 0) -> int:
        name = "call_return" if self._returns else "call_enter"
        return self._opened.program(name, self._code, bpf.PROG_TYPE_KPROBE, attach_type, flags)

    def _link(self, path: str, places: list[tuple[int, int]], flags: int = 0) -> None:
        """One link for `places`; where the kernel refuses one of them, halves, down to the one."""
        offsets, cookies = [offset for _, offset in places], [index for index, _ in places]
        try:
            program = self._program(bpf.UPROBE_MULTI, flags)
            link = bpf.link_uprobes(program, self._opened.path(path), offsets, cookies, self._returns)
        except OSError as error:
            if error.errno != bpf.ENOTSUPP:
                raise
            if len(places) == 1:
                self._links.refused.add(places[0][0])
                return
            middle = len(places) // 2
            self._link(path, places[:middle], flags)
            self._link(path, places[middle:], flags)
        else:
            self._links.multi.append(link)
