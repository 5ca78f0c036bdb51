"""Probes that are detached between windows: never under a window that a call begins meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tracepipe.tracer.bpf.maps import Control
from tracepipe.tracer.engines.probes import ProbeAttachment
from tracepipe.tracer.request import WindowPlan


class Probes:
    """What is attached, as far as windows have it."""

    rests = True

    def __init__(self) -> None:
        self.is_whole = True
        self.refused: set[int] = set()

    def complete(self) -> None:
        self.is_whole = True

    def rest(self) -> None:
        self.is_whole = False


@pytest.fixture
def attachment() -> ProbeAttachment:
    attached = ProbeAttachment.__new__(ProbeAttachment)
    control = [0] * len(Control)
    control[Control.IS_READY] = 1
    vars(attached).update(
        _maps=SimpleNamespace(control=control),
        _probing=Probes(),
        _reported_refused=set(),
        _plan=SimpleNamespace(windows=WindowPlan()),
    )
    return attached


def test_probes_rest_when_no_call_can_begin_a_window_any_more(attachment: ProbeAttachment) -> None:
    control, probes = attachment._maps.control, attachment._probing
    attachment.rest()
    assert (probes.is_whole, control[Control.IS_READY]) == (True, 0)
    attachment.rest()
    assert (probes.is_whole, control[Control.IS_READY]) == (False, 0)
    attachment.prepare()
    assert (probes.is_whole, control[Control.IS_READY]) == (True, 1)


def test_probes_stay_for_a_window_that_a_call_begins_as_they_are_to_rest(attachment: ProbeAttachment) -> None:
    control, probes = attachment._maps.control, attachment._probing
    attachment.rest()
    control[Control.WINDOW_NS] = 1  # by a call that had seen IS_READY
    for _ in range(3):
        attachment.rest()
        assert probes.is_whole
    control[Control.WINDOW_NS] = 0
    attachment.rest()
    attachment.rest()
    assert not probes.is_whole


def test_a_window_that_is_asked_for_before_the_probes_rest_finds_them_ready(
    attachment: ProbeAttachment,
) -> None:
    attachment.rest()
    attachment.prepare()
    assert attachment._maps.control[Control.IS_READY] == 1


def test_a_call_asks_for_each_window_that_libraries_in_the_command_follow(
    attachment: ProbeAttachment,
) -> None:
    attachment._plan.windows = WindowPlan(is_begin_followed=True)  # type: ignore[misc]
    attachment.prepare()
    assert attachment._maps.control[Control.IS_READY] == 0
