"""Hard negatives for pairs: texts that a model finds near an anchor, and that no row calls a positive of it."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from simcse_st.console import Table, progress
from simcse_st.data.columns import Pair
from simcse_st.data.files import digest_of, write_arrow
from simcse_st.data.sources import resolve
from simcse_st.data.training import TrainingData, load_training_data
from simcse_st.errors import InputError, RunError, one_line
from simcse_st.models import load_model, locate_here, locate_model
from simcse_st.recipe import DataSection, checked
from simcse_st.records import Record, Source, TrainFacts
from simcse_st.references import Given, Section
from simcse_st.run import check_free, file_sha256, locked, read_record, write_text

if TYPE_CHECKING:
    from datasets import Dataset
    from sentence_transformers import CrossEncoder, SentenceTransformer

    from simcse_st.mining.nearest import Nearest

logger = logging.getLogger(__name__)

MINED_FILE, EXAMPLES_FILE = "train.jsonl", "examples.jsonl"
SEARCH = ".search"  # the folder of what was found so far
_EXAMPLES = 10

Found = list[tuple[str, float]]  # hard negatives with their scores, highest first


class Mining(Section):
    """What is taken for a hard negative."""

    negatives: int = Field(default=3, gt=0)
    """How many an anchor gets at most."""
    relative_margin: float | None = Field(default=0.05, ge=0, lt=1)
    """By which share of its own similarity the anchor's least similar positive must beat it; null asks for none."""
    max_score: float | None = None
    """How similar it may be at most."""
    first: int = Field(default=0, ge=0)
    """How many of the nearest that are left are passed over."""
    last: int | None = Field(default=None, gt=0)
    """How far down the ranking it may stand; by default ten times as far as there are negatives to find."""

    def depth(self, positives: int) -> tuple[int, int]:
        """How many of the ranked passages can be taken, and how many are looked at.

        Args:
            positives: How many the anchor with the most has.
        """
        # As Sentence Transformers' mine_hard_negatives has it, so that both find the same.
        filtered = self.relative_margin is not None or self.max_score is not None
        last = self.last or self.first + self.negatives * (10 if filtered else 1) + positives
        if self.negatives > last - self.first:
            raise InputError(f"--range {self.first}:{last} leaves no room for {self.negatives} negatives")
        return last, last + positives + 1


class Mined(Record):
    """``manifest.json`` of mined data."""

    FILE: ClassVar = "manifest.json"

    train: TrainFacts
    """The rows that were given."""
    model: str
    corpus: list[Source]
    """Where passages come from beside the positives."""
    passages: int
    asked: dict[str, Any]
    """What the result depends on: the rows, the passages and the model by their checksums, and the options."""
    rows: int
    rows_with_mined: dict[str, int]
    """How many rows got so many mined hard negatives."""
    candidates: int
    """Pairs of an anchor and a passage that were looked at."""
    taken: dict[str, int]
    """How many of these each filter took, one after the other."""
    sha256: str
    """Of the rows as they are written."""


@dataclass(frozen=True)
class _Texts:
    """The distinct anchors and passages, and which are positives of which."""

    anchors: list[str]
    passages: list[str]
    positives: list[list[int]]  # of each anchor the numbers of its passages
    most: int  # rows of one anchor

    @classmethod
    def of(cls, data: TrainingData, corpus: Sequence[str]) -> _Texts:
        numbers: dict[str, int] = {}
        rows: Counter[str] = Counter()
        positives: dict[str, dict[int, None]] = {}
        for text in corpus:
            numbers.setdefault(text, len(numbers))
        for anchor, positive, _ in data.rows():
            number = numbers.setdefault(positive, len(numbers))
            positives.setdefault(anchor, {})[number] = None
            rows[anchor] += 1
        return cls(list(positives), list(numbers), [list(each) for each in positives.values()], max(rows.values()))


