"""``train(recipe)``: the one place where everything is put together."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.util.distributed import distributed_evaluation
from transformers import set_seed
from transformers.trainer_callback import ProgressCallback

from simcse_st.training.batch import BatchFacts
from simcse_st.training.callbacks import LossCallback, LossProgress, STSCallback
from simcse_st.card import CARD, load_template
from simcse_st.training.collator import SimCSECollator
from simcse_st.data import file_sha256
from simcse_st.environment import describe_environment
from simcse_st.errors import InputError, RunError
from simcse_st.evaluation.evaluators import STSEvaluator
from simcse_st.folder import EVALUATION, MARK, check_folder, make_folder, write_json
from simcse_st.training.inputs import Inputs, load_inputs, state_inputs
from simcse_st.loading import describe_model
from simcse_st.training.loss import SimCSELoss
from simcse_st.evaluation.evaluate import measure_run
from simcse_st.models import weights_sha256
from simcse_st.places import resolve
from simcse_st.card_records import write_card
from simcse_st.recipe import Recipe, check_same, load_recipe
from simcse_st.training.checkpoints import CheckpointCallback, checkpoint_to_resume, disk_errors, stoppable

logger = logging.getLogger(__name__)

# Transformers 5.24 renamed it, and warns of the old name.
_RECOMPUTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in SentenceTransformerTrainingArguments.__dataclass_fields__
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


def train(
    recipe: Recipe, output: str | Path | None = None, *, overwrite: bool = False, resume: bool = False
) -> TrainResult:
    """Runs a recipe: trains, keeps the weights of the best dev score, scores test once on them.

    Args:
        recipe: What to do, see :func:`~simcse_st.recipe.load_recipe`.
        output: The run folder; by default ``runs/NAME``.
        overwrite: Whether an earlier run in that folder may be replaced.
        resume: Goes on with a run of this recipe that stands there unfinished, from its last checkpoint, to the result
            that it would have had; on a CPU bit by bit. Without one it begins; of a finished one it gives the result.

    Returns:
        The scores and the kept model, loaded back from the run folder.

    Raises:
        InputError: Something in the recipe, the data or the base model cannot be used. No folder has been made.
        RunError: Training went wrong, or the saved weights are not those of the best score.
        KeyboardInterrupt: It was stopped, after a step, with a checkpoint.
    """
    folder = Path(output) if output else Path("runs") / recipe.name
    process = PartialState(cpu=not (torch.cuda.is_available() or torch.backends.mps.is_available()))
    if resume and _is_there(folder, recipe, overwrite):
        return _load_result(folder, str(process.device))
    if process.is_main_process:
        check_folder(folder, overwrite or resume, resumable=True)
    with disk_errors(folder):
        return _train(recipe, folder, process, resume=resume)


def _train(recipe: Recipe, folder: Path, process: PartialState, *, resume: bool) -> TrainResult:
    """What :func:`train` does where there is something to do."""
    load_template()  # a card that cannot be made is known before hours are spent
    inputs = load_inputs(recipe, process.num_processes, str(process.device))
    environment = describe_environment(inputs.model.device, inputs.precision, process.num_processes)
    checkpoint = checkpoint_to_resume(folder, inputs.manifest, environment) if resume else None
    if process.is_main_process:
        state_inputs(recipe, inputs)
    loss = _loss(recipe, inputs, process.num_processes)
    if checkpoint:
        loss.seen = BatchFacts(**checkpoint.seen)
    dev, test = (
        STSEvaluator(part.sentences1, part.sentences2, part.scores, paraphrases=part.paraphrases())
        for part in (inputs.dev, inputs.test)
    )
    base: dict[str, dict[str, float]] = {"dev": {}, "test": {}}
    with distributed_evaluation(inputs.model) as scoring:
        if scoring:
            base = {"dev": dev(inputs.model), "test": test(inputs.model)}
            logger.info("before training   dev %.2f, test %.2f", base["dev"]["spearman"], base["test"]["spearman"])
            if checkpoint:
                _check_base(folder, checkpoint.best["base_metrics"]["spearman"], base["dev"]["spearman"])

    # Nothing has been written so far; what fails from here on is a failed run.
    process.wait_for_everyone()  # all have looked for a checkpoint
    if process.is_main_process and checkpoint is None:
        make_folder(folder, recipe.to_yaml())
        write_json(folder / "manifest.json", inputs.manifest)
        write_json(folder / "environment.json", environment)
    process.wait_for_everyone()
    best = STSCallback(
        dev,
        folder / "checkpoints" / "best",
        eval_steps=recipe.training.eval_steps,
        base_metrics=base["dev"],
        history=folder / "history.jsonl",
        early_steps=recipe.training.early_steps,
        step_facts=_masked_cells(loss) if recipe.loss.mask_false_negatives else None,
        resumable=True,
    )
    if checkpoint:
        best.restore(checkpoint.best, history=process.is_main_process)
    saver = CheckpointCallback(recipe.training.save_steps or recipe.training.eval_steps, best, loss.seen, checkpoint)
    args = _arguments(recipe, inputs, folder / "checkpoints", process.num_processes)
    total_steps = _fit(recipe, inputs, loss, saver, args)

    if not process.is_main_process:
        process.wait_for_everyone()
        return _load_result(folder, str(process.device))
    model = _keep(best, folder, str(process.device))
    scores = {"base": {split: metrics["spearman"] for split, metrics in base.items()}, "test": test(model)}
    results = _record(recipe, inputs, folder, model, saver, scores, total_steps)
    process.wait_for_everyone()
    return TrainResult(folder, model, results)


def _record(
    recipe: Recipe,
    inputs: Inputs,
    folder: Path,
    model: SentenceTransformer,
    saver: CheckpointCallback,
    scores: dict[str, dict[str, float]],
    total_steps: int,
) -> dict[str, Any]:
    """Writes down what a run came to, and drops its checkpoints; returns the results."""
    best, seen, seconds = saver.best, saver.seen, saver.train_seconds()
    described = describe_model(model)
    base = recipe.model.base
    results = {
        "recipe": recipe.name,
        "best_step": best.best_step,
        "total_steps": total_steps,
        "base": scores["base"],
        "dev": {**best.best_metrics, "pairs": len(inputs.dev)},
        "test": {**scores["test"], "pairs": len(inputs.test)},
        "weights_sha256": best.best_sha256,
        # None of a folder: what this machine calls it goes into no card.
        "base_model": None if Path(resolve(base)).expanduser().exists() else base,
        "model_sha256": described["model_sha256"],
        "modules": described["modules"],
        "files": _checksums(folder / "model"),
        "train_seconds": seconds,
        "sentences_per_second": seen.sentences / seconds,
        "batches": seen.summary(),
    }
    write_json(folder / "results.json", results)
    write_json(folder / EVALUATION, measure_run(recipe.name, model, inputs.dev, inputs.test, scores["test"]))
    write_card(folder)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return results


def _is_there(folder: Path, recipe: Recipe, overwrite: bool) -> bool:
    """Whether a finished run of this recipe stands there.

    Raises:
        InputError: It is another recipe's, or is to be overwritten at the same time.
    """
    if overwrite:
        raise InputError("--resume goes on with a run, --overwrite begins it again: choose one")
    if not (folder / MARK).is_file():
        return False
    check_same(folder, recipe)
    if not all((folder / name).is_file() for name in ("results.json", f"model/{CARD}")):  # the card is written last
        return False
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # of a run that was cut short here
    logger.info("resume   %s is finished: its results stand", folder)
    if load_recipe(folder / MARK).card != recipe.card:
        logger.warning("odd      card.* has changed since: simcse-st card %s --set card.KEY=VALUE changes it", folder)
    return True


def _check_base(folder: Path, before: float, now: float) -> None:
    """Makes sure that a run goes on from the model that it began with.

    Raises:
        InputError: It does not.
    """
    if abs(before - now) > 0.01:  # of Spearman x100: more than another machine's rounding
        was = f"dev scored {before:.2f}, and now {now:.2f}"
        raise InputError(f"--resume: model.base has changed since {folder} was begun: {was}")


def _load_result(folder: Path, device: str) -> TrainResult:
    model = _load_saved(folder / "model", device)
    return TrainResult(folder, model, json.loads((folder / "results.json").read_text("utf-8")))


class SimCSETrainer(SentenceTransformerTrainer):
    """The stock trainer without its model card callback.

    That one fails on a column that mixes strings and null, looks things up on the hub, and quotes training data. The
    rest, and all arguments, are the stock trainer's.
    """

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Adds none."""


