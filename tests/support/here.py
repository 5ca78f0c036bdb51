"""Runs what would run in other processes in this one, where a test is about what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from tracepipe.dataset.build import build


class Here(Executor):
    """Does at once what is submitted, in this process: others would load the libraries anew."""

    def __init__(self, jobs: int, **of_processes: Any) -> None:
        assert jobs > 0

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """A call that is over."""
        done: Future[Any] = Future()
        try:
            done.set_result(call(*arguments, **named))
        except Exception as error:
            done.set_exception(error)
        return done


def read_ranks_here(patch: pytest.MonkeyPatch) -> None:
    """Have `dataset build` read recordings in this process."""
    patch.setattr("tracepipe.dataset.build.ProcessPoolExecutor", Here)


def build_here(recordings: str, dataset: str) -> None:
    """Build a dataset of a folder's recordings in this process."""
    with pytest.MonkeyPatch.context() as patch:
        read_ranks_here(patch)
        build([recordings], dataset, jobs=1)
