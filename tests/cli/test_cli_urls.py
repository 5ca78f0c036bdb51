"""Recordings at URLs: read, gathered, written, and refused."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest

from tests.cli.test_output import piped
from tests.support.here import build_here, read_ranks_here
from tests.support.program import PYTHONPATH
from tests.support.s3_server import Bucket, s3_server
from tests.support.simulated_job import SimulatedJob
from tracepipe.dataset.build import build
from tracepipe.errors import InputError, OutputError, TracepipeError
from tracepipe.recording import remote, uploads
from tracepipe.recording.uploads import Uploads, check

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "fixtures/capture-h200/input.jsonl"


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with s3_server("job") as one:
        yield one


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recordings of a job of four ranks, as files."""
    folder = tmp_path_factory.mktemp("job") / "runs"
    SimulatedJob(2, 2, steps=2).write(folder)
    return folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, in which each test leaves nothing but what it expects."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    yield folder
    assert list(folder.iterdir()) == []


def put_all(bucket: Bucket, runs: Path, folder: str) -> str:
    for file in runs.rglob("*.jsonl"):
        bucket.put(f"{folder}/{file.relative_to(runs)}", file.read_bytes())
    return bucket.url(folder)


def tables(dataset: Path, *left_out: str) -> list[list[Any]]:
    files = sorted(file for file in dataset.rglob("*.parquet") if "layer=alignment" not in file.parts)
    return [pl.read_parquet(file).drop(left_out, strict=False).rows() for file in files]


def ranks(dataset: Path) -> pl.DataFrame:
    return pl.read_parquet(dataset / "layer=ranks/**/*.parquet", hive_partitioning=True).sort("rank")


# Reading ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_recording_at_a_url_is_read_as_its_file_is(bucket: Bucket, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"run.jsonl{suffix}"
    assert piped(["convert", str(RECORDING), "-f", "tracepipe", "-o", str(file)])[0] == 0
    url = bucket.put(file.name, file.read_bytes())
    code, out, _ = piped(["summary", url, "--json"])
    assert (code, out) == (0, piped(["summary", str(file), "--json"])[1].replace(str(file), url))
    assert piped(["convert", url, "--force"])[0] == 0  # in this folder, as none is at the URL
    assert (tmp_path / "run.pftrace").stat().st_size > 0
    assert "wrote run.pftrace" in piped(["convert", url, "--force"])[2]


@pytest.mark.slow
def test_several_at_urls_are_one_timeline(bucket: Bucket, runs: Path) -> None:
    url = put_all(bucket, runs, "several")
    both = [f"{url}/node000/{rank}.jsonl" for rank in range(2)]
    code, _, messages = piped(["convert", *both, "-o", "both.pftrace"])
    assert code == 0
    assert all(f"placed: {one} by " in messages for one in both)
    code, _, messages = piped(["convert", both[0], both[0], "-o", "none.pftrace"])
    assert (code, messages.splitlines()[0]) == (1, f"tracepipe: {both[0]}: is named twice")


@pytest.mark.slow
def test_a_converted_trace_at_a_url_is_asked(bucket: Bucket) -> None:
    url = bucket.url("asked/run.pftrace")
    assert piped(["convert", str(RECORDING), "-o", url])[0] == 0
    ours, theirs = (piped(["query", one, "select count(*) from slice"]) for one in (str(RECORDING), url))
    assert (ours[:2]) == theirs[:2]
    assert ours[0] == 0


def test_the_ui_gets_a_trace_from_a_file(bucket: Bucket) -> None:
    code, _, messages = piped(["open", bucket.url("asked/run.pftrace")])
    assert (code, messages.splitlines()[1]) == (1, "  Copy it here first.")


