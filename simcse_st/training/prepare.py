"""The data of a recipe: read, described, and written down."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from simcse_st.console import progress
from simcse_st.data import HeldOut, TrainingData
from simcse_st.data.held_out import check_held_out, load_data
from simcse_st.data.sources import find_sources, resolve
from simcse_st.encoders import encoder_path, tokenizer_at_hand
from simcse_st.errors import RunError, listed
from simcse_st.recipe import Recipe
from simcse_st.records import SPLITS, Manifest, Overlap, Record, RetrievalFacts, Split, TrainFacts, Truncation
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
        recipe: The recipe; of its base, only the tokenizer is loaded, where it is on this disk.
        output: The folder; by default ``prepared/NAME``.
        overwrite: Whether what an earlier call left in that folder may be replaced.

    Returns:
        The folder: ``train.jsonl``, ``manifest.json`` and ``recipe.yaml``.

    Raises:
        InputError: Something cannot be used. Nothing has been written.
        RunError: The folder's disk is full.
    """
    folder = Path(output) if output else Path("prepared") / recipe.name
    check_data_places(recipe)
    with locked(folder):
        check_free(folder, overwrite)
        train, held_out = load_data(recipe.data)
        prompt = (recipe.model.prompts or {}).get(recipe.model.prompt or "", "")
        facts = facts_of_texts(recipe, train, held_out, tokenizer_at_hand(recipe.model), prompt)
        manifest = PreparedManifest(
            train=facts,
            dev=held_out["dev"].facts,
            test=held_out["test"].facts,
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
    check_data_places(recipe)


def check_data_places(recipe: Recipe) -> None:
    """The same for the data alone."""
    find_sources(recipe.data)
    check_held_out(recipe.data.dev, "dev")
    check_held_out(recipe.data.test, "test")


def facts_of_texts(
    recipe: Recipe, data: TrainingData, held_out: Mapping[Split, HeldOut], tokenizer: Any | None, prompt: str = ""
) -> TrainFacts:
    """The facts about training data, with those that take a look at every text of it.

    Args:
        recipe: The recipe.
        data: Its training data.
        held_out: Its dev and test, which should not stand in them.
        tokenizer: The base's tokenizer, if it is at hand.
        prompt: What stands before every text, whose tokens count too.
    """
    texts_of = {split: set(one.texts()) for split, one in held_out.items()}
    wanted = set().union(*texts_of.values())
    pairs_of = {split: [_pair(*pair) for pair in one.pairs()] for split, one in held_out.items()}
    wanted_pairs = {pair for pairs in pairs_of.values() for pair in pairs}
    found: set[str] = set()
    found_pairs: set[tuple[str, str]] = set()
    lengths = _Lengths(tokenizer, recipe.training.max_length) if tokenizer else None
    same = own = 0
    rows = iter(progress("counting tokens", len(data), data.rows()))
    while batch := list(islice(rows, 1000)):
        texts = []
        for anchor, *others in batch:
            positive, negatives = others or (None, [])
            row = [anchor, *([] if positive is None else [positive]), *negatives]
            texts += row
            same += anchor == positive
            own += sum(text in (anchor, positive) for text in negatives)
            found_pairs.update({_pair(anchor, other) for other in row[1:]} & wanted_pairs)
        found.update(wanted.intersection(texts))
        if lengths:
            lengths.add([prompt + text for text in texts])
    overlap = {}
    for split, sentences in texts_of.items():
        overlap[split] = Overlap(
            sentences=len(sentences & found),
            of_sentences=len(sentences),
            pairs=sum(pair in found_pairs for pair in pairs_of[split]),
            of_pairs=len(pairs_of[split]),
        )
    base = Path(resolve(recipe.model.base)).expanduser()
    name = base.name if base.exists() else recipe.model.base  # a folder of this machine is its own business
    update = {"truncation": lengths and lengths.facts(name), "overlap": overlap}
    return data.facts.model_copy(update={**update, "anchors_as_positives": same, "own_hard_negatives": own})


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one <= other else (other, one)


class _Lengths:
    """Counts the tokens of texts, and what of them a limit cuts off, special tokens included."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self.tokenizer, self.limit = tokenizer, limit
        self.special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
        self.counts = dict.fromkeys(
            ("texts", "texts_truncated", "tokens", "tokens_truncated", "unknown_tokens", "texts_unknown"), 0
        )

    def add(self, texts: list[str]) -> None:
        """Counts these."""
        counts = self.counts
        counts["texts"] += len(texts)
        for ids in self.tokenizer(texts, truncation=False, verbose=False)["input_ids"]:
            counts["tokens"] += len(ids)
            counts["texts_truncated"] += len(ids) > self.limit
            counts["tokens_truncated"] += max(0, len(ids) - self.limit)
            if unknown := ids.count(self.tokenizer.unk_token_id):
                counts["unknown_tokens"] += unknown
                counts["texts_unknown"] += unknown == sum(number not in self.special for number in ids)

    def facts(self, name: str) -> Truncation:
        """The counts, under the name of the tokenizer."""
        return Truncation(tokenizer=name, max_length=self.limit, **self.counts)


def state_data(recipe: Recipe, manifest: Manifest) -> None:
    """Says once what was read, what was left out, and what is going to be trained on."""
    facts, cut = manifest.train, manifest.train.truncation
    for split in SPLITS:
        for facts_of in manifest.held_out(split).parts.values():
            name = facts_of.sources[0].name
            if isinstance(facts_of, RetrievalFacts):
                logger.info(
                    "%-8s %s: %d queries, %d passages, %d to find",
                    split, name, facts_of.queries, facts_of.passages, facts_of.relevant,
                )  # fmt: skip
            for layout in facts_of.columns:
                if layout.startswith(("without", "SentEval")):
                    logger.info("%-8s %s: read %s", split, name, layout)
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
    for one in facts.of_sources:
        logger.info("source   %s: %d", one.name, one.rows)
    dropped = [f"{count} {reason.replace('_', ' ')}" for reason, count in facts.dropped.items() if count]
    if dropped:
        logger.info("dropped  %s", ", ".join(dropped))
    for line in facts.unusable_rows:
        logger.warning("unusable %s", line)
    for split, overlap in facts.overlap.items():
        if overlap.sentences:
            logger.warning(
                "overlap  %d of %d sentences of %s stand in the training data, and %d of its %d pairs in one row",
                overlap.sentences, overlap.of_sentences, split, overlap.pairs, overlap.of_pairs,
            )  # fmt: skip
    if facts.anchors_as_positives:
        logger.warning("data     %d anchors are their own positive", facts.anchors_as_positives)
    if facts.own_hard_negatives:
        logger.warning(
            "data     %d hard negatives are their row's anchor or positive: data.drop_duplicates leaves them out",
            facts.own_hard_negatives,
        )  # fmt: skip
    if cut is None:
        return
    if cut.unknown_tokens:
        logger.log(
            logging.WARNING if cut.texts_unknown else logging.INFO,
            "unknown  %.2f%% of the tokens are unknown to the tokenizer; %d texts are nothing else",
            100 * cut.unknown_tokens / cut.tokens, cut.texts_unknown,
        )  # fmt: skip
    logger.info(
        "lengths  %d of %d texts (%.1f%%) are longer than %d tokens; %d tokens are cut off",
        cut.texts_truncated, cut.texts, 100 * cut.texts_truncated / cut.texts, cut.max_length,
        cut.tokens_truncated,
    )  # fmt: skip
