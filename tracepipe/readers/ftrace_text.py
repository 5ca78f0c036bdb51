"""Reads ftrace's text, which Chrome's JSON has in `systemTraceEvents`.

    name-7   (    5) [000] d..3 0.001000: sched_switch: prev_comm=name prev_pid=7 … ==> next_comm=io …
    thread   process  CPU  flags seconds  event: its fields

Switches and wakings are read, and the marks that programs write (`tracing_mark_write: B|5|step`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from tracepipe.event.vocabulary import LEFT_STATES, RUNNABLE, RUNNING, WAKEUP, state_text

_LINE = re.compile(
    r" *.{0,64}?-(\d{1,10}) +(?:\( *(\d{1,10}|-+)\) +)?\[(\d{1,4})\] +(?:[^ :]{1,16} +)?"
    r"(\d{1,9})\.(\d{1,9}): +(\w{1,64}): ?(.*)",
    re.DOTALL,
)
_SWITCH = re.compile(
    r"prev_comm=(.{0,64}?) prev_pid=(\d{1,10}) prev_prio=-?\d{1,9} prev_state=(\w{1,9}\+?)\S{0,16} "
    r"==> next_comm=(.{0,64}?) next_pid=(\d{1,10}) next_prio=(-?\d{1,9})"
)
_WAKING = re.compile(r"comm=.{0,64}? pid=(\d{1,10}) .{0,64}?target_cpu=(\d{1,4})")
_MARK = re.compile(r"(?:0x\w{1,16}: )?([BEICSF])\|?(\d{0,10})(?:\|(.*?))?(?:\|(-?\d{1,18}))?\n?", re.DOTALL)
_PHASES: Final = {"S": "b", "F": "e"}
# The letters of ftrace's text for why a thread left; R+ is one that was preempted.
_STATES: Final = {"R": RUNNABLE, "R+": LEFT_STATES[0x100]} | dict(
    zip("SDTtXZPI", LEFT_STATES.values(), strict=False)
)

Event = dict[str, Any]


def process_of(line: str) -> tuple[int, int] | None:
    """The thread of a line and its process, where the line states it."""
    found = _LINE.match(line)
    return (int(found[1]), int(found[2])) if found and found[2] and found[2].isdigit() else None


def events_of(line: str) -> Iterator[Event]:
    """The events of a line as those of Chrome's JSON, with a time in µs as text. Those of the scheduler have
    the phase "scheduler", and are records but for their time.
    """
    if not (found := _LINE.match(line)):
        return
    tid, cpu, name, text = int(found[1]), int(found[3]), found[6], found[7]
    nanoseconds = found[5].ljust(9, "0")
    ts = f"{int(found[4] + nanoseconds[:6])}.{nanoseconds[6:]}"
    on: Event = {"ph": "scheduler", "ts": ts, "cpu": cpu}
    if name == "sched_switch" and (switch := _SWITCH.match(text)):
        before, after, state = switch.group(1, 4, 3)
        left = state_text(int(state)) if state.isdigit() else _STATES.get(state, _STATES.get(state[0], state))
        ends: Event = {"tid": int(switch[2]), "phase": "E", "comm": before, "args": {"prev_state": left}}
        begins: Event = {"tid": int(switch[5]), "phase": "B", "comm": after, "args": {"prio": int(switch[6])}}
        yield from ({**on, "name": RUNNING, **one} for one in (ends, begins))
    elif name in ("sched_waking", "sched_wakeup_new") and (waking := _WAKING.match(text)):
        args = {"by_tid": tid, "target_cpu": int(waking[2])}
        yield on | {"tid": int(waking[1]), "name": WAKEUP, "phase": "I", "args": args}
    elif name in ("tracing_mark_write", "print") and (mark := _MARK.fullmatch(text)):
        phase, title, value = mark[1], mark[3], mark[4]
        if (phase != "E" and title is None) or (phase in "CSF" and value is None):
            return
        event: Event = {"ph": _PHASES.get(phase, phase), "ts": ts, "tid": tid, "name": title}
        event["pid"] = int(mark[2] or tid)
        if phase == "E":
            del event["name"]
        elif phase == "C":
            event["args"] = {"value": int(value)}
        elif phase in "SF":
            event["id"] = f"{title} {value}"
        elif value is not None:  # it belongs to the name
            event["name"] += f"|{value}"
        yield event
