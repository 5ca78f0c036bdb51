"""Machines that are made up."""

from __future__ import annotations

from tracepipe.tracer.machine.facts import Machine

ALL = frozenset({"CAP_BPF", "CAP_PERFMON", "CAP_SYS_ADMIN"})


def machine(**facts: object) -> Machine:
    usual: dict[str, object] = {
        "system": "Linux",
        "release": "6.8.0-45-generic",
        "architecture": "x86_64",
        "capabilities": ALL,
        "seccomp": 0,
        "memlock_bytes": 8 << 20,
        "is_initial_pid_namespace": True,
        "is_initial_user_namespace": True,
    }
    return Machine(**{**usual, **facts})  # type: ignore[arg-type]
