"""Attaches the programs for functions: uprobes on files, kprobes on the kernel.

There is one link for all functions of a file, or of the kernel, where the kernel supports that (uprobes from
6.6, kprobes from 5.18 with CONFIG_FPROBE), and one link for each probe elsewhere. The link's cookie
identifies the probe that fired: its index in the plan.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tracepipe.errors import CaptureUnavailable
from tracepipe.hooks.hook import FilePlace, KernelPlace, Probe
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.bpf.misses import Misses
from tracepipe.tracer.request import Cause, TriggerPlace

# The kernel's errors for a function that cannot be probed: blacklisted, ambiguous name, or removed.
_UNPROBEABLE = {errno.EINVAL, errno.ENOENT, errno.EADDRNOTAVAIL, errno.EILSEQ, bpf.ENOTSUPP}

_DRIVER = "kernel"  # the layer of kernel functions, except for a few of the layer scheduler
_BEGINS, _ENDS = 1, 2  # enum trigger of probes.bpf.c


class Opened:
    """The open descriptors of one capture: programs, each loaded once, as the verifier takes some
    milliseconds for each, and files, so that probes can be attached again even after a file was renamed or
    replaced.
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
        """A path to the file that had this path at the first call. Raises OSError."""
        if path not in self._files:
            self._files[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._files[path]}"

    def close(self) -> None:
        """Close all; links hold the programs that are attached."""
        for descriptor in (*self._programs.values(), *self._files.values()):
            os.close(descriptor)
        self._programs, self._files = {}, {}


class Links:
    """The descriptors of attached probes: closing them detaches the probes. `refused` are the probes that the
    kernel refused, `misses` counts the hits that programs miss.

    A link of `multi` holds all probes of a file, one of `single` a probe, and one of `events` a tracepoint.
    Every close waits for the kernel, up to 0.1 s.
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
    """Attach those of `probes` (number → probe) that are in a file. `code` is the program for returns (True)
    and for entries. `patient` is the program for entries that may sleep: it reads texts, where the kernel
    supports such programs. Raises OSError.

    Returns come first: where probes are attached one by one, all returns are attached before any entry.
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
    """Attach a trigger's program to the functions that begin or end windows; `holds`: the program may sleep.
    Raises OSError.

    A cookie has what the function does in its lower 16 bits (enum trigger of probes.bpf.c), and its cause
    above them. Raises CaptureUnavailable where none of the functions can be probed.
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
            "The function that begins or ends windows cannot be probed at its first instruction.",
            "Name another function with --start-on or --stop-on.",
        )


def has_sleeping(opened: Opened, code: bytes) -> bool:
    """Whether the kernel accepts this program as one of uprobes that may sleep. Raises OSError for other
    errors.
    """
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
    """Attach those of `probes` that are in the kernel. Otherwise as `attach_uprobes`."""
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
    """Attach all with one link; returns False where the kernel has no such links or refuses a function."""
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
    """Attaches one program, for entries or for returns."""

    def __init__(self, links: Links, opened: Opened, code: bytes, returns: bool) -> None:
        self._links, self._opened, self._code, self._returns = links, opened, code, returns
        self._single = False  # the kernel has no multi links: one link for each probe

    def attach(self, path: str, places: list[tuple[int, int]]) -> None:
        """Attach to places in a file, as (probe, offset). Raises OSError."""
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
        """Attach a program that may sleep, with one link; returns whether the kernel supports that. Raises
        OSError.
        """
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
        """Attach `places` with one link; where the kernel refuses that, try each half, down to the refused
        place.
        """
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
