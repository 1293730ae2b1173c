"""Rows of a source -> what is trained on, with the facts about it: read once, written once."""

from __future__ import annotations

import hashlib
import json
import logging
import os.path
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simcse_st.data.reader import CONTRADICTION, ENTAILMENT, LABELS, Reader
from simcse_st.data.sources import FileSource, HubSource, digest_of, find_source
from simcse_st.errors import InputError, RunError
from simcse_st.recipe import DataSection, HubDataset, NLISection
from simcse_st.records import SampleFacts, TrainFacts

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

logger = logging.getLogger(__name__)

_BATCH = 10_000

Pair = tuple[str, str, list[str]]
PAIRS, SENTENCES = ("anchor", "positive", "negative"), ("sentence",)
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
    """

    dataset: Dataset
    facts: TrainFacts

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
        names = tuple(self.dataset.column_names)
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(_line(names, row) for row in self.rows())


def load_training_data(data: DataSection) -> TrainingData:
    """Reads what a recipe trains on, and compares it with what the recipe expects.

    Args:
        data: The recipe's section. With ``kind="pairs"``, labelled NLI rows, or rows with an anchor, a positive and any
            number of hard negatives; with ``kind="sentences"`` the distinct texts of these, or of plain text.

    Raises:
        InputError: A row cannot be used, with its place; nothing is left; or the data are not those expected.
        RunError: The temporary folder is full or cannot be written.

    Example:
        >>> load_training_data(DataSection(train="my_pairs.jsonl")).dataset
        Dataset({features: ['anchor', 'positive', 'negative'], num_rows: 33351})
    """
    import pyarrow as pa

    source = find_source(data.train, "train", data.quotes)
    reader = Reader(source, data)
    rows: Iterable[tuple[int, list[str]]] = reader.rows()
    if data.sample:
        rows = _sampled(rows, source, data.sample.rows, data.sample.seed)
    of_kind = _Sentences() if data.kind == "sentences" else _Pairs(reader, data)
    columns = {"anchor": pa.string(), "positive": pa.string(), "negative": pa.list_(pa.string())}
    schema = pa.schema({name: columns.get(name, pa.string()) for name in of_kind.names})
    digest = hashlib.sha256()

    def counted() -> Iterator[tuple[Any, ...]]:
        for row in of_kind.rows(rows):
            digest.update(_line(of_kind.names, row).encode())
            of_kind.count(row)
            yield row

    path = _write(counted(), schema)
    if not of_kind.written:
        raise InputError(f"{source.name}: {of_kind.nothing(reader)}")
    facts = TrainFacts(
        sources=reader.sources(),
        columns=reader.roles,
        columns_left_out=list(reader.left_out),
        rows_read=reader.rows_read,
        rows_usable=reader.rows_usable,
        dropped=dict(reader.dropped),
        unusable_rows=reader.unusable,
        sample=SampleFacts(rows=data.sample.rows, seed=data.sample.seed) if data.sample else None,
        prepared_sha256=digest.hexdigest(),
        **of_kind.facts(reader),
    )
    _check_expected(data, facts)
    from datasets import Dataset

    return TrainingData(Dataset.from_file(str(path)), facts)


class _Pairs:
    """Rows -> pairs with their hard negatives, and the counts of these."""

    names = PAIRS

    def __init__(self, reader: Reader, data: DataSection) -> None:
        self.reader, self.data = reader, data
        self.written = 0
        self.labels: Counter[int] = Counter()
        self._negatives: Counter[int] = Counter()
        self._anchors, self._texts = Digests(), Digests()
        self._seen: set[bytes] = set()

    def rows(self, rows: Iterable[tuple[int, list[str]]]) -> Iterator[Pair]:
        """The pairs."""
        for anchor, positive, negatives in self._all(rows):
            kept = negatives if self.data.hard_negatives else []
            if self.data.drop_duplicates:
                digest = digest_of(anchor, positive, *kept)
                if digest in self._seen:
                    self.reader.dropped["duplicate"] += 1
                    continue
                self._seen.add(digest)
            yield anchor, positive, kept

    def _all(self, rows: Iterable[tuple[int, list[str]]]) -> Iterator[Pair]:
        entailments: list[list[str]] = []
        contradictions: dict[str, dict[str, None]] = {}  # in their order, each once
        for label, texts in rows:
            if self.reader.kind != "labelled":
                if self.data.nli != NLISection():
                    name = self.reader.source.name
                    raise InputError(f"data.nli: {name} holds pairs as they are, and no labels to make them from")
                yield texts[0], texts[1], texts[2:]
                continue
            self.labels[label] += 1
            if label == ENTAILMENT:
                entailments.append(texts)
            elif label == CONTRADICTION:
                contradictions.setdefault(texts[0], {})[texts[1]] = None
        wanted = 1 if self.data.nli.hard_negatives == "first" else None
        for premise, hypothesis in entailments:
            yield premise, hypothesis, list(islice(contradictions.get(premise, ()), wanted))

    def count(self, row: tuple[Any, ...]) -> None:
        """Counts a pair."""
        anchor, positive, negatives = row
        self.written += 1
        self._negatives[len(negatives)] += 1
        self._anchors.add(anchor)
        for text in (anchor, positive, *negatives):
            self._texts.add(text)

    def nothing(self, reader: Reader) -> str:
        """Why there is no pair."""
        if reader.kind is None:
            return "there is no row in it that can be used"
        rows = "rows of the sample" if self.data.sample else "rows that are left"
        found = f"none of the {rows} is an entailment" if reader.kind == "labelled" else "no row is left"
        numbers = [f"{count} {reason.replace('_', ' ')}" for reason, count in reader.dropped.items() if count]
        return f"no pair: {found} ({', '.join([f'{reader.rows_read} read', *numbers])})"

    def facts(self, reader: Reader) -> dict[str, Any]:  # of TrainFacts
        """The counts."""
        words = "the rows as they are: anchor, positive and the hard negatives that are not null or empty"
        labels = None
        if reader.kind == "labelled":
            words = PAIR_RULE.format(negative=NEGATIVE_RULE[self.data.nli.hard_negatives])
            labels = {name: self.labels[number] for number, name in enumerate(LABELS)}
        words += "" if self.data.hard_negatives else "; hard negatives are left out"
        words += "; of equal rows the first is kept" if self.data.drop_duplicates else ""
        with_negative = self.written - self._negatives[0]
        return {
            "rule": words,
            "labels": labels,
            "pairs": self.written,
            "pairs_with_hard_negative": with_negative,
            "share_with_hard_negative": with_negative / self.written,
            "hard_negatives": sum(number * count for number, count in self._negatives.items()),
            "hard_negatives_per_row": {str(number): self._negatives[number] for number in sorted(self._negatives)},
            "unique_anchors": self._anchors.distinct(),
            "unique_sentences": self._texts.distinct(),
        }


class _Sentences:
    """Rows -> their distinct texts."""

    names = SENTENCES

    def __init__(self) -> None:
        self.texts = self.written = 0
        self._seen: set[bytes] = set()

    def rows(self, rows: Iterable[tuple[int, list[str]]]) -> Iterator[tuple[str]]:
        """The texts, each where it first occurs."""
        for text in (text for _, texts in rows for text in texts):
            self.texts += 1
            if (digest := digest_of(text)) not in self._seen:
                self._seen.add(digest)
                yield (text,)

    def count(self, row: tuple[Any, ...]) -> None:
        """Counts a text."""
        self.written += 1

    def nothing(self, reader: Reader) -> str:
        """Why there is no sentence."""
        return f"none of its {reader.rows_read} rows holds a sentence to train on"

    def facts(self, reader: Reader) -> dict[str, Any]:  # of TrainFacts
        """The counts."""
        return {
            "rule": SENTENCE_RULE,
            "sentences": self.written,
            "texts": self.texts,
            "blank_texts": reader.blank_texts,
            "duplicate_texts": self.texts - self.written,
        }


def _sampled(
    rows: Iterable[tuple[int, list[str]]], source: FileSource | HubSource, count: int, seed: int
) -> Iterator[tuple[int, list[str]]]:
    """A fixed sample of rows in their order. How many there are must be known first, so they wait on the disk."""
    import pyarrow as pa

    path = _write(rows, pa.schema({"label": pa.int8(), "texts": pa.list_(pa.string())}))
    with pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as stream:
        total = sum(batch.num_rows for batch in stream)
    if count > total:
        raise InputError(f"data.sample.rows is {count}, but {source.name} has {total} usable rows")
    # The standard library's generator: its draws are the same on all platforms and in all versions so far.
    chosen = np.zeros(total, dtype=bool)
    chosen[random.Random(seed).sample(range(total), count)] = True
    number = 0
    with pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as stream:
        for batch in stream:
            drawn = batch.filter(pa.array(chosen[number : number + batch.num_rows]))
            yield from zip(*(column.to_pylist() for column in drawn.columns), strict=True)
            number += batch.num_rows
    path.unlink()


_folders: list[tempfile.TemporaryDirectory[str]] = []  # which stay until the process ends: data are mapped from them


def _write(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> Path:
    """Writes rows into an Arrow file of their own; memory holds a batch of them."""
    import pyarrow as pa

    iterator = iter(rows)
    try:
        folder = tempfile.TemporaryDirectory(prefix="simcse-st-", ignore_cleanup_errors=True)
        _folders.append(folder)
        path = Path(folder.name) / "rows.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            while batch := list(islice(iterator, _BATCH)):
                columns = list(map(list, zip(*batch, strict=True)))
                writer.write_batch(pa.record_batch(columns, schema=schema))
    except OSError as error:
        raise RunError(
            f"cannot write to the temporary folder {tempfile.gettempdir()}: {error.strerror or error}; set TMPDIR to "
            "another"
        ) from error
    return path


def _line(names: Iterable[str], row: tuple[Any, ...]) -> str:
    return json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n"


class Digests:
    """Digests of texts in the order they are added, to count different texts without holding them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, *texts: str) -> None:
        """Adds the digest of a text, or one of several texts together."""
        self._bytes += digest_of(*texts)

    def sha256(self) -> str:
        """One checksum over all of them in their order."""
        return hashlib.sha256(self._bytes).hexdigest()

    def distinct(self) -> int:
        """How many different ones there are."""
        digests = np.frombuffer(self._bytes, dtype="S16")
        first = np.frombuffer(self._bytes, dtype=np.uint8)[::16] >> 4
        # Part by part, by the first four bits, since sorting makes copies.
        return sum(len(np.unique(digests[first == part])) for part in range(16))


def _check_expected(data: DataSection, facts: TrainFacts) -> None:
    """Compares the data with what the recipe says of its source."""
    expect, reference = data.expect, data.train
    if expect is None:
        return
    if isinstance(reference, list):
        raise InputError("data.expect is about one source, but data.train is a list: join the files, or leave it out")
    name = reference.dataset if isinstance(reference, HubDataset) else reference
    if os.path.normpath(expect.source) not in (os.path.normpath(name), Path(name).name):
        logger.warning("expect   is about %s, so nothing is expected of %s", expect.source, name)
        return
    found = {**facts.model_dump(), "sha256": facts.sources[0].sha256}
    # Of the data as they are, which training without hard negatives does not use.
    about = {"source"} if data.hard_negatives else {"source", "pairs_with_hard_negative", "prepared_sha256"}
    for key, wanted in expect.model_dump(exclude=about, exclude_none=True).items():
        value = found.get(key)
        begin, elided, end = str(wanted).partition("...")
        same = str(value).startswith(begin) and str(value).endswith(end) if elided else value == wanted
        if not same:
            got = f"of {expect.source} it is {value}" if value is not None else f"{expect.source} has none"
            raise InputError(f"data.expect.{key} is {wanted}, but {got}")
