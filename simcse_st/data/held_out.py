"""What a model is measured on, dev and test: graded pairs, or a retrieval set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simcse_st.data.columns import Row, RowError, as_list, sentence
from simcse_st.data.files import digest_of
from simcse_st.data.sources import find_source, find_sources
from simcse_st.data.sts import GradedPairs, check_graded_pairs, load_graded_pairs
from simcse_st.data.training import TrainingData, load_training_data
from simcse_st.errors import InputError, listed
from simcse_st.recipe import DataSection
from simcse_st.records import SPLITS, RetrievalFacts, SetsFacts, Source, Split
from simcse_st.references import (
    HeldOutReference,
    HeldOutSets,
    HoldOut,
    HubDataset,
    NanoBEIR,
    Reference,
    RetrievalCorpus,
    RetrievalRows,
    hold_out_of,
)
from simcse_st.run import is_kept

_NANO_BEIR = "sentence-transformers/NanoBEIR-en"
HUB_SPLIT = {"dev": "validation", "test": "test"}
_IDS = ("_id", "id")
_PAIR_RULE = (
    "each distinct anchor is a query that should find its positives among all distinct positives and hard negatives; a "
    "passage that is the query itself does not count"
)


@dataclass(frozen=True)
class RetrievalSet:
    """Queries, and which of many passages they should find.

    Attributes:
        queries: The queries.
        passages: All passages, each text once.
        relevant: Of each query, the numbers of the passages that it should find, never that of its own text.
        facts: For the manifest.
    """

    queries: list[str]
    passages: list[str]
    relevant: list[set[int]]
    facts: RetrievalFacts

    def __len__(self) -> int:
        """The number of queries."""
        return len(self.queries)

    def texts(self) -> list[str]:
        """Every text once."""
        return list(dict.fromkeys([*self.passages, *self.queries]))

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Each query with each passage that it should find."""
        for query, found in zip(self.queries, self.relevant, strict=True):
            yield from ((query, self.passages[number]) for number in sorted(found))

    def write(self, path: Path) -> None:
        """Writes the set as JSON Lines of anchors, positives and hard negatives, read back as the same set."""
        left = set(range(len(self.passages))).difference(*self.relevant)
        with path.open("w", encoding="utf-8", newline="\n") as file:
            for query, found in zip(self.queries, self.relevant, strict=True):
                positives = [self.passages[number] for number in sorted(found)]
                row = {"anchor": query, "positive": positives, "negative": [self.passages[n] for n in sorted(left)]}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                left = set()  # with the first query: whose hard negatives they were makes no difference here


@dataclass(frozen=True)
class NamedSets:
    """Several sets at once.

    Attributes:
        sets: Them by their names.
    """

    sets: dict[str, GradedPairs | RetrievalSet]

    @property
    def facts(self) -> SetsFacts:
        """For the manifest."""
        return SetsFacts(sets={name: one.facts for name, one in self.sets.items()})

    def __len__(self) -> int:
        """The number of graded pairs and queries."""
        return sum(map(len, self.sets.values()))

    def texts(self) -> list[str]:
        """Every text once."""
        return list(dict.fromkeys(text for one in self.sets.values() for text in one.texts()))

    def pairs(self) -> Iterator[tuple[str, str]]:
        """The pairs of all."""
        return (pair for one in self.sets.values() for pair in one.pairs())


HeldOut = GradedPairs | RetrievalSet | NamedSets


def parts_of(held_out: HeldOut) -> dict[str, GradedPairs | RetrievalSet]:
    """The sets by their names; one alone has none."""
    return held_out.sets if isinstance(held_out, NamedSets) else {"": held_out}


def keep(held_out: HeldOut, reference: HeldOutReference, path: Path) -> None:
    """Writes what only this run has of a held-out set; see :meth:`~simcse_st.run.Run.held_out`."""
    if isinstance(reference, HeldOutSets):
        for name, one in reference.sets.items():
            keep(parts_of(held_out)[name], one, path.with_suffix("") / f"{name}.jsonl")
    elif is_kept(reference) and not isinstance(held_out, NamedSets):
        path.parent.mkdir(exist_ok=True)
        held_out.write(path)


def check_held_out(reference: HeldOutReference | Path, split: Split) -> None:
    """Makes sure, without reading them, that the files of dev or test are there."""
    if isinstance(reference, HeldOutSets):
        for one in reference.sets.values():
            check_held_out(one, split)
    elif isinstance(reference, RetrievalRows):
        find_sources(DataSection(train=reference.retrieval), HUB_SPLIT[split])
    elif isinstance(reference, RetrievalCorpus):
        for part in (reference.corpus, reference.queries, reference.relevant):
            find_source(part, HUB_SPLIT[split])
    elif not isinstance(reference, (NanoBEIR, HoldOut)):
        check_graded_pairs(reference, HUB_SPLIT[split])


