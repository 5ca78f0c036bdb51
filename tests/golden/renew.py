"""Writes the expected files anew: `python -m tests.golden.renew [CASE …]`, all cases without a name.

A renewal is a statement that the new output is right: read every changed line (`git diff fixtures`) first.
"""

from __future__ import annotations

import sys

from tests.golden.cases import cases


def main(names: list[str]) -> None:
    """Renew the cases of these names."""
    for case in cases():
        if names and case.name not in names:
            continue
        text, report = case.convert("text")
        (case.folder / "expected.txt").write_bytes(text)
        (case.folder / "expected-report.txt").write_text(report)
        print(f"renewed {case.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
