"""Rows of a source -> what is trained on, with the facts about it: read once, written once."""

from __future__ import annotations

import hashlib
import json
import logging
import os.path
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simcse_st.data.columns import (
    BLANK_TEXTS,
    CONTRADICTION,
    ENTAILMENT,
    LABELS,
    Pair,
    Roles,
    Row,
    RowError,
    Texts,
    by_number,
)
from simcse_st.data.files import DELIMITED, count_distinct, digest_of, file_format, write_arrow
from simcse_st.data.sources import FileSource, GivenSource, HubSource, find_source
from simcse_st.errors import InputError
from simcse_st.recipe import DataSection, Expect, HoldOut, HubDataset, NLISection
from simcse_st.records import SPLITS, Split, TrainFacts

if TYPE_CHECKING:
    import pyarrow as pa
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
    """

    dataset: Dataset
    facts: TrainFacts
    held_out: dict[Split, list[Pair]]

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

    source = find_source(data.train, split, data.quotes)
    counts = _Counts()
    rows = _read(source, data, counts)
    if data.sample:
        rows = _sampled(rows, source.name, data.sample.rows, data.sample.seed)
    made: Iterator[tuple[Any, ...]]
    if data.kind == "sentences":
        made, schema = _distinct(rows, counts), pa.schema({"sentence": pa.string()})
    else:
        pairs = _pairs(rows, data, counts)
        if any(isinstance(getattr(data, part), HoldOut) for part in SPLITS):
            pairs = _without_held_out(pairs, source.name, data, counts)
        made = _counted(pairs, data, counts)
        schema = _pairs_schema()
    digest = hashlib.sha256()

    def hashed() -> Iterator[tuple[Any, ...]]:
        for row in made:
            digest.update(_line(schema.names, row).encode())
            counts.written += 1
            yield row

    path = write_arrow(hashed(), schema)
    if not counts.written:
        raise InputError(_why_nothing(source.name, data, counts))
    blank_texts = counts.dropped.pop(BLANK_TEXTS, 0)
    facts = TrainFacts(
        sources=source.records(counts.of_tables),
        columns=counts.columns | ({"negative": list(counts.negative_columns)} if counts.negative_columns else {}),
        columns_left_out=list(counts.left_out),
        rows_read=counts.read,
        rows_usable=counts.usable,
        dropped=dict(counts.dropped),
        unusable_rows=counts.unusable,
        sample=data.sample,
        rule=SENTENCE_RULE if data.kind == "sentences" else _pair_rule(data, counts),
        prepared_sha256=digest.hexdigest(),
    )
    if data.kind == "sentences":
        repeated = counts.texts - counts.written
        made_facts = {"sentences": counts.written, "texts": counts.texts, "duplicate_texts": repeated}
        facts = facts.model_copy(update={**made_facts, "blank_texts": blank_texts})
    else:
        facts = _with_pairs(facts, counts)
    if data.expect:
        _check_expected(data, data.expect, facts)
    from datasets import Dataset

    return TrainingData(Dataset.from_file(str(path)), facts, counts.held_out)


@dataclass
class _Counts:
    """What is counted as rows are read, made and written."""

    kind: str | None = None
    read: int = 0
    usable: int = 0
    written: int = 0
    of_tables: list[int] = field(default_factory=list)
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


def _read(source: FileSource | HubSource | GivenSource, data: DataSection, counts: _Counts) -> Iterator[Texts]:
    """Reads the rows that can be used, once, and counts the others."""
    seen: set[str] = set()
    columns: Roles | None = None
    for name, rows in source.tables(header=not by_number(data.columns)):
        columns = names = None
        before = counts.read
        for row in rows:
            counts.read += 1
            try:
                if isinstance(row, RowError):
                    raise row
                if columns is None:
                    columns = _recognised(row, source.name, data, counts)
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
            yield from made
        if counts.read == before:
            after = " (its first line is the header)" if file_format(Path(name)) in DELIMITED else ""
            raise InputError(f"{name}: there is no row in it{after}")
        counts.of_tables.append(counts.read - before)
    absent = [name for name in (columns and columns.mapped_negatives) or () if name not in seen]
    if absent:
        raise InputError(f"data.columns.negative: no column {absent[0]!r} in any row of {source.name}")


def _recognised(row: Row, source: str, data: DataSection, counts: _Counts) -> Roles:
    """The columns of a file, by its first row."""
    columns = Roles.of(row, data.columns)
    if counts.kind not in (None, columns.kind):
        raise InputError(f"{row.where}: {columns.kind}, where {counts.kind} rows came before: give one kind of data")
    if columns.kind == "sentences" and data.kind != "sentences":
        raise InputError(f"{source}: single sentences make no pairs: set data.kind=sentences for the unsupervised mode")
    if columns.kind == "pairs" and data.nli != NLISection():
        raise InputError(f"data.nli: {source} holds pairs as they are, and no labels to make them from")
    if counts.kind is None:
        counts.kind, counts.columns = columns.kind, {role: [name] for role, name in columns.used.items()}
    return columns


def _pairs(rows: Iterable[Texts], data: DataSection, counts: _Counts) -> Iterator[Pair]:
    """Pairs as they are, or by the rule for labelled rows once all of these are read."""
    entailments: list[list[str]] = []
    contradictions: dict[str, dict[str, None]] = {}  # in their order, each once
    for label, texts in rows:
        counts.labels[label] += 1
        if counts.kind != "labelled":
            yield texts[0], texts[1], texts[2:]
        elif label == ENTAILMENT:
            entailments.append(texts)
        elif label == CONTRADICTION:
            contradictions.setdefault(texts[0], {})[texts[1]] = None
    wanted = slice(1 if data.nli.hard_negatives == "first" else None)
    for premise, hypothesis in entailments:
        yield premise, hypothesis, list(contradictions.get(premise, ()))[wanted]


def _counted(pairs: Iterable[Pair], data: DataSection, counts: _Counts) -> Iterator[Pair]:
    """The pairs that are trained on."""
    seen: set[bytes] = set()
    for anchor, positive, negatives in pairs:
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
        yield anchor, positive, kept


def _distinct(rows: Iterable[Texts], counts: _Counts) -> Iterator[tuple[str]]:
    """The texts of rows, each where it first occurs."""
    seen: set[bytes] = set()
    for text in (text for _, texts in rows for text in texts):
        counts.texts += 1
        if (digest := digest_of(text)) not in seen:
            seen.add(digest)
            yield (text,)


def _why_nothing(source: str, data: DataSection, counts: _Counts) -> str:
    if data.kind == "sentences":
        return f"{source}: none of its {counts.read} rows holds a sentence to train on"
    why = "none of the rows that are left is an entailment" if counts.kind == "labelled" else "no row is left"
    numbers = [f"{count} {reason.replace('_', ' ')}" for reason, count in counts.dropped.items() if count]
    return f"{source}: no pair: {why} ({', '.join([f'{counts.read} read', *numbers])})"


def _pair_rule(data: DataSection, counts: _Counts) -> str:
    rule = "the rows as they are: anchor, positive and the hard negatives that are not null or empty"
    if counts.kind == "labelled":
        rule = PAIR_RULE.format(negative=NEGATIVE_RULE[data.nli.hard_negatives])
    rule += "" if data.hard_negatives else "; hard negatives are left out"
    return rule + ("; of equal rows the first is kept" if data.drop_duplicates else "")


def _with_pairs(facts: TrainFacts, counts: _Counts) -> TrainFacts:
    """Adds the facts about pairs and their hard negatives."""
    with_negative = counts.written - counts.negatives[0]
    labels = {name: counts.labels[number] for number, name in enumerate(LABELS)}
    made = {
        "labels": labels if counts.kind == "labelled" else None,
        "pairs": counts.written,
        "pairs_with_hard_negative": with_negative,
        "share_with_hard_negative": with_negative / counts.written,
        "hard_negatives": sum(number * count for number, count in counts.negatives.items()),
        "hard_negatives_per_row": {str(number): count for number, count in sorted(counts.negatives.items()) if count},
        "unique_anchors": count_distinct(counts.anchors),
        "unique_sentences": count_distinct(counts.sentences),
    }
    return facts.model_copy(update=made)


def _pairs_schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema({"anchor": pa.string(), "positive": pa.string(), "negative": pa.list_(pa.string())})


@contextmanager
def _waiting(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> Iterator[list[pa.RecordBatch]]:
    """Rows that wait on the disk, where something about all of them must be known before the first is used."""
    import pyarrow as pa

    path = write_arrow(rows, schema)
    with pa.memory_map(str(path)) as file:
        yield pa.ipc.open_stream(file).read_all().to_batches()
    path.unlink()


def _rows_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _without_held_out(pairs: Iterable[Pair], source: str, data: DataSection, counts: _Counts) -> Iterator[Pair]:
    """The pairs that are trained on; those that dev and test hold out are put aside, whole anchors at a time.

    A pair that shares a text with one of these is dropped, so that nothing is trained on that is measured.
    """
    with _waiting(pairs, _pairs_schema()) as batches:
        of_anchor = Counter(digest_of(anchor) for batch in batches for anchor in batch["anchor"].to_pylist())
        split_of: dict[bytes, Split] = {}
        for split in SPLITS:
            if not isinstance(wanted := getattr(data, split), HoldOut):
                continue
            needed = wanted.rows(of_anchor.total())
            left, rows = [anchor for anchor in of_anchor if anchor not in split_of], 0
            random.Random(wanted.seed).shuffle(left)
            while rows < needed and left:
                split_of[anchor := left.pop()] = split
                rows += of_anchor[anchor]
            if rows < needed:
                has = f"{of_anchor.total():,} pairs" if split == SPLITS[0] else f"{rows:,} pairs left"
                raise InputError(f"data.{split}: hold_out is {needed}, but {source} has {has}")
            counts.held_out[split] = []
        held: set[bytes] = set()
        for row in (row for batch in batches for row in _rows_of(batch)):
            if of_split := split_of.get(digest_of(row[0])):
                counts.held_out[of_split].append(row)
                held.update(digest_of(text) for text in (*row[:2], *row[2]))
                counts.dropped["held_out"] += 1
        for row in (row for batch in batches for row in _rows_of(batch)):
            if digest_of(row[0]) in split_of:
                continue
            if held.isdisjoint(digest_of(text) for text in (*row[:2], *row[2])):
                yield row
            else:
                counts.dropped["text_of_a_held_out_pair"] += 1


def _sampled(rows: Iterable[Texts], source: str, count: int, seed: int) -> Iterator[Texts]:
    """A fixed sample of rows in their order."""
    import pyarrow as pa

    with _waiting(rows, pa.schema({"label": pa.int8(), "texts": pa.list_(pa.string())})) as batches:
        total = sum(batch.num_rows for batch in batches)
        if count > total:
            raise InputError(f"data.sample.rows is {count}, but {source} has {total} usable rows")
        # The standard library's generator: its draws are the same on all platforms and in all versions so far.
        chosen = np.zeros(total, dtype=bool)
        chosen[random.Random(seed).sample(range(total), count)] = True
        number = 0
        for batch in batches:
            drawn = batch.filter(pa.array(chosen[number : number + batch.num_rows]))
            yield from _rows_of(drawn)
            number += batch.num_rows


def _line(names: Iterable[str], row: tuple[Any, ...]) -> str:
    return json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n"


def _check_expected(data: DataSection, expect: Expect, facts: TrainFacts) -> None:
    """Compares the data with what the recipe says of its source."""
    reference = data.train
    if isinstance(reference, list):
        raise InputError("data.expect is about one source, but data.train is a list: join the files, or leave it out")
    name = reference.dataset if isinstance(reference, HubDataset) else str(reference)
    if os.path.normpath(expect.source) not in (os.path.normpath(name), Path(name).name):
        logger.warning("expect   is about %s, so nothing is expected of %s", expect.source, name)
        return
    found = {**facts.model_dump(), "sha256": facts.sources[0].sha256}
    # Of the data as they are, which training without hard negatives does not use.
    about = {"source"} if data.hard_negatives else {"source", "pairs_with_hard_negative", "prepared_sha256"}
    for key, wanted in expect.model_dump(exclude=about, exclude_none=True).items():
        value = found.get(key)
        if not fnmatchcase(str(value), str(wanted).replace("...", "*")):
            got = f"of {expect.source} it is {value}" if value is not None else f"{expect.source} has none"
            raise InputError(f"data.expect.{key} is {wanted}, but {got}")
