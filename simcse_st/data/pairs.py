"""Training pairs with their hard negatives, out of labelled NLI rows or of pairs and triplets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simcse_st.data.sources import Source
from simcse_st.data.table import CONTRADICTION, ENTAILMENT, Table, read_table
from simcse_st.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

NLI_RULE = (
    "a pair (premise, hypothesis) for every entailment row, in file order; its hard negative is the first "
    "contradiction hypothesis, in file order, of the very same premise; rows without consensus (label -1, '-' or "
    "missing) are dropped"
)
PAIR_RULE = "the rows as they are: anchor, positive and the hard negatives that are not null or empty"


@dataclass(frozen=True)
class Pairs:
    """What is trained on."""

    anchors: list[str]
    positives: list[str]
    negatives: list[list[str]]
    facts: dict[str, Any] = field(default_factory=dict)
    """For the manifest: source, counts and the rule in words."""

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.anchors)

    @property
    def texts(self) -> list[str]:
        """All sentences, with repetitions."""
        return [*self.anchors, *self.positives, *(text for row in self.negatives for text in row)]

    def dataset(self) -> Dataset:
        """The pairs as a data set with the columns ``anchor``, ``positive`` and ``negative``, a list of strings."""
        from datasets import Dataset, Features, List, Value

        text = Value("string")
        return Dataset.from_dict(
            {"anchor": self.anchors, "positive": self.positives, "negative": self.negatives},
            features=Features({"anchor": text, "positive": text, "negative": List(text)}),
        )


def load_pairs(
    source: Source, *, hard_negatives: bool = True, sample_rows: int | None = None, sample_seed: int = 42
) -> Pairs:
    """Reads training data and makes pairs of it.

    Args:
        source: Labelled NLI rows, or rows with an anchor, a positive and any number of hard negatives.
        hard_negatives: False leaves the hard negatives out.
        sample_rows: Use only so many rows (of labelled rows, those with consensus), drawn by seed, in file order.
        sample_seed: The seed of the sample.

    Raises:
        InputError: A row that cannot be used, with its place; or no pair at all.
    """
    table = read_table(source, sample_rows, sample_seed)
    if table.columns.kind == "sentences":
        raise InputError(
            f"{source.name}: single sentences make no pairs: set data.kind=sentences for the unsupervised mode"
        )
    labelled = table.columns.kind == "labelled"
    triples, rule = (_of_labelled(table), NLI_RULE) if labelled else (_as_given(table), PAIR_RULE)
    if not triples:
        raise InputError(f"{source.name}: no pair: none of its {table.facts['rows_read']} rows is an entailment")
    anchors, positives, negatives = (list(column) for column in zip(*triples, strict=True))
    if not hard_negatives:
        negatives, rule = [[] for _ in negatives], f"{rule}; hard negatives are left out"
    with_negative = sum(map(bool, negatives))
    facts = {
        **table.facts,
        "rule": rule,
        "pairs": len(anchors),
        "pairs_with_hard_negative": with_negative,
        "share_with_hard_negative": with_negative / len(anchors),
        "hard_negatives": sum(map(len, negatives)),
    }
    return Pairs(anchors, positives, negatives, facts)


def truncation(tokenizer: Callable[..., Any], texts: Sequence[str], max_length: int) -> dict[str, Any]:
    """How many texts a limit cuts, and how much of them.

    Args:
        tokenizer: The model's tokenizer.
        texts: The texts of the training data.
        max_length: Tokens that are kept, special tokens included.
    """
    texts_cut = tokens_cut = tokens = 0
    for begin in range(0, len(texts), 10_000):
        for ids in tokenizer(list(texts[begin : begin + 10_000]), truncation=False, verbose=False)["input_ids"]:
            tokens += len(ids)
            texts_cut += len(ids) > max_length
            tokens_cut += max(0, len(ids) - max_length)
    return {
        "max_length": max_length,
        "texts": len(texts),
        "texts_truncated": texts_cut,
        "tokens": tokens,
        "tokens_truncated": tokens_cut,
    }


def _of_labelled(table: Table) -> list[tuple[str, str, list[str]]]:
    columns = table.columns
    first_contradiction: dict[str, str] = {}
    for row in table.rows:
        if table.label(row) == CONTRADICTION:
            first_contradiction.setdefault(table.text(row, columns.first), table.text(row, columns.second))
    triples = []
    for row in table.rows:
        if table.label(row) == ENTAILMENT:
            premise = table.text(row, columns.first)
            negatives = [first_contradiction[premise]] if premise in first_contradiction else []
            triples.append((premise, table.text(row, columns.second), negatives))
    return triples


def _as_given(table: Table) -> list[tuple[str, str, list[str]]]:
    columns = table.columns
    return [
        (table.text(row, columns.first), table.text(row, columns.second), table.negatives(row)) for row in table.rows
    ]
