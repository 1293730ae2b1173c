"""Graded sentence pairs: semantic textual similarity."""

from __future__ import annotations

import hashlib
import json
import math
import os.path
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simcse_st.data.columns import Row, RowError, Rows, sentence
from simcse_st.data.files import DELIMITED, Quotes, digest_of, file_format, read_file, read_lines, split_quoted
from simcse_st.data.sources import FileSource, file_record, find_source, resolve
from simcse_st.errors import InputError, excerpt, listed
from simcse_st.records import GradedFacts, Source
from simcse_st.references import Given, GradedFile, GradedReference, HubDataset

Graded = tuple[str, str, float]
Triple = tuple[str, str, str]  # the columns of the two sentences and the score

# The names that public data gives to the three columns.
_NAMES: tuple[Triple, ...] = (
    ("sentence1", "sentence2", "score"),
    ("sentence1", "sentence2", "label"),  # GLUE
    ("sentence_A", "sentence_B", "relatedness_score"),  # SICK
)
HIGHEST_SCORE = 5.0
PARAPHRASE = 4.0
_NO_GOLD = "no_gold"


@dataclass(frozen=True)
class GradedPairs:
    """Sentence pairs with gold scores.

    Attributes:
        facts: For the manifest, with the scale: a gold score is ``score / scale`` of the highest.
    """

    sentences1: list[str]
    sentences2: list[str]
    scores: list[float]
    facts: GradedFacts

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.scores)

    def texts(self) -> list[str]:
        """Every sentence once."""
        return list(dict.fromkeys([*self.sentences1, *self.sentences2]))

    def pairs(self) -> Iterator[tuple[str, str]]:
        """The sentences of each pair."""
        return zip(self.sentences1, self.sentences2, strict=True)

    def write(self, path: Path) -> None:
        """Writes the pairs as JSON Lines, which are read back as the same pairs."""
        rows = zip(self.sentences1, self.sentences2, self.scores, strict=True)
        lines = [json.dumps(dict(zip(_NAMES[0], row, strict=True)), ensure_ascii=False) + "\n" for row in rows]
        path.write_text("".join(lines), encoding="utf-8")

    def paraphrases(self) -> list[bool]:
        """Which pairs mean the same: gold at least 4 of 5 (as Wang & Isola 2020 and the paper take them)."""
        return [gold >= PARAPHRASE for gold in self.gold_of_5()]

    def gold_of_5(self) -> list[float]:
        """The gold scores on the scale 0 to 5, whatever their own is."""
        # Rounded, since 0.2 in single precision is a little more than a fifth.
        return [round(_of_5(score, self.facts.lowest, self.facts.scale), 6) for score in self.scores]


def _of_5(score: float, lowest: float, highest: float) -> float:
    return (score - lowest) * HIGHEST_SCORE / (highest - lowest)


def check_graded_pairs(reference: GradedReference | Path, split: str) -> None:
    """Makes sure, without reading them, that the files of graded pairs are there."""
    if _folder(reference) is None:
        find_source(reference.file if isinstance(reference, GradedFile) else reference, split)


def _folder(reference: GradedReference | Path) -> Path | None:
    """The folder of this disk that a reference names, as SentEval's years are."""
    if isinstance(reference, (HubDataset, GradedFile, Given)):
        return None
    path = Path(resolve(str(reference))).expanduser()
    return path if os.path.isdir(path) else None


