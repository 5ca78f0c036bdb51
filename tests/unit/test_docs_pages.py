"""The pages of documentation: their links, the scripts behind their figures, and what the site generates."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

import tracepipe
from tests.support.commands import options
from tests.support.pages import ROOT, pages, text_of
from tracepipe import cli

DOCS = [page for page in pages() if not page.startswith("fixtures/")]
# What measures: a script of one of these folders.
SCRIPT = re.compile(r"`(?:python |python -m )?((?:benchmarks|tests|scripts)[/.][\w./]+)[^`]*`")
# A figure that a measurement gave: a ratio, a time, a rate or a share.
FIGURE = re.compile(
    r"\d[\d.,]*(?:\u2009| )?(?:×|% slower|[nµm]s\b|[MG]B/s| times as)|\d\.\d+ times|(?<=\| )\d[\d.]+(?= \|)"
)
SPEAKS_OF_MEASURING = re.compile(r"\b(?:[Mm]easured|medians?|natively|was found to be)\b")


def sections(page: str) -> list[tuple[str, str]]:
    """The headings of a page with what stands under each, without blocks of code."""
    text = re.sub(r"^```\w+\n.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    parts = re.split(r"^(#{1,4} .*)$", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings."""
    plain = [re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()) for heading, _ in sections(page)]
    return {text.strip().replace(" ", "-") for text in plain}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in pages():
        text = re.sub(r"^```\w+\n.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"https?:", target):
                continue
            path, _, anchor = target.partition("#")
            file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
            if not file.exists() or (anchor and anchor not in anchors(file.relative_to(ROOT).as_posix())):
                broken.append(f"{page}: {target}")
    assert broken == []


def test_scripts_that_pages_name_exist() -> None:
    missing = []
    for page in DOCS:
        for name in SCRIPT.findall(text_of(page)):
            path = name if "/" in name else name.replace(".", "/") + ".py"
            if not (ROOT / path).exists() and not (ROOT / path.removesuffix(".py")).exists():
                missing.append(f"{page}: {name}")
    assert missing == []


def test_measured_figures_name_what_prints_them() -> None:
    """The script or the fixture is named in the section, or the section says that it was measured once.

    Such sections have a table of figures, or a figure in a paragraph that speaks of measuring.
    """
    unnamed = []
    for page in DOCS:
        if page == "CHANGELOG.md":
            continue
        for heading, text in sections(page):
            tables = "\n".join(re.findall(r"^\|.*$", text, re.MULTILINE))
            measured = len(FIGURE.findall(tables)) > 5 or any(
                SPEAKS_OF_MEASURING.search(part) and FIGURE.search(part) for part in text.split("\n\n")
            )
            named = SCRIPT.search(text) or re.search(r"fixtures/[\w-]+", text) or "Measured once" in text
            if measured and not named:
                unnamed.append(f"{page}: {heading}")
    assert unnamed == []


def test_the_site_has_every_page() -> None:
    named = re.findall(
        r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    there = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    generated = {"commands.md", "python.md", *site().AT_THE_TOP}
    assert sorted(named) == sorted(there | generated)


def test_the_overview_has_every_page() -> None:
    overview = text_of("docs/index.md")
    there = {path.name for path in ROOT.glob("docs/*.md")} - {"index.md"}
    assert [name for name in sorted(there) if f"({name})" not in overview] == []


def site() -> ModuleType:
    """The hook of MkDocs."""
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts/docs_site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_commands_has_every_option() -> None:
    page = site().commands_page()
    assert {name for name in options() - {"--help"} if f"`{name}`" not in page} == set()
    assert "## tracepipe hooks\n" in page and "### tracepipe hooks test\n" in page
    assert cli.app.info.name == "tracepipe"


def test_the_page_of_python_has_every_name() -> None:
    page = site().python_page()
    assert [name for name in tracepipe.__all__ if f"## `{name}`" not in page] == []
    assert "capture(\n    command: str" in page


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("[Security](../SECURITY.md)", "[Security](SECURITY.md)"),
        ("[speed](../README.md#speed)", "speed"),
        ("[all](docs/tracks.md#memory)", "[all](tracks.md#memory)"),
        ("![picture](images/warps.png)", "![picture](images/warps.png)"),
        ("| `a\\|b` | c\\|d |", "| `a|b` | c\\|d |"),
    ],
)
def test_links_and_tables_are_made_for_the_site(text: str, there: str) -> None:
    hook = site()
    assert hook.site_tables(hook.site_links(text)) == there