def _loss(recipe: Recipe, inputs: Inputs, devices: int) -> SimCSELoss:
    set_seed(recipe.seed)  # for the first weights of a train-only head
    try:
        return SimCSELoss(
            inputs.model,
            train_only_head=recipe.model.head == "train-only",
            gather_across_devices=devices > 1,
            **recipe.loss.model_dump(),
        )
    except (ValueError, OSError) as error:
        raise InputError(f"loss: {error}") from error


def _masked_cells(loss: SimCSELoss) -> Callable[[], dict[str, int]]:
    """Gives the number of masked cells since it was last asked."""
    before = loss.seen.masked_cells  # of a resumed run, what it had seen

    def facts() -> dict[str, int]:
        nonlocal before
        since, before = loss.seen.masked_cells - before, loss.seen.masked_cells
        return {"masked_cells": since}

    return facts


def _arguments(recipe: Recipe, inputs: Inputs, checkpoints: Path, devices: int) -> SentenceTransformerTrainingArguments:
    settings = recipe.training
    schedule: str = settings.schedule
    if schedule == "constant" and settings.warmup_steps:
        schedule = "constant_with_warmup"  # transformers' name for it; its plain "constant" ignores the warm-up
    recomputing: dict[str, Any] = {_RECOMPUTING: True} if settings.gradient_checkpointing else {}
    return SentenceTransformerTrainingArguments(
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
        use_cpu=inputs.model.device.type == "cpu",
        torch_compile=settings.torch_compile,
        # A GPU would wait for its next batch; on a CPU another process would take from training what it gives.
        dataloader_num_workers=_workers(settings.workers, inputs.model.device.type),
        seed=recipe.seed,
        dataloader_drop_last=True,
        dataloader_pin_memory=inputs.model.device.type == "cuda",
        # Every step's own loss, and the true one: by default a NaN is replaced by the mean of the losses before it.
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        **recomputing,
    )


