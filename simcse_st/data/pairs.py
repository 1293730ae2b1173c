"""Training pairs with their hard negatives, out of labelled NLI rows or of pairs and triplets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from simcse_st.data.prepared import TrainingData, describe_pairs, sha256_of_lines
from simcse_st.data.rows import progress
from simcse_st.data.sources import Source
from simcse_st.data.spool import Digests, Spool, Texts, batches
from simcse_st.data.table import CONTRADICTION, ENTAILMENT, Reading, Table, read_table
from simcse_st.errors import InputError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

Pair = tuple[str, str, list[str]]

_NEGATIVE_RULE = {
    "first": "its hard negative is the first contradiction hypothesis, in file order, of the very same premise",
    "all": "its hard negatives are all different contradiction hypotheses, in file order, of the very same premise",
    "random": "its hard negative is one contradiction hypothesis of the very same premise, drawn by the seed {seed}",
}
_PAIR_RULE = {"all": "every entailment row", "one_per_premise": "the first entailment row of every premise"}


@dataclass(frozen=True)
class NLIRule:
    """How labelled rows become pairs.

    Attributes:
        pairs: A pair for every entailment row, or for the first of every premise only.
        hard_negatives: Of the contradictions of the same premise: the first, all, or one at random.
        seed: Which one at random.
    """

    pairs: Literal["all", "one_per_premise"] = "all"
    hard_negatives: Literal["first", "all", "random"] = "first"
    seed: int = 42

    def __post_init__(self) -> None:
        for key, allowed in (("pairs", _PAIR_RULE), ("hard_negatives", _NEGATIVE_RULE)):
            if getattr(self, key) not in allowed:
                raise InputError(f"{key} is {getattr(self, key)!r}: {nearest(str(getattr(self, key)), allowed)}")

    def __str__(self) -> str:
        """The rule in words."""
        return (
            f"a pair (premise, hypothesis) for {_PAIR_RULE[self.pairs]}, in file order; "
            f"{_NEGATIVE_RULE[self.hard_negatives].format(seed=self.seed)}; rows without consensus (label -1, '-' or "
            "missing) are dropped"
        )


def load_pairs(
    source: Source | str | Path,
    reading: Reading | None = None,
    *,
    rule: NLIRule | None = None,
    hard_negatives: bool = True,
    drop_duplicates: bool = False,
) -> TrainingData:
    """Reads training data and makes pairs of it.

    Args:
        source: Labelled NLI rows, or rows with an anchor, a positive and any number of hard negatives.
        reading: How to read the rows.
        rule: How labelled rows become pairs.
        hard_negatives: False leaves the hard negatives out.
        drop_duplicates: Whether of equal pairs with equal hard negatives only the first is kept.

    Returns:
        Rows ``anchor``, ``positive``, ``negative``, a list.

    Raises:
        InputError: A row that cannot be used, with its place; or no pair at all.
    """
    source = source if isinstance(source, Source) else Source(source)
    table = read_table(source, reading or Reading(), sentences=False)
    if table.kind == "labelled":
        used = rule or NLIRule()
        pairs, words = _of_labelled(table, used), str(used)
    elif rule not in (None, NLIRule()):
        raise InputError(f"data.nli: {source.name} holds pairs as they are, and no labels to make them from")
    else:
        pairs = ((texts[0], texts[1], texts[2:]) for _, texts in table)
        words = "the rows as they are: anchor, positive and the hard negatives that are not null or empty"
    if not hard_negatives:
        pairs = ((anchor, positive, []) for anchor, positive, _ in pairs)
        words += "; hard negatives are left out"
    spool = Spool(_schema(), pairs)
    dropped = dict(table.facts["dropped"])
    if drop_duplicates:
        everything, spool = spool, _without_duplicates(spool)
        dropped["duplicate"] = len(everything) - len(spool)
        words += "; of equal rows the first is kept"
    if not len(spool):
        rows = "rows of the sample" if table.facts["sample"] else "rows that are left"
        found = f"none of the {rows} is an entailment" if table.kind == "labelled" else "no row is left"
        numbers = [f"{count} {reason.replace('_', ' ')}" for reason, count in dropped.items() if count]
        why = ", ".join([f"{table.facts['rows_read']} read", *numbers])
        raise InputError(f"{source.name}: no pair: {found} ({why})")
    counts = describe_pairs(progress(spool, "counting", len(spool)))
    facts = {**table.facts, "dropped": dropped, "rule": words, **counts}
    data = TrainingData(spool, facts)
    facts["prepared_sha256"] = sha256_of_lines(progress(data.lines(), "hashing", len(data)))
    return data


def _without_duplicates(spool: Spool) -> Spool:
    digests = Digests()
    for anchor, positive, negatives in spool:
        digests.add(anchor, positive, *negatives)
    return Spool(_schema(), (row for row, first in zip(spool, digests.first(), strict=True) if first))


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema({"anchor": pa.string(), "positive": pa.string(), "negative": pa.list_(pa.string())})


def _of_labelled(table: Table, rule: NLIRule) -> Iterator[Pair]:
    contradictions = _Contradictions(table, rule)
    first = _first_of_premise(table) if rule.pairs == "one_per_premise" else None
    entailments = (texts for label, texts in table if label == ENTAILMENT)
    number = 0
    for batch in batches(entailments):
        negatives = contradictions.of([premise for premise, _ in batch])
        for (premise, hypothesis), of_row in zip(batch, negatives, strict=True):
            if first is None or first[number]:
                yield premise, hypothesis, of_row
            number += 1


def _first_of_premise(table: Table) -> np.ndarray:
    """Which entailment rows are the first of their premise."""
    return Digests(texts[0] for label, texts in table if label == ENTAILMENT).first()


class _Contradictions:
    """The contradiction hypotheses by their premise: 32 bytes for each in memory, the texts on disk."""

    def __init__(self, table: Table, rule: NLIRule) -> None:
        self._rule = rule
        self._random = random.Random(rule.seed)
        self._hypotheses = Texts()
        premises = Digests()
        for label, texts in table:
            if label == CONTRADICTION:
                premises.add(texts[0])
                self._hypotheses.append(texts[1])
        digests = premises.array()
        # Stable, so that those of one premise stay in file order.
        self._order = np.argsort(digests, kind="stable")
        self._premises = digests[self._order]

    def of(self, premises: list[str]) -> Iterator[list[str]]:
        """The hard negatives of each premise, by the rule."""
        digests = Digests(premises).array()
        begins = np.searchsorted(self._premises, digests, side="left").tolist()
        ends = np.searchsorted(self._premises, digests, side="right").tolist()
        for begin, end in zip(begins, ends, strict=True):
            # Only those that are wanted: a premise may have thousands.
            if begin < end and self._rule.hard_negatives == "first":
                end = begin + 1
            elif begin < end and self._rule.hard_negatives == "random":
                begin = self._random.randrange(begin, end)
                end = begin + 1
            yield list(dict.fromkeys(self._hypotheses[number] for number in self._order[begin:end].tolist()))
