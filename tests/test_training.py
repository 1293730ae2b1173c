"""Whole runs on a tiny model: what is kept, what is written, what repeats."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from transformers import TrainerState

from helpers import sentences
from simcse_st import (
    InputError,
    Recipe,
    SimCSECollator,
    SimCSELoss,
    SimCSETrainer,
    STSCallback,
    build_model,
    load_recipe,
    train,
)
from simcse_st.errors import RunError
from simcse_st.identity import weights_sha256
from simcse_st.run import Run
from simcse_st.training.inputs import choose_precision
from simcse_st.training.session import _keep


@pytest.fixture
def data(tiny_data: Path) -> Path:
    return tiny_data


@pytest.fixture
def recipe(tiny_recipe: Recipe) -> Recipe:
    return tiny_recipe


def history(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in history(folder) if "loss" in entry]


def change(recipe: Recipe, section: str, **keys: object) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=keys)})


def test_a_run_leaves_records_that_agree_with_its_model(recipe: Recipe, tmp_path: Path, data: Path):
    result = train(recipe, tmp_path / "run")
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {
        "recipe.yaml", "manifest.json", "environment.json", "history.jsonl", "results.json", "evaluation.json", "model",
    }  # fmt: skip
    assert load_recipe(folder / "recipe.yaml") == recipe

    results = json.loads((folder / "results.json").read_text())
    assert results == json.loads(result.results.to_json())
    entries = history(folder)
    # 40 rows in batches of 8, twice: ten steps, the untrained model and dev at 3, 6, 9 and 10.
    assert [entry["step"] for entry in entries if "loss" in entry] == list(range(1, 11))
    dev = {entry["step"]: entry["dev"]["spearman"] for entry in entries if "dev" in entry}
    assert list(dev) == [0, 3, 6, 9, 10]
    assert results["base"]["dev"] == dev.pop(0)
    assert results["dev"]["spearman"] == max(dev.values())
    assert dev[results["best_step"]] == max(dev.values())
    assert results["total_steps"] == 10
    hard_negatives = sum(i % 3 for i in range(40))
    assert results["batches"]["sentences"] == 2 * (80 + hard_negatives)
    assert results["sentences_per_second"] == pytest.approx(results["batches"]["sentences"] / results["train_seconds"])

    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["train"]["pairs"], manifest["train"]["hard_negatives"]) == (40, hard_negatives)

    # The saved model, through stock code alone, scores what the records say.
    for split in ("dev", "test"):
        rows = [line.split(",") for line in (data / f"{split}.csv").read_text().splitlines()]
        first, second, gold = zip(*rows, strict=True)
        stock = EmbeddingSimilarityEvaluator(list(first), list(second), [float(score) for score in gold])
        scores = stock(SentenceTransformer(str(folder / "model")))
        assert results[split]["spearman"] == pytest.approx(100 * scores["spearman_cosine"], abs=1e-4)
        assert results[split]["pearson"] == pytest.approx(100 * scores["pearson_cosine"], abs=1e-3)


def test_the_same_seed_repeats_every_loss_bit_for_bit(recipe: Recipe, tmp_path: Path):
    train(recipe, tmp_path / "one")
    train(recipe, tmp_path / "two")
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    train(load_recipe(tmp_path / "r.yaml", ["seed=43"]), tmp_path / "other")
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert losses(tmp_path / "one") != losses(tmp_path / "other")


def test_how_often_dev_is_scored_does_not_change_training(recipe: Recipe, tmp_path: Path):
    train(recipe, tmp_path / "often")
    train(change(recipe, "training", eval_steps=100), tmp_path / "once")
    assert losses(tmp_path / "often") == losses(tmp_path / "once")


def test_without_hard_negatives_the_batch_is_smaller(recipe: Recipe, tmp_path: Path):
    result = train(change(recipe, "data", hard_negatives=False), tmp_path / "run")
    assert result.results.batches.sentences == 2 * 80
    assert (result.results.batches.fewest_negatives, result.results.batches.most_negatives) == (7, 7)


def scripted_training(scores: list[float], tiny_base: Path, folder: Path) -> tuple[STSCallback, list[str]]:
    """Trains with an evaluator that gives these scores; returns the checksum of the weights at each of them."""
    model = build_model(tiny_base, device="cpu")
    checksums: list[str] = []

    def evaluator(scored: SentenceTransformer) -> dict[str, float]:
        checksums.append(weights_sha256(scored))
        return {"spearman": scores[len(checksums) - 1]}

    texts = sentences(32)
    callback = STSCallback(evaluator, folder / "best", eval_steps=1)
    SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(folder / "trainer"), per_device_train_batch_size=4, max_steps=len(scores) - 1,
            report_to="none", save_strategy="no", logging_steps=1, learning_rate=1e-3,
        ),
        train_dataset=Dataset.from_dict({"anchor": texts[:16], "positive": texts[16:]}),
        loss=SimCSELoss(model),
        data_collator=SimCSECollator(model.preprocess),
        callbacks=[callback],
    ).train()  # fmt: skip
    return callback, checksums


def test_the_best_step_is_kept_and_not_the_last(tiny_base: Path, tmp_path: Path):
    callback, checksums = scripted_training([10, 70, 80, 60], tiny_base, tmp_path)
    assert (callback.base_metrics, callback.best_step, callback.best_metrics) == ({"spearman": 10}, 2, {"spearman": 80})
    assert len(set(checksums)) == 4
    assert callback.best_sha256 == checksums[2]
    assert weights_sha256(SentenceTransformer(str(tmp_path / "best"))) == checksums[2]


def test_of_equal_scores_the_earliest_is_kept(tiny_base: Path, tmp_path: Path):
    callback, checksums = scripted_training([90, 70, 70, 70], tiny_base, tmp_path)
    assert (callback.best_step, callback.best_sha256) == (1, checksums[1])


def test_a_score_that_is_no_number_ends_the_run(tiny_base: Path, tmp_path: Path):
    with pytest.raises(RunError, match="spearman is nan at step 2: are all embeddings the same"):
        scripted_training([50, 60, math.nan, 70], tiny_base, tmp_path)


def test_a_metric_that_does_not_exist_is_noticed_before_the_first_step(tiny_base: Path, tmp_path: Path):
    callback = STSCallback(lambda _: {"spearman": 1.0}, tmp_path / "best", eval_steps=1, metric="spearmen")
    with pytest.raises(InputError, match="no metric 'spearmen': did you mean 'spearman'?"):
        callback.on_train_begin(None, TrainerState(), None, model=None)  # type: ignore[arg-type]


def test_weights_that_are_not_the_scored_ones_are_an_error(tiny_base: Path, tmp_path: Path):
    callback, _ = scripted_training([10, 70, 80, 60], tiny_base, tmp_path)
    model = SentenceTransformer(str(tmp_path / "best"))
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3
    model.save_pretrained(str(tmp_path / "best"), create_model_card=False)
    with pytest.raises(RunError, match="does not load as the weights that were scored at step 2"):
        _keep(callback, Run(tmp_path), "cpu")


def test_the_checksum_is_that_of_the_scored_weights_whatever_is_saved(tiny_base: Path, tmp_path: Path):
    class Forgetful(SentenceTransformer):
        """Saves other weights than it has."""

        def save_pretrained(self, *args, **kwargs):  # type: ignore[no-untyped-def, override]
            other = build_model(tiny_base, device="cpu", pooling="mean")
            with torch.no_grad():
                next(other.parameters()).view(-1)[0] += 1.0
            other.save_pretrained(*args, **kwargs)

    model = Forgetful(modules=list(build_model(tiny_base, device="cpu")), device="cpu")
    callback = STSCallback(lambda _: {"spearman": 1.0}, tmp_path / "best", eval_steps=1)
    callback._save(model)
    callback.best_step = 1
    with pytest.raises(RunError, match="does not load as the weights that were scored"):
        _keep(callback, Run(tmp_path), "cpu")


def test_a_loss_that_is_no_number_ends_the_run(recipe: Recipe, tmp_path: Path):
    with pytest.raises(RunError, match=r"the loss is (nan|inf) at step \d"):
        train(change(recipe, "training", learning_rate=1e30, eval_steps=100), tmp_path / "run")
    with pytest.raises(RunError, match=r"step \d: .*(not finite|same similarity)"):
        train(change(recipe, "training", learning_rate=1e30, eval_steps=1), tmp_path / "other")


def test_bf16_trains_on_a_cpu(recipe: Recipe, tmp_path: Path):
    train(change(recipe, "training", precision="bf16", epochs=1), tmp_path / "half")
    train(change(recipe, "training", epochs=1), tmp_path / "full")
    assert json.loads((tmp_path / "half" / "environment.json").read_text())["precision"] == "bf16"
    first, expected = losses(tmp_path / "half")[0], losses(tmp_path / "full")[0]
    assert first != expected
    assert first == pytest.approx(expected, rel=0.02)


def test_runs_are_not_overwritten_unless_asked(recipe: Recipe, tmp_path: Path):
    folder = tmp_path / "run"
    train(recipe, folder)
    before = (folder / "results.json").read_bytes()
    with pytest.raises(InputError, match="exists already"):
        train(recipe, folder)
    assert (folder / "results.json").read_bytes() == before
    (folder / "checkpoints").mkdir()
    (folder / "model" / "left-over").touch()
    (folder / "notes.txt").touch()
    train(change(recipe, "training", epochs=1), folder, overwrite=True)
    assert not (folder / "checkpoints").exists()
    assert not (folder / "model" / "left-over").exists()
    assert (folder / "notes.txt").exists()  # a user's own

    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.tex").touch()
    with pytest.raises(InputError, match="is no folder of this command"):
        train(recipe, precious, overwrite=True)
    assert (precious / "chapter1.tex").exists()


def test_unusable_input_leaves_no_folder(recipe: Recipe, tmp_path: Path, data: Path):
    bad = {
        "40 pairs are fewer than one batch of 64": change(recipe, "training", batch_size=64),
        "there is no folder": change(recipe, "model", base="./nowhere"),
        "is no model folder": change(recipe, "model", base=str(data)),
        "'nobody/nothing' cannot be loaded from the Hugging Face Hub, and no such folder is here .offline": change(
            recipe, "model", base="nobody/nothing"
        ),
        "requires 0000": change(recipe, "model", sha256="0" * 64),
        "fp16, which needs a GPU": change(recipe, "training", precision="fp16"),
        "takes 128 tokens at most": change(recipe, "training", max_length=500),
        "dev.jsonl: no such file": change(recipe, "data", dev="dev.jsonl"),
    }
    for message, broken in bad.items():
        with pytest.raises(InputError, match=message):
            train(broken, tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.fixture
def broken_bases(tiny_base: Path, tmp_path: Path) -> dict[str, Path]:
    """Folders that look like the tiny encoder's."""
    made = {}
    for name in (
        "no tokenizer",
        "more layers",
        "other names",
        "truncated",
        "wrong sizes",
        "modules",
        "nan",
        "constant",
    ):
        made[name] = tmp_path / name.replace(" ", "-")
        shutil.copytree(tiny_base, made[name])
    for file in made["no tokenizer"].glob("tokenizer*"):
        file.unlink()
    config = json.loads((tiny_base / "config.json").read_text())
    (made["more layers"] / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    (made["wrong sizes"] / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    weights = load_file(tiny_base / "model.safetensors")
    save_file({f"x{name}": tensor for name, tensor in weights.items()}, made["other names"] / "model.safetensors")
    save_file({name: tensor * math.nan for name, tensor in weights.items()}, made["nan"] / "model.safetensors")
    save_file({name: tensor * 0 for name, tensor in weights.items()}, made["constant"] / "model.safetensors")
    whole = (tiny_base / "model.safetensors").read_bytes()
    (made["truncated"] / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (made["modules"] / "modules.json").write_text("{}")
    return made


def test_a_base_that_is_not_what_it_seems_is_refused(recipe: Recipe, broken_bases: dict[str, Path], tmp_path: Path):
    messages = {
        "no tokenizer": "has no tokenizer",
        "more layers": "lacks .* of the encoder's weights, .* e.g. encoder.layer.2",
        "other names": "belongs to another architecture",
        "truncated": "cannot be loaded as a folder",
        "wrong sizes": "cannot be loaded as a folder",
        "modules": "is no list of Sentence Transformers modules",
        "nan": "not finite",
        "constant": "(one vector to sentences that begin alike|not finite)",
    }
    for name, folder in broken_bases.items():
        with pytest.raises(InputError, match=messages[name]) as error:
            train(change(recipe, "model", base=str(folder)), tmp_path / "run")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "run").exists()


def test_an_output_that_cannot_be_made_is_refused_at_once(recipe: Recipe, tmp_path: Path):
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/run"), tmp_path / ("x" * 300)):
        with pytest.raises(InputError, match="--output"):
            train(recipe, output)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    train(change(recipe, "training", epochs=1), tmp_path / "link")
    assert (tmp_path / "empty" / "results.json").is_file()


@pytest.mark.parametrize(
    ("trainer_class", "missing"),
    [(SentenceTransformerTrainer, ""), (SentenceTransformerTrainer, []), (SimCSETrainer, None)],
)
def test_missing_negatives_in_a_plain_script(trainer_class: type, missing: object, tiny_base: Path, tmp_path: Path):
    texts = sentences(24)
    model = build_model(tiny_base, device="cpu")
    there = [[text] if missing == [] else text for text in texts[16:21]]
    trainer = trainer_class(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=2, report_to="none", save_strategy="no"
        ),
        train_dataset=Dataset.from_dict(
            {
                "anchor": texts[:8],
                "positive": texts[8:16],
                "negative": [missing, *there[:4], missing, missing, there[4]],
            }
        ),
        loss=SimCSELoss(model),
        data_collator=SimCSECollator(model.preprocess),
    )
    trainer.train()
    assert trainer.loss.seen.sentences == 16 + 5


def test_the_saved_model_needs_only_stock_modules(recipe: Recipe, tmp_path: Path):
    train(recipe, tmp_path / "run")
    modules = json.loads((tmp_path / "run" / "model" / "modules.json").read_text())
    assert [module["type"].split(".")[0] for module in modules] == ["sentence_transformers"] * 3
    assert [module["type"].split(".")[-1] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    program = f"""
import sys
sys.modules["simcse_st"] = None  # importing it fails from here on
from sentence_transformers import SentenceTransformer
model = SentenceTransformer({str(tmp_path / "run" / "model")!r})
norms = (model.encode(["a b", "c d e"]) ** 2).sum(1)
assert abs(norms - 1).max() < 1e-6, norms
assert model.max_seq_length == 128
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_sentence_transformers_folder_gives_its_encoder_alone(tiny_base: Path, tmp_path: Path):
    model = build_model(tiny_base, device="cpu")
    model.save_pretrained(str(tmp_path / "st"), create_model_card=False)
    again = build_model(tmp_path / "st", device="cpu", max_length=64)
    assert [type(module).__name__ for module in again] == ["Transformer", "Pooling", "Normalize"]
    assert weights_sha256(again) == weights_sha256(model)
    assert (again.max_seq_length, model.max_seq_length) == (64, 128)


@pytest.mark.parametrize(
    "keys",
    [{"gradient_checkpointing": True}, {"workers": 1}, {"precision": "bf16"}],
    ids=lambda keys: next(iter(keys)),
)
def test_keys_that_pass_through_to_the_trainer(keys: dict, tiny_recipe: Recipe, tmp_path: Path):
    """They change how fast and in how much memory, and but for bf16 nothing else."""
    settings = tiny_recipe.training.model_copy(update={"max_steps": 4})
    plain = train(tiny_recipe.model_copy(update={"training": settings}), tmp_path / "plain")
    changed = train(tiny_recipe.model_copy(update={"training": settings.model_copy(update=keys)}), tmp_path / "changed")
    first, second = (
        [json.loads(line)["loss"] for line in (run.folder / "history.jsonl").read_text().splitlines() if "loss" in line]
        for run in (plain, changed)
    )
    assert second == pytest.approx(first, rel=0.02 if "precision" in keys else 1e-6)
    assert (first != second) == ("precision" in keys)


@pytest.mark.parametrize(
    ("device", "has_bf16", "wanted", "expected"),
    [
        ("cuda", True, "auto", "bf16"),
        ("cuda", False, "auto", "fp16"),
        ("cpu", True, "auto", "fp32"),
        ("mps", True, "auto", "fp32"),
        ("cuda", False, "fp32", "fp32"),
        ("cpu", False, "bf16", "bf16"),
        ("mps", True, "fp16", "not supported on Apple's GPUs"),
        ("mps", True, "bf16", "not supported on Apple's GPUs"),
        ("cpu", True, "fp16", "which needs a GPU"),
    ],
)
def test_the_precision_suits_the_device(
    device: str, has_bf16: bool, wanted: str, expected: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    recipe = change(recipe, "training", precision=wanted)
    if " " not in expected:
        assert choose_precision(recipe, torch.device(device)) == expected
        return
    with pytest.raises(InputError, match=expected):
        choose_precision(recipe, torch.device(device))


def test_a_warm_up_longer_than_the_run_and_a_loss_of_nothing_are_said(
    recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    same = tmp_path / "same.jsonl"
    same.write_text("".join(json.dumps({"anchor": "a", "positive": "a"}) + "\n" for _ in range(8)))
    recipe = change(change(recipe, "data", train=str(same)), "training", batch_size=2, max_steps=3, warmup_steps=3)
    recipe = change(recipe, "loss", mask_false_negatives=True)  # whose only other row is masked
    train(recipe, tmp_path / "run")
    assert "warm-up  its 3 steps are not over when the run ends, after 3" in caplog.text
    assert "loss     it was 0 from the first step to the last: there was nothing to learn" in caplog.text
