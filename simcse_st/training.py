"""``train(recipe)``: the only place where the rooms are wired together."""

from __future__ import annotations

import json
import logging
import platform
import shutil
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from transformers.trainer_callback import ProgressCallback

from simcse_st.callbacks import LossProgress, STSCallback
from simcse_st.card import render_card
from simcse_st.collator import SimCSECollator
from simcse_st.data import GradedPairs, Pairs, Source, file_sha256, load_graded_pairs, load_pairs, truncation
from simcse_st.errors import InputError, RunError
from simcse_st.evaluation import STSEvaluator
from simcse_st.loss import SimCSELoss
from simcse_st.modeling import build_model, weights_sha256
from simcse_st.recipe import HubDataset, Recipe, resolve

logger = logging.getLogger(__name__)

_PACKAGES = (
    "simcse-st",
    "sentence-transformers",
    "transformers",
    "torch",
    "datasets",
    "huggingface_hub",
    "scipy",
    "numpy",
)


@dataclass(frozen=True)
class TrainResult:
    """What a run came to; all of it also stands in the run folder.

    Attributes:
        folder: The run folder.
        model: The kept weights, as loaded back from ``folder / "model"``.
        results: The content of ``results.json``. Scores are Spearman x100, not rounded.
    """

    folder: Path
    model: SentenceTransformer
    results: dict[str, Any]


@dataclass(frozen=True)
class _Inputs:
    """Everything a run needs, loaded and checked before its folder is made."""

    model: SentenceTransformer
    pairs: Pairs
    dev: GradedPairs
    test: GradedPairs
    precision: str
    manifest: dict[str, Any]


def train(recipe: Recipe, output: str | Path | None = None, *, overwrite: bool = False) -> TrainResult:
    """Runs a recipe: trains, keeps the weights of the best dev score, scores test once on them.

    Args:
        recipe: What to do, see :func:`~simcse_st.recipe.load_recipe`.
        output: The run folder; by default ``runs/NAME``.
        overwrite: Whether an earlier run in that folder may be replaced.

    Returns:
        The scores and the kept model, loaded back from the run folder.

    Raises:
        InputError: Something in the recipe, the data or the base model cannot be used. No folder has been made.
        RunError: Training went wrong, or the saved weights are not those of the best score.
    """
    folder = Path(output) if output else Path("runs") / recipe.name
    _check_folder(folder, overwrite)
    inputs = _load(recipe)
    _state(recipe, inputs)

    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    environment = _environment(inputs)
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    _write_json(folder / "manifest.json", inputs.manifest)
    _write_json(folder / "environment.json", environment)

    dev = STSEvaluator(inputs.dev.sentences1, inputs.dev.sentences2, inputs.dev.scores)
    test = STSEvaluator(inputs.test.sentences1, inputs.test.sentences2, inputs.test.scores)
    best = STSCallback(
        dev, folder / "checkpoints" / "best", eval_steps=recipe.training.eval_steps, history=folder / "history.jsonl"
    )
    loss = SimCSELoss(inputs.model, **recipe.loss.model_dump())
    base_test = test(inputs.model)["spearman"]
    begin = time.perf_counter()
    total_steps = _fit(recipe, inputs, loss, best, folder / "checkpoints")
    seconds = time.perf_counter() - begin - best.seconds

    model = _keep(best, folder)
    results = {
        "recipe": recipe.name,
        "best_step": best.best_step,
        "total_steps": total_steps,
        "base": {"dev": best.base_metrics["spearman"], "test": base_test},
        "dev": {**best.best_metrics, "pairs": len(inputs.dev)},
        "test": {**test(model), "pairs": len(inputs.test)},
        "weights_sha256": best.best_sha256,
        "train_seconds": seconds,
        "sentences_per_second": loss.seen.sentences / seconds,
        "batches": loss.seen.summary(),
    }
    card = render_card(recipe.model_dump(mode="json"), results, inputs.manifest, environment)
    (folder / "model" / "README.md").write_text(card, encoding="utf-8")
    _write_json(folder / "results.json", results)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return TrainResult(folder, model, results)


class _Trainer(SentenceTransformerTrainer):
    """The stock trainer without its model card: that one looks things up on the hub, and quotes training data."""

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Adds none; the card is written from the run's records."""