def load_graded_pairs(reference: GradedReference | Path, split: str = "test", quotes: Quotes = None) -> GradedPairs:
    """Reads graded pairs.

    Args:
        reference: CSV, TSV, JSON Lines, Parquet or a Hub dataset with columns sentence1, sentence2 and score (or as
            GLUE and SICK name them); a table of these three without a header; STS-B as published (seven columns, split
            by tabs); or a folder of SentEval's STS12 to STS16, of which all parts are put together. Scores go from 0
            to 5 or from 0 to 1; a :class:`~simcse_st.recipe.GradedFile` says other names and scales.
        split: The split of a Hub dataset that names none.
        quotes: Of a TSV whose fields stand in quotes: what these are.

    Raises:
        InputError: A row cannot be used, with its place; or scores are missing or all the same.
    """
    folder = _folder(reference)
    if folder:
        return _load_senteval(folder)
    told = reference if isinstance(reference, GradedFile) else GradedFile(file=str(reference))
    source = find_source(told.file if isinstance(reference, GradedFile) else reference, split, quotes)
    pairs: list[Graded] = []
    layouts: dict[str, None] = {}
    ungraded: list[RowError] = []
    scales: set[bool] = set()
    sets: set[str] = set()
    tables: Iterable[tuple[Rows, str]] = ((rows, "") for _, rows in source.tables())
    if isinstance(source, FileSource):
        tables = (_open(path, quotes, told) for path in source.paths)
    for rows, layout in tables:
        highest = 0.0
        for row in _good(rows):
            columns = _by_name(row.cells, row.where_named, told)
            layouts[layout or ", ".join(columns)] = None
            sets.add(str(row.cells.get("SemEval_set")))
            try:
                pairs.append(_parse(row, columns, told.scale))
            except RowError as error:
                if error.reason != _NO_GOLD:
                    raise
                ungraded.append(error)
            else:
                highest = max(highest, pairs[-1][2])
        scales.add(highest <= 1)
    if ungraded and not pairs:
        raise InputError(
            f"{source.name}: all {len(ungraded)} scores are -1: it comes without gold scores, as GLUE's test sets do; "
            "take another split or data set, e.g. sentence-transformers/stsb"
        )
    if ungraded:
        raise ungraded[0]
    if len(sets) > 1:
        raise InputError(f"{source.name}: holds several sets, {listed(sorted(sets))} in SemEval_set: keep one")
    if len(scales) > 1 and not told.scale:
        raise InputError(f"{source.name}: some of its files have scores up to 1, some up to 5: name one of them")
    if (
        not told.columns
        and "sentence1, sentence2, label" in layouts
        and all(score == int(score) for _, _, score in pairs)
    ):
        raise InputError(
            f"{source.name}: its label holds whole numbers only: are these classes? graded scores stand in a column "
            "score, or in GLUE's label with their decimals"
        )
    return _graded(pairs, source.name, source.records(), list(layouts), told.scale)


def _graded(
    pairs: list[Graded],
    name: str,
    sources: list[Source],
    columns: list[str],
    told: list[float] | None = None,
    subsets: dict[str, int] | None = None,
    pairs_without_score: int = 0,
) -> GradedPairs:
    if not pairs:
        raise InputError(f"{name}: there is no graded pair in it")
    sentences1, sentences2, scores = (list(column) for column in zip(*pairs, strict=True))
    if len(set(scores)) == 1:
        raise InputError(f"{name}: all {len(scores)} scores are {scores[0]:g}, so nothing can be measured")
    lowest, highest = told or (0.0, HIGHEST_SCORE if max(scores) > 1 or subsets else 1.0)
    digests = [digest_of(first, second, repr(score)) for first, second, score in pairs]
    digests += [digest_of(part, str(size)) for part, size in (subsets or {}).items()]
    facts = GradedFacts(
        sources=sources,
        columns=columns,
        pairs=len(scores),
        scale=highest,
        lowest=lowest,
        mean_gold=_of_5(sum(scores) / len(scores), lowest, highest),
        pairs_sha256=hashlib.sha256(b"".join(digests)).hexdigest(),
        subsets=subsets or {},
        pairs_without_score=pairs_without_score,
    )
    return GradedPairs(sentences1, sentences2, scores, facts)


def _good(rows: Iterable[Row | RowError]) -> Iterator[Row]:
    """The rows, up to the first broken one."""
    for row in rows:
        if isinstance(row, RowError):
            raise row
        yield row


def _open(path: Path, quotes: Quotes, told: GradedFile) -> tuple[Rows, str]:
    """The rows of a file, and what to say of its layout where it has no header."""
    name, promised = str(path), file_format(path) or ""
    if promised not in (*DELIMITED, ".txt") or told.columns:
        return read_file(path, name), ""
    line = next((line for _, line in read_lines(path, name)), "")
    if isinstance(line, RowError):
        raise line
    line = line.rstrip("\r\n")
    by_tabs = line.split("\t")
    if len(by_tabs) >= 7 and _number(by_tabs[4]) is not None:
        return _official_rows(path, name), "without a header, as STS-B is published: columns 6, 7 and 5"
    layout = ".csv" if promised == ".csv" else ".tsv"
    fields = by_tabs if layout == ".tsv" or not line else split_quoted(name, 1, line, ",")
    if len(fields) == 3 and _number(fields[2]) is not None:
        rows = _good(read_file(path, name, layout=layout, header=False))
        return (_named(row, *row.cells.values()) for row in rows), "without a header: columns 1, 2 and 3"
    if len(fields) > 1:
        _by_name(fields, f"{name}:1", told)
    # A text file is as its publisher wrote it: SICK's quotes are characters like any other.
    return read_file(path, name, layout=layout, quotes="text" if promised == ".txt" else quotes), ""


