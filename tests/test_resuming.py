"""A run that is stopped, killed or out of disk goes on to the very result that it would have had."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from helpers import stop_at
from simcse_st import InputError, Recipe, RunError, train
from simcse_st.evaluation.evaluators import HeldOutEvaluator
from simcse_st.training.batch import BatchCounter
from simcse_st.training.callbacks import BestState, STSCallback
from simcse_st.training.checkpoints import (
    Checkpoint,
    CheckpointCallback,
    CheckpointRecord,
    latest_checkpoint,
)

SHORT = {"eval_steps": 4, "save_steps": 3, "epochs": 3, "early_steps": 2}


@pytest.fixture
def recipe(tiny_recipe: Recipe, tmp_path: Path) -> Recipe:
    """Fifteen steps in three epochs, dropout on, scored at 4, 8, 12, 15, saved at 3, 6, 9, 12, 15."""
    training = tiny_recipe.training.model_copy(update=SHORT)
    loss = tiny_recipe.loss.model_copy(update={"mask_false_negatives": True})
    lines = Path(str(tiny_recipe.data.train)).read_text().splitlines()
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for file, rows in zip(files, (lines[:16], lines[16:20] + lines[:20]), strict=True):
        file.write_text("\n".join(rows) + "\n")  # most of them twice, so that something is masked
    recipe = tiny_recipe.model_copy(update={"training": training, "loss": loss})
    base = shutil.copytree(recipe.model.base, tmp_path / "base")
    return with_(with_(recipe, "data", train=[*map(str, files)]), "model", base=str(base))


@pytest.fixture
def stopped(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run, stopped after seven steps."""
    with monkeypatch.context() as patch:
        stop_at(7, patch)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "stopped")
    return tmp_path / "stopped"


