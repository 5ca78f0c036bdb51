"""What `ranks --engine spark` says where there is no Spark: at once, where Spark takes minutes."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.cli.test_output import piped
from tracepipe.dataset.places import Dataset
from tracepipe.errors import LibraryMissing, TracepipeError
from tracepipe.ranks import engine
from tracepipe.ranks.engine import reason_of


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """An empty dataset."""
    return str(Dataset.made(str(tmp_path / "ds")).folder)


@pytest.mark.slow
def test_missing_pyspark_is_reported_with_what_to_install(
    dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyspark", "pyspark.sql"):
        monkeypatch.setitem(sys.modules, name, None)
    code, _, err = piped(["ranks", dataset, "--engine", "spark"])
    assert code == LibraryMissing.exit_code
    assert "ranks needs pyspark" in err
    assert "pip install 'pyspark==VERSION'" in err


@pytest.mark.parametrize(("home", "where"), [("", "PATH"), ("/none", "JAVA_HOME, which is /none")])
def test_missing_java_is_reported_with_the_places_that_were_searched(
    home: str, where: str, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", home)
    monkeypatch.setattr(engine, "import_module", lambda _: None)
    code, _, err = piped(["ranks", dataset, "--engine", "spark"])
    assert code == LibraryMissing.exit_code
    assert f"Spark needs Java, which is not in {where}" in err


@pytest.fixture
def gone() -> int:
    """A port that nothing listens on."""
    with socket.socket() as once:
        once.bind(("127.0.0.1", 0))
        return int(once.getsockname()[1])


def test_a_master_that_is_gone_is_named(gone: int) -> None:
    with pytest.raises(
        TracepipeError, match=f"No Spark master answers: 127.0.0.1:{gone}: Connection refused"
    ):
        engine.check_answers(f"spark://127.0.0.1:{gone}")


def test_one_master_of_several_is_enough(gone: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as master:
        engine.check_answers(f"spark://127.0.0.1:{gone},127.0.0.1:{master.getsockname()[1]}")


@pytest.mark.parametrize(
    "master", ["spark://", "spark://head", "spark://head:x", "spark://:1", "spark://h:0"]
)
def test_a_wrong_address_is_refused(master: str) -> None:
    with pytest.raises(TracepipeError, match=f"Not the address of a Spark master: {master}"):
        engine.check_answers(master)


def test_other_clusters_are_not_queried() -> None:
    engine.check_answers("yarn")


def test_the_reason_of_a_java_exception_is_its_own() -> None:
    text = (
        "An error occurred while calling o1.sql.\n: java.io.IOException: No such disk\n\tat X.y(X.java:1)\n"
    )
    assert reason_of(ValueError(text)) == "java.io.IOException: No such disk"
    assert reason_of(ValueError("one line\nmore")) == "one line"