def _check_folder(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise InputError(f"{folder} exists already: choose another --output, or replace it with --overwrite")
    if not (folder / "recipe.yaml").is_file():
        raise InputError(f"{folder} is no run folder (it has no recipe.yaml), so --overwrite will not replace it")


def _load(recipe: Recipe) -> _Inputs:
    """Loads and checks all that a run needs, cheap things first."""
    data, sample = recipe.data, recipe.data.sample
    dev = load_graded_pairs(_source(data.dev, "validation"))
    test = load_graded_pairs(_source(data.test, "test"))
    pairs = load_pairs(
        _source(data.train, "train"),
        hard_negatives=data.hard_negatives,
        sample_rows=sample.rows if sample else None,
        sample_seed=sample.seed if sample else 0,
    )
    if len(pairs) < recipe.training.batch_size:
        raise InputError(
            f"data.train: {len(pairs)} pairs are fewer than one batch of {recipe.training.batch_size}: "
            "lower training.batch_size or give more data"
        )
    if torch.cuda.device_count() > 1 and not torch.distributed.is_torchelastic_launched():
        raise InputError(
            f"{torch.cuda.device_count()} GPUs without a launcher: start one process a GPU, e.g. torchrun "
            "--nproc-per-node gpu -m simcse_st train ..., or choose one with CUDA_VISIBLE_DEVICES=0"
        )
    base = resolve(recipe.model.base)
    if recipe.model.sha256:
        _check_weights(Path(base), recipe.model.sha256)
    model = build_model(
        base, pooling=recipe.model.pooling, max_length=recipe.model.max_length, revision=recipe.model.revision
    )
    limit = recipe.training.max_length
    if limit > (longest := model.max_seq_length or limit):
        raise InputError(f"training.max_length is {limit}, but the model takes {longest} tokens at most")
    manifest = {
        "train": {**pairs.facts, "truncation": truncation(model.tokenizer, pairs.texts, limit)},
        "dev": dev.facts,
        "test": test.facts,
    }
    return _Inputs(model, pairs, dev, test, _precision(recipe, model.device), manifest)


def _source(reference: str | HubDataset, default_split: str) -> Source:
    if isinstance(reference, HubDataset):
        return Source(reference.dataset, reference.config, reference.split or default_split, reference.revision)
    return Source(resolve(reference), split=default_split)


def _check_weights(folder: Path, expected: str) -> None:
    path = folder / "model.safetensors"
    if not path.is_file():
        raise InputError(f"model.sha256: {folder} has no model.safetensors to compare it with")
    if (found := file_sha256(path)) != expected:
        raise InputError(f"{path}: its SHA-256 is {found}, but model.sha256 requires {expected}")


def _precision(recipe: Recipe, device: torch.device) -> str:
    wanted = recipe.training.precision
    if wanted == "auto":
        return "fp16" if device.type == "cuda" else "fp32"
    if wanted == "fp16" and device.type == "cpu":
        raise InputError("training.precision is fp16, which needs a GPU: on this CPU use bf16 or fp32")
    return wanted


def _state(recipe: Recipe, inputs: _Inputs) -> None:
    """Says once what the loss is going to see."""
    facts, cut, batch = inputs.manifest["train"], inputs.manifest["train"]["truncation"], recipe.training.batch_size
    parameters = sum(parameter.numel() for parameter in inputs.model.parameters())
    hard = batch * facts["hard_negatives"] / facts["pairs"]
    logger.info(
        "model    %s, %.1fM parameters, pooling %s, on %s in %s",
        recipe.model.base, parameters / 1e6, recipe.model.pooling, inputs.model.device, inputs.precision,
    )  # fmt: skip
    logger.info(
        "data     %d pairs of %d rows; %d (%.1f%%) have a hard negative, %d hard negatives in all",
        facts["pairs"], facts["rows_read"], facts["pairs_with_hard_negative"],
        100 * facts["share_with_hard_negative"], facts["hard_negatives"],
    )  # fmt: skip
    if facts["columns_left_out"]:
        logger.warning("columns  %s hold no text role and are left out", ", ".join(facts["columns_left_out"]))
    logger.info(
        "batches  %d rows: an anchor sees %.1f negatives on average, %d other rows' positives and %.1f hard negatives",
        batch, batch - 1 + hard, batch - 1, hard,
    )  # fmt: skip
    logger.info(
        "lengths  %d of %d texts (%.1f%%) are longer than %d tokens; %d tokens are cut off",
        cut["texts_truncated"], cut["texts"], 100 * cut["texts_truncated"] / cut["texts"], cut["max_length"],
        cut["tokens_truncated"],
    )  # fmt: skip


def _fit(recipe: Recipe, inputs: _Inputs, loss: SimCSELoss, best: STSCallback, checkpoints: Path) -> int:
    """Trains; returns the number of steps."""
    settings = recipe.training
    schedule: str = settings.schedule
    if schedule == "constant" and settings.warmup_steps:
        schedule = "constant_with_warmup"  # transformers' name for it; its plain "constant" ignores the warm-up
    args = SentenceTransformerTrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=settings.batch_size,
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=schedule,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm or 0.0,
        fp16=inputs.precision == "fp16",
        bf16=inputs.precision == "bf16",
        seed=recipe.seed,
        dataloader_drop_last=True,
        dataloader_pin_memory=inputs.model.device.type == "cuda",
        # Every step's own loss, and the true one: by default a NaN is replaced by the mean of the losses before it.
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
    )
    trainer = _Trainer(
        model=inputs.model,
        args=args,
        train_dataset=inputs.pairs.dataset(),
        loss=loss,
        data_collator=SimCSECollator(inputs.model.preprocess, max_length=settings.max_length),
        callbacks=[best],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(LossProgress)
    trainer.train()
    return trainer.state.global_step


def _keep(best: STSCallback, folder: Path) -> SentenceTransformer:
    """Puts the best weights into ``folder/model`` and proves that what loads from there are those weights."""
    if best.best_step is None:
        raise RunError("no step was scored, so there are no weights to keep")
    target = folder / "model"
    best.best_model.rename(target)
    model = SentenceTransformer(str(target), local_files_only=True)
    if weights_sha256(model) != best.best_sha256:
        raise RunError(f"{target} does not load as the weights that were scored at step {best.best_step}")
    return model


def _environment(inputs: _Inputs) -> dict[str, Any]:
    device = inputs.model.device
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "precision": inputs.precision,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
