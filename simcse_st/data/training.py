"""Rows of a source -> what is trained on, with the facts about it: read once, written once."""

from __future__ import annotations

import hashlib
import json
import logging
import os.path
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simcse_st.data.columns import (
    BLANK_TEXTS,
    CONTRADICTION,
    ENTAILMENT,
    LABELLED,
    LABELS,
    Pair,
    Roles,
    Row,
    RowError,
    SourcedPair,
    Texts,
    by_number,
)
from simcse_st.data.files import DELIMITED, count_distinct, digest_of, file_format, write_arrow
from simcse_st.data.sampling import sampled, without_held_out
from simcse_st.data.sources import FileSource, GivenSource, HubSource, find_sources
from simcse_st.errors import InputError
from simcse_st.recipe import DataSection, Expect
from simcse_st.records import SPLITS, SourceRows, Split, TrainFacts
from simcse_st.references import HubDataset, NLISection, hold_out_of

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

PAIR_RULE = (
    "a pair (premise, hypothesis) for every entailment row, in file order; {negative}; rows without consensus (label "
    "-1, '-' or missing) are dropped"
)
NEGATIVE_RULE = {
    "first": "its hard negative is the first contradiction hypothesis, in file order, of the very same premise",
    "all": "its hard negatives are all different contradiction hypotheses, in file order, of the very same premise",
}
AS_THEY_ARE = "the rows as they are: anchor, positive and the hard negatives that are not null or empty"
SENTENCE_RULE = (
    "every distinct text of the rows (exact string, first occurrence first, row by row: premise and hypothesis, or "
    "anchor, positive and hard negatives); rows without consensus and blank texts are dropped"
)


