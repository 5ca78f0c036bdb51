"""The commands, options and snippets of the documentation: what can run here does, all others are parsed.

A code block is run unless `<!-- not run: REASON -->` is in front of it. Its files are those of `RECORDINGS`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.commands import commands, is_command, options, parse, run, tracepipe_arguments
from tests.support.pages import ROOT, Block, blocks, pages, text_of

LANGUAGES = {"sh", "console", "python", "sql", "json", "toml", "cpp", "text"}
# The files that the pages name → the recordings of fixtures/ that are taken for them.
RECORDINGS = {
    "run.jsonl": "capture-h200/input.jsonl",
    "hosted.jsonl": "host-stacks/input.jsonl",
    "steps.jsonl": "capture-h200-training/input.jsonl",
    "stalls.jsonl": "gpu-stalls/input.jsonl",
    "rank0.jsonl": "merged-pytorch/probes.jsonl.zst",
    "rank1.jsonl": "merged-pytorch/kineto.json.zst",
    "probes.jsonl": "merged-pytorch/probes.jsonl.zst",
    "torch.json.gz": "merged-pytorch/kineto.json.zst",
    "report.sqlite": "nsys-h100/input.sqlite",
    "trace.json": "kineto-b200-overlaps/input.json",
    "trace.pftrace": "perfetto-sched/input.pftrace",
    "threads.txt": "bpftime-late-lane/input.txt",
    "before.jsonl": "capture-h200-training/input.jsonl",
    "after.jsonl": "capture-h200-training/input.jsonl",
    "a1.jsonl": "capture-h200-training/input.jsonl",
    "b1.jsonl": "capture-h200-training/input.jsonl",
}
# Others of the user's own.
TEXTS = {"report.sql": "select name, count(*) as calls from slice group by name"}
# Pages whose blocks other tests run: they are parsed here.
RUN_ELSEWHERE = {
    "docs/api.md": "tests/integration/test_api_docs.py",
    "docs/coming-from.md": "tests/integration/test_coming_from.py",
    "docs/recipes.md": "tests/unit/test_recipes.py",
}
# Pages that are one story: their blocks run one after the other, in one folder.
STORIES = {"docs/dataset.md", "docs/tutorial.md"}
# Options of other programs that pages name.
OTHER_OPTIONS = {
    *("--seconds", "--seed", "--keep", "--programs", "--rate"),  # the project's own tools
    *("--privileged", "--cap-add", "--security-opt", "--mount-proc", "--tmpfs"),  # docker, unshare
    *(
        "--align_combine",
        "--log_torch",
        "--no-python",
        "--output-format",
        "--ultra",
    ),  # VizTracer, torchrun, …
}

ALL = [block for page in pages() for block in blocks(page)]
TYPED = [block for block in ALL if block.language in ("sh", "console")]
RUN = [
    block
    for block in TYPED
    if not block.reason and block.page not in RUN_ELSEWHERE and not block.page.startswith("fixtures/")
]

RUNS = [[block] for block in RUN if block.page not in STORIES]
RUNS += [[block for block in RUN if block.page == page] for page in sorted(STORIES)]


def test_every_block_is_fenced_and_has_a_language() -> None:
    assert [str(block) for block in ALL if block.language not in LANGUAGES] == []
    for page in pages():
        text = re.sub(r"^```\w+\n.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
        assert "```" not in text, page
        assert re.findall(r"\n\n {4}(?! *[-|\d])\S.*", text) == [], page


def test_a_page_that_is_run_elsewhere_is_read_there() -> None:
    for page, test in RUN_ELSEWHERE.items():
        assert page in text_of(test)
        assert any(block.page == page for block in ALL)


@pytest.mark.parametrize("page", sorted({block.page for block in TYPED}))
def test_commands_are_parsed(page: str) -> None:
    count = 0
    for block in blocks(page):
        if block.language not in ("sh", "console"):
            continue
        for line, _ in commands(block):
            for arguments in tracepipe_arguments(line):
                count += 1
                assert parse(arguments) == "", f"{block}: {line}"
    assert count or "tracepipe " not in "".join(block.text for block in blocks(page))


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("some", RUNS, ids=lambda some: str(some[0]))
def test_blocks_run(
    some: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    for block in some:
        copy_recordings(block, tmp_path)
        for line, shown in commands(block):
            printed = run(line, tmp_path, monkeypatch, capsys)
            if block.language == "console":
                assert is_shown(shown, printed), f"{block}: {line}\n{printed}"


def copy_recordings(block: Block, folder: Path) -> None:
    """Give a block the files that it names."""
    for name, source in RECORDINGS.items():
        pattern = re.sub(r"\d?\.jsonl$", r"\\d?[*]?.jsonl", name)
        if re.search(rf"(?<![\w.-])(?:{re.escape(name)}|{pattern})", block.text):
            shutil.copy(ROOT / "fixtures" / source, folder / name)
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")


def is_shown(shown: str, printed: str) -> bool:
    """Whether a page shows what a command printed. A line `…` stands for any lines."""
    parts = [re.escape(part) for part in re.split(r"^…\n", shown.rstrip("\n") + "\n", flags=re.MULTILINE)]
    lines = "".join(line.rstrip() + "\n" for line in printed.rstrip("\n").split("\n"))
    return re.fullmatch(r"(?:.*\n)*?".join(parts), lines) is not None


def test_output_may_be_cut() -> None:
    assert is_shown("a\n…\nd\n", "a  \nb\nc\nd\n\n")
    assert is_shown("a\n…\n", "a\nb\n")
    assert not is_shown("a\nd\n", "a\nb\nd\n")
    assert not is_shown("a\n…\ne\n", "a\nb\nd\n")


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "python"], ids=str)
def test_a_snippet_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile(block.text, str(block), "exec")
    if block.reason or block.page in RUN_ELSEWHERE:
        return
    copy_recordings(block, tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(code, {})


def test_options_and_commands_in_sentences_are_known() -> None:
    known = options()
    unknown = []
    for page in (page for page in pages() if not page.startswith("fixtures/")):
        prose = re.sub(r"^```\w+\n.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
        for span in re.findall(r"`([^`\n]+)`", prose):
            words = span.split()
            if words[0] == "tracepipe" and len(words) > 1 and words[1].isalpha():
                unknown += [] if is_command(words[1]) else [f"{page}: {span}"]
            if words[0] == "tracepipe" or words[0].startswith("--"):
                own = words[: words.index("--")] if "--" in words else words
                unknown += [
                    f"{page}: {word}"
                    for word in own
                    if re.match(r"--\w", word) and word.partition("=")[0] not in known | OTHER_OPTIONS
                ]
    assert unknown == []