def test_what_is_not_an_object_is_named(bucket: Bucket) -> None:
    bucket.put("folder/run.jsonl", b"")
    for url, what in (
        (bucket.url("folder/"), "is a folder"),
        (bucket.url("none.jsonl"), "cannot be read: nothing is there"),
        ("s3://other-bucket/run.jsonl", "cannot be read: "),
        (bucket.url("folder/run.jsonl"), "is empty"),
        ("nothing://run.jsonl", "cannot be read: Protocol not known: nothing"),
    ):
        code, _, messages = piped(["summary", url])
        assert (code, messages.startswith(f"tracepipe: {url}: {what}")) == (1, True), messages


def test_an_object_that_comes_in_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/cut/run.jsonl", RECORDING.read_bytes())
    cut = lambda self, path, target: Path(target).write_bytes(RECORDING.read_bytes()[:1000])  # noqa: E731
    monkeypatch.setattr(type(memory), "get_file", cut)
    code, _, messages = piped(["summary", "memory://cut/run.jsonl"])
    assert code == 1
    assert f"has {RECORDING.stat().st_size:,} bytes, of which 1,000 came" in messages


# Datasets -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dataset_of_urls_is_that_of_the_files(bucket: Bucket, runs: Path, tmp_path: Path) -> None:
    url = put_all(bucket, runs, "gathered")
    bucket.put("gathered/node000/.hidden.jsonl", b"{}")
    bucket.put("gathered/node000/notes.md", b"no recording")
    assert piped(["dataset", "build", url, "-o", "ds"])[0] == 0
    build_here(str(runs), str(tmp_path / "local"))
    own = "source", "source_mtime_ns", "source_version"
    assert tables(tmp_path / "ds", *own) == tables(tmp_path / "local", *own)
    found = ranks(tmp_path / "ds")
    assert found["source"].to_list() == [f"{url}/node00{rank // 2}/{rank}.jsonl" for rank in range(4)]
    assert found["source_mtime_ns"].null_count() == 4
    assert found["source_version"].n_unique() == 4
    assert piped(["convert", "ds", "--ranks", "1,2", "-o", "slow.pftrace"])[0] == 0