def mine(
    data: Any,
    model: str | Path | SentenceTransformer,
    *,
    corpus: str | Path | Sequence[str] | None = None,
    negatives: int = 3,
    relative_margin: float | None = 0.05,
    max_score: float | None = None,
    first: int = 0,
    last: int | None = None,
    cross_encoder: str | Path | None = None,
    keep_own: bool = True,
    output: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    device: str | None = None,
) -> Dataset:
    """Finds hard negatives for pairs; every row stays, in its order, with as many as there are for it.

    A hard negative is near the anchor, but less so than the anchor's positives. It is never the anchor, nor a positive
    of it in any row. Where ``mine_hard_negatives`` of Sentence Transformers keeps an anchor, it finds the same.

    Args:
        data: Pairs or triplets in any form of ``data.train``: a file, a Hub dataset, rows of a program, or a
            :class:`~simcse_st.recipe.DataSection`.
        model: Finds them: a name as ``evaluate`` takes it, or a loaded model.
        corpus: Where to look beside the distinct positives of the data: a file of sentences, or a list.
        negatives: How many an anchor gets at most.
        relative_margin: By which share of its own similarity to the anchor the least similar positive must beat them.
        max_score: How similar they may be at most (cosine, or what the cross-encoder says).
        first: How many of the nearest that are left are passed over.
        last: How far down the ranking they may stand.
        cross_encoder: Scores what was found again, and ranks it anew.
        keep_own: Whether a row's own hard negatives stay, before the mined ones.
        output: A folder for ``train.jsonl``, ``manifest.json`` and ``examples.jsonl``.
        overwrite: Whether what an earlier call left in that folder may be replaced.
        resume: Goes on with a call that was interrupted there.
        device: Where to compute.

    Returns:
        Columns ``anchor``, ``positive`` and ``negative`` (a list).

    Raises:
        InputError: Something cannot be used. Nothing has been written.

    Example:
        >>> mined = mine("pairs.jsonl", "sentence-transformers/all-MiniLM-L6-v2", negatives=3)
        >>> mined[0]["negative"]
        ['A dog is sleeping.', 'A cat runs.']
    """
    settings = checked(
        Mining, negatives=negatives, relative_margin=relative_margin, max_score=max_score, first=first, last=last
    )
    settings.depth(1)
    section = data if isinstance(data, DataSection) else checked(DataSection, train=_reference(data))
    if section.kind != "pairs":
        raise InputError("data.kind=sentences: single sentences have no positives that a negative could be compared to")
    if isinstance(model, (str, Path)):
        locate_here(model)
    if overwrite and resume:
        raise InputError("--resume goes on with a call, --overwrite begins it again: choose one")
    with ExitStack() as stack:
        folder = Path(output) if output else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="simcse-st-")))
        if output:
            stack.enter_context(locked(folder))
            check_free(folder, overwrite or resume, resumable=True, records=(Mined.FILE, SEARCH))
        return _mine(section, model, corpus, settings, cross_encoder, keep_own, folder, resume, device)


def _reference(data: Any) -> Any:  # what data.train takes
    if isinstance(data, (str, Path)):
        return str(data)
    sources = isinstance(data, list) and all(isinstance(one, (str, Section)) for one in data)
    return data if sources or isinstance(data, Section) else Given(data)


def _mine(
    section: DataSection,
    model: str | Path | SentenceTransformer,
    corpus: str | Path | Sequence[str] | None,
    settings: Mining,
    cross_encoder: str | Path | None,
    keep_own: bool,
    folder: Path,
    resume: bool,
    device: str | None,
) -> Dataset:
    told, sources = _read_corpus(corpus)
    data = load_training_data(section)
    texts = _Texts.of(data, told)
    from simcse_st.identity import describe_model  # and with it torch
    from simcse_st.mining.nearest import find_nearest

    located = locate_model(model) if isinstance(model, (str, Path)) else None
    loaded: Any = load_model(located, device) if located else model
    judge = _load_cross_encoder(cross_encoder, device) if cross_encoder else None
    last, looked_at = settings.depth(texts.most)
    key = {
        "prepared_sha256": data.facts.prepared_sha256,
        "passages_sha256": hashlib.sha256(b"".join(map(digest_of, texts.passages))).hexdigest(),
        "model_sha256": describe_model(loaded).model_sha256,
        "looked_at": looked_at,
    }
    judged_by = str(cross_encoder) if cross_encoder else None
    asked = {**key, **settings.model_dump(), "cross_encoder": judged_by, "keep_own": keep_own}
    if resume and (folder / Mined.FILE).is_file():
        before = read_record(folder / Mined.FILE, Mined).asked
        if differing := [name for name in asked if before.get(name) != asked[name]]:
            raise InputError(
                f"--resume: {folder} is of another call ({', '.join(differing)} differs): choose another --output, or "
                "--overwrite it"
            )
        logger.info("resume   %s is finished: its rows stand", folder)
        return load_training_data(DataSection(train=str(folder / MINED_FILE))).dataset
    if not resume:  # first the record: what is half replaced must not look finished
        for old in (Mined.FILE, MINED_FILE, EXAMPLES_FILE):
            (folder / old).unlink(missing_ok=True)
        shutil.rmtree(folder / SEARCH, ignore_errors=True)
    logger.info("mine     %d anchors among %d passages", len(texts.anchors), len(texts.passages))
    if data.facts.labels:
        logger.warning("mine     captions paraphrase each other: look at %s before you train on these", EXAMPLES_FILE)
    nearest = find_nearest(loaded, texts.anchors, texts.passages, texts.positives, looked_at, folder / SEARCH, key)
    taken = dict.fromkeys(("anchor_or_positive", "relative_margin", "max_score", "first"), 0)
    found = dict(zip(texts.anchors, _filtered(settings, texts, nearest, last, judge, taken), strict=True))
    mined = _write(folder, data, found, keep_own)
    counts = Counter(len(_of_row(found[anchor], own, keep_own)) for anchor, _, own in data.rows())
    manifest = Mined(
        train=data.facts,
        model=located.name if located else "a loaded model",
        corpus=sources,
        passages=len(texts.passages),
        asked=asked,
        rows=len(data),
        rows_with_mined={str(number): counts[number] for number in sorted(counts)},
        candidates=int((nearest.passages >= 0).sum()),
        taken=taken,
        sha256=file_sha256(folder / MINED_FILE),
    )
    write_text(folder / Mined.FILE, manifest.to_json())
    del nearest
    shutil.rmtree(folder / SEARCH, ignore_errors=True)
    return mined


