"""How a recipe names data: files, data sets on the Hub, rows of a program, and what is made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import CoreSchema, PydanticSerializationUnexpectedValue, core_schema
from typing_extensions import Self


class Section(BaseModel):
    """Strict and frozen: an unknown key or another type is an error, and nothing changes after loading."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class HubDataset(Section):
    """A data set on the Hugging Face Hub."""

    dataset: str = Field(min_length=1)
    """Its id, ``owner/name``."""
    config: str | None = None
    """Its configuration (subset), where it has several."""
    split: str | None = None
    """The split to read: by default ``train`` for ``data.train``, ``validation`` for ``dev``, ``test`` for ``test``."""
    revision: str | None = None
    """A commit, tag or branch; name a commit to be sure of the same data later."""
    files: str | None = None
    """The files to read, by name or pattern, where the data set's own configuration does not name them."""
    streaming: bool = False
    """Reads it over the network as it goes, and keeps no copy of it in the cache."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.files and self.streaming:
            raise ValueError(f"{self.dataset}: named files are read whole: leave streaming out")
        return self


GIVEN = "given to train()"


class Given:
    """Rows that a program hands over in the place of a file's name; a recipe's YAML can only say that they were.

    Args:
        rows: A ``datasets.Dataset`` (also streaming), an iterable of mappings of columns to values, a mapping of
            columns to lists, or a tuple of lists.
        columns: Of a tuple: the names of its columns.
    """

    def __init__(self, rows: Any, columns: tuple[str, ...] = ("anchor", "positive", "negative")) -> None:
        self.rows, self.columns = rows, columns

    def __str__(self) -> str:
        return GIVEN

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        def as_text(value: object) -> str:
            if not isinstance(value, cls):  # but another member of the same union
                raise PydanticSerializationUnexpectedValue(type(value).__name__)
            return GIVEN

        serialization = core_schema.plain_serializer_function_ser_schema(as_text, when_used="json")
        return core_schema.is_instance_schema(cls, serialization=serialization)


Name = Annotated[str, Field(min_length=1)]


class GradedColumns(Section):
    """Which columns of graded pairs hold what."""

    sentence1: Name
    """The first sentence."""
    sentence2: Name
    """The second."""
    score: Name
    """The gold score."""


class GradedFile(Section):
    """A file of graded pairs whose columns or scores are not the usual ones."""

    file: Name
    """Its name."""
    columns: GradedColumns | None = None
    """Its columns, where they are not sentence1, sentence2 and score."""
    scale: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """The lowest and the highest score there can be; null for 0 to 5 or 0 to 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scale and not self.scale[0] < self.scale[1]:
            raise ValueError(f"{self.file}: scale is the lowest and the highest score, not {self.scale}")
        return self


Column = Name | Annotated[int, Field(gt=0)]


class Columns(Section):
    """Which columns hold what: their names, or in a CSV or TSV without a header their numbers from 1."""

    anchor: Column | None = None
    """Of pairs: the anchor."""
    positive: Column | None = None
    """Of pairs: the positive."""
    negative: Column | list[Column] | None = None
    """Of pairs: the hard negatives, in one column or several."""
    premise: Column | None = None
    """Of labelled NLI rows: the premise."""
    hypothesis: Column | None = None
    """Of labelled NLI rows: the hypothesis."""
    label: Column | None = None
    """Of labelled NLI rows: the label."""
    text: Column | None = None
    """Of single sentences: the sentence."""


class NLISection(Section):
    """How labelled rows become pairs."""

    hard_negatives: Literal["first", "all"] = "first"
    """Of the contradictions of the very same premise: the first in file order, or all that differ."""


class Sample(Section):
    """A fixed sample of the rows."""

    rows: int = Field(gt=0)
    """How many rows to keep, in file order."""
    seed: int = Field(default=42, ge=0)
    """Which ones."""


class _Own(Section):
    """What one of several sources has of its own."""

    columns: Columns | None = None
    """Which of its columns hold what; null takes ``data.columns``."""
    nli: NLISection | None = None
    """How its labelled rows become pairs; null takes ``data.nli``."""
    sample: Sample | None = None
    """A fixed sample of its rows; ``data.sample`` is drawn from those of all sources."""


class SourceFile(_Own):
    """One of several sources of training data: a file or pattern."""

    file: Name
    """Its name."""

    def reference(self) -> str:
        """What it is without what is its own."""
        return self.file


class SourceDataset(HubDataset, _Own):
    """One of several sources of training data: a data set on the Hub."""

    def reference(self) -> HubDataset:
        """What it is without what is its own."""
        return HubDataset(**self.model_dump(include=set(HubDataset.model_fields)))


def form_of(value: object) -> str | None:
    """Which form of a reference this is: what is wrong with it is then said of that form."""
    for kind, form in ((str, "<name>"), (list, "<list>"), (Given, "<given>")):
        if isinstance(value, kind):
            return form
    keys = value if isinstance(value, Mapping) else getattr(type(value), "model_fields", {})
    return next((f"<{key}>" for key in _KEYS if key in keys), None)


_KEYS = ("dataset", "file", "retrieval", "corpus", "nano_beir", "hold_out", "sets")
_Hub = Annotated[HubDataset, Tag("<dataset>")]
_File = Annotated[Name, Tag("<name>")]
_Rows = Annotated[Given, Tag("<given>")]


def _one_of(forms: str) -> Discriminator:
    return Discriminator(form_of, custom_error_type="form", custom_error_message=f"should be {forms}")