@dataclass(frozen=True)
class TrainingData:
    """What is trained on.

    Attributes:
        dataset: Columns ``anchor``, ``positive`` and ``negative`` (a list), or the one column ``sentence``. It is
            mapped from a temporary file, so that memory holds little of it.
        facts: For the manifest.
        held_out: The pairs of dev and test that the recipe holds out.
        source_of: The number of the source that each row is from.
    """

    dataset: Dataset
    facts: TrainFacts
    held_out: dict[Split, list[Pair]]
    source_of: np.ndarray

    @property
    def rows_of_sources(self) -> list[int]:
        """How many rows each source has."""
        return [one.rows for one in self.facts.of_sources] or [len(self)]

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.dataset)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows: anchor, positive and the list of hard negatives; or the sentence alone."""
        names = self.dataset.column_names
        for batch in self.dataset.with_format("arrow").iter(batch_size=1000):
            yield from zip(*(batch[name].to_pylist() for name in names), strict=True)

    def texts(self) -> Iterator[str]:
        """All texts, with repetitions."""
        return (text for row in self.rows() for cell in row for text in ([cell] if isinstance(cell, str) else cell))

    def write(self, path: Path) -> None:
        """Writes the rows as JSON Lines, which are read back as the same rows."""
        names = self.dataset.column_names
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(_line(names, row) for row in self.rows())


def load_training_data(data: DataSection, split: str = "train") -> TrainingData:
    """Reads what a recipe trains on, and compares it with what the recipe expects.

    Args:
        data: The recipe's section. With ``kind="pairs"``, labelled NLI rows, or rows with an anchor, a positive and any
            number of hard negatives; with ``kind="sentences"`` the distinct texts of these, or of plain text.
        split: The split of a Hub dataset that names none.

    Raises:
        InputError: A row cannot be used, with its place; nothing is left; or the data are not those expected.
        RunError: The temporary folder is full or cannot be written.

    Example:
        >>> load_training_data(DataSection(train="my_pairs.jsonl")).dataset
        Dataset({features: ['anchor', 'positive', 'negative'], num_rows: 33351})
    """
    import pyarrow as pa

    sections, sources = data.sources(), find_sources(data, split)
    name = sources[0].name + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")
    counts = _Counts()
    each = (
        sampled(_read(number, source, section, counts), source.name, section.sample)
        for number, (source, section) in enumerate(zip(sources, sections, strict=True))
    )
    rows = sampled(chain.from_iterable(each), name, data.sample)
    made: Iterator[tuple[Any, ...]]
    if data.kind == "sentences":
        made, schema = _distinct(rows, counts), pa.schema({"sentence": pa.string()})
    else:
        pairs = _pairs(rows, sections, counts)
        if any(hold_out_of(getattr(data, part)) for part in SPLITS):
            pairs = without_held_out(pairs, name, data, counts.held_out, counts.dropped)
        made = _counted(pairs, data, counts)
        text = pa.string()
        schema = pa.schema({"anchor": text, "positive": text, "negative": pa.list_(text)})
    digest = hashlib.sha256()

    def hashed() -> Iterator[tuple[Any, ...]]:
        for row in made:
            digest.update(_line(schema.names, row).encode())
            yield row

    path = write_arrow(hashed(), schema)
    if not counts.source_of:
        raise InputError(_why_nothing(name, data, counts))
    source_of = np.array(counts.source_of)
    of_sources = [
        SourceRows(name=source.public_name, rows=int((source_of == number).sum()), sample=section.sample)
        for number, (source, section) in enumerate(zip(sources, sections, strict=True))
    ]
    blank_texts = counts.dropped.pop(BLANK_TEXTS, 0)
    facts = TrainFacts(
        sources=[record for one, rows in zip(sources, counts.of_tables, strict=True) for record in one.records(rows)],
        of_sources=of_sources if len(sources) > 1 else [],
        columns=counts.columns | ({"negative": list(counts.negative_columns)} if counts.negative_columns else {}),
        columns_left_out=list(counts.left_out),
        rows_read=counts.read,
        rows_usable=counts.usable,
        dropped=dict(counts.dropped),
        unusable_rows=counts.unusable,
        sample=data.sample,
        rule=SENTENCE_RULE if data.kind == "sentences" else _pair_rule(sections, counts),
        prepared_sha256=digest.hexdigest(),
    )
    if data.kind == "sentences":
        sentences = len(source_of)
        repeated = counts.texts - sentences
        made_facts = {"sentences": sentences, "texts": counts.texts, "duplicate_texts": repeated}
        facts = facts.model_copy(update={**made_facts, "blank_texts": blank_texts})
    else:
        facts = _with_pairs(facts, counts)
    if data.expect:
        _check_expected(data, data.expect, facts)
    from datasets import Dataset

    return TrainingData(Dataset.from_file(str(path)), facts, counts.held_out, source_of)


@dataclass
class _Counts:
    """What is counted as rows are read, made and written."""

    kinds: list[str] = field(default_factory=list)  # of the sources
    read: int = 0
    usable: int = 0
    source_of: array[int] = field(default_factory=lambda: array("h"))  # of the rows that are trained on
    of_tables: list[list[int]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=lambda: Counter(no_consensus=0, too_long=0))
    unusable: list[str] = field(default_factory=list)
    columns: dict[str, list[str]] = field(default_factory=dict)
    negative_columns: dict[str, None] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)
    labels: Counter[int] = field(default_factory=Counter)
    negatives: Counter[int] = field(default_factory=Counter)
    # Digests of texts, to count different ones without holding the texts.
    anchors: bytearray = field(default_factory=bytearray)
    sentences: bytearray = field(default_factory=bytearray)
    texts: int = 0
    held_out: dict[Split, list[Pair]] = field(default_factory=dict)


def _read(
    number: int, source: FileSource | HubSource | GivenSource, data: DataSection, counts: _Counts
) -> Iterator[Texts]:
    """Reads the rows of one source that can be used, once, and counts the others."""
    seen: set[str] = set()
    columns: Roles | None = None
    counts.of_tables.append([])
    for name, rows in source.tables(header=not by_number(data.columns)):
        columns = names = None
        before = counts.read
        for row in rows:
            counts.read += 1
            try:
                if isinstance(row, RowError):
                    raise row
                if columns is None:
                    columns = _recognised(row, number, source.name, data, counts)
                if row.cells.keys() != names:  # in JSON Lines, any row may have columns of its own
                    names = row.cells.keys()
                    negatives = columns.negatives(names)
                    seen.update(names)
                    counts.left_out.update(dict.fromkeys(columns.left_out(row, data.kind == "sentences")))
                    counts.negative_columns.update(dict.fromkeys(negatives))
                made = columns.parse(row, negatives, data, counts.dropped)
            except RowError as error:
                if data.strict:
                    raise
                counts.dropped[error.reason] += 1
                if len(counts.unusable) < 3:
                    counts.unusable.append(str(error))
                continue
            counts.usable += bool(made)
            yield from ((number, *texts) for texts in made)
        if counts.read == before:
            after = " (its first line is the header)" if file_format(Path(name)) in DELIMITED else ""
            raise InputError(f"{name}: there is no row in it{after}")
        counts.of_tables[-1].append(counts.read - before)
    absent = [name for name in (columns and columns.mapped_negatives) or () if name not in seen]
    if absent:
        raise InputError(f"data.columns.negative: no column {absent[0]!r} in any row of {source.name}")


def _recognised(row: Row, number: int, source: str, data: DataSection, counts: _Counts) -> Roles:
    """The columns of a file, by its first row; all files of a source hold one kind of rows."""
    columns = Roles.of(row, data.columns)
    if counts.kinds[number:] not in ([], [columns.kind]):
        before = counts.kinds[number]
        raise InputError(f"{row.where}: {columns.kind}, where {before} rows came before: give one kind of data")
    if columns.kind == "sentences" and data.kind != "sentences":
        raise InputError(f"{source}: single sentences make no pairs: set data.kind=sentences for the unsupervised mode")
    if columns.kind == "pairs" and data.nli != NLISection():
        raise InputError(f"data.nli: {source} holds pairs as they are, and no labels to make them from")
    if len(counts.kinds) == number:
        counts.kinds.append(columns.kind)
    for role, name in columns.used.items():
        if name not in (names := counts.columns.setdefault(role, [])):
            names.append(name)
    return columns


def _pairs(rows: Iterable[Texts], sections: list[DataSection], counts: _Counts) -> Iterator[SourcedPair]:
    """Pairs as they are, and by the rule for labelled rows once those of all sources are read."""
    entailments: list[tuple[int, list[str]]] = []
    contradictions: dict[str, dict[str, None]] = {}  # in their order, each once
    for source, label, texts in rows:
        if counts.kinds[source] != LABELLED:
            yield source, texts[0], texts[1], texts[2:]
            continue
        counts.labels[label] += 1
        if label == ENTAILMENT:
            entailments.append((source, texts))
        elif label == CONTRADICTION:
            contradictions.setdefault(texts[0], {})[texts[1]] = None
    wanted = [slice(1 if section.nli.hard_negatives == "first" else None) for section in sections]
    for source, (premise, hypothesis) in entailments:
        yield source, premise, hypothesis, list(contradictions.get(premise, ()))[wanted[source]]


def _counted(pairs: Iterable[SourcedPair], data: DataSection, counts: _Counts) -> Iterator[Pair]:
    """The pairs that are trained on."""
    seen: set[bytes] = set()
    for source, anchor, positive, negatives in pairs:
        kept = negatives if data.hard_negatives else []
        if data.drop_duplicates:
            others = [text for text in kept if text not in (anchor, positive)]
            counts.dropped["hard_negatives_like_anchor_or_positive"] += len(kept) - len(others)
            kept = others
            digest = digest_of(anchor, positive, *kept)
            if digest in seen:
                counts.dropped["duplicate"] += 1
                continue
            seen.add(digest)
        counts.negatives[len(kept)] += 1
        counts.anchors += digest_of(anchor)
        for text in (anchor, positive, *kept):
            counts.sentences += digest_of(text)
        counts.source_of.append(source)
        yield anchor, positive, kept


def _distinct(rows: Iterable[Texts], counts: _Counts) -> Iterator[tuple[str]]:
    """The texts of rows, each where it first occurs."""
    seen: set[bytes] = set()
    for source, text in ((source, text) for source, _, texts in rows for text in texts):
        counts.texts += 1
        if (digest := digest_of(text)) not in seen:
            seen.add(digest)
            counts.source_of.append(source)
            yield (text,)


def _why_nothing(source: str, data: DataSection, counts: _Counts) -> str:
    if data.kind == "sentences":
        return f"{source}: none of its {counts.read} rows holds a sentence to train on"
    why = "none of the rows that are left is an entailment" if LABELLED in counts.kinds else "no row is left"
    numbers = [f"{count} {reason.replace('_', ' ')}" for reason, count in counts.dropped.items() if count]
    return f"{source}: no pair: {why} ({', '.join([f'{counts.read} read', *numbers])})"


def _pair_rule(sections: list[DataSection], counts: _Counts) -> str:
    rules: dict[str, list[str]] = {}  # with the numbers of the sources that they are about
    for number, (kind, section) in enumerate(zip(counts.kinds, sections, strict=True), 1):
        labelled = PAIR_RULE.format(negative=NEGATIVE_RULE[section.nli.hard_negatives])
        rules.setdefault(labelled if kind == LABELLED else AS_THEY_ARE, []).append(str(number))
    rule = next(iter(rules))
    if len(rules) > 1:
        rule = "; ".join(f"of source {', '.join(numbers)}: {rule}" for rule, numbers in rules.items())
    rule += "" if sections[0].hard_negatives else "; hard negatives are left out"
    return rule + ("; of equal rows the first is kept" if sections[0].drop_duplicates else "")


def _with_pairs(facts: TrainFacts, counts: _Counts) -> TrainFacts:
    """Adds the facts about pairs and their hard negatives."""
    pairs = len(counts.source_of)
    with_negative = pairs - counts.negatives[0]
    labels = {name: counts.labels[number] for number, name in enumerate(LABELS)}
    made = {
        "labels": labels if LABELLED in counts.kinds else None,
        "pairs": pairs,
        "pairs_with_hard_negative": with_negative,
        "share_with_hard_negative": with_negative / pairs,
        "hard_negatives": sum(number * count for number, count in counts.negatives.items()),
        "hard_negatives_per_row": {str(number): count for number, count in sorted(counts.negatives.items()) if count},
        "unique_anchors": count_distinct(counts.anchors),
        "unique_sentences": count_distinct(counts.sentences),
    }
    return facts.model_copy(update=made)


def _line(names: Iterable[str], row: tuple[Any, ...]) -> str:
    return json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n"


def _check_expected(data: DataSection, expect: Expect, facts: TrainFacts) -> None:
    """Compares the data with what the recipe says of its source."""
    names = [one.train.dataset if isinstance(one.train, HubDataset) else str(one.train) for one in data.sources()]
    if not any(os.path.normpath(expect.source) in (os.path.normpath(name), Path(name).name) for name in names):
        logger.warning("expect   is about %s, so nothing is expected of %s", expect.source, ", ".join(names))
        return
    if isinstance(data.train, list):
        raise InputError("data.expect is about one source, but data.train is a list: join the files, or leave it out")
    found = {**facts.model_dump(), "sha256": facts.sources[0].sha256}
    # Of the data as they are, which training without hard negatives does not use.
    about = {"source"} if data.hard_negatives else {"source", "pairs_with_hard_negative", "prepared_sha256"}
    for key, wanted in expect.model_dump(exclude=about, exclude_none=True).items():
        value = found.get(key)
        if not fnmatchcase(str(value), str(wanted).replace("...", "*")):
            got = f"of {expect.source} it is {value}" if value is not None else f"{expect.source} has none"
            raise InputError(f"data.expect.{key} is {wanted}, but {got}")
