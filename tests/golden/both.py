"""Conversions by both implementations of the inner loops, which must give the same bytes and findings."""

from __future__ import annotations

import io
from pathlib import Path

from tests.support.cores import cores_here, running
from tracepipe.converters import CONVERTERS
from tracepipe.recording.account import Account, account_lines
from tracepipe.recording.convert import Conversion, ConversionOptions


def converted(
    path: Path | str, to: str, options: ConversionOptions | None = None, cores: tuple[str, ...] = ()
) -> tuple[bytes, Account]:
    """The output and the account, after every core that is here (or of `cores`) gave the same ones."""
    outcomes = []
    for core in cores or cores_here():
        out = io.BytesIO()
        with running(core):
            account = Conversion(str(path), CONVERTERS[to], options or ConversionOptions()).run(out)
        outcomes.append((out.getvalue(), account))
    first, *others = outcomes
    for output, account in others:
        assert [*account_lines(account)] == [*account_lines(first[1])]
        assert account == first[1]
        assert_same(output, first[0])
    return first


def assert_same(output: bytes, reference: bytes) -> None:
    """Compare outputs that are too long for a readable difference: shows the first place that differs."""
    if output == reference:
        return
    pairs = zip(output, reference, strict=False)
    at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(output), len(reference)))
    around = slice(max(0, at - 60), at + 60)
    assert output[around] == reference[around], f"from byte {at} on"
    raise AssertionError(f"{len(output)} bytes and {len(reference)}")
