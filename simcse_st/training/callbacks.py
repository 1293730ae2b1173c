"""Trainer callbacks: graded pairs scored during training with the best weights kept, and the progress bar."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.util.distributed import distributed_evaluation, get_rank, get_world_size
from torch import nn
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from simcse_st.errors import InputError, RunError, nearest
from simcse_st.identity import tensors_sha256, weights_sha256
from simcse_st.records import Record

logger = logging.getLogger(__name__)

_EARLY = 100  # steps

Evaluator = Callable[[SentenceTransformer], dict[str, float]]


class BestState(Record):
    """What a :class:`STSCallback` goes on from."""

    base_metrics: dict[str, float]
    best_step: int | None = None
    best_metrics: dict[str, float]
    best_sha256: str
    history_bytes: int
    """How much of the history was written."""


def any_process(flag: bool, args: TrainingArguments) -> bool:
    """Whether it is so in one of the processes that train together; each of them must ask."""
    if get_world_size() == 1:
        return flag
    flags = torch.tensor([int(flag)], device=args.device)
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    return bool(flags.item())


class STSCallback(TrainerCallback):
    """Scores a model every so many steps and at the end, and keeps the best weights on disk.

    The weights of the best step are saved as a complete model together with their checksum, so that what is left
    after training can be proven to be what was scored. Works in any ``SentenceTransformerTrainer``.

    Args:
        evaluator: Gives the metrics of a model, e.g. :class:`~simcse_st.evaluation.evaluators.STSEvaluator`.
        best_model: Folder for the best weights; whatever it holds is replaced.
        eval_steps: Steps between two scores.
        metric: The metric to maximise; of equal scores the earliest is kept.
        base_metrics: The metrics of the untrained model; by default it is scored when training begins.
        baseline: The score to beat; by default the untrained model's.
        history: A JSON Lines file that gets a line for every logged loss and every score, as they happen.
        step_facts: Gives what else to write beside a logged loss.
        early_steps: In the first 100 steps, where geometry changes most, metrics are also written every so many steps;
            these choose nothing.
        patience: Ends training after so many scores without a better one.
        log: Is told each score as ``{"eval_METRIC": value}``, e.g. the trainer's ``log``; set it when there is one.

    Attributes:
        base_metrics: The metrics before training.
        best_step: The step of the best score, or None before the first.
        best_metrics: Its metrics.
        best_sha256: Checksum of its weights, see :func:`~simcse_st.models.weights_sha256`.
        seconds: Time spent here: scoring and saving.

    Example:
        >>> callback = STSCallback(STSEvaluator(sentences1, sentences2, scores), "best", eval_steps=50)
        >>> SentenceTransformerTrainer(model, args, train_dataset, loss=loss, callbacks=[callback]).train()
        >>> best = SentenceTransformer("best")
    """

    def __init__(
        self,
        evaluator: Evaluator,
        best_model: str | Path,
        *,
        eval_steps: int,
        metric: str = "spearman",
        base_metrics: dict[str, float] | None = None,
        baseline: float | None = None,
        history: str | Path | None = None,
        step_facts: Callable[[], dict[str, Any]] | None = None,
        early_steps: int | None = None,
        patience: int | None = None,
        log: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        if eval_steps < 1:
            raise ValueError(f"eval_steps must be at least 1, not {eval_steps}")
        self.evaluator = evaluator
        self.best_model = Path(best_model)
        self.eval_steps = eval_steps
        self.metric = metric
        self.history = Path(history) if history else None
        self.step_facts = step_facts or dict
        self.early_steps = early_steps
        self.patience = patience
        self.log = log
        self.base_metrics = base_metrics or {}
        self.baseline = baseline
        self.best_step: int | None = None
        self.best_metrics: dict[str, float] = {}
        self.best_sha256 = ""
        self.seconds = 0.0
        self._due = self._early = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the untrained model's score: what to compare with, and proof before hours are spent that it exists.

        Raises:
            InputError: The evaluator does not give the metric.
        """
        if state.global_step > 0:  # resumed
            return
        begin = time.perf_counter()
        with distributed_evaluation(kwargs["model"]) as scores:
            if scores:
                self.base_metrics = self.base_metrics or self.evaluator(kwargs["model"])
                if self.metric not in self.base_metrics:
                    raise InputError(f"no metric {self.metric!r}: {nearest(self.metric, self.base_metrics)}")
                self._tell(0, "dev", self.base_metrics)
        self.seconds += time.perf_counter() - begin

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Asks for a log entry when a score is due, so that the loss of this step is written before it."""
        self._due = state.global_step % self.eval_steps == 0 or state.global_step >= state.max_steps
        early = (
            self.early_steps is not None and state.global_step <= _EARLY and state.global_step % self.early_steps == 0
        )
        self._early = early and not self._due
        if self._due or self._early:
            control.should_log = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the loss down, and scores the model if that is due.

        Raises:
            RunError: The loss or the score is not finite.
        """
        logs = kwargs["logs"]
        if "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            hint = "lower the learning rate, or raise the temperature"
            raise RunError(f"the loss is {logs['loss']} at step {state.global_step}: {hint}")
        if state.is_world_process_zero:
            rate = logs["learning_rate"]
            self._write(step=state.global_step, loss=logs["loss"], learning_rate=rate, **self.step_facts())
        if self._due or self._early:
            begin = time.perf_counter()
            # Several devices encode together; one of them scores and saves.
            with distributed_evaluation(kwargs["model"]) as scores:
                if scores and self._due:
                    self._keep_if_best(kwargs["model"], state, logs["loss"])
                elif scores:
                    self._score(kwargs["model"], state.global_step, "early")
            self._due = self._early = False
            if self.patience and any_process(self.is_out_of_patience(state.global_step), args):
                control.should_training_stop = control.should_save = True
            self.seconds += time.perf_counter() - begin

    def is_out_of_patience(self, step: int) -> bool:
        """Whether training ends after a step; of several processes the first one knows."""
        if self.patience is None or self.best_step is None:
            return False
        return step - self.best_step >= self.patience * self.eval_steps

    def _keep_if_best(self, model: SentenceTransformer, state: TrainerState, loss: float) -> None:
        metrics = self._score(model, state.global_step)
        score = metrics[self.metric]
        better = self.best_step is None or score > self.best_metrics[self.metric]
        if better:
            self.best_step, self.best_metrics = state.global_step, metrics
            self._save(model)
        remark = "   best so far" if better else ""
        to_beat = self.base_metrics[self.metric] if self.baseline is None else self.baseline
        if better and score < to_beat:
            remark += f", below the base's {to_beat:.2f}"
        logger.info(
            "step %*d of %d   loss %.4f   dev %.2f%s",
            len(str(state.max_steps)), state.global_step, state.max_steps, loss, score,
            remark,
        )  # fmt: skip

    def _score(self, model: SentenceTransformer, step: int, key: str = "dev") -> dict[str, float]:
        try:
            metrics = self.evaluator(model)
        except InputError as error:
            raise RunError(f"step {step}: {error}") from error
        if not math.isfinite(metrics[self.metric]):
            raise RunError(f"{self.metric} is {metrics[self.metric]} at step {step}: are all embeddings the same?")
        self._tell(step, key, metrics)
        return metrics

    def _tell(self, step: int, key: str, metrics: dict[str, float]) -> None:
        self._write(step=step, **{key: metrics})
        if self.log:
            self.log({f"eval_{name}": value for name, value in metrics.items()})

    def state(self) -> BestState:
        """What :meth:`restore` takes: the best so far."""
        written = self.history.stat().st_size if self.history and self.history.exists() else 0
        return BestState(
            base_metrics=self.base_metrics,
            best_step=self.best_step,
            best_metrics=self.best_metrics,
            best_sha256=self.best_sha256,
            history_bytes=written,
        )

    def restore(self, state: BestState) -> None:
        """Goes back to an earlier state; the history loses what was written since."""
        self.base_metrics, self.best_step = state.base_metrics, state.best_step
        self.best_metrics, self.best_sha256 = state.best_metrics, state.best_sha256
        if self.history and get_rank() == 0:
            os.truncate(self.history, state.history_bytes)

    def _save(self, model: SentenceTransformer) -> None:
        # Written beside the old one first: a full disk must not cost the best weights so far.
        fresh = self.best_model.with_name(f"{self.best_model.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        model.save_pretrained(str(fresh), create_model_card=False)
        self.best_sha256 = weights_sha256(model)
        shutil.rmtree(self.best_model, ignore_errors=True)
        fresh.rename(self.best_model)

    def _write(self, **line: Any) -> None:
        if self.history:
            with self.history.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


class LossCallback(TrainerCallback, ExportableState):
    """Keeps the parameters of a loss, such as a train-only head, with its model.

    The trainer optimises the parameters of a loss, but neither saves them, nor restores them, nor averages their
    gradients over devices. This does.

    Args:
        parameters: The parameters by their names: ``loss.own_parameters()``.

    Raises:
        RunError: A run resumes from a checkpoint whose parameters are not in ``output_dir``.
    """

    FILE = "loss.safetensors"

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restores what the checkpoint holds that training resumes from; gives all devices the same."""
        if state.global_step > 0:
            path = self._path(args, state)
            if not path.is_file():
                raise RunError(f"cannot resume the parameters of the loss: there is no {path}")
            saved = load_file(path)
            for name, parameter in self.parameters.items():
                parameter.data.copy_(saved[name])
            # The trainer does not say which folder it resumes from, but hands on what state() gave it.
            callbacks: Any = state.stateful_callbacks
            expected = callbacks.get(type(self).__name__, {}).get("attributes", {})
            if expected != self.state()["attributes"]:
                raise RunError(f"{path} is not of the checkpoint that training resumes from: keep its output_dir")
        if get_world_size() > 1:
            for parameter in self.parameters.values():
                torch.distributed.broadcast(parameter.data, src=0)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Averages the gradients over the devices, as the trainer does for the model's."""
        if get_world_size() > 1:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad /= get_world_size()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Adds them to the checkpoint that was just written."""
        if state.is_world_process_zero:
            save_file({name: parameter.data for name, parameter in self.parameters.items()}, self._path(args, state))

    def state(self) -> dict[str, Any]:
        """What the trainer writes into a checkpoint's state: the parameters' checksum."""
        return {"args": {}, "attributes": {"sha256": tensors_sha256(self.parameters)}}

    def _path(self, args: TrainingArguments, state: TrainerState) -> Path:
        return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / self.FILE


class LossProgress(ProgressCallback):
    """Transformers' progress bar, with the current loss beside it instead of a line for every step.

    Where the output is no terminal there is no bar: a log file holds the lines of :class:`STSCallback`.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draws the bar."""
        hidden = None if state.is_world_process_zero else True  # None: where there is no terminal
        done = state.global_step
        self.training_bar: Any = tqdm(total=state.max_steps, initial=done, dynamic_ncols=True, disable=hidden)
        self.current_step = done

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Shows the loss of the last step."""
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.4f}", refresh=False)
