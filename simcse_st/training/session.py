"""One run from its recipe to its card: the trainer and all that is put together for it."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.util.distributed import distributed_evaluation
from transformers import TrainerCallback, set_seed
from transformers.trainer_callback import ProgressCallback

from simcse_st.card import render_card
from simcse_st.data import GradedPairs, HeldOut, TrainingData
from simcse_st.data.held_out import keep
from simcse_st.errors import InputError, RunError, is_out_of_memory
from simcse_st.evaluation.evaluate import measure_run
from simcse_st.evaluation.evaluators import HeldOutEvaluator, scores_of
from simcse_st.identity import weights_sha256
from simcse_st.models import Located, load_model
from simcse_st.recipe import Recipe
from simcse_st.records import SPLITS, Results, Split
from simcse_st.references import metrics_of
from simcse_st.run import CARD, Run, file_sha256
from simcse_st.training.arguments import trackers, training_arguments
from simcse_st.training.batch import BatchCounter
from simcse_st.training.callbacks import LossCallback, LossProgress, STSCallback
from simcse_st.training.checkpoints import CheckpointCallback, checkpoint_to_resume, disk_errors, stoppable
from simcse_st.training.collator import SimCSECollator
from simcse_st.training.inputs import Inputs, load_inputs, state_inputs
from simcse_st.training.loss import SimCSELoss

logger = logging.getLogger(__name__)


def run_recipe(recipe: Recipe, folder: Path, read: tuple[TrainingData, dict[Split, HeldOut]], *, resume: bool) -> None:
    """Runs a recipe in a folder that this process holds; see :func:`~simcse_st.training.train.train`."""
    run = Run(folder)
    process = PartialState(cpu=not (torch.cuda.is_available() or torch.backends.mps.is_available()))
    with disk_errors(folder), _memory_errors(recipe):
        _run_recipe(recipe, run, process, read, resume=resume)
    process.wait_for_everyone()


@contextlib.contextmanager
def _memory_errors(recipe: Recipe) -> Iterator[None]:
    """Says in one line what to do about memory that is too small."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        cached = recipe.loss.mini_batch_num_tokens or recipe.loss.mini_batch_size
        remedy = "lower it" if cached else "4096, say, computes the same batch part by part"
        raise RunError(
            f"out of memory with training.batch_size {recipe.training.batch_size}: set loss.mini_batch_num_tokens "
            f"({remedy}), or take a smaller batch"
        ) from error


def _run_recipe(
    recipe: Recipe,
    run: Run,
    process: PartialState,
    read: tuple[TrainingData, dict[Split, HeldOut]],
    *,
    resume: bool,
) -> None:
    inputs = load_inputs(recipe, *read, process.num_processes, str(process.device))
    checkpoint = checkpoint_to_resume(run, inputs.manifest, inputs.environment) if resume else None
    if process.is_main_process:
        state_inputs(recipe, inputs)
    loss = _loss(recipe, inputs, process.num_processes)
    if checkpoint:
        loss.seen = BatchCounter(**checkpoint.record.seen)
    metrics = _metrics(recipe)
    sizes = recipe.loss.matryoshka or ()
    evaluators = {split: HeldOutEvaluator(one, sizes) for split, one in inputs.held_out.items()}
    before = _score(inputs, inputs.model, evaluators, metrics, "before training")
    if checkpoint and before:
        chosen = metrics["dev"]
        _check_base(run.folder, checkpoint.record.best.base_metrics[chosen], before["dev"][chosen])
    base = before
    if not inputs.stack.is_base:  # a gain over less than the base would be none
        saved = load_model(Located(recipe.model.base, inputs.stack.folder), str(process.device))
        base = _score(inputs, saved, evaluators, metrics, "the base as saved")
        del saved

    args = training_arguments(recipe, inputs, loss, run.checkpoints, process.num_processes)
    reporting = trackers(recipe.training.report_to, run.folder)

    # Nothing has been written so far; what fails from here on is a failed run.
    process.wait_for_everyone()  # all have looked for a checkpoint
    if process.is_main_process and checkpoint is None:
        run.begin(recipe)
        for split, one in inputs.held_out.items():
            keep(one, getattr(recipe.data, split), run.kept(split))
        run.write(inputs.manifest)
        run.write(inputs.environment)
    process.wait_for_everyone()
    best = STSCallback(
        evaluators["dev"],
        run.checkpoints / "best",
        eval_steps=recipe.training.eval_steps,
        base_metrics=before.get("dev"),
        metric=metrics["dev"],
        baseline=base["dev"][metrics["dev"]] if base else None,
        history=run.history_path,
        early_steps=recipe.training.early_steps if isinstance(inputs.held_out["dev"], GradedPairs) else None,
        step_facts=_masked_cells(loss) if recipe.loss.mask_false_negatives else None,
        patience=recipe.training.patience,
    )
    if checkpoint:
        checkpoint.restore(best)
    saver = CheckpointCallback(recipe.training.save_steps or recipe.training.eval_steps, best, loss.seen, checkpoint)
    total_steps = _fit(recipe, inputs, loss, saver, args, reporting)
    if process.is_main_process:
        model = _keep(best, run, str(process.device))
        _record(recipe, inputs, run, model, saver, (base, before), total_steps)


def _metrics(recipe: Recipe) -> dict[Split, str]:
    """The metric of dev and of test that counts: on test, that of dev where it has one."""
    known = {split: metrics_of(getattr(recipe.data, split), recipe.loss.matryoshka or ()) for split in SPLITS}
    chosen = recipe.training.metric or known["dev"][0]
    return {split: chosen if chosen in metrics else metrics[0] for split, metrics in known.items()}