@pytest.mark.slow
def test_an_object_is_read_again_when_it_is_another_one(
    bucket: Bucket, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_ranks_here(monkeypatch)
    url = put_all(bucket, runs, "again")
    assert piped(["dataset", "build", f"{url}/", "-o", "ds"])[0] == 0
    _, _, messages = piped(["dataset", "build", url, "-o", "ds"])
    assert "4 ranks (0 written, 4 unchanged, 0 left out)" in messages
    key, content = "again/node000/1.jsonl", (runs / "node000/1.jsonl").read_bytes()
    bucket.put(key, content)  # later, and the same
    _, _, messages = piped(["dataset", "build", url, "-o", "ds"])
    assert "4 ranks (0 written, 4 unchanged, 0 left out)" in messages
    other = content.replace(b'"world_size":4', b'"world_size":5')
    assert len(other) == len(content) and other != content
    bucket.put(key, other)
    code, _, messages = piped(["convert", "ds", "-o", "all.pftrace"])
    assert (code, f"{url}/node000/1.jsonl: is not the recording" in messages) == (1, True)
    _, _, messages = piped(["dataset", "build", url, "-o", "ds"])
    assert "4 ranks (1 written, 3 unchanged, 0 left out)" in messages
    assert ranks(tmp_path / "ds")["world_size"].to_list() == [4, 5, 4, 4]


@pytest.mark.slow
def test_names_of_a_listing_are_not_trusted(
    bucket: Bucket, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_ranks_here(monkeypatch)
    url, content = put_all(bucket, runs, "odd"), (runs / "node000/1.jsonl").read_bytes()
    others = content.replace(b'"rank":1', b'"rank":9'), content.replace(b'"rank":1', b'"rank":8')
    bucket.put("odd/a b#c%41?d=1/x.jsonl", others[0])
    bucket.put("odd/\x1b[31mred/x.jsonl", others[1])
    bucket.put("odd/file::memory.jsonl", others[0])
    bucket.put("odd/broken.jsonl", b"this is none\n")
    before = sorted(tmp_path.rglob("*"))
    code, _, messages = piped(["dataset", "build", url, "-o", "ds"])
    assert code == 1
    assert f"left out: {url}/file::memory.jsonl: URLs with two colons in a row are not taken" in messages
    assert f"left out: {url}/broken.jsonl: the content is not of a known input format" in messages
    assert "\x1b" not in messages
    assert ranks(tmp_path / "ds")["rank"].to_list() == [0, 1, 2, 3, 8, 9]
    shutil.rmtree(tmp_path / "ds")
    assert sorted(tmp_path.rglob("*")) == before


def test_parent_folders_in_a_listing_lead_nowhere(runs: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    content = (runs / "node000/1.jsonl").read_bytes()
    memory.pipe("/up/../../../etc/1.jsonl", content)
    memory.pipe("/up/2.jsonl", content.replace(b'"rank":1', b'"rank":2'))
    build_here("memory://up", str(tmp_path / "ds"))
    assert ranks(tmp_path / "ds")["rank"].to_list() == [2]  # what begins with a dot is hidden
    assert not Path("/etc/1.jsonl").exists()


def test_an_object_without_a_version_is_read_each_time(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_ranks_here(monkeypatch)
    fsspec.filesystem("memory").pipe("/each/1.jsonl", (runs / "node000/1.jsonl").read_bytes())
    counts = [build(["memory://each"], str(tmp_path / "ds")).unchanged for _ in range(2)]
    monkeypatch.setattr(remote, "_VERSIONS", ())
    counts += [build(["memory://each"], str(tmp_path / "other")).unchanged for _ in range(2)]
    assert counts == [0, 1, 0, 0]


def test_a_folder_without_recordings_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    url = bucket.put("empty/notes.md", b"").rpartition("/")[0]
    with pytest.raises(InputError, match=r"^s3://job/empty: holds no recordings$"):
        build_here(url, str(tmp_path / "ds"))


def test_datasets_stay_on_file_systems(bucket: Bucket) -> None:
    url = bucket.put("there/1.jsonl", b"{}").rpartition("/")[0]
    code, _, messages = piped(["dataset", "build", url, "-o", bucket.url("ds")])
    assert code == 1
    assert "is a URL, and a dataset is " in messages
    assert "aws s3 sync FOLDER URL" in messages
    assert bucket.keys("ds") == []


# Writing ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_output_is_copied_when_it_is_complete(bucket: Bucket, tmp_path: Path) -> None:
    url = bucket.url("out/run.json")
    assert piped(["convert", str(RECORDING), "-o", url])[2].endswith(f"wrote {url}\n")
    assert piped(["convert", str(RECORDING), "-o", "run.json"])[0] == 0
    assert bucket.get("out/run.json") == (tmp_path / "run.json").read_bytes()
    code, _, messages = piped(["convert", str(RECORDING), "-o", url])
    assert (code, messages.splitlines()[0]) == (1, f"tracepipe: {url} exists")
    bucket.put("out/run.json", b"older")
    assert piped(["convert", str(RECORDING), "-o", url, "--force"])[0] == 0
    assert bucket.get("out/run.json") == (tmp_path / "run.json").read_bytes()
    assert piped(["convert", "none.jsonl", "-o", bucket.url("out/none.json")])[0] == 1
    assert bucket.keys("out/") == ["out/run.json"]


def test_a_url_that_came_meanwhile_is_not_replaced(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("raced.jsonl", b"of another")
    monkeypatch.setattr(remote, "is_taken", lambda url: False)
    with pytest.raises(OutputError, match=r"^s3://job/raced\.jsonl exists$"):
        remote.send(str(RECORDING), bucket.url("raced.jsonl"), force=False)
    assert bucket.get("raced.jsonl") == b"of another"


@pytest.mark.parametrize("option", [["export"], ["capture", "--command-output"]])
def test_outputs_that_are_no_single_file_are_refused(bucket: Bucket, option: list[str]) -> None:
    url = bucket.url("refused")
    line = ["export", str(RECORDING), "-o", url]
    if option[0] == "capture":
        line = ["capture", "--command-output", url, "--", "true"]
    code, _, messages = piped(line)
    assert (code, "URL" in messages.splitlines()[0]) == (2 if option[0] == "capture" else 1, True)
    assert bucket.keys("refused") == []


# What is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hidden@bucket/run.jsonl",
        "s3://key:hid/den@bucket/run.jsonl",
        "sftp://user:hidden@host:22/run.jsonl",
        "https://host:443/run.jsonl?X-Amz-Signature=hidden",
    ],
)
@pytest.mark.parametrize(
    "line",
    [
        ["summary", "URL"],
        ["convert", "URL"],
        ["query", "URL", "select 1"],
        ["dataset", "build", "URL", "-o", "ds"],
        ["convert", str(RECORDING), "-o", "URL"],
        ["capture", "-o", "URL", "--", "true"],
    ],
    ids=lambda line: "-".join(line[:2]).rpartition("/")[2],
)
def test_passwords_are_neither_taken_nor_shown(line: list[str], url: str) -> None:
    code, out, messages = piped([url if one == "URL" else one for one in line])
    assert code in (1, 2)
    assert "are not taken" in messages
    assert "hid" not in out + messages


def test_ports_and_letters_are_no_passwords() -> None:
    for url in ("sftp://user@host:22/a:b@c", "s3://bucket/a:b@c", "abfs://container@account.net/x",
                "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/key", "http://host:80"):  # fmt: skip
        remote.check_url(url)
    with pytest.raises(TracepipeError, match=r"is a path\.$"):
        remote.check_url("file:///tmp/run.jsonl")


def test_what_to_install_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    code, _, messages = piped(["summary", "gs://bucket/run.jsonl"])
    assert (code, messages.splitlines()[-1]) == (3, "  pip install gcsfs")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    code, _, messages = piped(["summary", "s3://bucket/run.jsonl"])
    assert (code, messages.splitlines()[-1]) == (3, "  pip install 'tracepipe[remote]'")


LOADED = """
import sys
from tracepipe import cli
try:
    cli.main()
finally:
    print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [["convert", str(RECORDING), "-o", "run.pftrace"], ["capture", "-o", "run.jsonl", "--", "./no-program"]],
    ids=["convert", "capture"],
)
def test_paths_load_nothing_for_urls(line: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", LOADED, *line]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    loaded = set(done.stderr.split())
    assert "tracepipe" in loaded
    assert loaded & {"fsspec", "s3fs", "aiohttp", "botocore", "asyncio"} == set()


# Recordings that are captured ---------------------------------------------------------------------------


def kept(url: str, content: bytes, messages: list[str], *, force: bool = False) -> list[OutputError]:
    """Keep a recording for a URL, as a capture does."""
    with Uploads(messages.append) as uploads:
        with uploads.written_recording(url, force=force) as sink:
            sink.write(content)
        return uploads.wait()


@pytest.mark.slow
def test_a_recording_is_copied_when_it_has_ended(bucket: Bucket, temporary: Path) -> None:
    url, messages = bucket.url("kept/a/3.jsonl.gz"), list[str]()
    check(url, force=False)
    assert kept(url, b"a line\n", messages) == []
    assert remote.found(url).size_bytes == len(bucket.get("kept/a/3.jsonl.gz"))
    assert messages[0].startswith(f"{url} is recorded to {temporary}/tracepipe-")
    with pytest.raises(OutputError, match=r"^s3://job/kept/a/3\.jsonl\.gz exists$"):
        check(url, force=False)
    check(url, force=True)


def test_a_recording_that_never_began_leaves_nothing(bucket: Bucket) -> None:
    assert kept(bucket.url("never/3.jsonl"), b"", []) == []
    assert bucket.keys("never/") == []


@pytest.mark.slow
def test_a_capture_that_fails_sends_what_it_has(bucket: Bucket) -> None:
    messages: list[str] = []
    url = bucket.url("failed/3.jsonl")
    with (
        pytest.raises(RuntimeError),
        Uploads(messages.append) as uploads,
        uploads.written_recording(url, force=False) as sink,
    ):
        sink.write(b"a line\n")
        raise RuntimeError
    assert bucket.get("failed/3.jsonl") == b"a line\n"


@pytest.mark.slow
def test_what_cannot_be_copied_stays(bucket: Bucket, temporary: Path, tmp_path: Path) -> None:
    url = bucket.put("stays/3.jsonl", b"of another")
    with pytest.raises(OutputError, match="there is no bucket none"):
        check("s3://none/3.jsonl", force=False)
    (error,) = kept(url, b"a line\n", [])
    (file,) = temporary.glob("*/3.jsonl")
    assert error.message == f"{url} exists; the recording is {file}"
    assert error.hint == f"Copy it under another name: aws s3 cp {file} s3://job/stays/NAME"
    assert (file.read_bytes(), bucket.get("stays/3.jsonl")) == (b"a line\n", b"of another")
    file.unlink()
    file.parent.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_the_command_to_copy_it_later_is_stated(
    bucket: Bucket, temporary: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    url = f"{scheme}://job/hand/it's 3.jsonl"
    with monkeypatch.context() as stopped:
        stopped.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        (error,) = kept(url, b"a line\n", [])
    (file,) = temporary.glob("*/*.jsonl")
    assert error.message.startswith(f"{url} cannot be written: ")
    assert error.message.endswith(f"; the recording is {file}")
    command = shlex.split(error.hint.removeprefix("Copy it: "))
    assert command[-2:] == [str(file), url]
    if scheme == "s3":
        assert command[:3] == ["aws", "s3", "cp"]
    else:  # which the program of AWS does not know
        subprocess.run(command, check=True)
        assert bucket.get("hand/it's 3.jsonl") == b"a line\n"
    file.unlink()
    file.parent.rmdir()


def test_the_second_signal_ends_the_copying(
    bucket: Bucket, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = iter([KeyboardInterrupt, SystemExit])

    def interrupted(process: subprocess.Popen[bytes]) -> None:
        raise next(signals)

    stuck: Callable[..., Any] = lambda *_, **__: subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE)  # noqa: E731
    monkeypatch.setattr(uploads, "start_sending", stuck)
    monkeypatch.setattr(uploads, "wait_until_sent", interrupted)
    messages: list[str] = []
    running = Uploads(messages.append)
    url = bucket.url("ended/3.jsonl")
    with running.written_recording(url, force=False) as sink:
        sink.write(b"a line\n")
    with pytest.raises(SystemExit):
        running.wait()
    (file,) = temporary.glob("*/3.jsonl")
    assert messages[-2] == "a second signal ends the copying"
    assert messages[-1].startswith(f"{url} is not written; the recording is {file}. Copy it: ")
    file.unlink()
    file.parent.rmdir()


@pytest.mark.slow
def test_the_first_signal_lets_it_be_copied(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for, signals = uploads.wait_until_sent, iter([KeyboardInterrupt])

    def interrupted_once(process: subprocess.Popen[bytes]) -> None:
        for one in signals:
            raise one
        wait_for(process)

    monkeypatch.setattr(uploads, "wait_until_sent", interrupted_once)
    assert kept(bucket.url("once/3.jsonl"), b"a line\n", []) == []
    assert bucket.keys("once/") == ["once/3.jsonl"]


def test_the_process_that_copies_gets_no_signal_of_the_terminal(bucket: Bucket) -> None:
    process = uploads._started({"url": bucket.url("uploads.jsonl")})
    try:
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(OutputError, match=r"^the process that writes URLs ended with -9$"):
            uploads.wait_until_sent(process)
    finally:
        process.kill()


@pytest.mark.slow
def test_a_flight_recorder_numbers_its_urls(bucket: Bucket) -> None:
    url = bucket.put("last/run.jsonl.zst", b"")
    bucket.put("last/run-2.jsonl.zst", b"")
    assert Uploads(print).another(url) == bucket.url("last/run-3.jsonl.zst")