Reference = Annotated[_File | _Hub, _one_of("a file, a hub data set, or a mapping with the key dataset")]
SourceReference = Annotated[
    _File | Annotated[SourceFile, Tag("<file>")] | Annotated[SourceDataset, Tag("<dataset>")],
    _one_of("a file, a hub data set, or a mapping with the key file or dataset"),
]
TrainingReference = Annotated[
    _File | _Hub | _Rows | Annotated[list[SourceReference], Field(min_length=1), Tag("<list>")],
    _one_of("a file, a hub data set, a mapping with the key dataset, or a list of sources"),
]


class RetrievalRows(Section):
    """Pairs or triplets as a retrieval set: each anchor is a query, its positives are what it should find."""

    retrieval: TrainingReference
    """Them, in any form of ``data.train``."""
    columns: Columns | None = None
    """Which columns hold what, where their names do not tell."""


class RetrievalCorpus(Section):
    """A retrieval set in three parts, as BEIR has it."""

    corpus: Reference
    """The passages: ``_id``, ``text`` and, if it has one, ``title``."""
    queries: Reference
    """The queries: ``_id`` and ``text``."""
    relevant: Reference
    """Which passages a query should find: ``query-id``, ``corpus-id`` and, if graded, ``score`` above 0."""


class NanoBEIR(Section):
    """One of the small retrieval sets of NanoBEIR, from the Hub."""

    nano_beir: Name
    """Its name, e.g. ``NanoMSMARCO``."""


class HoldOut(Section):
    """Rows of ``data.train`` as a retrieval set: no row that is trained on shares a text with them."""

    hold_out: float = Field(gt=0)
    """How many; below 1, their share of all, but 1,000 at most. Where the last anchor has several, a few more."""
    seed: int = Field(default=42, ge=0)
    """Which ones."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hold_out >= 1 and self.hold_out % 1:
            raise ValueError(f"hold_out is a number of rows, or a share below 1, not {self.hold_out}")
        return self

    def rows(self, of: int) -> int:
        """How many rows of so many."""
        return min(math.ceil(of * self.hold_out), 1000) if self.hold_out < 1 else int(self.hold_out)


GradedReference = _File | _Hub | Annotated[GradedFile, Tag("<file>")] | _Rows
_OneReference = (
    GradedReference
    | Annotated[RetrievalRows, Tag("<retrieval>")]
    | Annotated[RetrievalCorpus, Tag("<corpus>")]
    | Annotated[NanoBEIR, Tag("<nano_beir>")]
    | Annotated[HoldOut, Tag("<hold_out>")]
)
_FORMS = "a file, a hub data set, or a mapping with the key dataset, file, retrieval, corpus, nano_beir"


class HeldOutSets(Section):
    """Several held-out sets at once, each under its name."""

    sets: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z][\w.-]*$")],
        Annotated[_OneReference, _one_of(f"{_FORMS} or hold_out")],
    ] = Field(min_length=1)
    """Them. Their metrics are ``NAME/METRIC``; that of the first counts unless ``training.metric`` says otherwise."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(isinstance(one, HoldOut) for one in self.sets.values()) > 1:
            raise ValueError("one hold_out is enough: give its sets together the rows that they should have")
        return self


HeldOutReference = Annotated[
    _OneReference | Annotated[HeldOutSets, Tag("<sets>")], _one_of(f"{_FORMS}, hold_out or sets")
]
RETRIEVAL = (RetrievalRows, RetrievalCorpus, NanoBEIR)

# The metrics of each kind of held-out set that can choose the best step, the default first; all x100.
GRADED_METRICS = ("spearman", "pearson")
RETRIEVAL_METRICS = (
    "ndcg@10", "mrr@10", "map@100",
    *(f"{name}@{k}" for name in ("accuracy", "recall", "precision") for k in (1, 3, 5, 10, 100)),
)  # fmt: skip


def files_of(reference: object) -> list[str]:
    """The files, if any, that a reference to data names."""
    if isinstance(reference, str):
        return [reference]
    if isinstance(reference, list):
        return [name for one in reference for name in files_of(one)]
    if isinstance(reference, HeldOutSets):
        return files_of([*reference.sets.values()])
    keys = ("file", "retrieval", "corpus", "queries", "relevant") if isinstance(reference, Section) else ()
    return [name for key in keys for name in files_of(getattr(reference, key, None))]


def is_public(reference: object) -> bool:
    """Whether all files that a reference names come with a package, so that anyone can have them."""
    if GIVEN in str(reference):
        return False
    return all(name.startswith("package:") for name in files_of(reference))


def hold_out_of(reference: object) -> HoldOut | None:
    """What of a held-out set is taken from the training data."""
    sets = reference.sets.values() if isinstance(reference, HeldOutSets) else [reference]
    return next((one for one in sets if isinstance(one, HoldOut)), None)


def metrics_of(reference: object, sizes: Iterable[int] = ()) -> tuple[str, ...]:
    """The metrics that a held-out set has, the default first.

    Args:
        reference: The set.
        sizes: To which embeddings are cut beside; the metrics of these are ``SIZE/METRIC``.
    """
    if isinstance(reference, HeldOutSets):
        each = {name: metrics_of(one, sizes) for name, one in reference.sets.items()}
        return tuple(f"{name}/{metric}" for name, metrics in each.items() for metric in metrics)
    known = RETRIEVAL_METRICS if isinstance(reference, (*RETRIEVAL, HoldOut)) else GRADED_METRICS
    return (*known, *(f"{size}/{metric}" for size in sizes for metric in known))