def _score(
    inputs: Inputs,
    model: SentenceTransformer,
    evaluators: dict[Split, HeldOutEvaluator],
    metrics: dict[Split, str],
    what: str,
) -> dict[Split, dict[str, float]]:
    """The metrics on dev and test; of several processes, in the first alone."""
    with distributed_evaluation(model) as scoring:
        if not scoring:
            return {}
        found: dict[Split, dict[str, float]] = {}
        for split, evaluator in evaluators.items():
            try:
                found[split] = evaluator(model)
            except InputError as error:
                raise InputError(
                    f"{inputs.manifest.held_out(split).sources[0].name}, before training: {error}"
                ) from None
    logger.info("%s   dev %.2f, test %.2f", what, *(found[split][metrics[split]] for split in SPLITS))
    return found


def _record(
    recipe: Recipe,
    inputs: Inputs,
    run: Run,
    model: SentenceTransformer,
    saver: CheckpointCallback,
    before: tuple[dict[Split, dict[str, float]], dict[Split, dict[str, float]]],
    total_steps: int,
) -> None:
    """Measures the kept model, writes down what the run came to, and drops its checkpoints."""
    best, seconds = saver.best, saver.train_seconds
    if not any(entry.loss for entry in run.history()):
        logger.warning("loss     it was 0 from the first step to the last: there was nothing to learn")
    metrics = _metrics(recipe)
    evaluation = measure_run(recipe.name, model, inputs.held_out, metrics, recipe.loss.matryoshka or ())
    base, untrained = ({split: one[split][metric] for split, metric in metrics.items()} for one in before)
    (measured,) = evaluation.models
    assert best.best_step is not None
    assert measured.tasks.test
    planned, _ = recipe.training.steps(inputs.data.rows_of_sources)
    results = Results(
        recipe=recipe.name,
        best_step=best.best_step,
        total_steps=total_steps,
        planned_steps=planned if total_steps < planned else None,
        base=base,
        base_metrics=before[0],
        untrained=None if inputs.stack.is_base else untrained,
        dev=scores_of(inputs.held_out["dev"], metrics["dev"], best.best_metrics),
        test=scores_of(inputs.held_out["test"], metrics["test"], measured.tasks.test.metrics),
        weights_sha256=best.best_sha256,
        base_model=inputs.base_model,
        model_sha256=measured.model_sha256,
        modules=measured.modules,
        files=_checksums(run.model_path),
        train_seconds=seconds,
        sentences_per_second=saver.seen.sentences / seconds,
        batches=saver.seen.facts(),
    )
    if results.dev.value <= results.base["dev"]:
        logger.warning(
            "gain     none: dev is %.2f, and %.2f of the base as it is: keep the base",
            results.dev.value,
            results.base["dev"],
        )
    run.write(results)
    run.write(evaluation)
    render_card(Run(run.folder))
    shutil.rmtree(run.checkpoints, ignore_errors=True)


def _check_base(folder: Path, before: float, now: float) -> None:
    """Makes sure that a run goes on from the model that it began with."""
    if abs(before - now) > 0.01:  # of Spearman x100: more than another machine's rounding
        was = f"dev scored {before:.2f}, and now {now:.2f}"
        raise InputError(f"--resume: model.base has changed since {folder} was begun: {was}")


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


def _fit(
    recipe: Recipe,
    inputs: Inputs,
    loss: SimCSELoss,
    saver: CheckpointCallback,
    args: SentenceTransformerTrainingArguments,
    reporting: list[TrainerCallback],
) -> int:
    """Trains; returns the number of steps.

    Raises:
        RunError: The disk is full or cannot be written.
        KeyboardInterrupt: The run was stopped.
    """
    checkpoint = saver.resumed
    if checkpoint and (done := checkpoint.record.step) >= checkpoint.record.total_steps:
        return done
    if checkpoint and saver.best.is_out_of_patience(done):
        return done
    own = loss.own_parameters()
    # What the trainer saves with a checkpoint asks the hub for nothing.
    inputs.model.model_card_data.local_files_only = True
    inputs.model.model_card_data.generate_widget_examples = False
    trainer = SimCSETrainer(
        model=inputs.model,
        args=args,
        train_dataset=inputs.data.dataset,
        loss=loss,
        data_collator=SimCSECollator(
            inputs.model.preprocess,
            max_length=recipe.training.max_length,
            prompts=inputs.model.prompts.get(inputs.model.default_prompt_name or ""),
            shared_dropout_mask=recipe.model.shared_dropout_mask,
        ),
        callbacks=[*reporting, saver.best, *([LossCallback(own)] if own else []), saver],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(LossProgress)
    if reporting:
        saver.best.log = trainer.log
    with stoppable(saver, Path(str(args.output_dir)).parent):
        trainer.train(resume_from_checkpoint=str(checkpoint.folder) if checkpoint else None)
    return trainer.state.global_step


def _keep(best: STSCallback, run: Run, device: str) -> SentenceTransformer:
    """Puts the best weights into ``model/`` and proves that what loads from there are those weights."""
    if best.best_step is None:
        raise RunError("no step was scored, so there are no weights to keep")
    model = SentenceTransformer(str(best.best_model), device=device, local_files_only=True)
    if weights_sha256(model) != best.best_sha256:
        raise RunError(f"{best.best_model} does not load as the weights that were scored at step {best.best_step}")
    shutil.rmtree(run.model_path, ignore_errors=True)  # of a run that was cut short just here
    best.best_model.rename(run.model_path)
    return model


def _checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a model, by its path; not of the card, which a resumed run may find there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stem != Path(CARD).stem)
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
