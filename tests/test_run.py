"""A run's folder: who is at work in it, whether it is finished, what is said of a record that is none."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from simcse_st import InputError, Run
from simcse_st.records import Manifest, Results
from simcse_st.run import locked, open_run, read_record

HOLD = """
import sys
from pathlib import Path
from simcse_st.run import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
CLI = [sys.executable, "-m", "simcse_st"]


@pytest.fixture
def holder(tmp_path: Path):
    """A process that is at work in a folder, and the folder."""
    folder = tmp_path / "runs" / "a"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process, folder
        process.kill()


def test_a_second_process_is_told_who_is_at_work(holder: tuple[subprocess.Popen, Path]):
    process, folder = holder
    with pytest.raises(InputError) as error, locked(folder):
        pass
    assert str(error.value) == (
        f"{folder} is in use by process {process.pid} on {socket.gethostname()}: "
        "wait until it ends, or name another folder"
    )
    done = subprocess.run([*CLI, "train", "--output", str(folder)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"simcse-st: {error.value}\n")
    # Nothing has been taken from the first.
    with pytest.raises(InputError, match="is in use by process"), locked(folder):
        pass


def test_a_process_that_ends_leaves_nothing(holder: tuple[subprocess.Popen, Path], tmp_path: Path):
    process, folder = holder
    assert folder.is_dir()
    process.communicate("")
    assert process.returncode == 0
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_killed_process_is_no_obstacle(holder: tuple[subprocess.Popen, Path]):
    process, folder = holder
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left = {path.name for path in folder.iterdir()}
    assert left == {".lock", ".lock-holder"}
    with locked(folder):
        assert str(os.getpid()) in (folder / ".lock-holder").read_text()
        (folder / "something").write_text("")
    assert [path.name for path in folder.iterdir()] == ["something"]


def test_a_folder_stays_if_something_is_in_it_or_it_was_there(tmp_path: Path):
    with locked(tmp_path / "new" / "inner"):
        pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with locked(tmp_path / "old"):
        pass
    assert (tmp_path / "old").is_dir()
    with pytest.raises(FileNotFoundError), locked(tmp_path / "used"):
        shutil.copytree(tmp_path / "nowhere", shutil.copytree(tmp_path / "old", tmp_path / "used" / "inner"))
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["inner"]
    with locked(tmp_path / "used"):  # and again
        pass


def test_only_the_first_of_several_processes_holds_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    with locked(tmp_path / "x"):
        assert not (tmp_path / "x").exists()


def test_what_is_no_folder_or_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="--output: .*file is a file, but must name a folder"),
        locked(tmp_path / "file"),
    ):
        pass
    with (
        pytest.raises(InputError, match="--output: cannot write to .*: Not a directory"),
        locked(tmp_path / "file" / "inner"),
    ):
        pass
    assert (tmp_path / "file").read_text() == ""


def test_a_run_is_finished_when_its_card_is_written(run: Path, tmp_path: Path):
    assert Run(run).is_begun
    assert Run(run).is_finished
    assert open_run(run).results.recipe == "tiny"
    for missing in ("recipe.yaml", "results.json", "model/README.md"):
        copy = tmp_path / "copy"
        shutil.copytree(run, copy)
        (copy / missing).unlink()
        assert not Run(copy).is_finished
        assert Run(copy).is_begun == (missing != "recipe.yaml")
        with pytest.raises(
            InputError, match=r"copy is (no run folder: it has no recipe.yaml|of a run that did not end)"
        ):
            open_run(copy)
        shutil.rmtree(copy)


def test_a_model_that_was_changed_is_named(run: Path):
    assert Run(run).check_model_files().keys() == Run(run).results.files.keys()
    (run / "model" / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"model: notes.txt: not of the model that was measured"):
        Run(run).check_model_files()
    (run / "model" / "notes.txt").unlink()
    with (run / "model" / "config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(
        InputError, match=r"model/config.json has changed since it was measured \(SHA-256 [0-9a-f]{64}\)"
    ):
        Run(run).check_model_files()
    (run / "model" / "config.json").unlink()
    with pytest.raises(InputError, match=r"model: config.json: not there any more"):
        Run(run).check_model_files()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda values: values["dev"].pop("spearman"), "dev: Value error, spearman is missing"),
        (lambda values: values.update(best_step="many"), "best_step: Input should be a valid integer"),
        (lambda values: values.clear(), "recipe: Field required"),
    ],
)
def test_a_record_that_is_none_is_said_by_file_and_key(change, says: str, run: Path):
    path = run / "results.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(InputError) as error:
        read_record(path, Results)
    assert str(error.value).startswith(f"{path}: not a record of this command: {says}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"{", "not a record of this command: Invalid JSON: "), (b"\xff{", "cannot be read as a record: "), (None, "")],
)
def test_a_file_that_is_no_record(content: bytes | None, says: str, tmp_path: Path):
    path = tmp_path / "manifest.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_record(path, Manifest)
    assert str(error.value).startswith(f"{path}: {says}")
    assert "\n" not in str(error.value)


def test_records_come_back_as_they_were_written(run: Path):
    for kind in (Results, Manifest):
        record = Run(run).read(kind)
        Run(run).write(record)
        assert Run(run).read(kind) == record
        assert ": null" not in (run / kind.FILE).read_text()
    values = {**json.loads(Run(run).results.to_json()), "of a later version": 1}
    (run / "results.json").write_text(json.dumps(values))
    assert Run(run).results == Run(run).read(Results)
