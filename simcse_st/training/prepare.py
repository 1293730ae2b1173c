"""The data of a recipe: read, described, and written down."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from simcse_st.console import progress
from simcse_st.data import TrainingData, load_graded_pairs, load_training_data
from simcse_st.data.sources import find_source, resolve
from simcse_st.data.sts import check_graded_pairs
from simcse_st.encoders import encoder_path, load_tokenizer
from simcse_st.errors import RunError, listed
from simcse_st.recipe import Recipe
from simcse_st.records import SPLITS, Manifest, Record, Truncation
from simcse_st.run import Run, check_free, locked, package_versions

logger = logging.getLogger(__name__)

TRAIN_FILE = "train.jsonl"


class Output(Record):
    """A file that was written."""

    file: str
    rows: int
    sha256: str


class PreparedManifest(Manifest):
    """``manifest.json`` of prepared data: a run's, with what was written and by which versions."""

    FILE: ClassVar = "manifest.json"

    outputs: list[Output]
    packages: dict[str, str]


def prepare(recipe: Recipe, output: str | Path | None = None, *, overwrite: bool = False) -> Path:
    """Writes down what a recipe would train on.

    Args:
        recipe: The recipe; of its model, only the tokenizer is loaded.
        output: The folder; by default ``prepared/NAME``.
        overwrite: Whether what an earlier call left in that folder may be replaced.

    Returns:
        The folder: ``train.jsonl``, ``manifest.json`` and ``recipe.yaml``.

    Raises:
        InputError: Something cannot be used. Nothing has been written.
        RunError: The folder's disk is full.
    """
    folder = Path(output) if output else Path("prepared") / recipe.name
    check_places(recipe)
    with locked(folder):
        check_free(folder, overwrite)
        tokenizer = load_tokenizer(recipe.model)
        dev = load_graded_pairs(recipe.data.dev, "validation", recipe.data.quotes)
        test = load_graded_pairs(recipe.data.test, "test", recipe.data.quotes)
        train = load_training_data(recipe.data)
        cut = count_truncated(tokenizer, recipe, train)
        facts = train.facts.model_copy(update={"truncation": cut})
        manifest = PreparedManifest(
            train=facts,
            dev=dev.facts,
            test=test.facts,
            outputs=[Output(file=TRAIN_FILE, rows=len(train), sha256=facts.prepared_sha256)],
            packages=package_versions(),
        )
        state_data(recipe, manifest)
        run = Run(folder)
        run.begin(recipe)
        unfinished = folder / f"{TRAIN_FILE}.part"
        try:
            train.write(unfinished)
            unfinished.rename(folder / TRAIN_FILE)
        except OSError as error:
            raise RunError(f"{folder}: cannot be written: {error.strerror}") from error
        finally:
            unfinished.unlink(missing_ok=True)
        run.write(manifest)
    return folder


def check_places(recipe: Recipe) -> None:
    """Makes sure, before anything is read, that the files and folders which a recipe names are there."""
    encoder_path(recipe.model.base)
    find_source(recipe.data.train, "train", recipe.data.quotes)
    check_graded_pairs(recipe.data.dev, "validation")
    check_graded_pairs(recipe.data.test, "test")


def count_truncated(tokenizer: Any, recipe: Recipe, data: TrainingData) -> Truncation:
    """How many training texts the training length cuts, and how much of them.

    Args:
        tokenizer: The model's tokenizer.
        recipe: The recipe.
        data: Its training data.
    """
    max_length = recipe.training.max_length
    number = texts_cut = tokens_cut = tokens = 0
    texts = iter(progress("counting tokens", None, data.texts()))
    while batch := list(islice(texts, 1000)):
        number += len(batch)
        for ids in tokenizer(batch, truncation=False, verbose=False)["input_ids"]:
            tokens += len(ids)
            texts_cut += len(ids) > max_length
            tokens_cut += max(0, len(ids) - max_length)
    base = Path(resolve(recipe.model.base)).expanduser()
    return Truncation(
        tokenizer=base.name if base.exists() else recipe.model.base,  # a folder of this machine is its own business
        max_length=max_length,
        texts=number,
        texts_truncated=texts_cut,
        tokens=tokens,
        tokens_truncated=tokens_cut,
    )


def state_data(recipe: Recipe, manifest: Manifest) -> None:
    """Says once what was read, what was left out, and what is going to be trained on."""
    facts, cut = manifest.train, manifest.train.truncation
    for split in SPLITS:
        for layout in manifest.graded(split).columns:
            if layout.startswith(("without", "SentEval")):
                logger.info("%-8s %s: read %s", split, manifest.graded(split).sources[0].name, layout)
    if facts.columns_left_out:
        logger.warning("columns  %s hold no text role and are left out", listed(facts.columns_left_out))
    if recipe.data.kind == "sentences":
        logger.info(
            "data     %d distinct sentences of %d rows: %d texts, %d more were blank",
            facts.sentences, facts.rows_read, facts.texts, facts.blank_texts,
        )  # fmt: skip
    else:
        logger.info(
            "data     %d pairs of %d rows; %d (%.1f%%) have a hard negative, %d hard negatives in all",
            facts.pairs, facts.rows_read, facts.pairs_with_hard_negative,
            100 * facts.share_with_hard_negative, facts.hard_negatives,
        )  # fmt: skip
    dropped = [f"{count} {reason.replace('_', ' ')}" for reason, count in facts.dropped.items() if count]
    if dropped:
        logger.info("dropped  %s", ", ".join(dropped))
    for line in facts.unusable_rows:
        logger.warning("unusable %s", line)
    if cut is None:
        return
    logger.info(
        "lengths  %d of %d texts (%.1f%%) are longer than %d tokens; %d tokens are cut off",
        cut.texts_truncated, cut.texts, 100 * cut.texts_truncated / cut.texts, cut.max_length,
        cut.tokens_truncated,
    )  # fmt: skip
