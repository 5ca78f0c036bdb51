"""Reports on recordings, and the report on the ranks of a job, with the files that they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from tracepipe import paths
from tracepipe.api.dataset import dataset_of
from tracepipe.api.open import load
from tracepipe.api.options import ReadOptions
from tracepipe.errors import OutputError
from tracepipe.options import STANDARD, Option
from tracepipe.printable import json_schema
from tracepipe.reports import REPORTS
from tracepipe.reports.report import FileOutput, FolderOutput, Report, Result

if TYPE_CHECKING:
    from tracepipe.recording.files import Progress
    from tracepipe.store.run import Run
    from tracepipe.store.store import Facts

OptionsT = TypeVar("OptionsT")

__all__ = [
    "REPORTS", "FileOutput", "FolderOutput", "JobOptions", "Made", "Report", "make", "make_of_job",
    "with_all_rows",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of `tracepipe ranks`."""

    step: Annotated[
        int | None, Option("Show the critical path of step N. Default: the step of median length.", "N")
    ] = None
    top: Annotated[int, Option("List at most N rows in each table; 0: all.", "N")] = 10
    engine: Annotated[
        str, Option("Evaluate with DuckDB in this process, or with Spark.", choices=("duckdb", "spark"))
    ] = "duckdb"
    master: Annotated[
        str,
        Option(
            "The Spark cluster: spark://HOST:7077, yarn, … Default: Spark in a process on this machine.",
            "URL",
        ),
    ] = ""


Showing = Callable[[str], AbstractContextManager["Progress | None"]]
"""A context that shows the progress of reading the recording of that name."""


@dataclass(frozen=True, slots=True)
class Made:
    """A report that was made: the facts of its recordings, or the dataset; and the file that was written."""

    name: str
    result: Result
    facts: list[Facts] = field(default_factory=list)
    dataset: str = ""
    output: str = ""

    @property
    def schema(self) -> str:
        """The name and version of its form as JSON."""
        return json_schema(self.name)

    def lazily(self) -> dict[str, Any]:
        """The report as JSON values, with iterators instead of lists."""
        data: dict[str, Any] = {"schema": self.schema, "report": self.name}
        if self.dataset:
            data["dataset"] = self.dataset
        else:
            from tracepipe.present.writing.rendering import facts_json

            recordings = [facts_json(one) for one in self.facts]
            for recording, side in zip(recordings, self.result.sides, strict=False):
                recording["side"] = side
            data["recordings"] = recordings
        return data | ({"output": self.output} if self.output else {}) | self.result.lazily()

    def lines(self, *, width: int, colours: bool, ascii_only: bool, full_names: bool) -> Iterator[str]:
        """The report as text."""
        from tracepipe.present.writing.rendering import report_lines

        return report_lines(
            self.facts,
            self.result,
            width=width,
            colours=colours,
            ascii_only=ascii_only,
            full_names=full_names,
        )


def make(
    report: Report,
    inputs: list[list[str]],
    options: object,
    how: ReadOptions,
    *,
    output: str = "",
    force: bool = False,
    showing: Showing,
) -> Made:
    """Make a report of recordings, some for each of its inputs, and write its file or folder, if it has one.

    Of a dataset, `report` writes the page of a job. Standard input can be one of the inputs. Raises
    InputError, FormatError, ClockError, OutputError, LibraryMissing, and TracepipeError where an option does
    not fit.
    """
    from tracepipe.recording.outputs import default_output, replacing, replacing_folder

    companions = {name: path for name in report.companions if (path := getattr(options, name))}
    if needs := dict.fromkeys(
        [*report.needs, *(one for name in companions for one in report.companions[name])]
    ):
        from tracepipe.libraries import require

        require(report.name, needs)
    first = inputs[0][0]
    if report.name == "report" and paths.is_folder(first):
        target = output or default_output(first.rstrip("/") or first, ".html")
        top = getattr(options, "top", None)
        of_job = JobOptions() if top is None else JobOptions(top=top)
        return make_of_job(first, target, of_job, force=force, showing=showing)
    if report.name in OF_JOBS and paths.is_folder(first):
        with dataset_of(first, how, showing) as (dataset, notes):
            return _made_of_job(report.name, first, dataset, options, notes)
    # The recordings that options name come after the inputs; their format is that of their content.
    found = partial(_run, report, [*inputs, *([path] for path in companions.values())], options, how, showing)
    if report.output is None:
        facts, result = found()
        return Made(report.name, result, facts)
    if isinstance(report.output, FolderOutput):
        target = output or default_output(first, report.output.ending(options))
        with replacing_folder(target, force=force) as folder:
            facts, result = found()
            for name, write in result.files.items():
                with (folder / name).open("wb") as out:
                    write(out)
    else:
        target = output or default_output(first, report.output.endings[0])
        ending = _ending_of(target, report.output.endings)
        with replacing(target, force=force, sources=[first]) as out:
            facts, result = found()
            result.files[ending](out)
    return Made(report.name, result, facts, output=target)


