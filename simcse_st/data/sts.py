"""Graded sentence pairs: semantic textual similarity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simcse_st.data.formats import DELIMITED, file_format, read_file
from simcse_st.data.lines import first_line
from simcse_st.data.quoting import split_quoted
from simcse_st.data.rows import Row, RowError, excerpt, listed, sentence
from simcse_st.data.sources import Source, file_record, is_folder
from simcse_st.data.spool import Digests
from simcse_st.errors import InputError

Graded = tuple[str, str, float]
Columns = tuple[str, str, str]

# The names that public data gives to the three columns.
_NAMES: tuple[Columns, ...] = (
    ("sentence1", "sentence2", "score"),
    ("sentence1", "sentence2", "label"),  # GLUE
    ("sentence_A", "sentence_B", "relatedness_score"),  # SICK
)
_HEADERLESS: Columns = ("1", "2", "3")
# STS-B as published: genre, file, year, index, score, sentence1, sentence2, and in some rows its sources.
_OFFICIAL: Columns = ("6", "7", "5")
HIGHEST_SCORE = 5.0
PARAPHRASE = 4.0


@dataclass(frozen=True)
class GradedPairs:
    """Sentence pairs with gold scores.

    Attributes:
        scale: The highest score there can be, 5 or 1: a gold score is ``score / scale`` of it.
        facts: For the manifest: source, counts and scale.
        subsets: The sizes of the parts that these pairs are put together from, in order, where there are several.
    """

    sentences1: list[str]
    sentences2: list[str]
    scores: list[float]
    scale: float = HIGHEST_SCORE
    facts: dict[str, Any] = field(default_factory=dict)
    subsets: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.scores)

    def paraphrases(self) -> list[bool]:
        """Which pairs mean the same: gold at least 4 of 5 (as Wang & Isola 2020 and the paper take them)."""
        return [gold >= PARAPHRASE for gold in self.gold_of_5()]

    def gold_of_5(self) -> list[float]:
        """The gold scores on the scale 0 to 5, whatever their own is."""
        # Rounded, since 0.2 in single precision is a little more than a fifth.
        return [round(score * HIGHEST_SCORE / self.scale, 6) for score in self.scores]


def load_graded_pairs(source: Source | str | Path) -> GradedPairs:
    """Reads graded pairs.

    Args:
        source: CSV, TSV, JSON Lines, Parquet or a hub data set with columns sentence1, sentence2 and score (or as GLUE
            and SICK name them); a table of these three without a header; STS-B as published (seven columns, split by
            tabs); or a folder of SentEval's STS12 to STS16, of which all parts are put together. Scores go from 0 to 5
            or from 0 to 1.

    Raises:
        InputError: A row that cannot be used, with its place; or scores that are missing or all the same.
    """
    source = source if isinstance(source, Source) else Source(source)
    folder = Path(source.name).expanduser()
    if isinstance(source.reference, str) and is_folder(folder):
        return _load_senteval(folder, source.name)
    pairs: list[Graded] = []
    layouts: dict[str, None] = {}
    ungraded: list[RowError] = []
    highest: dict[str, float] = {}
    sets: set[str] = set()
    for row, columns, layout in _rows(source):
        layouts[layout] = None
        sets.add(str(row.cells.get("SemEval_set")))
        try:
            pairs.append(_parse(row, columns))
            highest[row.place] = max(pairs[-1][2], highest.get(row.place, 0.0))
        except _NoGoldError as error:
            ungraded.append(error)
    if ungraded and not pairs:
        raise InputError(
            f"{source.name}: all {len(ungraded)} scores are -1: it comes without gold scores, as GLUE's test sets do; "
            "take another split or data set, e.g. sentence-transformers/stsb"
        )
    if ungraded:
        raise ungraded[0]
    if len(sets) > 1:
        raise InputError(f"{source.name}: holds several sets, {listed(sorted(sets))} in SemEval_set: keep one")
    if len({value <= 1 for value in highest.values()}) > 1:
        raise InputError(f"{source.name}: some of its files have scores up to 1, some up to 5: name one of them")
    if "sentence1, sentence2, label" in layouts and all(score == int(score) for _, _, score in pairs):
        raise InputError(
            f"{source.name}: its label holds whole numbers only: are these classes? graded scores stand in a column "
            "score, or in GLUE's label with their decimals"
        )
    return _graded(pairs, source.name, {"sources": source.record(), "columns": list(layouts)})


class _NoGoldError(RowError):
    """A score of -1, which stands for none in public data."""


def _graded(pairs: list[Graded], name: str, facts: dict[str, Any], scale: float | None = None) -> GradedPairs:
    if not pairs:
        raise InputError(f"{name}: there is no graded pair in it")
    sentences1, sentences2, scores = (list(column) for column in zip(*pairs, strict=True))
    if len(set(scores)) == 1:
        raise InputError(f"{name}: all {len(scores)} scores are {scores[0]:g}, so nothing can be measured")
    scale = scale or (1.0 if max(scores) <= 1 else HIGHEST_SCORE)
    digests = Digests()
    for first, second, score in pairs:
        digests.add(first, second, repr(score))
    for name, size in facts.get("subsets", {}).items():
        digests.add(name, str(size))
    mean = sum(scores) / len(scores) * HIGHEST_SCORE / scale
    facts = {**facts, "pairs": len(scores), "scale": scale, "mean_gold": mean, "pairs_sha256": digests.sha256()}
    return GradedPairs(sentences1, sentences2, scores, scale, facts)


def _rows(source: Source) -> Iterator[tuple[Row, Columns, str]]:
    """Each row with its three columns, and what to say of the layout."""
    paths = source.paths()
    for rows, columns, layout in map(_open, paths) if paths else [(source.rows(), None, "")]:
        for row in rows:
            if isinstance(row, RowError):
                raise row
            named = columns or _by_name(row.cells, row.where_named)
            yield row, named, layout or ", ".join(named)


def _open(path: Path) -> tuple[Iterator[Row | RowError], Columns | None, str]:
    """The rows of a file, and if they have no names, which columns hold what."""
    name, promised = str(path), file_format(path) or ""
    if promised not in (*DELIMITED, ".txt"):
        return read_file(path, name), None, ""
    line = first_line(path, name)
    by_tabs = line.split("\t")
    if len(by_tabs) >= 7 and _number(by_tabs[4]) is not None:
        return _official_rows(path, name), _OFFICIAL, "without a header, as STS-B is published: columns 6, 7 and 5"
    layout = ".csv" if promised == ".csv" else ".tsv"
    fields = by_tabs if layout == ".tsv" or not line else split_quoted(name, 1, line, ",")
    if len(fields) == 3 and _number(fields[2]) is not None:
        rows = read_file(path, name, layout=layout, header=False)
        return rows, _HEADERLESS, "without a header: columns 1, 2 and 3"
    if len(fields) > 1:
        _by_name(fields, f"{name}:1")
    # A text file is as its publisher wrote it: SICK's quotes are characters like any other.
    return read_file(path, name, layout=layout, quotes=False if promised == ".txt" else None), None, ""


def _official_rows(path: Path, name: str) -> Iterator[Row | RowError]:
    # Not as a table: some rows of the published files name their sources in further columns.
    for row in read_file(path, name, layout=".txt"):
        if isinstance(row, Row):
            fields = row.cells["text"].split("\t")
            if len(fields) < 7:
                raise RowError(f"{row.where}: {len(fields)} fields where 7 belong, split by tabs")
            row = row._replace(cells={str(number): field for number, field in enumerate(fields, 1)})
        yield row


def _by_name(found: Iterable[str], where: str) -> Columns:
    for names in _NAMES:
        if set(names) <= set(found):
            return names
    raise InputError(
        f"{where}: found the columns {listed(found)}, but need sentence1, sentence2 and score "
        "(a table without a header has these three in this order)"
    )


def _parse(row: Row, columns: Columns) -> Graded:
    first = sentence(row, "sentence1", row.cells[columns[0]])
    second = sentence(row, "sentence2", row.cells[columns[1]])
    gold = row.cells[columns[2]]
    score = math.nan if isinstance(gold, bool) else _number(gold)
    if score == -1:
        raise _NoGoldError(f"{row.where}: score is -1, which is none, but must be from 0 to {HIGHEST_SCORE:g}")
    if score is None or not 0 <= score <= HIGHEST_SCORE:
        raise RowError(f"{row.where}: score is {excerpt(gold)}, but must be a number from 0 to {HIGHEST_SCORE:g}")
    return first, second, score


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, str) and "_" in value else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _load_senteval(folder: Path, name: str) -> GradedPairs:
    """All parts of a year of STS in SentEval's layout; a pair with an empty line for its score is left out."""
    inputs = sorted(folder.glob("STS.input.*.txt"))
    if not inputs:
        raise InputError(f"{name} is a folder without SentEval's STS.input.*.txt: name a file in it")
    pairs: list[Graded] = []
    subsets: dict[str, int] = {}
    sources, ungraded = [], 0
    for path in inputs:
        part = path.name.removeprefix("STS.input.").removesuffix(".txt")
        gold = folder / f"STS.gs.{part}.txt"
        if not gold.is_file():
            raise InputError(f"{path}: its scores are not there: no such file as {gold.name}")
        graded, left_out = _senteval_part(path, gold)
        if not graded:
            raise InputError(f"{gold}: not one of its {left_out} pairs has a score")
        pairs += graded
        ungraded += left_out
        subsets[part] = len(graded)
        sources += [file_record(path), file_record(gold)]
    layout = "SentEval's: two sentences a line, split by a tab, and their scores in a file of their own"
    facts = {"sources": sources, "columns": [layout], "subsets": subsets, "pairs_without_score": ungraded}
    return replace(_graded(pairs, name, facts, HIGHEST_SCORE), subsets=subsets)


def _senteval_part(path: Path, gold: Path) -> tuple[list[Graded], int]:
    texts, scores = _text_lines(path), _text_lines(gold)
    if len(texts) != len(scores):
        raise InputError(f"{path} has {len(texts)} lines, but {gold.name} has {len(scores)}")
    graded: list[Graded] = []
    for row, score in zip(texts, scores, strict=True):
        if not score.cells["text"].strip():
            continue
        fields = row.cells["text"].split("\t")
        if len(fields) != 2:
            raise RowError(f"{row.where}: {len(fields)} fields where 2 sentences belong, split by a tab")
        cells = dict(zip(_HEADERLESS, (*fields, score.cells["text"]), strict=True))
        graded.append(_parse(row._replace(cells=cells), _HEADERLESS))
    return graded, len(texts) - len(graded)


def _text_lines(path: Path) -> list[Row]:
    lines = []
    for row in read_file(path, str(path)):
        if isinstance(row, RowError):
            raise row
        lines.append(row)
    return lines
