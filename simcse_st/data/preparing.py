"""The data part of a recipe: loaded, checked, described, and written out."""

from __future__ import annotations

import logging
import os.path
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simcse_st.data import (
    GradedPairs,
    NLIRule,
    Reading,
    Source,
    TrainingData,
    load_graded_pairs,
    load_pairs,
    load_sentences,
    truncation,
)
from simcse_st.data.rows import listed
from simcse_st.environment import package_versions
from simcse_st.errors import InputError, RunError
from simcse_st.folder import check_folder, make_folder, write_json
from simcse_st.places import resolve
from simcse_st.recipe import HubDataset, Recipe, check_combinations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TRAIN_FILE = "train.jsonl"


@dataclass(frozen=True)
class RecipeData:
    """What a recipe trains on and is measured on."""

    train: TrainingData
    dev: GradedPairs
    test: GradedPairs

    def manifest(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, Any]:
        """What identifies the data, with what the training length cuts off."""
        cut = truncation(tokenizer, self.train.texts(), max_length)
        name = Path(tokenizer.name_or_path)
        cut["tokenizer"] = (
            name.name if name.is_absolute() else str(name)
        )  # a folder of this machine is its own business
        return {"train": {**self.train.facts, "truncation": cut}, "dev": self.dev.facts, "test": self.test.facts}


def load_data(recipe: Recipe) -> RecipeData:
    """Reads all data that a recipe names, and compares it with what the recipe expects.

    Raises:
        InputError: Something cannot be used.
    """
    check_combinations(recipe)
    dev = load_graded_pairs(source_of(recipe.data.dev, "validation"))
    test = load_graded_pairs(source_of(recipe.data.test, "test"))
    train = _load_training_data(recipe)
    _check_expected(recipe, train)
    return RecipeData(train, dev, test)


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
    check_folder(folder, overwrite)
    from simcse_st.models import load_tokenizer  # and with it torch: what can be refused without has been by now

    tokenizer = load_tokenizer(resolve(recipe.model.base), recipe.model.revision)
    data = load_data(recipe)
    manifest = data.manifest(tokenizer, recipe.training.max_length)
    state_data(recipe, manifest)
    try:
        make_folder(folder, recipe.to_yaml())
        unfinished = folder / f"{TRAIN_FILE}.part"
        try:
            data.train.write(unfinished)
            unfinished.rename(folder / TRAIN_FILE)
        finally:
            unfinished.unlink(missing_ok=True)
        outputs = [{"file": TRAIN_FILE, "rows": len(data.train), "sha256": data.train.facts["prepared_sha256"]}]
        packages = package_versions()
        write_json(folder / "manifest.json", {**manifest, "outputs": outputs, "packages": packages})
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {error.strerror}") from error
    return folder


