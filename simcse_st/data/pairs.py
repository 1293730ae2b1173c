"""Training pairs with their hard negatives, out of labelled NLI rows or of pairs and triplets."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simcse_st.data.sources import Row, Source, excerpt
from simcse_st.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

# (premise, hypothesis, label) and (anchor, positive, negative...), under the names that public data gives them.
_NLI_COLUMNS = (("premise", "hypothesis", "label"), ("sentence1", "sentence2", "gold_label"))
_PAIR_COLUMNS = (("anchor", "positive", r"negative(_\d+)?"), ("sent0", "sent1", "hard_neg"))

ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)
_LABELS = {
    **{"entailment": ENTAILMENT, "neutral": NEUTRAL, "contradiction": CONTRADICTION},
    **{str(label): label for label in range(3)},
}
_NO_CONSENSUS = ("-1", "-", "")

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
    rows = iter(source.rows())
    first = next(rows, None)
    if first is None:
        raise InputError(f"{source.name}: there is no row in it")
    columns = Columns.of(first)
    make, rule = (_pairs_of_labelled, NLI_RULE) if columns.labelled else (_pairs_as_given, PAIR_RULE)
    counts: Counter[str] = Counter(rows_read=0, rows_without_consensus=0)
    rows = itertools.chain([first], rows)
    triples = make(rows, columns, counts, lambda kept: draw_sample(kept, source, sample_rows, sample_seed))
    if not triples:
        raise InputError(f"{source.name}: none of its {counts['rows_read']} rows is an entailment, so there is no pair")
    anchors, positives, negatives = (list(column) for column in zip(*triples, strict=True))
    if not hard_negatives:
        negatives, rule = [[] for _ in negatives], f"{rule}; hard negatives are left out"
    with_negative = sum(map(bool, negatives))
    facts = {
        "source": source.record(),
        "rule": rule,
        **counts,
        "sample": None if sample_rows is None else {"rows": sample_rows, "seed": sample_seed},
        "pairs": len(anchors),
        "pairs_with_hard_negative": with_negative,
        "share_with_hard_negative": with_negative / len(anchors),
        "hard_negatives": sum(map(len, negatives)),
        "columns_left_out": columns.left_out,
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


Triple = tuple[str, str, list[str]]
Sampler = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Columns:
    """Which columns hold what, found by their names."""

    labelled: bool
    first: str
    second: str
    third: str
    """The label's name, or a pattern of the hard negatives' names."""
    left_out: list[str]

    @classmethod
    def of(cls, row: Row) -> Columns:
        """Recognises the columns of a row.

        Raises:
            InputError: They are neither of labelled rows nor of pairs.
        """
        for labelled, known in ((True, _NLI_COLUMNS), (False, _PAIR_COLUMNS)):
            for first, second, third in known:
                needed = {first, second, third} if labelled else {first, second}
                if needed <= set(row.cells):
                    left_out = [name for name in row.cells if name not in needed and not re.fullmatch(third, name)]
                    return cls(labelled, first, second, third, left_out)
        raise InputError(
            f"{row.where}: found the columns {', '.join(map(str, row.cells))}, but need premise, hypothesis and label, "
            "or anchor and positive (with negative, negative_1, ...)"
        )


def _pairs_of_labelled(rows: Iterable[Row], columns: Columns, counts: Counter[str], sample: Sampler) -> list[Triple]:
    labelled = []
    for row in rows:
        counts["rows_read"] += 1
        label = label_of(row, columns.third)
        if label is None:
            counts["rows_without_consensus"] += 1
        elif label == NEUTRAL:
            labelled.append(("", "", label))  # counts for the sample; its text is not used
        else:
            labelled.append((text_of(row, columns.first), text_of(row, columns.second), label))
    labelled = sample(labelled)
    first_contradiction: dict[str, str] = {}
    for premise, hypothesis, label in labelled:
        if label == CONTRADICTION:
            first_contradiction.setdefault(premise, hypothesis)
    return [
        (premise, hypothesis, [first_contradiction[premise]] if premise in first_contradiction else [])
        for premise, hypothesis, label in labelled
        if label == ENTAILMENT
    ]


def _pairs_as_given(rows: Iterable[Row], columns: Columns, counts: Counter[str], sample: Sampler) -> list[Triple]:
    triples = []
    for row in rows:
        counts["rows_read"] += 1
        triples.append((text_of(row, columns.first), text_of(row, columns.second), negatives_of(row, columns)))
    return sample(triples)


def label_of(row: Row, column: str) -> int | None:
    """A row's label, 0 to 2, or None where there is no consensus."""
    value = row.cells.get(column)
    # bool and float compare equal to int, but mean something else here.
    if value is None or (isinstance(value, (str, int)) and str(value) in _NO_CONSENSUS):
        return None
    label = _LABELS.get(str(value)) if isinstance(value, str) or type(value) is int else None
    if label is None:
        raise InputError(
            f"{row.where}: {column} is {excerpt(value)}, but must be entailment, neutral or contradiction, or 0, 1, 2, "
            "or -1 for no consensus"
        )
    return label


def text_of(row: Row, column: str) -> str:
    """A sentence that must be there."""
    value = row.cells.get(column)
    if not isinstance(value, str) or not value.strip():
        what = "is missing" if value is None else f"is {excerpt(value)}"
        raise InputError(f"{row.where}: {column} {what}, but must be a sentence")
    return value


def negatives_of(row: Row, columns: Columns) -> list[str]:
    """All hard negatives of a row: in any number of columns, each a sentence, a list of sentences, or nothing."""
    found = []
    for name, value in row.cells.items():
        if not re.fullmatch(columns.third, name):
            continue
        for text in value if isinstance(value, list) else [value]:
            if text is None or text == "":
                continue
            if not isinstance(text, str) or not text.strip():
                raise InputError(
                    f"{row.where}: {name} is {excerpt(text)}, but must be a sentence, or null where there is none"
                )
            found.append(text)
    return found


def draw_sample(kept: list[Any], source: Source, rows: int | None, seed: int) -> list[Any]:
    """A sample fixed by its seed, in the order of the file."""
    if rows is None:
        return kept
    if rows > len(kept):
        raise InputError(f"data.sample.rows is {rows}, but {source.name} has {len(kept)} usable rows")
    return [kept[index] for index in sorted(random.Random(seed).sample(range(len(kept)), rows))]
