"""``train(recipe)``: the only place where the rooms are wired together."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.util.distributed import distributed_evaluation
from transformers import set_seed
from transformers.trainer_callback import ProgressCallback

from simcse_st.callbacks import LossCallback, LossProgress, STSCallback
from simcse_st.card import render_card
from simcse_st.collator import SimCSECollator
from simcse_st.errors import InputError, RunError
from simcse_st.evaluation import STSEvaluator
from simcse_st.inputs import Inputs, environment_of, load_inputs, state_inputs
from simcse_st.loss import SimCSELoss
from simcse_st.modeling import weights_sha256
from simcse_st.recipe import Recipe

logger = logging.getLogger(__name__)


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
    process = PartialState(cpu=not (torch.cuda.is_available() or torch.backends.mps.is_available()))
    if process.is_main_process:
        _check_folder(folder, overwrite)
    inputs = load_inputs(recipe, process.num_processes, str(process.device))
    environment = environment_of(inputs, process.num_processes)
    if process.is_main_process:
        state_inputs(recipe, inputs)
        _make_folder(folder, recipe, inputs.manifest, environment)
    process.wait_for_everyone()

    dev, test = (STSEvaluator(part.sentences1, part.sentences2, part.scores) for part in (inputs.dev, inputs.test))
    set_seed(recipe.seed)  # for the head's first weights
    loss = SimCSELoss(
        inputs.model,
        train_only_head=recipe.model.head == "train-only",
        gather_across_devices=process.num_processes > 1,
        **recipe.loss.model_dump(),
    )
    best = STSCallback(
        dev,
        folder / "checkpoints" / "best",
        eval_steps=recipe.training.eval_steps,
        history=folder / "history.jsonl",
        step_facts=_masked_cells(loss) if recipe.loss.mask_false_negatives else None,
    )
    with distributed_evaluation(inputs.model) as scores:
        base_test = test(inputs.model)["spearman"] if scores else None
    begin = time.perf_counter()
    total_steps = _fit(recipe, inputs, loss, best, folder / "checkpoints", process.num_processes)
    seconds = time.perf_counter() - begin - best.seconds
    sentences = sum(gather_object([loss.seen.sentences]))

    if not process.is_main_process:
        process.wait_for_everyone()
        return TrainResult(folder, _load_saved(folder), json.loads((folder / "results.json").read_text("utf-8")))
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
        "sentences_per_second": sentences / seconds,
        "batches": loss.seen.summary(),
    }
    card = render_card(recipe.model_dump(mode="json"), results, inputs.manifest, environment)
    (folder / "model" / "README.md").write_text(card, encoding="utf-8")
    _write_json(folder / "results.json", results)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    process.wait_for_everyone()
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


def _make_folder(folder: Path, recipe: Recipe, manifest: dict[str, Any], environment: dict[str, Any]) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    _write_json(folder / "manifest.json", manifest)
    _write_json(folder / "environment.json", environment)


def _masked_cells(loss: SimCSELoss) -> Callable[[], dict[str, int]]:
    """Gives the number of masked cells since it was last asked."""
    before = 0

    def facts() -> dict[str, int]:
        nonlocal before
        since, before = loss.seen.masked_cells - before, loss.seen.masked_cells
        return {"masked_cells": since}

    return facts


def _fit(recipe: Recipe, inputs: Inputs, loss: SimCSELoss, best: STSCallback, checkpoints: Path, devices: int) -> int:
    """Trains; returns the number of steps."""
    settings = recipe.training
    schedule: str = settings.schedule
    if schedule == "constant" and settings.warmup_steps:
        schedule = "constant_with_warmup"  # transformers' name for it; its plain "constant" ignores the warm-up
    args = SentenceTransformerTrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=settings.batch_size // devices,
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
        # Otherwise the process group that is there already would be taken for a mistake.
        accelerator_config={"use_configured_state": True},
        use_cpu=inputs.model.device.type == "cpu",
        report_to="none",
    )
    own = loss.own_parameters()
    trainer = _Trainer(
        model=inputs.model,
        args=args,
        train_dataset=inputs.data.dataset(),
        loss=loss,
        data_collator=SimCSECollator(
            inputs.model.preprocess,
            max_length=settings.max_length,
            shared_dropout_mask=recipe.model.shared_dropout_mask,
        ),
        callbacks=[best, *([LossCallback(own)] if own else [])],
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
    model = _load_saved(folder)
    if weights_sha256(model) != best.best_sha256:
        raise RunError(f"{target} does not load as the weights that were scored at step {best.best_step}")
    return model


def _load_saved(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder / "model"), local_files_only=True)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
