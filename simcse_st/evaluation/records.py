"""What evaluations and groups of runs hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from simcse_st.records import Environment, HeldOutFacts, ModelFacts, Record, Scores, Split

YEARS = ("sts12", "sts13", "sts14", "sts15", "sts16")
ON_DEV = ("geometry", "retrieval", "gold-scores", "mistakes")
TASKS = ("dev", "test", *ON_DEV, *YEARS, "sick-r")
GROUPS: dict[str, tuple[str, ...]] = {
    "default": ("dev", "test", *ON_DEV),
    "sts": (*YEARS, "test", "sick-r"),
    "all": TASKS,
}

# The number of pairs and the mean gold score of 5 over all of STS-B, by which to know it whatever file it comes from.
_STSB: dict[Split, tuple[int, float]] = {"dev": (1500, 2.3639), "test": (1379, 2.6079)}


def is_stsb(split: Split, pairs: int, mean_gold: float | None) -> bool:
    """Whether graded pairs are all of STS-B's dev or test."""
    size, mean = _STSB[split]
    return pairs == size and abs((mean_gold or 0.0) - mean) < 0.01


class Subset(Record):
    """One part of a year of STS."""

    spearman: float
    n: int


class YearScores(Record):
    """A year of STS under the three aggregations in use."""

    all: float
    """Spearman x100 over all pairs together: the paper's."""
    pearson_all: float
    n: int
    mean: float | None = None
    wmean: float | None = None
    """The mean of the subsets' Spearman, plain and weighted by size."""
    subsets: dict[str, Subset] = Field(default={})
    pairs_sha256: str = ""
    mean_gold: float | None = None


class Geometry(Record):
    """Alignment and uniformity (Wang & Isola 2020); lower is better."""

    alignment: float
    pairs: int
    uniformity: float
    sentences: int


class Retrieval(Record):
    """How early the second sentence of a pair is found among all sentences."""

    recall_at_1: float = Field(alias="recall@1")
    recall_at_5: float = Field(alias="recall@5")
    mrr: float
    n: int
    sentences: int
    top1_judged: int
    top1_judged_at_most_1: int


class GoldBand(Record):
    """Cosine similarity of the pairs with one rounded gold score."""

    gold: int
    n: int
    median: float | None = None
    mean: float | None = None


class GradedPair(Record):
    """A pair with its gold score from 0 to 5 and a model's cosine."""

    sentence1: str
    sentence2: str
    gold: float
    cosine: float


class Mistakes(Record):
    """The pairs on which a model is most confidently wrong."""

    overrated: list[GradedPair]
    underrated: list[GradedPair]


class Average(Record):
    """The mean of the paper's seven STS sets."""

    all: float
    over: list[str]


class MTEBScore(Record):
    """The main score of an MTEB task, x100."""

    main_score: float
    metric: str
    dataset: str | None = None
    """Its id on the Hub."""
    revision: str
    parts: dict[str, float] = Field(default={})
    """The score of each part, ``SUBSET_SPLIT``."""
    version: str
    """Of mteb."""


class Tasks(Record):
    """What was measured of a model."""

    dev: Scores | None = None
    test: Scores | None = None
    geometry: Geometry | None = None
    retrieval: Retrieval | None = None
    gold_scores: list[GoldBand] | None = Field(default=None, alias="gold-scores")
    mistakes: Mistakes | None = None
    sts12: YearScores | None = None
    sts13: YearScores | None = None
    sts14: YearScores | None = None
    sts15: YearScores | None = None
    sts16: YearScores | None = None
    sick_r: Scores | None = Field(default=None, alias="sick-r")
    average: Average | None = None
    mteb: dict[str, MTEBScore] | None = None

    def split(self, name: Split) -> Scores | None:
        """The score on dev or test."""
        return self.dev if name == "dev" else self.test

    def task(self, name: str) -> Any:  # of the types above
        """The result of a task by its name; None if it was not run."""
        return getattr(self, name.replace("-", "_"))

    def score(self, name: str) -> float | None:
        """Spearman x100 of a set of graded pairs; of a year of STS the paper's, over all subsets together."""
        result = self.task(name)
        return result.all if isinstance(result, YearScores) else result and result.metrics.get("spearman")


class MeasuredModel(ModelFacts):
    """A model with what was measured of it."""

    name: str
    revision: str | None = None
    tasks: Tasks


class Evaluation(Record):
    """``evaluation.json``: models measured side by side on the same data."""

    FILE: ClassVar = "evaluation.json"

    protocol: str
    data: dict[str, HeldOutFacts]
    """By the task; those on dev go by ``dev``."""
    models: list[MeasuredModel]
    environment: Environment


# seeds.json and ablation.json


class Spread(Record):
    """Mean and standard deviation (of a sample; one value has none) over seeds."""

    mean: float
    sd: float | None = None
    n: int

    def text(self, sign: str = "") -> str:
        """``mean ± standard deviation``, the latter only where there is one."""
        return f"{self.mean:{sign}.2f}" + ("" if self.sd is None else f" ± {self.sd:.2f}")


class SameData(Record):
    """What all runs of a group have in common."""

    prepared_sha256: str
    dev_pairs: int
    test_pairs: int
    dev_pairs_sha256: str
    test_pairs_sha256: str
    metrics: dict[Split, str] = Field(default={"dev": "spearman", "test": "spearman"})
    """What their scores are."""


class SeedRun(Record):
    """One run of a group."""

    seed: int
    best_step: int
    dev: float
    test: float
    dev_of_step: dict[int, float]
    hard_negatives: int
    masked_cells: int
    data: SameData
    packages: dict[str, str]


class Seeds(Record):
    """``seeds.json``: a recipe under several seeds."""

    FILE: ClassVar = "seeds.json"

    recipe: str
    seeds: list[SeedRun]
    dev: Spread
    test: Spread
    data: SameData
    packages: dict[str, str]


class MatchedRuns(Record):
    """Two runs of one seed, with a part and without it."""

    seed: int
    full: dict[Split, float]
    without: dict[Split, float]
    difference: dict[Split, float]
    dev_difference_of_step: dict[int, float]


def spread_of(values: Sequence[float]) -> Spread:
    """The spread of some values."""
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    deviation = (squares / (len(values) - 1)) ** 0.5 if len(values) > 1 else None
    return Spread(mean=mean, sd=deviation, n=len(values))


class SpreadAtStep(Spread):
    """The difference on dev at one step."""

    step: int


class AblatedPart(Record):
    """What a part of a recipe gains."""

    key: str
    value: Any
    seeds: list[MatchedRuns]
    difference: dict[Split, Spread]
    steps: list[SpreadAtStep]


class Ablation(Record):
    """``ablation.json``: a recipe with and without some of its parts."""

    FILE: ClassVar = "ablation.json"

    recipe: str
    full: list[SeedRun]
    without: dict[str, AblatedPart]
    data: SameData
    packages: dict[str, str]