def with_(recipe: Recipe, section: str, **keys: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=keys)})


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run came to, but for its times."""
    results = json.loads((folder / "results.json").read_text())
    for key in ("train_seconds", "sentences_per_second"):
        del results[key]
    assert not (folder / "checkpoints").exists()
    assert not list(folder.rglob("*.part"))
    return {
        "results": results,
        "history": (folder / "history.jsonl").read_text(),
        "evaluation": json.loads((folder / "evaluation.json").read_text()),
        "card": (folder / "model" / "README.md").read_text(),
        "files": sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")),
    }


def test_training_time_is_that_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr("simcse_st.training.checkpoints.time.perf_counter", lambda: now)
    best = STSCallback(dict, tmp_path, eval_steps=1)  # type: ignore[arg-type]
    state = BestState(base_metrics={}, best_metrics={}, best_sha256="", history_bytes=0)
    record = CheckpointRecord(step=1, total_steps=2, best=state, seen={}, train_seconds=7.0, files={})
    saver = CheckpointCallback(1, best, BatchCounter(), Checkpoint(tmp_path, record))
    best.seconds = 100.0  # of scoring, before training begins
    nothing: Any = None
    now = 20.0
    saver.on_train_begin(nothing, nothing, nothing)
    best.seconds += 4.0
    now = 50.0
    step = SimpleNamespace(global_step=1, max_steps=9, is_world_process_zero=False)
    control: Any = SimpleNamespace()
    saver.on_step_end(nothing, step, control)  # type: ignore[arg-type]
    assert control.should_save
    best.seconds += 5.0  # scored and saved between two steps
    now = 90.0
    saver.on_save(nothing, step, control)  # type: ignore[arg-type]
    now = 100.0
    saver.on_step_end(nothing, step, control)  # type: ignore[arg-type]
    now = 150.0
    assert saver.train_seconds == 7.0 + (30.0 - 4.0) + 10.0


HEAD = {"model": {"head": "train-only"}, "training": {"max_grad_norm": 1.0}}
UNSUPERVISED = {"data": {"kind": "sentences"}, "loss": {"mask_false_negatives": False, "mlm_weight": 0.1}}
BY_SOURCE = {"training": {"batches": "by_source"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, HEAD, UNSUPERVISED, BY_SOURCE], ids=["plain", "head", "unsupervised with mlm", "by source"]
)
def test_a_stopped_run_goes_on_to_the_same_result(
    changes: dict, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for section, keys in changes.items():
        recipe = with_(recipe, section, **keys)
    if "data" in changes:
        recipe = with_(recipe, "training", max_steps=15)
    whole = train(recipe, tmp_path / "whole")
    masked = [json.loads(line).get("masked_cells", 0) for line in (tmp_path / "whole" / "history.jsonl").open()]
    assert any(masked) == recipe.loss.mask_false_negatives
    # In the first epoch, at its last step, inside the second, at a step that is scored, twice at the last.
    for step, number in (
        (2, signal.SIGINT),
        (5, signal.SIGTERM),
        (8, signal.SIGINT),
        (12, signal.SIGTERM),
        (15, signal.SIGINT),
    ):
        with monkeypatch.context() as patch:
            stop_at(step, patch, number)
            with pytest.raises(KeyboardInterrupt):
                train(recipe, tmp_path / "run", resume=True)
        checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
        assert checkpoint is not None
        assert (checkpoint.record.step, checkpoint.record.total_steps) == (step, 15)
        assert f"resumed, it goes on from step {step} of 15" in caplog.text
        kept = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
        assert len(kept) <= 2  # the newest, and the best weights
    resumed = train(recipe, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert resumed.results.weights_sha256 == whole.results.weights_sha256
    # Once more gives what is there.
    before = (tmp_path / "run" / "results.json").read_bytes()
    assert train(recipe, tmp_path / "run", resume=True).results == whole.results.model_validate_json(before)
    assert (tmp_path / "run" / "results.json").read_bytes() == before


def run_in(folder: Path, recipe: Recipe) -> None:
    """What the killed process does."""
    import torch

    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    train(recipe, folder, resume=True)


@pytest.mark.slow
def test_a_run_killed_at_twenty_random_moments(recipe: Recipe, tmp_path: Path):
    """Killed as the system kills: no handler runs, and files end where they were."""
    # The processes are forked from one that has imported the libraries and done nothing else: they start at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["simcse_st.training.session", "tests.test_resuming", "torch"])

    def start(folder: Path) -> multiprocessing.process.BaseProcess:
        process = context.Process(target=run_in, args=(folder, recipe))
        process.start()
        return process

    start(tmp_path / "first").join()  # the libraries' first use
    began = time.monotonic()
    process = start(tmp_path / "whole")
    process.join()
    assert process.exitcode == 0
    seconds = time.monotonic() - began
    draw, folder, kills, steps = random.Random(4), tmp_path / "run", 0, set()
    while kills < 20:
        process = start(folder)
        process.join(draw.uniform(0.05, 1.1) * seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
            checkpoint = latest_checkpoint(folder / "checkpoints")
            steps.add(checkpoint.record.step if checkpoint else 0)
        else:
            assert process.exitcode == 0
        if process.exitcode == 0:  # it came to its end: the next begins anew
            assert outcome(folder) == outcome(tmp_path / "whole")
            shutil.rmtree(folder)
    process = start(folder)
    process.join()
    assert process.exitcode == 0
    assert outcome(folder) == outcome(tmp_path / "whole")
    assert len(steps) > 2, steps  # it was not always killed at the same place


def test_what_cannot_be_resumed_is_said(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = tmp_path / "train.jsonl"
    data.write_text("".join(Path(str(file)).read_text() for file in recipe.data.train))
    recipe = with_(recipe, "data", train=str(data))
    for split in ("dev", "test"):
        pairs = shutil.copy(str(getattr(recipe.data, split)), tmp_path / f"{split}.csv")
        recipe = with_(recipe, "data", **{split: str(pairs)})
    with monkeypatch.context() as patch:
        stop_at(7, patch)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="run is a run of another recipe: seed, training.epochs"):
        train(with_(recipe, "training", epochs=4).model_copy(update={"seed": 1}), tmp_path / "run", resume=True)
    with pytest.raises(InputError, match="--resume goes on with a run, --overwrite begins it again: choose one"):
        train(recipe, tmp_path / "run", resume=True, overwrite=True)
    with pytest.raises(InputError, match="run exists already: .* --resume"):
        train(recipe, tmp_path / "run")
    environment = tmp_path / "run" / "environment.json"
    environment.write_text(before[environment].decode().replace('"devices": 1', '"devices": 2'))
    with pytest.raises(InputError, match=r"run was begun with 2 process\(es\), not 1"):
        train(recipe, tmp_path / "run", resume=True)
    environment.write_bytes(before[environment])
    for split in ("dev", "test"):
        pairs = tmp_path / f"{split}.csv"
        text = pairs.read_text()
        pairs.write_text(text.replace("3.0", "2.5"))
        with pytest.raises(InputError, match=f"--resume: data.{split} has changed since .*run was begun"):
            train(recipe, tmp_path / "run", resume=True)
        pairs.write_text(text)
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    with pytest.raises(InputError, match="--resume: data.train has changed since .*run was begun"):
        train(recipe, tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    data.write_text("\n".join(lines) + "\n")
    assert train(recipe, tmp_path / "run", resume=True).results.total_steps == 15
    # Nothing there, or a run that was stopped before its first checkpoint: it begins.
    assert train(recipe, tmp_path / "new", resume=True).results.total_steps == 15
    assert outcome(tmp_path / "new")["results"] == outcome(tmp_path / "run")["results"]


def damage(name: str, folder: Path) -> None:
    """Takes a file away, or with "-" before its name its end."""
    path = next(folder.glob(name.removeprefix("-")))
    if path.is_dir():
        shutil.rmtree(path)
    elif name.startswith("-"):
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checkpoints/checkpoint-7/rng_state.pth", "rng_state.pth is missing"),
        ("checkpoints/checkpoint-7/trainer_state.json", "trainer_state.json is missing"),
        ("-checkpoints/checkpoint-7/optimizer.pt", "optimizer.pt has .* bytes, not "),
        ("-checkpoints/checkpoint-7/model.safetensors", "model.safetensors has .* bytes, not "),
        ("-checkpoints/checkpoint-7/simcse_st.json", "checkpoint-7/simcse_st.json: not a record of this command"),
        ("checkpoints/checkpoint-7/best", "checkpoint-7/best/.* is missing"),
        ("history.jsonl", "history.jsonl is shorter than it was"),
        ("-history.jsonl", "history.jsonl is shorter than it was"),
        ("-manifest.json", "manifest.json: not a record of this command"),
        ("environment.json", "environment.json: cannot be read"),
    ],
)
def test_a_damaged_run_is_not_gone_on_with(name: str, message: str, stopped: Path, recipe: Recipe, tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    damage(name, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=f"--resume: .*{message}.*--overwrite"):
        train(recipe, folder, resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_it_goes_on_with_other_workers_and_checkpoints(stopped: Path, recipe: Recipe, tmp_path: Path):
    shutil.copytree(stopped, tmp_path / "run")
    train(recipe, tmp_path / "whole")
    train(with_(recipe, "training", workers=1, save_steps=5), tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_another_base_is_not_gone_on_with(stopped: Path, recipe: Recipe, tmp_path: Path):
    shutil.copytree(stopped, tmp_path / "run")
    weights = Path(recipe.model.base) / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}, weights, {"format": "pt"})
    with pytest.raises(InputError, match="--resume: model.base has changed since .* dev scored .*, and now "):
        train(recipe, tmp_path / "run", resume=True)


def test_a_run_killed_where_folders_change_goes_on(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As the recipe is written, and when the best weights have become the model."""
    train(recipe, tmp_path / "whole")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml.part").write_text("name: ti")
    with monkeypatch.context() as patch:
        stop_at(15, patch)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "run", resume=True)
    (tmp_path / "run" / "checkpoints" / "best").rename(tmp_path / "run" / "model")
    train(recipe, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_run_killed_at_its_very_end_is_finished(recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    train(recipe, tmp_path / "run")
    before = outcome(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "checkpoint-15").mkdir(parents=True)
    caplog.set_level("INFO", "simcse_st")
    changed = with_(recipe, "card", notes="more")
    train(changed, tmp_path / "run", resume=True)
    assert "run is finished: its results stand" in caplog.text
    assert "card.* has changed: simcse-st card" in caplog.text
    assert outcome(tmp_path / "run") == before


def test_the_disk_holds_one_checkpoint_and_one_best(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rising = itertools.count()
    score = HeldOutEvaluator.__call__
    monkeypatch.setattr(
        HeldOutEvaluator,
        "__call__",
        lambda self, *arguments, **options: {**score(self, *arguments, **options), "spearman": float(next(rising))},
    )
    stop_at(14, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["best", "checkpoint-14"]


def test_a_checkpoint_that_was_cut_short_is_not_resumed_from(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        stop_at(7, patch)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(checkpoints / "checkpoint-7", checkpoints / "checkpoint-9")
    (checkpoints / "checkpoint-9" / "simcse_st.json").unlink()
    (checkpoints / "checkpoint-9" / "optimizer.pt").write_bytes(b"")
    shutil.copytree(checkpoints / "checkpoint-7", checkpoints / "checkpoint-7-copy")  # a user's own
    found = latest_checkpoint(checkpoints)
    assert found is not None
    assert found.record.step == 7
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    ("size", "reason"),
    [(20_000, "File too large"), (150_000, "inline_container")],
    ids=["the weights do not fit", "the optimizer's state, twice as large, does not"],
)
def test_a_full_disk_is_said_and_the_last_checkpoint_resumes(
    size: int,
    reason: str,
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    from simcse_st.training.checkpoints import CheckpointCallback

    train(recipe, tmp_path / "whole")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def on_step_begin(self: CheckpointCallback, args, state, control, **kwargs) -> None:
        if state.global_step == 7:  # from here on no file may be larger than this
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointCallback, "on_step_begin", on_step_begin)
        try:
            with pytest.raises(RunError, match=f"checkpoints: cannot be written: .*{reason}"):
                train(recipe, tmp_path / "run")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "resumed, it goes on from step 6 of 15" in caplog.text
    train(recipe, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_resume_to_the_same_result(recipe: Recipe, tmp_path: Path):
    recipe = with_(with_(recipe, "loss", mask_false_negatives=False), "training", eval_steps=3, save_steps=3)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "simcse_st", "train"]
    command += [str(tmp_path / "recipe.yaml"), "--resume", "--output"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = subprocess.run(
        [*command, str(tmp_path / "whole")], env=environment, capture_output=True, text=True, check=False
    )
    assert whole.returncode == 0, whole.stderr
    with subprocess.Popen(
        [*command, str(tmp_path / "run")], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and latest_checkpoint(tmp_path / "run" / "checkpoints") is None:
            time.sleep(0.01)
        for entry in Path("/proc").glob("[0-9]*"):  # the launcher gives each of its processes a session of its own
            with contextlib.suppress(OSError):
                if str(tmp_path / "run").encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
    assert not (tmp_path / "run" / "results.json").exists()
    resumed = subprocess.run(
        [*command, str(tmp_path / "run")], env=environment, capture_output=True, text=True, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "resume   from step " in resumed.stderr
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
