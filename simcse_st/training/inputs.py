"""Everything that a recipe needs, loaded and checked before anything is written."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from transformers import set_seed

from simcse_st.data import HeldOut, TrainingData
from simcse_st.encoders import encoder_path
from simcse_st.errors import InputError
from simcse_st.identity import describe_modules, dropout_probabilities, length_of
from simcse_st.models import Stack, build_stack
from simcse_st.recipe import Recipe
from simcse_st.records import Environment, Manifest, Split
from simcse_st.run import describe_environment, file_sha256
from simcse_st.training.prepare import facts_of_texts, state_data

logger = logging.getLogger(__name__)

_SAMPLES = 3  # rows, for the card


@dataclass(frozen=True)
class Inputs:
    """Everything a run needs."""

    stack: Stack
    data: TrainingData
    held_out: dict[Split, HeldOut]
    manifest: Manifest
    environment: Environment
    base_model: str | None
    """The base's id on the Hub; null for a local folder."""

    @property
    def model(self) -> SentenceTransformer:
        """What is trained."""
        return self.stack.model


def load_inputs(
    recipe: Recipe, data: TrainingData, held_out: dict[Split, HeldOut], devices: int, device: str
) -> Inputs:
    """Checks and loads all that a run needs beside its data, cheap things first.

    Args:
        recipe: What is going to run.
        data: Its training data.
        held_out: Its dev and test.
        devices: The number of processes that train together.
        device: Where to put this one's model.
    """
    precision = choose_precision(recipe, torch.device(device))
    check_machine(recipe, devices, precision)
    by_source = recipe.training.batches == "by_source"
    for number, rows in enumerate(data.rows_of_sources if by_source else [len(data)]):
        if rows < recipe.training.batch_size:
            name = f"data.train.{number}" if by_source else "data.train"
            raise InputError(
                f"{name}: {rows} {recipe.data.kind} are fewer than one batch of {recipe.training.batch_size}: lower "
                "training.batch_size or give more data"
            )
    if recipe.model.sha256:
        _check_weights(Path(encoder_path(recipe.model.base)), recipe.model.sha256)
    set_seed(recipe.seed)  # for the first weights of a head that is kept
    stack = build_stack(recipe.model, device)
    model = stack.model
    _check_dropout(recipe, model)
    limit = recipe.training.max_length
    if limit > (longest := length_of(model) or limit):
        raise InputError(f"training.max_length is {limit}, but the model takes {longest} tokens at most")
    samples = [list(row) for row in islice(data.rows(), _SAMPLES)] if recipe.card.samples else None
    prompt = model.prompts.get(model.default_prompt_name or "") or ""
    facts = facts_of_texts(recipe, data, held_out, model.tokenizer, prompt)
    manifest = Manifest(
        train=facts.model_copy(update={"samples": samples}),
        dev=held_out["dev"].facts,
        test=held_out["test"].facts,
        base_changes=stack.changes,
    )
    environment = describe_environment(model.device, precision, devices)
    is_local = Path(encoder_path(recipe.model.base)).exists()  # asked now: the folder may be gone when the run ends
    return Inputs(stack, data, held_out, manifest, environment, None if is_local else recipe.model.base)


def check_machine(recipe: Recipe, devices: int, precision: str) -> None:
    """Makes sure that keys are right together, and on this machine.

    Args:
        recipe: What is going to run.
        devices: The number of processes that train together.
        precision: That of the run.
    """
    own = recipe.model.head == "train-only" or recipe.loss.mlm_weight > 0
    if devices > 1 and own and recipe.training.max_grad_norm and precision == "fp16":
        # Clipping unscales fp16 gradients before those of the loss's own parameters could be averaged.
        raise InputError(
            "training.precision: fp16 with training.max_grad_norm and a train-only head or mlm_weight does not work on "
            "several devices: use bf16 or fp32"
        )
    if recipe.model.attention == "flash_attention_2" and not (torch.cuda.is_available() and precision != "fp32"):
        raise InputError("model.attention: flash_attention_2 takes a GPU, and training.precision fp16 or bf16")
    if recipe.training.batch_size % devices:
        raise InputError(
            f"training.batch_size is {recipe.training.batch_size}, but must be a multiple of the {devices} processes"
        )
    if devices == 1 and torch.cuda.device_count() > 1:
        raise InputError(
            f"{torch.cuda.device_count()} GPUs without a launcher: start one process a GPU, e.g. torchrun "
            "--nproc-per-node gpu -m simcse_st train ..., or choose one with CUDA_VISIBLE_DEVICES=0"
        )


