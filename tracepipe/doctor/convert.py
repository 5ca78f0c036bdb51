"""What converting needs: the native core. Without it everything runs in Python alone, and takes longer."""

from __future__ import annotations

from collections.abc import Iterator

from tracepipe.doctor.finding import LIMITED, WORKS, Examination, Finding


def convert(examination: Examination) -> Iterator[Finding]:
    """Whether the native core runs, and how to build it."""
    detail, mend = examination.trials.core()
    yield Finding("convert", "core", LIMITED if mend else WORKS, detail, mend)
