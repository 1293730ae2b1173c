"""What a run's records hold: one type for each file in its folder."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from simcse_st.references import Sample

Split = Literal["dev", "test"]
SPLITS: tuple[Split, Split] = ("dev", "test")


class Record(BaseModel):
    """A JSON object that a command leaves behind. Keys of later versions are passed over."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, use_attribute_docstrings=True)

    FILE: ClassVar[str] = ""
    """The file's name in a run's folder, of a record that has one of its own."""

    def to_json(self) -> str:
        """The record as its file holds it; what is null is left out."""
        return self.model_dump_json(indent=2, exclude_none=True, by_alias=True) + "\n"


# manifest.json


class InputFile(Record):
    """A file that was read. Its folder is not recorded: a card would publish the path."""

    file: str
    sha256: str
    bytes: int | None = None


class Source(Record):
    """One input: a file, or a dataset on the Hub."""

    file: str | None = None
    bytes: int | None = None
    sha256: str | None = None
    dataset: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    """The commit that was read."""
    files: list[InputFile] | None = None
    """The files of the dataset, where the recipe names them."""
    rows: int | None = None

    @property
    def name(self) -> str:
        """The dataset's id or the file's name."""
        return self.dataset or self.file or ""


class SourceRows(Record):
    """One of several sources."""

    name: str
    rows: int
    """Its rows that are trained on."""
    sample: Sample | None = None
    """What was drawn of its usable rows."""


class Truncation(Record):
    """How much of the training texts the training length cuts off."""

    tokenizer: str
    max_length: int
    texts: int
    texts_truncated: int
    tokens: int
    tokens_truncated: int
    unknown_tokens: int = 0
    """Tokens that stand for what the tokenizer does not know."""
    texts_unknown: int = 0
    """Texts of nothing else."""


class Overlap(Record):
    """What of a held-out set stands in the training data, as the very same text."""

    sentences: int
    """Distinct texts of it."""
    of_sentences: int
    pairs: int
    """Pairs, graded or of a query and what it should find, whose texts stand in one row, as anchor and positive or
    hard negative."""
    of_pairs: int


class TrainFacts(Record):
    """What was read for training, and what became of it."""

    sources: list[Source]
    of_sources: list[SourceRows] = []
    """Of several sources what became of each, in their order."""
    columns: dict[str, list[str]]
    """The columns that were used, by their roles."""
    columns_left_out: list[str] = []
    rows_read: int
    rows_usable: int
    dropped: dict[str, int]
    """Rows left out, by the reason."""
    unusable_rows: list[str] = []
    """The first errors of rows that cannot be used, where ``data.strict`` is false."""
    labels: dict[str, int] | None = None
    sample: Sample | None = None
    rule: str
    prepared_sha256: str
    """SHA-256 of the rows as ``simcse-st prepare`` writes them."""
    pairs: int | None = None
    pairs_with_hard_negative: int = 0
    share_with_hard_negative: float = 0.0
    hard_negatives: int = 0
    hard_negatives_per_row: dict[str, int] = {}
    unique_anchors: int | None = None
    unique_sentences: int | None = None
    sentences: int | None = None
    """Distinct sentences, in unsupervised training; ``pairs`` is then null."""
    texts: int | None = None
    blank_texts: int | None = None
    duplicate_texts: int | None = None
    anchors_as_positives: int = 0
    """Pairs of one text."""
    own_hard_negatives: int = 0
    """Hard negatives that are their row's anchor or positive."""
    overlap: dict[Split, Overlap] = {}
    truncation: Truncation | None = None
    """Null where no tokenizer was at hand."""
    samples: list[list[Any]] | None = None
    """The first rows, where ``card.samples`` asks for them: texts and lists of texts."""

    @property
    def kind(self) -> Literal["supervised", "unsupervised"]:
        """How the rows are trained on."""
        return "unsupervised" if self.sentences is not None else "supervised"

    @property
    def rows(self) -> int:
        """Rows that are trained on."""
        return self.sentences if self.sentences is not None else self.pairs or 0


class _OneSet(Record):
    """What is known of one held-out set."""

    @property
    def parts(self) -> dict[str, Any]:
        """The sets by their names: this one, without a name."""
        return {"": self}


class GradedFacts(_OneSet):
    """Graded pairs that a model is scored on."""

    sources: list[Source]
    columns: list[str]
    pairs: int
    scale: float
    """The highest score there can be: 5, 1, or what the recipe says."""
    lowest: float = 0.0
    """The lowest."""
    mean_gold: float
    """On the scale from 0 to 5."""
    pairs_sha256: str
    subsets: dict[str, int] = {}
    pairs_without_score: int = 0

    @property
    def size(self) -> str:
        """What a score is of, in words."""
        return f"{self.pairs:,} pairs"


class RetrievalFacts(_OneSet):
    """A retrieval set that a model is scored on."""

    sources: list[Source]
    rule: str
    """What it is made of, in words."""
    queries: int
    passages: int
    relevant: int
    """Pairs of a query and a passage that it should find."""
    pairs_sha256: str
    """SHA-256 of queries, passages, and which should find which."""
    columns: list[str] = []
    mean_gold: None = None

    @property
    def size(self) -> str:
        """What a score is of, in words."""
        return f"{self.queries:,} queries"