def _check_dropout(recipe: Recipe, model: SentenceTransformer) -> None:
    """Without dropout, two views of a sentence are one vector, and nothing is learned."""
    probabilities = dropout_probabilities(model)
    if recipe.data.kind == "sentences" and not recipe.model.shared_dropout_mask and not any(probabilities.values()):
        names = ", ".join(f"{name}={value:g}" for name, value in probabilities.items()) or "it has none"
        raise InputError(f"the encoder's dropout is off ({names}), so there are no two views: set model.dropout=0.1")


def _check_weights(folder: Path, expected: str) -> None:
    path = folder / "model.safetensors"
    if not path.is_file():
        raise InputError(f"model.sha256: {folder} has no model.safetensors to compare it with")
    if (found := file_sha256(path)) != expected:
        raise InputError(
            f"{path}: its SHA-256 is {found}, but model.sha256 requires {expected} (for another base set it to null)"
        )


def choose_precision(recipe: Recipe, device: torch.device) -> str:
    """The precision of a run: what the recipe says or, if that is ``auto``, what suits the device."""
    wanted = recipe.training.precision
    if wanted == "auto":
        if device.type != "cuda":
            return "fp32"
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if wanted == "fp16" and device.type == "cpu":
        raise InputError("training.precision is fp16, which needs a GPU: on this CPU use bf16 or fp32")
    if wanted != "fp32" and device.type == "mps":
        raise InputError(f"training.precision is {wanted}, which is not supported on Apple's GPUs (mps): use fp32")
    return wanted


def state_inputs(recipe: Recipe, inputs: Inputs) -> None:
    """Says once what the loss is going to see."""
    facts, batch = inputs.manifest.train, recipe.training.batch_size
    parameters = sum(parameter.numel() for parameter in inputs.model.parameters())
    hard = facts.hard_negatives / len(inputs.data) * (batch if recipe.loss.share_hard_negatives else 1)
    logger.info(
        "model    %s, %.1fM parameters, %s, on %s in %s",
        recipe.model.base, parameters / 1e6, " -> ".join(describe_modules(inputs.model)), inputs.model.device,
        inputs.environment.precision,
    )  # fmt: skip
    for change in inputs.stack.changes:
        logger.info("base     %s", change)
    state_data(recipe, inputs.manifest)
    logger.info(
        "batches  %d rows: an anchor sees %.1f negatives on average, %d other rows' positives and %.1f hard negatives",
        batch, batch - 1 + hard, batch - 1, hard,
    )  # fmt: skip
    width = inputs.model.get_embedding_dimension() or 0
    if recipe.loss.matryoshka and width not in recipe.loss.matryoshka:
        logger.warning(
            "sizes    %s do not have the model's own, %d, which is not trained", recipe.loss.matryoshka, width
        )
    if recipe.training.batches == "by_source":
        logger.info("batches  of one source each")
    steps, warmup = recipe.training.steps(inputs.data.rows_of_sources)
    if warmup >= steps:
        logger.warning("warm-up  its %d steps are not over when the run ends, after %d", warmup, steps)
    if patience := recipe.training.patience:
        logger.info(
            "patience ends after %d dev scores without a better one; the schedule stays that of %d steps",
            patience,
            steps,
        )
    if recipe.data.kind == "sentences":
        logger.info("hint     a loss near zero and an early best step are normal here: two views are easily matched")
