"""How long, how fast and shown where: the trainer's controls as keys of a recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from helpers import stop_at
from simcse_st import InputError, Recipe, load_recipe, train
from simcse_st.training.session import SimCSETrainer


def with_training(recipe: Recipe, **keys: Any) -> Recipe:
    return recipe.changed(**{f"training__{key}": value for key, value in keys.items()})


def entries(folder: Path, key: str) -> list[tuple[int, Any]]:
    lines = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    return [(line["step"], line[key]) for line in lines if key in line]


def test_overrides_may_be_a_mapping():
    strings = ["training.epochs=1.5", "data.train=a.jsonl", "model.base=b", "data.sample={rows: 9, seed: 1}"]
    mapping = {"training.epochs": 1.5, "data.train": Path("a.jsonl"), "model.base": "b"}
    mapping |= {"data.sample": {"rows": 9, "seed": 1}}
    assert load_recipe("snli-sup", mapping) == load_recipe("snli-sup", strings)
    # A section is changed in the keys that are given, as by `extends`.
    changed = load_recipe("snli-sup", {"training": {"epochs": 1}})
    assert changed == load_recipe("snli-sup", ["training.epochs=1"])


def test_a_share_of_the_steps_warms_up(tiny_recipe: Recipe, tmp_path: Path):
    recipe = with_training(tiny_recipe, warmup_steps=0.35, learning_rate=1.0, max_steps=10, eval_steps=10)
    assert recipe.training.steps([40]) == (10, 4)  # 3.5 and rounded up, as the trainer does
    train(with_training(recipe, learning_rate=1e-3), tmp_path / "run")
    rates = [rate for _, rate in entries(tmp_path / "run", "learning_rate")]
    # Linear up over four steps, then down to 0 at the tenth.
    assert rates == pytest.approx([1e-3 * min(step / 4, (10 - step) / 6) for step in range(10)])


@pytest.mark.parametrize(
    ("schedule", "args", "expected"),
    [
        ("polynomial", {"lr_end": 0.0, "power": 2.0}, lambda step: (1 - step / 5) ** 2),
        ("cosine_with_min_lr", {"min_lr_rate": 0.5}, None),
        ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "linear"}, lambda step: min(1, (5 - step) / 2)),
    ],
)
def test_schedules_are_those_of_transformers(
    schedule: str, args: dict, expected: Any, tiny_recipe: Recipe, tmp_path: Path
):
    keys = {"schedule": schedule, "args": {"lr_scheduler_kwargs": args}, "max_steps": 5}
    train(with_training(tiny_recipe, **keys), tmp_path / "run")
    rates = [rate / 1e-3 for _, rate in entries(tmp_path / "run", "learning_rate")]
    if expected:
        assert rates == pytest.approx([expected(step) for step in range(5)])
    else:
        assert rates[0] == 1
        assert min(rates) > 0.5


def test_part_of_an_epoch(tiny_recipe: Recipe, tmp_path: Path):
    recipe = with_training(tiny_recipe, schedule="constant")
    train(with_training(recipe, epochs=2.0), tmp_path / "two")
    train(with_training(recipe, epochs=1.5), tmp_path / "part")
    assert len(entries(tmp_path / "two", "loss")) == 10  # of five steps an epoch
    assert entries(tmp_path / "part", "loss") == entries(tmp_path / "two", "loss")[:8]


def test_patience_ends_a_run_and_changes_nothing_else(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = with_training(tiny_recipe, epochs=4.0, eval_steps=2, save_steps=3, learning_rate=0.01)
    whole = train(recipe, tmp_path / "whole")
    scores = [(step, dev["spearman"]) for step, dev in entries(tmp_path / "whole", "dev") if step]
    best, stop = (0, -200.0), 0
    for step, score in scores:
        best = (step, score) if score > best[1] else best
        if step - best[0] == 2 * 2:
            stop = step
            break
    assert 0 < stop < 20, "this seed does not lose patience: take another learning rate"
    patient = with_training(recipe, patience=2)
    run = train(patient, tmp_path / "patient")
    assert (run.results.best_step, run.results.total_steps, run.results.planned_steps) == (best[0], stop, 20)
    assert entries(run.folder, "loss") == entries(whole.folder, "loss")[:stop]
    if whole.results.best_step == best[0]:
        assert run.results.weights_sha256 == whole.results.weights_sha256
    card = (run.model_path / "README.md").read_text()
    assert f"of {stop} (20 were planned; 2 dev scores without a better one ended it)" in card

    for moment in (1, best[0], stop - 1, stop, stop):  # stopped where patience ends, too, it stays at its end
        with monkeypatch.context() as patch:
            stop_at(moment, patch)
            with pytest.raises(KeyboardInterrupt):
                train(patient, tmp_path / "resumed", resume=True)
            if moment == stop:
                break
    resumed = train(patient, tmp_path / "resumed", resume=True)
    assert (resumed.folder / "history.jsonl").read_text() == (run.folder / "history.jsonl").read_text()
    assert resumed.results.weights_sha256 == run.results.weights_sha256
    assert resumed.results.total_steps == stop


def test_a_tracker_shows_what_the_history_says(tiny_recipe: Recipe, tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plain = train(tiny_recipe, tmp_path / "plain")
    run = train(with_training(tiny_recipe, report_to=["tensorboard"]), tmp_path / "run")
    assert (run.folder / "history.jsonl").read_text() == (plain.folder / "history.jsonl").read_text()
    assert run.results.weights_sha256 == plain.results.weights_sha256

    events = accumulator.EventAccumulator(str(run.folder / "tensorboard")).Reload()
    shown = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert shown["train/loss"] == [(step, pytest.approx(loss)) for step, loss in entries(run.folder, "loss")]
    scored = sorted(entries(run.folder, "dev") + entries(run.folder, "early"))
    assert len(scored) > 4
    for metric in ("spearman", "alignment", "uniformity"):
        assert shown[f"eval/{metric}"] == [(step, pytest.approx(of[metric])) for step, of in scored]


def test_arguments_reach_the_trainer(tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = with_training(tiny_recipe, max_steps=3)
    seen = []
    monkeypatch.setattr(SimCSETrainer, "get_batch_samples", spy(seen, SimCSETrainer.get_batch_samples))
    plain = train(recipe, tmp_path / "plain")
    other = train(with_training(recipe, args={"optim": "sgd", "run_name": "third"}), tmp_path / "other")
    assert [args.run_name for args in seen[:: len(seen) - 1]] == ["tiny", "third"]
    assert entries(plain.folder, "loss")[0] == entries(other.folder, "loss")[0]
    assert entries(plain.folder, "loss")[2] != entries(other.folder, "loss")[2]

    still = {"learning_rate_mapping": {r"word_embeddings": 0.0}}
    frozen = train(with_training(recipe, args=still), tmp_path / "frozen")
    before = load_file(Path(recipe.model.base) / "model.safetensors")
    after, moved = (load_file(run.model_path / "model.safetensors") for run in (frozen, plain))
    name = "embeddings.word_embeddings.weight"
    assert (after[name] == before[name]).all()
    assert not (moved[name] == before[name]).all()
    assert not (after["encoder.layer.0.output.dense.weight"] == before["encoder.layer.0.output.dense.weight"]).all()


def spy(seen: list, original: Any) -> Any:
    def wrapped(self: SimCSETrainer, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.args)
        return original(self, *args, **kwargs)

    return wrapped


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"args": {"adam_beta": 0.8}}, "the trainer has no argument 'adam_beta': did you mean 'adam_beta2' or"),
        ({"args": {"learning_rate": 0.1}}, "'learning_rate' is settled by the run"),
        ({"args": {"gradient_accumulation_steps": 2}}, "'gradient_accumulation_steps' is settled by the run"),
        ({"args": {"eval_strategy": "steps"}}, "'eval_strategy' is settled by the run"),
        ({"args": {"load_best_model_at_end": True}}, "'load_best_model_at_end' is settled by the run"),
        ({"args": {"adam_beta1": "x"}}, "'adam_beta1' should be a valid number, not 'x'"),
        ({"args": {"adam_beta1": 2.0}}, "training.args: Invalid beta parameter"),
        ({"args": {"optim": "best"}}, "training.args: best is not a valid OptimizerNames"),
        ({"args": {"learning_rate_mapping": {"nowhere": 0.1}}}, "'nowhere' matches no name such as 'model.0"),
        ({"args": {"learning_rate_mapping": {"(": 0.1}}}, "training.args: missing \\)"),
        ({"schedule": "warmup_stable_decay"}, "training.schedule: "),
        ({"schedule": "cosine", "args": {"lr_scheduler_kwargs": {"min": 1}}}, "training.schedule: .*'min'"),
        ({"report_to": ["tensorbord"]}, "no tracker 'tensorbord': did you mean 'tensorboard'"),
        ({"report_to": ["swanlab"]}, "pip install swanlab"),
    ],
)
def test_what_the_trainer_would_not_take_is_refused_first(
    keys: dict, message: str, tiny_recipe: Recipe, tmp_path: Path
):
    with pytest.raises(InputError, match=message) as caught:
        train(with_training(tiny_recipe, **keys), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


LITTLE_MEMORY = """
import resource, sys
import torch, sentence_transformers, datasets, simcse_st.training.session
from simcse_st import cli
torch.set_num_threads(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (700 << 20), -1))
sys.argv[0] = "simcse-st"
cli.main()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory as Linux does")
def test_too_little_memory_names_the_remedy(tiny_recipe: Recipe, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    text = " ".join("word" for _ in range(60))
    rows.write_text(
        "".join(json.dumps({"anchor": f"{i} {text}", "positive": f"{text} {i}"}) + "\n" for i in range(4096))
    )
    recipe = tiny_recipe.changed(data__train=str(rows), training__batch_size=4096, training__max_length=126)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    command = [sys.executable, "-c", LITTLE_MEMORY, "train", str(tmp_path / "recipe.yaml"), "--output", "run"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "simcse-st: out of memory with training.batch_size 4096: set loss.mini_batch_num_tokens"
    )