class SetsFacts(Record):
    """Several sets that a model is scored on, by their names."""

    sets: dict[str, GradedFacts | RetrievalFacts]
    mean_gold: None = None

    @property
    def parts(self) -> dict[str, Any]:
        """The sets by their names."""
        return dict(self.sets)

    @property
    def sources(self) -> list[Source]:
        """Those of all."""
        return [source for one in self.sets.values() for source in one.sources]

    @property
    def pairs_sha256(self) -> str:
        """SHA-256 of all."""
        lines = [f"{name} {one.pairs_sha256}\n" for name, one in self.sets.items()]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def size(self) -> str:
        """What a score is of, in words."""
        return ", ".join(f"{name}: {one.size}" for name, one in self.sets.items())


HeldOutFacts = GradedFacts | RetrievalFacts | SetsFacts


class Manifest(Record):
    """``manifest.json``: the data of a run."""

    FILE: ClassVar = "manifest.json"

    train: TrainFacts
    dev: HeldOutFacts
    test: HeldOutFacts
    base_changes: list[str] = []
    """What of the base is not as it is saved, in words."""

    def held_out(self, split: Split) -> HeldOutFacts:
        """The facts about dev or test."""
        return self.dev if split == "dev" else self.test


class ModelFacts(Record):
    """What identifies a model, whatever it is called."""

    model_sha256: str
    modules: list[str]
    dimension: int
    max_length: int | None = None
    parameters: int
    precision: str


# environment.json


class Environment(Record):
    """``environment.json``: what a command ran on."""

    FILE: ClassVar = "environment.json"

    python: str
    system: str
    packages: dict[str, str]
    device: str
    devices: int
    threads: int
    precision: str


# history.jsonl


class HistoryEntry(Record):
    """A line of ``history.jsonl``: the loss of a step, or a score."""

    step: int
    loss: float | None = None
    learning_rate: float | None = None
    masked_cells: int | None = None
    dev: dict[str, float] | None = None
    early: dict[str, float] | None = None
    """Dev in the first steps, which chooses nothing."""


# results.json


class Scores(Record):
    """What a model scores on graded pairs or a retrieval set: each metric under its name, x100 and not rounded.

    Of graded pairs also ``alignment`` and ``uniformity``, as they are.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float]

    metric: str = "spearman"
    """The one that counts."""
    n: int = Field(validation_alias=AliasChoices("n", "pairs"))
    """Graded pairs, or queries."""
    pairs_sha256: str = ""
    """Of the set, as the manifest has it."""
    mean_gold: float | None = None

    if TYPE_CHECKING:  # the metrics, which are those of the set

        def __getattr__(self, name: str) -> float: ...

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.metric not in self.metrics:
            raise ValueError(f"{self.metric} is missing")
        return self

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics."""
        return self.__pydantic_extra__

    @property
    def value(self) -> float:
        """The metric that counts."""
        return self.metrics[self.metric]


class BatchFacts(Record):
    """What the loss saw in training, on all devices that share their negatives."""

    batches: int
    sentences: int
    anchors: int
    negatives: int
    fewest_negatives: int
    most_negatives: int
    masked_cells: int
    mean_negatives: float | None = None
    """Negatives in an anchor's denominator, on average."""


class Results(Record):
    """``results.json``: what a run came to."""

    FILE: ClassVar = "results.json"

    recipe: str
    best_step: int
    total_steps: int
    planned_steps: int | None = None
    """Those that its schedule was for, where patience ended training before."""
    base: dict[Split, float]
    """The metric of each of the base: as it is saved or, of a bare encoder, as the recipe reads it."""
    base_metrics: dict[Split, dict[str, float]] = {}
    """All metrics of the base."""
    untrained: dict[Split, float] | None = None
    """The same of what was trained before it was, where the recipe reads the base otherwise than it is saved."""
    dev: Scores
    test: Scores
    weights_sha256: str
    base_model: str | None = None
    """The base's id on the Hub; null for a local folder, whose path is nobody else's business."""
    model_sha256: str
    modules: list[str]
    files: dict[str, str]
    """The SHA-256 of each file of ``model/`` but the card."""
    train_seconds: float
    sentences_per_second: float
    batches: BatchFacts

    def split(self, name: Split) -> Scores:
        """The scores on dev or test."""
        return self.dev if name == "dev" else self.test

    @property
    def stack(self) -> str:
        """The modules as the card prints them."""
        return " -> ".join(self.modules)


# push.json


class PushedFile(Record):
    """A file of a published model."""

    size: int
    sha256: str


class Push(Record):
    """What was published, and where."""

    repo: str
    revision: str
    private: bool
    commit: str | None = None
    url: str | None = None
    pull_request: int | None = None
    files: dict[str, PushedFile]
    stack: str
    weights_sha256: str
    scores: dict[Split, float]


class Pushes(Push):
    """``push.json``: the last push, and of each other repository and branch the last."""

    FILE: ClassVar = "push.json"

    earlier: list[Push]