def mined_table(mined: Mined) -> Table:
    """How many rows got how many, and what the filters took."""
    rows = [[f"rows with {number} mined", f"{count:,}"] for number, count in mined.rows_with_mined.items()]
    rows += [["candidates looked at", f"{mined.candidates:,}"]]
    rows += [[f"taken by {name.replace('_', ' ')}", f"{count:,}"] for name, count in mined.taken.items() if count]
    return Table(f"{mined.rows:,} rows, {mined.passages:,} passages", ["", "count"], rows)


def _read_corpus(corpus: str | Path | Sequence[str] | None) -> tuple[list[str], list[Source]]:
    """The passages to look through beside the positives, and where they come from."""
    if corpus is None:
        return [], []
    train = str(corpus) if isinstance(corpus, (str, Path)) else Given([{"text": text} for text in corpus])
    read = load_training_data(checked(DataSection, train=train, kind="sentences"))
    return [text for (text,) in read.rows()], read.facts.sources


def _load_cross_encoder(name: str | Path, device: str | None) -> CrossEncoder:
    from sentence_transformers import CrossEncoder

    try:
        found = CrossEncoder(resolve(str(name)), device=device)
    except Exception as error:  # of many classes, from the hub's to those about what stands in the folder
        raise InputError(f"--cross-encoder {name}: {one_line(error)}") from error
    if found.num_labels != 1:
        raise InputError(f"--cross-encoder {name}: must give a pair one score, not {found.num_labels}")
    return found


def _filtered(
    settings: Mining,
    texts: _Texts,
    nearest: Nearest,
    last: int,
    judge: CrossEncoder | None,
    taken: dict[str, int],
) -> Iterator[Found]:
    """The hard negatives of each anchor, in the order of the anchors; counts what each filter takes."""
    number_of = {text: number for number, text in enumerate(texts.passages)}
    for row, anchor in enumerate(progress("choosing negatives", len(texts.anchors), texts.anchors)):
        passages = nearest.passages[row]
        passages = passages[passages >= 0]
        scores, positive = nearest.scores[row][: len(passages)], float(nearest.positive[row])
        excluded = np.isin(passages, [*texts.positives[row], number_of.get(anchor, -1)])
        if judge is not None:
            pairs = [(anchor, texts.passages[number]) for number in (*passages, *texts.positives[row])]
            judged = np.asarray(judge.predict(pairs, show_progress_bar=False), dtype=np.float32)
            scores, positive = judged[: len(passages)], float(judged[len(passages) :].min())
        left = ~excluded
        taken["anchor_or_positive"] += int(excluded.sum())
        limits = {
            "relative_margin": None
            if settings.relative_margin is None
            else positive - abs(positive) * settings.relative_margin,
            "max_score": settings.max_score,
        }
        for name, limit in limits.items():
            if limit is not None:
                above = left & (scores > np.float32(limit))
                taken[name] += int(above.sum())
                left &= ~above
        order = np.flatnonzero(left)
        order = order[np.argsort(-scores[order], kind="stable")][:last]
        taken["first"] += min(settings.first, len(order))
        chosen = order[settings.first : settings.first + settings.negatives]
        yield [(texts.passages[passages[number]], float(scores[number])) for number in chosen]


def _of_row(found: Found, own: list[str], keep_own: bool) -> Found:
    """What of an anchor's hard negatives is new to a row."""
    return [(text, score) for text, score in found if not keep_own or text not in own]


def _write(folder: Path, data: TrainingData, found: Mapping[str, Found], keep_own: bool) -> Dataset:
    """Writes the rows, and some of them with their scores."""
    import pyarrow as pa
    from datasets import Dataset

    def rows() -> Iterator[Pair]:
        for anchor, positive, own in data.rows():
            new = [text for text, _ in _of_row(found[anchor], own, keep_own)]
            yield anchor, positive, [*(own if keep_own else []), *new]

    text = pa.string()
    path = write_arrow(rows(), pa.schema({"anchor": text, "positive": text, "negative": pa.list_(text)}))
    mined = replace(data, dataset=Dataset.from_file(str(path)))
    try:
        mined.write(folder / f"{MINED_FILE}.part")
        (folder / f"{MINED_FILE}.part").rename(folder / MINED_FILE)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {error.strerror}") from error
    shown = set(random.Random(42).sample(range(len(data)), min(_EXAMPLES, len(data))))
    lines = [
        {"anchor": anchor, "positive": positive, "own": own, "mined": _of_row(found[anchor], own, keep_own)}
        for number, (anchor, positive, own) in enumerate(data.rows())
        if number in shown
    ]
    write_text(folder / EXAMPLES_FILE, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return mined.dataset