def _official_rows(path: Path, name: str) -> Iterator[Row]:
    """STS-B as published: genre, file, year, index, score, sentence1, sentence2, and in some rows its sources."""
    for row in _good(read_file(path, name, layout=".txt")):
        fields = row.cells["text"].split("\t")
        if len(fields) < 7:
            raise RowError(f"{row.where}: {len(fields)} fields where 7 belong, split by tabs")
        yield _named(row, fields[5], fields[6], fields[4])


def _named(row: Row, *cells: str) -> Row:
    return row._replace(cells=dict(zip(_NAMES[0], cells, strict=True)))


def _by_name(found: Iterable[str], where: str, told: GradedFile) -> Triple:
    known: tuple[Triple, ...] = _NAMES
    if told.columns:
        known = ((told.columns.sentence1, told.columns.sentence2, told.columns.score),)
    for names in known:
        if set(names) <= set(found):
            return names
    raise InputError(
        f"{where}: found the columns {listed(found)}, but need {', '.join(known[0][:2])} and {known[0][2]} "
        "(a table without a header has these three in this order); name others as {file: ..., columns: "
        "{sentence1: ..., sentence2: ..., score: ...}}"
    )


def _parse(row: Row, columns: Triple, told: list[float] | None = None) -> Graded:
    first = sentence(row, "sentence1", row.cells[columns[0]])
    second = sentence(row, "sentence2", row.cells[columns[1]])
    gold = row.cells[columns[2]]
    score = math.nan if isinstance(gold, bool) else _number(gold)
    lowest, highest = told or (0.0, HIGHEST_SCORE)
    if score == -1 and not told:
        raise RowError(f"{row.where}: score is -1, which is none, but must be from 0 to {HIGHEST_SCORE:g}", _NO_GOLD)
    if score is None or not lowest <= score <= highest:
        hint = "" if told or score is None else "; of another scale say {file: ..., scale: [LOWEST, HIGHEST]}"
        must = f"must be a number from {lowest:g} to {highest:g}"
        raise RowError(f"{row.where}: score is {excerpt(gold)}, but {must}{hint}")
    return first, second, score


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, str) and "_" in value else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _load_senteval(folder: Path) -> GradedPairs:
    """All parts of a year of STS in SentEval's layout; a pair with an empty line for its score is left out."""
    pairs: list[Graded] = []
    subsets: dict[str, int] = {}
    sources: list[Source] = []
    lines = 0
    for path in sorted(folder.glob("STS.input.*.txt")):
        part = path.name.removeprefix("STS.input.").removesuffix(".txt")
        gold = folder / f"STS.gs.{part}.txt"
        if not gold.is_file():
            raise InputError(f"{path}: its scores are not there: no such file as {gold.name}")
        texts, scores = (list(_good(read_file(file, str(file)))) for file in (path, gold))
        if len(texts) != len(scores):
            raise InputError(f"{path} has {len(texts)} lines, but {gold.name} has {len(scores)}")
        before = len(pairs)
        for row, score in zip(texts, scores, strict=True):
            fields = row.cells["text"].split("\t")
            if not score.cells["text"].strip():
                continue
            if len(fields) != 2:
                raise RowError(f"{row.where}: {len(fields)} fields where 2 sentences belong, split by a tab")
            pairs.append(_parse(_named(row, *fields, score.cells["text"]), _NAMES[0]))
        if len(pairs) == before:
            raise InputError(f"{gold}: not one of its {len(texts)} pairs has a score")
        lines += len(texts)
        subsets[part] = len(pairs) - before
        sources += [file_record(path), file_record(gold)]
    if not subsets:
        raise InputError(f"{folder} is a folder without SentEval's STS.input.*.txt: name a file in it")
    layout = "SentEval's: two sentences a line, split by a tab, and their scores in a file of their own"
    return _graded(pairs, str(folder), sources, [layout], None, subsets, lines - len(pairs))
