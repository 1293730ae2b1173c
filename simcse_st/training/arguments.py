"""A recipe's ``training`` section as the trainer's own arguments and trackers, proven before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import Trainer, TrainerCallback, get_scheduler
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_reporting_integration_callbacks

from simcse_st.errors import InputError, excerpt, nearest, one_line
from simcse_st.recipe import Recipe
from simcse_st.run import TENSORBOARD
from simcse_st.training.batch import by_source
from simcse_st.training.inputs import Inputs
from simcse_st.training.loss import SimCSELoss

# Transformers 5.24 renamed it, and warns of the old name.
_RECOMPUTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in SentenceTransformerTrainingArguments.__dataclass_fields__
)

# What would break a promise of a run (its own scores choose the step, a batch is a batch of the loss, a resumed run is
# the uninterrupted one) or does nothing here.
_REFUSED = re.compile(
    r"do_|eval_|\w+_eval|\w+_eval_|save_|hub_|push_to_|load_best|metric_for|greater_is|resume_|restore_|ignore_data|"
    r"enable_jit|gradient_accumulation|auto_find|fsdp|deepspeed|parallelism|accelerator|local_rank|batch_|multi_dataset|"
    r"prompts|router|logging_|warmup_ratio|label_|length_|train_sampling|prediction_loss|include_for|remove_unused|"
    r"(activation|gradient)_checkpointing$"
)


def training_arguments(
    recipe: Recipe, inputs: Inputs, loss: SimCSELoss, checkpoints: Path, devices: int
) -> SentenceTransformerTrainingArguments:
    """The trainer's arguments.

    Args:
        recipe: What is going to run.
        inputs: What it needs.
        loss: Its loss, which holds all parameters that are trained.
        checkpoints: The trainer's ``output_dir``.
        devices: The number of processes.

    Raises:
        InputError: ``training.args`` or the schedule cannot be used.
    """
    settings = recipe.training
    steps, warmup = settings.steps(inputs.data.rows_of_sources)
    # Transformers' plain "constant" ignores the warm-up.
    schedule = "constant_with_warmup" if settings.schedule == "constant" and warmup else settings.schedule
    device = inputs.model.device.type
    ours: dict[str, Any] = {
        "output_dir": str(checkpoints),
        "per_device_train_batch_size": settings.batch_size // devices,
        "num_train_epochs": settings.epochs,
        "max_steps": settings.max_steps or -1,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": schedule,
        "warmup_steps": warmup,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm or 0.0,
        "fp16": inputs.environment.precision == "fp16",
        "bf16": inputs.environment.precision == "bf16",
        "use_cpu": device == "cpu",
        "torch_compile": settings.torch_compile,
        # A GPU would wait for its next batch; on a CPU another process would take from training what it gives.
        "dataloader_num_workers": int(device == "cuda") if settings.workers is None else settings.workers,
        "seed": recipe.seed,
        "dataloader_drop_last": True,
        "dataloader_pin_memory": device == "cuda",
        # Every step's own loss, and the true one: by default a NaN is replaced by the mean of the losses before it.
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",  # see trackers()
    }
    if settings.batches == "by_source":
        ours["batch_sampler"] = partial(by_source, source_of=inputs.data.source_of, devices=devices)
    if settings.gradient_checkpointing:
        ours[_RECOMPUTING] = True
    _check_names(settings.args, ours)
    with _refusing("training.args"):
        args = SentenceTransformerTrainingArguments(**{"run_name": recipe.name, **settings.args, **ours})
        make, keys = Trainer.get_optimizer_cls_and_kwargs(args, cast(Any, loss))
        weight = torch.nn.Parameter(torch.zeros(1))
        named = {"params", "model", "optimizer_dict"} & keys.keys()  # some optimizers take a model apart themselves
        optimizer = torch.optim.SGD([weight], lr=1.0) if named else make([weight], **keys)
        _check_rates(args.learning_rate_mapping, loss)
    with _refusing("training.schedule"):
        get_scheduler(schedule, optimizer, warmup, steps, cast(Any, args.lr_scheduler_kwargs))
    return args


def _check_names(given: dict[str, Any], ours: dict[str, Any]) -> None:
    """Makes sure that arguments exist, are of their type, and are nobody else's."""
    hints = get_type_hints(SentenceTransformerTrainingArguments)
    known = SentenceTransformerTrainingArguments.__dataclass_fields__
    for name, value in given.items():
        if name not in known:
            raise InputError(f"training.args: the trainer has no argument {name!r}: {nearest(name, known)}")
        if name in ours or _REFUSED.match(name):
            raise InputError(f"training.args: {name!r} is settled by the run or by another key of the recipe")
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"].removeprefix("Input ")
            raise InputError(f"training.args: {name!r} {problem}, not {excerpt(value)}") from None


def _check_rates(rates: object, loss: SimCSELoss) -> None:
    """Makes sure that each pattern of ``learning_rate_mapping`` is one of some parameter's name."""
    names = [name for name, _ in loss.named_parameters()]
    for pattern in rates if isinstance(rates, dict) else ():
        if not any(re.search(pattern, name) for name in names):
            raise InputError(f"training.args: learning_rate_mapping: {pattern!r} matches no name such as {names[0]!r}")


def trackers(names: list[str], folder: Path) -> list[TrainerCallback]:
    """The callbacks that report to these trackers; they write nothing before training begins.

    Args:
        names: As transformers has them.
        folder: The run's folder. TensorBoard's files go into ``tensorboard`` there, unless the environment says where.

    Raises:
        InputError: A tracker is not known, not installed or not set up.
    """
    made: list[Any] = []
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise InputError(f"training.report_to: no tracker {name!r}: {nearest(name, INTEGRATION_TO_CALLBACK)}")
        try:
            made += [kind() for kind in get_reporting_integration_callbacks([name])]
        except (RuntimeError, ImportError) as error:
            hint = "" if "`" in str(error) else f" (pip install {name})"  # most name their command themselves
            raise InputError(f"training.report_to: {one_line(error)}{hint}") from None
        if name == "tensorboard":  # by default in output_dir, which goes when the run ends
            made[-1].logging_dir = made[-1].logging_dir or str(folder / TENSORBOARD)
    return made


@contextmanager
def _refusing(key: str) -> Iterator[None]:
    """Says in one line what the libraries do not take."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError, RuntimeError, ImportError, re.error) as error:
        raise InputError(f"{key}: {one_line(error)}") from None