def with_all_rows(options: OptionsT) -> OptionsT:
    """The options of a report, without a limit of rows. One with `all` has a screen of its own, and stays."""
    if not hasattr(options, "top") or hasattr(options, "all"):
        return options
    given: Any = options
    without_limit: OptionsT = replace(given, top=0)
    return without_limit


OF_JOBS = ("summary", "steps", "whatif")
"""The reports on a recording that can be made of a folder of recordings or a dataset too."""


def _made_of_job(name: str, path: str, dataset: str, options: object, notes: list[str]) -> Made:
    """A report of `OF_JOBS` of a dataset of what is at `path`."""
    from tracepipe.dataset.places import Dataset
    from tracepipe.ranks.engine import opened
    from tracepipe.ranks.job import Job
    from tracepipe.ranks.report import screen, steps
    from tracepipe.ranks.whatif import whatif
    from tracepipe.reports.whatif import Options

    found = Dataset.opened(dataset)
    with opened("duckdb", found) as engine:
        job = Job(engine, found)
        if isinstance(options, Options):
            result = whatif(job, options)
        elif name == "summary":
            result = screen(job, Path(path).name)
        else:
            result = steps(job, getattr(options, "top", 0))
    result.notes = [*notes, *result.notes]
    return Made(name, result, dataset=path)


def make_of_job(path: str, output: str, options: JobOptions, *, force: bool, showing: Showing) -> Made:
    """Make the report on the ranks of a dataset, a folder of recordings or a recording, and write its page to
    `output` unless that is empty.
    """
    from tracepipe.dataset.places import Dataset
    from tracepipe.ranks.engine import opened
    from tracepipe.ranks.job import Job
    from tracepipe.ranks.report import report
    from tracepipe.recording.outputs import replacing

    ending = ""
    if output:
        from tracepipe.libraries import require
        from tracepipe.ranks.page import ENDINGS, NEEDS

        require("ranks -o", NEEDS)
        ending = _ending_of(output, ENDINGS)
    with ExitStack() as stack:
        # Before all else: a file that is there already is known at once.
        out = stack.enter_context(replacing(output, force=force)) if ending else None
        dataset, notes = stack.enter_context(dataset_of(path, ReadOptions(), showing))
        found = Dataset.opened(dataset)
        job = Job(stack.enter_context(opened(options.engine, found, options.master)), found)
        result = report(job, options.top, options.step)
        result.notes = [*notes, *result.notes]
        if out is not None:
            from tracepipe.ranks.page import write

            write(job, result, ending, out)
    return Made("ranks", result, dataset=path, output=output)


def _run(
    report: Report, sides: list[list[str]], options: object, how: ReadOptions, showing: Showing
) -> tuple[list[Facts], Result]:
    """The facts of the recordings, in order, and the report's result."""
    facts: dict[tuple[str, bool], Facts] = {}
    inputs, notes = len(report.inputs), list[str]()

    def loaded(path: str, is_input: bool) -> Run:
        read_as = how if is_input else replace(how, source_format="")
        with showing(f"{report.name} {Path(path).name}") as bar:
            run = load(path, read_as, progress=bar)
            if report.of_one_clock and run.facts.unplaced and paths.is_file(path):
                clocks = dict.fromkeys(run.facts.unplaced, 0)
                run = load(
                    path, replace(read_as, assume_offset={**read_as.assume_offset, **clocks}), progress=bar
                )
                notes.append(f"{', '.join(clocks)}: not related to the host's clock; its own times are used")
        facts[path, is_input] = run.facts
        return run

    @cache
    def load_of(path: str, is_input: bool) -> Callable[[], Run]:
        load_it = partial(loaded, path, is_input)
        return cache(load_it) if path == STANDARD else load_it  # standard input is read once

    loads = [[load_of(path, side < inputs) for path in some] for side, some in enumerate(sides)]
    if report.takes_several:
        result = report.run(*loads, options)
    else:
        runs = [load_it() for (load_it,) in loads]
        companions = [name for name in report.companions if getattr(options, name)]
        result = report.run(*runs[:inputs], options, **dict(zip(companions, runs[inputs:], strict=True)))
    result.notes += notes
    return [facts[path, side < inputs] for side, some in enumerate(sides) for path in some], result


def _ending_of(target: str, endings: Sequence[str]) -> str:
    """The ending of a file to write, one of `endings`, which decides its kind. Raises OutputError."""
    if target == STANDARD:
        return endings[0]
    ending = Path(target).suffix.lower()
    if ending not in endings:
        raise OutputError(f"{target} has no known ending", f"Name a file ending with {', '.join(endings)}.")
    return ending
