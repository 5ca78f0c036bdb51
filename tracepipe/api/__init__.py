"""The library: what `import tracepipe` offers, and what the commands call."""


def described_reports() -> dict[str, str]:
    """Report → its description, one line, in the order in which they are listed. No report is loaded."""
    from tracepipe.reports import REPORTS

    return {name: REPORTS.about(name) for name in REPORTS}
