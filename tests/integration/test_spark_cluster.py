"""`tracepipe ranks --engine spark` on a real cluster: a master and two workers on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli_ranks import FAULTS, asked, made
from tracepipe.dataset.places import Dataset

HAS_SPARK = importlib.util.find_spec("pyspark") is not None
JAVA = shutil.which("java") is not None

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not HAS_SPARK, reason="no PySpark (pip install 'tracepipe[cluster]')"),
    pytest.mark.skipif(not JAVA, reason="no Java (apt install openjdk-17-jre-headless)"),
]

LIMIT_S = 240
WORKERS = 2
# Programs of seconds: what Java's second compiler and its collector in parallel take is more than they gain.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# What the JVM says of a module that Spark asks for, and no setting turns off.
OF_JAVA = "WARNING: Using incubator modules: jdk.incubator.vector"
ASK = """
import sys
from tracepipe.cli import app
master, *datasets = sys.argv[1:]
for dataset in datasets:
    options = ["--engine", "spark", "--master", master, "--json", "--top", "0"]
    app(["ranks", dataset, *options], standalone_mode=False)
    print("\\0")
"""


class Program:
    """A program in a group of its own, whose log is read as it comes."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        # What captures at the same time goes first.
        self._process = subprocess.Popen(
            ["nice", *command], env=env, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._seen: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            self._lines.put(line)
        self._lines.put(None)

    def says(self, pattern: str) -> str:
        """Wait for a line of the log. What the pattern's group has of it."""
        give_up_s = time.monotonic() + LIMIT_S
        while (line := self._lines.get(timeout=give_up_s - time.monotonic())) is not None:
            self._seen.append(line)
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError(f"ended without saying {pattern}: {''.join(self._seen)}")

    def stop(self) -> None:
        """End it and all that it started."""
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, kind)
                self._process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._reader.join(10)
        assert not self._reader.is_alive()  # something still has the pipe


@dataclass
class Cluster:
    """A master, two workers, and their folders."""

    folder: Path
    master: str = ""
    programs: list[Program] = field(default_factory=list)

    def __post_init__(self) -> None:
        conf = self.folder / "conf"
        conf.mkdir()
        (conf / "spark-defaults.conf").write_text(
            f"spark.executor.memory 512m\nspark.executor.extraJavaOptions {QUICK}\n"
        )
        self.env = os.environ | {
            "SPARK_CONF_DIR": str(conf), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK, "SPARK_LOCAL_DIRS": str(self.folder / "spilled"),
        }  # fmt: skip

    def start(self) -> None:
        """Come back when the master knows all workers."""
        at = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        master = self._program("master.Master", *at)
        self.master = master.says(r"Starting Spark master at (spark://\S+)")
        for number in range(WORKERS):
            place = ["--work-dir", str(self.folder / f"worker{number}")]
            self._program("worker.Worker", *at, "--cores", "1", "--memory", "512M", *place, self.master)
        for _ in range(WORKERS):
            master.says(r"(Registering worker)")

    def _program(self, name: str, *arguments: str) -> Program:
        spec = importlib.util.find_spec("pyspark")
        assert spec and spec.submodule_search_locations
        spark_class = Path(spec.submodule_search_locations[0], "bin/spark-class")
        self.programs.append(
            Program([str(spark_class), f"org.apache.spark.deploy.{name}", *arguments], self.env)
        )
        return self.programs[-1]

    def logs(self, worker: int) -> list[str]:
        """Of each executor that ran on a worker, what it logged."""
        executors = (self.folder / f"worker{worker}").glob("app-*/*/stderr")
        return [log.read_text(errors="replace") for log in executors]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster, which ends with the module."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        made.start()
        yield made
    finally:
        for program in reversed(made.programs):
            program.stop()


def without_collectives(dataset: Path, folder: Path) -> Path:
    """A copy of a dataset, without the layer that recordings of one rank do not have."""
    copy = shutil.copytree(dataset, folder / "bare")
    shutil.rmtree(Dataset.opened(str(copy)).layer("collectives"))
    return copy


def asked_of(cluster: Cluster, *datasets: Path) -> tuple[list[dict[str, Any]], str]:
    """What Spark answers about each dataset, and all that comes on stderr."""
    command = ["nice", sys.executable, "-c", ASK, cluster.master, *map(str, datasets)]
    with subprocess.Popen(
        command, env=cluster.env, text=True, start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, err
    return [json.loads(part) for part in out.split("\0")[:-1]], err


def test_a_cluster_finds_what_duckdb_finds_to_the_last_digit(tmp_path: Path, cluster: Cluster) -> None:
    dataset = made(tmp_path, FAULTS)
    bare = without_collectives(dataset, tmp_path)
    answers, err = asked_of(cluster, dataset, bare)
    assert answers == [asked(dataset), asked(bare)]
    assert len(answers[0]["slow"]) == len(FAULTS)
    assert answers[0]["collectives"] and answers[0]["critical_path"]
    assert answers[1]["collectives"] == []
    assert [line for line in err.splitlines() if line != OF_JAVA] == []
    # The workers' executors evaluated it, not the program that asked.
    for worker in range(WORKERS):
        logs = cluster.logs(worker)
        assert len(logs) == 2  # one for each report
        assert "Running task" in logs[0]