def state_data(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Says once what was read, what was left out, and what is going to be trained on."""
    facts, cut = manifest["train"], manifest["train"]["truncation"]
    for split in ("train", "dev", "test"):
        for layout in manifest[split]["columns"] if split != "train" else ():
            if layout.startswith("without") or layout.startswith("SentEval"):
                logger.info("%-8s %s: read %s", split, _first_source(manifest[split]), layout)
    if facts["columns_left_out"]:
        logger.warning("columns  %s hold no text role and are left out", listed(facts["columns_left_out"]))
    if recipe.data.kind == "sentences":
        logger.info(
            "data     %d distinct sentences of %d rows: %d texts, %d more were blank",
            facts["sentences"], facts["rows_read"], facts["texts"], facts["blank_texts"],
        )  # fmt: skip
    else:
        logger.info(
            "data     %d pairs of %d rows; %d (%.1f%%) have a hard negative, %d hard negatives in all",
            facts["pairs"], facts["rows_read"], facts["pairs_with_hard_negative"],
            100 * facts["share_with_hard_negative"], facts["hard_negatives"],
        )  # fmt: skip
    dropped = [f"{count} {reason.replace('_', ' ')}" for reason, count in facts["dropped"].items() if count]
    if dropped:
        logger.info("dropped  %s", ", ".join(dropped))
    if facts["words_for_nothing"]:
        words = ", ".join(f"{word!r} ({count} times)" for word, count in facts["words_for_nothing"].items())
        logger.warning(
            "odd      hard negatives that read %s are trained on as texts: leave the cell empty for none", words
        )
    for source in facts["sources"]:
        if "quotes" in source:
            way = "as in a CSV" if source["quotes"] == "csv" else "characters of the text"
            logger.info("quotes   in %s are %s", source["file"], way)
    for line in facts["unusable_rows"]:
        logger.warning("unusable %s", line)
    logger.info(
        "lengths  %d of %d texts (%.1f%%) are longer than %d tokens; %d tokens are cut off",
        cut["texts_truncated"], cut["texts"], 100 * cut["texts_truncated"] / cut["texts"], cut["max_length"],
        cut["tokens_truncated"],
    )  # fmt: skip


def _first_source(facts: dict[str, Any]) -> str:
    source = facts["sources"][0]
    return str(source.get("file") or source["dataset"])


def _load_training_data(recipe: Recipe) -> TrainingData:
    data = recipe.data
    sample = data.sample
    reading = Reading(
        columns=data.columns.model_dump(exclude_none=True) if data.columns else {},
        strict=data.strict,
        max_characters=data.max_characters,
        sample_rows=sample.rows if sample else None,
        sample_seed=sample.seed if sample else 0,
    )
    source = source_of(data.train, "train", None if data.quotes is None else data.quotes == "csv")
    if data.kind == "sentences":
        return load_sentences(source, reading)
    return load_pairs(
        source,
        reading,
        rule=NLIRule(**data.nli.model_dump()),
        hard_negatives=data.hard_negatives,
        drop_duplicates=data.drop_duplicates,
    )


def source_of(reference: str | list[str] | HubDataset, default_split: str, quotes: bool | None = None) -> Source:
    """The source that a key of a recipe names.

    Args:
        reference: The key's value.
        default_split: The split of a hub data set that names none.
        quotes: As :class:`~simcse_st.data.Source` takes it.
    """
    if isinstance(reference, HubDataset):
        split = reference.split or default_split
        return Source(
            reference.dataset, reference.config, split, reference.revision, reference.files, reference.streaming
        )
    if isinstance(reference, list):
        return Source(tuple(map(resolve, reference)), quotes=quotes)
    return Source(resolve(reference), split=default_split, quotes=quotes)


def _check_expected(recipe: Recipe, train: TrainingData) -> None:
    """Compares the data with what the recipe says of its source.

    Raises:
        InputError: They differ.
    """
    expect, reference = recipe.data.expect, recipe.data.train
    if expect is None:
        return
    if isinstance(reference, list):
        raise InputError("data.expect is about one source, but data.train is a list: join the files, or leave it out")
    name = reference.dataset if isinstance(reference, HubDataset) else reference
    if os.path.normpath(expect.source) not in (os.path.normpath(name), Path(name).name):
        logger.warning("expect   is about %s, so nothing is expected of %s", expect.source, name)
        return
    found = {**train.facts, "sha256": train.facts["sources"][0].get("sha256")}
    # Of the data as they are, which training without hard negatives does not use.
    about = {"source"} if recipe.data.hard_negatives else {"source", "pairs_with_hard_negative", "prepared_sha256"}
    for key, wanted in expect.model_dump(exclude=about, exclude_none=True).items():
        value = found.get(key)
        begin, elided, end = str(wanted).partition("...")
        same = str(value).startswith(begin) and str(value).endswith(end) if elided else value == wanted
        if not same:
            got = f"of {expect.source} it is {value}" if value is not None else f"{expect.source} has none"
            raise InputError(f"data.expect.{key} is {wanted}, but {got}")
