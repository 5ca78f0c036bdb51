"""Diagnosis of conversions: the native core. Without it everything runs in Python, and takes longer."""

from __future__ import annotations

from collections.abc import Iterator

from tracepipe.doctor.diagnosis import LIMITED, WORKS, Diagnosis, Examination


def convert(examination: Examination) -> Iterator[Diagnosis]:
    """Whether the native core runs, and how to build it."""
    detail, fix = examination.trials.core()
    yield Diagnosis("convert", "core", LIMITED if fix else WORKS, detail, fix)
