"""Attaches the programs for functions: uprobes on files, kprobes on the kernel.

One link for all functions of a file, or of the kernel, where the kernel can (uprobes from 6.6, kprobes from
5.18 with CONFIG_FPROBE), one link a probe elsewhere. Which probe fired is the link's cookie: its index in the
plan.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict

from tracepipe.capture.bpf import bpf
from tracepipe.capture.bpf.misses import Misses
from tracepipe.capture.request import Cause, TriggerPlace
from tracepipe.errors import CaptureUnavailable
from tracepipe.hooks.hook import FilePlace, KernelPlace, Probe

# What the kernel answers for a function that it will not probe: blacklisted, ambiguous by name, gone since.
_UNPROBEABLE = {errno.EINVAL, errno.ENOENT, errno.EADDRNOTAVAIL, errno.EILSEQ, bpf.ENOTSUPP}

_DRIVER = "kernel"  # the layer of functions of the kernel, but for a few of the scheduler's
_BEGINS, _ENDS = 1, 2  # enum trigger of probes.bpf.c


class Links:
    """What holds probes in place: closing it detaches them. `refused` are the probes that the kernel would
    not set, `misses` what programs miss of the kernel's own.

    `multi` links go at once; of `single` ones every close waits for the kernel.
    """

    def __init__(self) -> None:
        self.multi: list[int] = []
        self.single: list[int] = []
        self.refused: set[int] = set()
        self.misses = Misses()


def attach_uprobes(links: Links, probes: list[Probe], code: dict[bool, bytes], patient: bytes) -> None:
    """Attach to every probe that is in a file. `code` is the program for returns (True) and entries; texts
    are read by `patient`, that for entries which may sleep, where the kernel has such. Raises OSError.

    Returns come first: where probes are attached singly, all returns are there before any entry.
    """
    by_path: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, probe in enumerate(probes):
        if isinstance(probe.place, FilePlace):
            by_path[probe.place.path].append((index, probe.place.offset))
    if not by_path:
        return
    for returns in (True, False):
        attacher, reader = _Uprobes(links, code[returns], returns), _Uprobes(links, patient, returns)
        try:
            for path, places in by_path.items():
                # A return without its entry would be an end without a begin.
                wanted = [place for place in places if _is_wanted(probes, place[0], returns, links)]
                texts = [] if returns else [place for place in wanted if _has_text(probes[place[0]])]
                if texts and reader.attach_sleeping(path, texts):
                    wanted = [place for place in wanted if place not in texts]
                attacher.attach(path, wanted)
        finally:
            attacher.close()
            reader.close()


def attach_triggers(links: Links, triggers: list[TriggerPlace], code: bytes) -> None:
    """Attach the program `trigger` to functions that begin or end windows. Raises OSError.

    A cookie is what the function does, and above 16 bits its cause: enum trigger of probes.bpf.c. Raises
    CaptureUnavailable where the kernel lets none of them be probed.
    """
    own = Links()
    for begins in (True, False):
        attacher = _Uprobes(own, code, returns=not begins)
        cookie = _BEGINS if begins else Cause.STOP << 16 | _ENDS
        try:
            for one in triggers:
                if one.begins == begins:
                    attacher.attach(one.place.path, [(cookie, one.place.offset)])
        finally:
            attacher.close()
    links.multi += own.multi
    links.single += own.single
    if triggers and not (own.multi or own.single):
        raise CaptureUnavailable(
            "What begins or ends windows cannot be probed: the first instruction of its function.",
            "Name another function with --start-on or --stop-on.",
        )


def _has_text(probe: Probe) -> bool:
    return any(argument.kind == "str" for argument in probe.signature.arguments)


def attach_kprobes(links: Links, probes: list[Probe], code: dict[bool, bytes]) -> None:
    """Attach to every probe that is in the kernel. `code` as for `attach_uprobes`. Raises OSError."""
    places = [
        (index, probe.place) for index, probe in enumerate(probes) if isinstance(probe.place, KernelPlace)
    ]
    for returns in (True, False):
        wanted = [place for place in places if _is_wanted(probes, place[0], returns, links)]
        name = "driver_return" if returns else "driver_enter"
        if not wanted or _link_kprobes_at_once(links, name, code[returns], wanted, returns):
            continue
        loaded = bpf.load_program(name, code[returns], bpf.PROG_TYPE_KPROBE)
        links.misses.watch(loaded, _DRIVER)
        try:
            for index, place in wanted:
                try:
                    links.single.append(
                        bpf.link_one_kprobe(loaded, place.symbol, place.address, index, returns)
                    )
                except OSError as error:
                    if error.errno not in _UNPROBEABLE:
                        raise
                    links.refused.add(index)
        finally:
            os.close(loaded)


def _is_wanted(probes: list[Probe], index: int, returns: bool, links: Links) -> bool:
    return index not in links.refused and (probes[index].hook.returns or not returns)


def _link_kprobes_at_once(
    links: Links, name: str, code: bytes, places: list[tuple[int, KernelPlace]], returns: bool
) -> bool:
    """Whether one link took them all: no, where the kernel has none or refuses one of the functions."""
    if not all(place.address for _, place in places):
        return False
    try:
        loaded = bpf.load_program(name, code, bpf.PROG_TYPE_KPROBE, bpf.KPROBE_MULTI)
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
    finally:
        os.close(loaded)
    return True


class _Uprobes:
    """One program, for entries or for returns, and the links that it is attached with."""

    def __init__(self, links: Links, code: bytes, returns: bool) -> None:
        self._links, self._code, self._returns = links, code, returns
        self._loaded: dict[bool, int] = {}
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
        for index, offset in places:
            try:
                link = bpf.link_one_uprobe(self._program(multi=False), path, offset, index, self._returns)
            except OSError as error:
                if error.errno not in (bpf.ENOTSUPP, errno.EINVAL):  # EINVAL: not in the file's code
                    raise
                self._links.refused.add(index)
            else:
                self._links.single.append(link)

    def attach_sleeping(self, path: str, places: list[tuple[int, int]]) -> bool:
        """Attach a program that may sleep, by one link; whether the kernel has that. Raises OSError."""
        try:
            if True not in self._loaded:
                self._loaded[True] = bpf.load_program(
                    "call_enter", self._code, bpf.PROG_TYPE_KPROBE, bpf.UPROBE_MULTI, bpf.SLEEPABLE
                )
            self._link(path, places)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EMFILE):
                raise
            return False
        return True

    def close(self) -> None:
        """Give the program back; the links hold it."""
        for descriptor in self._loaded.values():
            os.close(descriptor)

    def _program(self, *, multi: bool) -> int:
        if multi not in self._loaded:
            name = "call_return" if self._returns else "call_enter"
            attach_type = bpf.UPROBE_MULTI if multi else 0
            self._loaded[multi] = bpf.load_program(name, self._code, bpf.PROG_TYPE_KPROBE, attach_type)
        return self._loaded[multi]

    def _link(self, path: str, places: list[tuple[int, int]]) -> None:
        """One link for `places`; where the kernel refuses one of them, halves, down to the one."""
        offsets, cookies = [offset for _, offset in places], [index for index, _ in places]
        try:
            link = bpf.link_uprobes(self._program(multi=True), path, offsets, cookies, self._returns)
        except OSError as error:
            if error.errno != bpf.ENOTSUPP:
                raise
            if len(places) == 1:
                self._links.refused.add(places[0][0])
                return
            middle = len(places) // 2
            self._link(path, places[:middle])
            self._link(path, places[middle:])
        else:
            self._links.multi.append(link)