def load_held_out(
    reference: HeldOutReference | Path,
    split: Split,
    data: DataSection | None = None,
    training: TrainingData | None = None,
) -> HeldOut:
    """Reads dev or test.

    Args:
        reference: What it is.
        split: Which of the two: of a Hub dataset that names no split, dev is ``validation``.
        data: The section it stands in, whose ``quotes`` count for it.
        training: The training data, for a set that is held out of them.

    Raises:
        InputError: A row cannot be used, with its place; or there is nothing to measure.
    """
    quotes = data.quotes if data else None
    if isinstance(reference, HeldOutSets):
        each = {name: load_held_out(one, split, data, training) for name, one in reference.sets.items()}
        return NamedSets({name: one for name, one in each.items() if not isinstance(one, NamedSets)})
    if isinstance(reference, HoldOut):
        if training is None:
            raise InputError("hold_out: a set that is held out of training data stands in a recipe")
        rows = training.held_out[split]
        rule = f"{len(rows):,} pairs of the training data, whole anchors drawn by seed {reference.seed}; {_PAIR_RULE}"
        return _of_rows(rows, training.facts.sources, rule, f"data.{split}")
    if isinstance(reference, RetrievalRows):
        section = DataSection(train=reference.retrieval, columns=reference.columns, quotes=quotes)
        read = load_training_data(section, HUB_SPLIT[split])
        return _of_rows(read.rows(), read.facts.sources, _PAIR_RULE, read.facts.sources[0].name)
    if isinstance(reference, NanoBEIR):
        name = reference.nano_beir
        corpus, queries, relevant = (
            HubDataset(dataset=_NANO_BEIR, config=part, split=name) for part in ("corpus", "queries", "qrels")
        )
        reference = RetrievalCorpus(corpus=corpus, queries=queries, relevant=relevant)
    if isinstance(reference, RetrievalCorpus):
        return _of_corpus(reference, HUB_SPLIT[split])
    return load_graded_pairs(reference, HUB_SPLIT[split], quotes)


def load_data(data: DataSection) -> tuple[TrainingData, dict[Split, HeldOut]]:
    """Reads all that a recipe trains and measures on.

    Args:
        data: The recipe's section.
    """
    # The small ones first, but for what is held out of the large one.
    references: dict[Split, HeldOutReference] = {"dev": data.dev, "test": data.test}
    found = {
        split: load_held_out(reference, split, data)
        for split, reference in references.items()
        if not hold_out_of(reference)
    }
    training = load_training_data(data)
    return training, {
        split: found.get(split) or load_held_out(references[split], split, data, training) for split in SPLITS
    }


def _of_rows(rows: Iterable[tuple[Any, ...]], sources: list[Source], rule: str, name: str) -> RetrievalSet:
    """The set of pairs and triplets."""
    places: dict[str, int] = {}
    found: dict[str, set[int]] = {}
    for anchor, positive, negatives in rows:
        for text in (positive, *negatives):
            places.setdefault(text, len(places))
        if positive != anchor:
            found.setdefault(anchor, set()).add(places[positive])
    return _checked(list(found), list(places), list(found.values()), sources, rule, name)


def _of_corpus(reference: RetrievalCorpus, split: str) -> RetrievalSet:
    """The set of BEIR's three tables."""
    sources: list[Source] = []
    places: dict[str, int] = {}
    passages: dict[str, int] = {}
    for row in _table(reference.corpus, split, sources):
        title, text = row.cells.get("title"), row.cells.get("text")
        text = sentence(row, "text", f"{title} {text}" if title and text else text)
        passages[_id(row, _IDS)] = places.setdefault(text, len(places))
    rows = _table(reference.queries, split, sources)
    queries = {_id(row, _IDS): sentence(row, "text", row.cells.get("text")) for row in rows}
    found: dict[str, set[int]] = {}
    for row in _table(reference.relevant, split, sources):
        query = _id(row, ("query-id", "query_id"))
        if query not in queries:
            raise InputError(f"{row.where}: no query has the id {query!r}")
        for passage in as_list(row.cells.get("corpus-id", row.cells.get("corpus_id"))):
            if str(passage) not in passages:
                raise InputError(f"{row.where}: no passage has the id {str(passage)!r}")
            if _grade(row) > 0:
                found.setdefault(query, set()).add(passages[str(passage)])
    own = {query: found[query] - {places.get(text, -1)} for query, text in queries.items() if query in found}
    asked = {query: numbers for query, numbers in own.items() if numbers}
    rule = (
        "each query that should find a passage is ranked against all distinct passages, a passage's title before its "
        "text; one that is the query itself does not count"
    )
    texts = [queries[query] for query in asked]
    return _checked(texts, list(places), list(asked.values()), sources, rule, sources[0].name)


def _table(reference: Reference, split: str, sources: list[Source]) -> Iterator[Row]:
    """The rows of one of the three; adds where they come from."""
    source = find_source(reference, split)
    for _, rows in source.tables():
        for row in rows:
            if isinstance(row, RowError):
                raise row
            yield row
    sources += source.records()


def _id(row: Row, names: tuple[str, ...]) -> str:
    value = next((row.cells[name] for name in names if row.cells.get(name) not in (None, "")), None)
    if value is None:
        raise InputError(f"{row.where}: no {names[0]}: found the columns {listed(row.cells)}")
    return str(value)


def _grade(row: Row) -> float:
    try:
        return float(row.cells.get("score", 1))
    except (TypeError, ValueError):
        raise InputError(f"{row.where}: score is {row.cells['score']!r}, but must be a number") from None


def _checked(
    queries: list[str], passages: list[str], relevant: list[set[int]], sources: list[Source], rule: str, name: str
) -> RetrievalSet:
    if not queries or len(passages) < 2:
        raise InputError(
            f"{name}: {len(queries)} queries and {len(passages)} passages make no retrieval set: it takes a query that "
            "should find another text, and two passages"
        )
    digest = hashlib.sha256()
    for query, found in zip(queries, relevant, strict=True):
        digest.update(digest_of(query, *sorted(passages[number] for number in found)))
    digest.update(digest_of(*sorted(passages)))
    facts = RetrievalFacts(
        sources=sources,
        rule=rule,
        queries=len(queries),
        passages=len(passages),
        relevant=sum(map(len, relevant)),
        pairs_sha256=digest.hexdigest(),
    )
    return RetrievalSet(queries, passages, relevant, facts)