def _workers(wanted: int | None, device: str) -> int:
    return int(device == "cuda") if wanted is None else wanted


def _fit(
    recipe: Recipe,
    inputs: Inputs,
    loss: SimCSELoss,
    saver: CheckpointCallback,
    args: SentenceTransformerTrainingArguments,
) -> int:
    """Trains; returns the number of steps.

    Raises:
        RunError: The disk is full or cannot be written.
        KeyboardInterrupt: The run was stopped.
    """
    checkpoint = saver.resumed
    if checkpoint and checkpoint.step >= checkpoint.total_steps:
        return checkpoint.total_steps
    own = loss.own_parameters()
    # What the trainer saves with a checkpoint asks the hub for nothing.
    inputs.model.model_card_data.local_files_only = True
    inputs.model.model_card_data.generate_widget_examples = False
    trainer = SimCSETrainer(
        model=inputs.model,
        args=args,
        train_dataset=inputs.data.dataset(),
        loss=loss,
        data_collator=SimCSECollator(
            inputs.model.preprocess,
            max_length=recipe.training.max_length,
            shared_dropout_mask=recipe.model.shared_dropout_mask,
        ),
        callbacks=[saver.best, *([LossCallback(own)] if own else []), saver],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(LossProgress)
    with stoppable(saver, Path(str(args.output_dir)).parent):
        trainer.train(resume_from_checkpoint=str(checkpoint.folder) if checkpoint else None)
    return trainer.state.global_step


def _keep(best: STSCallback, folder: Path, device: str) -> SentenceTransformer:
    """Puts the best weights into ``folder/model`` and proves that what loads from there are those weights."""
    if best.best_step is None:
        raise RunError("no step was scored, so there are no weights to keep")
    place = best.kept if best.kept.exists() else folder / "model"  # where a run that was cut short just here put them
    model = _load_saved(place, device)
    if weights_sha256(model) != best.best_sha256:
        raise RunError(f"{place} does not load as the weights that were scored at step {best.best_step}")
    if place == best.kept:
        place.rename(folder / "model")
    return model


def _checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a model, by its path; not of the card, which a resumed run may find there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stem != Path(CARD).stem)
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}


def _load_saved(path: Path, device: str) -> SentenceTransformer:
    return SentenceTransformer(str(path), device=device, local_files_only=True)
