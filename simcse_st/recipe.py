"""What a recipe may say: every key with its type, its default and its meaning.

A section is also the argument of whatever it is about: reading takes a :class:`DataSection`, the loss checks its
arguments by a :class:`LossSection`. How a recipe is read from YAML stands in :mod:`simcse_st.recipes`.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator
from typing_extensions import Self

from simcse_st.errors import InputError, nearest
from simcse_st.references import (
    Columns,
    HeldOutReference,
    Name,
    NLISection,
    Sample,
    Section,
    SourceFile,
    TrainingReference,
    hold_out_of,
    metrics_of,
)


class Expect(Section):
    """What is known of a source: another value stops the run."""

    source: Name
    """The file's name, or the data set, that this is about; of any other source nothing is expected."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$|^[0-9a-f]{8,}\.\.\.[0-9a-f]{4,}$")
    """SHA-256 of the file, whole or as ``begin...end``."""
    rows_read: int | None = None
    """Rows in it."""
    pairs: int | None = None
    """Pairs that it makes."""
    pairs_with_hard_negative: int | None = None
    """Those of them that have a hard negative; not compared where ``data.hard_negatives`` is false."""
    sentences: int | None = None
    """Distinct sentences, for ``data.kind=sentences``."""
    prepared_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of what is trained on, as ``manifest.json`` and ``simcse-st prepare`` say; not compared where
    ``data.hard_negatives`` is false."""


Pooling = Literal["cls", "mean", "first_last_avg", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean"]


class ModelSection(Section):
    """What is trained: a base with what stands on it, and Normalize."""

    base: str = Field(min_length=1)
    """A hub id, a local folder (bare encoder or Sentence Transformers model), or ``package:NAME/PATH`` for a folder
    inside an installed Python package."""
    revision: str | None = None
    """Commit, tag or branch of a hub base."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Required SHA-256 of a local base's ``model.safetensors``; another file is refused."""
    pooling: Pooling | None = None
    """How the encoder's token vectors become one sentence vector, by the names of Sentence Transformers (``cls`` is the
    first token's, as in the paper), or ``first_last_avg``, the mean over tokens of the first and the last layer's;
    whatever stood on the encoder goes. null takes a Sentence Transformers base as it is saved, and reads a bare encoder
    through its [CLS]."""
    prompts: dict[Name, str] | None = None
    """Texts that may stand before a sentence, by their names; null leaves the base's."""
    prompt: str | None = None
    """The name of that which stands before every sentence: in training, in every evaluation, and in the saved model
    unless its user says otherwise. "" is none; null leaves the base's default."""
    head: Literal["none", "train-only", "keep"] = "none"
    """The paper's MLP (linear, tanh) behind pooling: absent, in training only (its unsupervised models), or part of
    the saved model (its supervised ones)."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Sets all dropout probabilities of the encoder, hidden and attention; null leaves the encoder's own (0.1 in
    BERT)."""
    shared_dropout_mask: bool = False
    """Ablation of unsupervised training (paper, table 3): both views of a sentence get the same dropout mask, which
    makes them one vector."""
    attention: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """How attention is computed; null leaves it to transformers. ``flash_attention_2`` (a GPU, fp16 or bf16, and the
    flash-attn package) computes no padding at all."""
    max_length: int | None = Field(default=None, gt=0)
    """Tokens a sentence may have in the saved model and in every evaluation; null leaves the base's own."""


class DataSection(Section):
    """What it is trained and measured on. Paths are relative to the working directory."""

    train: TrainingReference
    """Labelled NLI rows (premise, hypothesis, label), pairs and triplets (anchor, positive, negative...) or plain text
    (one sentence a line): a JSON Lines, CSV, TSV, Parquet or text file (also .gz), a pattern such as ``data/*.csv``, a
    hub data set, ``package:NAME/PATH``, or a list of these: several sources, each of which may have ``columns``,
    ``nli`` and ``sample`` of its own, e.g. ``[pairs.csv, {dataset: stanfordnlp/snli, sample: {rows: 10000}}]``."""
    kind: Literal["pairs", "sentences"] = "pairs"
    """``pairs`` trains anchors towards positives. ``sentences`` is the unsupervised mode: every distinct sentence of
    the data, whatever its column, towards itself under another dropout mask."""
    dev: HeldOutReference = "sentence-transformers/stsb"
    """What chooses the best step: graded sentence pairs; ``{retrieval: FILE_OR_DATASET}``, pairs or triplets whose
    anchors should find their positives; ``{corpus: ..., queries: ..., relevant: ...}``; ``{nano_beir: NanoMSMARCO}``;
    ``{hold_out: 500}``, so many rows of ``data.train``; or several, ``{sets: {NAME: ..., NAME: ...}}``."""
    test: HeldOutReference = "sentence-transformers/stsb"
    """The same for what is scored once, on the kept weights."""
    columns: Columns | None = None
    """Which columns hold what, where their names do not tell."""
    quotes: Literal["csv", "text"] | None = None
    """Of a TSV whose fields stand in quotes: whether these are those of a CSV, or belong to the text."""
    nli: NLISection = NLISection()
    """How labelled rows become pairs."""
    hard_negatives: bool = True
    """False trains on the same pairs without their hard negatives."""
    drop_duplicates: bool = False
    """Whether of equal pairs with equal hard negatives only the first is kept, and hard negatives that are their row's
    anchor or positive are left out."""
    max_characters: int | None = Field(default=None, gt=0)
    """Drops rows with a longer text, and counts them; null keeps all."""
    strict: bool = True
    """Whether a row that cannot be used is an error. False drops and counts such rows of ``data.train``."""
    sample: Sample | None = None
    """Use a fixed sample of the rows; of labelled rows, it is drawn after those without consensus are dropped."""
    expect: Expect | None = None
    """What is known of the data: counts and checksums."""

    def sources(self) -> list[DataSection]:
        """Each of several sources as a section of its own, and the one of one."""
        if not isinstance(self.train, list):
            return [self.model_copy(update={"sample": None})]
        sections = []
        for one in (SourceFile(file=one) if isinstance(one, str) else one for one in self.train):
            own = {"columns": one.columns or self.columns, "nli": one.nli or self.nli, "sample": one.sample}
            sections.append(self.model_copy(update={"train": one.reference(), **own}))
        return sections


class LossSection(Section):
    """The contrastive loss."""

    temperature: float = Field(default=0.05, ge=1e-6)
    """tau: cosine similarities are divided by it (paper, table D.1: 0.05)."""
    hard_negative_weight: float = Field(default=1.0, gt=0)
    """alpha: how many times a row's own hard negatives count in its denominator; log(alpha) on their logits, not a
    factor on the loss (paper, table 7: 1)."""
    share_hard_negatives: bool = True
    """Whether a row's hard negatives are negatives of all rows of the batch (the paper) or of their own row only."""
    mask_false_negatives: bool = False
    """Leaves another row's positive out of a row's denominator if its text is that of the row's anchor or positive,
    or if both have the same anchor. The paper does not."""
    matryoshka: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1)] | None = None
    """Sizes such as ``[768, 256, 64]``: the loss is the sum of that of the first so many numbers of each embedding
    (Kusupati et al. 2022), so that embeddings can be cut to these sizes afterwards. Each is scored."""
    mlm_weight: float = Field(default=0.0, ge=0)
    """Adds so many times the loss of predicting masked tokens (the paper's code: 0.1; for transfer tasks, not STS)."""
    mlm_probability: float = Field(default=0.15, gt=0, lt=1)
    """The share of tokens that it predicts."""
    mini_batch_size: int | None = Field(default=None, gt=0)
    """Turns gradient caching on: memory for so many sentences instead of a whole batch, for about half the speed."""
    mini_batch_num_tokens: int | None = Field(default=None, gt=0)
    """The same, counted in tokens."""
    chunk_size: int | None = Field(default=None, gt=0)
    """Sentences of one forward pass, sorted by length so that little is padded. By default the whole batch on a GPU; on
    a CPU passes are cut wherever that saves more than one costs. Changes speed, and not the loss but for dropout's
    draws."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.matryoshka and len(set(self.matryoshka)) < len(self.matryoshka):
            raise ValueError(f"matryoshka: {self.matryoshka} has a size twice")
        caches = [key for key in ("mini_batch_size", "mini_batch_num_tokens") if getattr(self, key) is not None]
        if len(caches) > 1:
            raise ValueError("mini_batch_size, mini_batch_num_tokens: gradient caching goes by one of them")
        for key, is_set in (("chunk_size", self.chunk_size is not None), ("mlm_weight", self.mlm_weight > 0)):
            if caches and is_set:
                raise ValueError(f"{key} does not go with gradient caching: leave out {key} or {caches[0]}")
        return self


# Transformers' own, but for one that goes by a metric of an evaluation that is the trainer's.
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip


class TrainingSection(Section):
    """How long and how fast."""

    batch_size: int = Field(default=128, gt=1)
    """Rows of a batch, over all devices together: an anchor sees the other rows' positives and all hard negatives."""
    batches: Literal["mixed", "by_source"] = "mixed"
    """Of several sources: whether a batch has rows of all of them, or of one, whose other rows are then its negatives.
    Each source's last rows that fill no batch are left out of an epoch, other ones each time."""
    epochs: float = Field(default=3, gt=0)
    """Passes over the data, also part of one."""
    max_steps: int | None = Field(default=None, gt=0)
    """Ends training after so many steps, whatever ``epochs`` says."""
    learning_rate: float = Field(default=5e-5, gt=0)
    """Of AdamW, at its highest."""
    schedule: Schedule = "linear"
    """How the learning rate ends, by transformers' names; what some of them take beside it stands in ``args``, e.g.
    ``{lr_scheduler_kwargs: {min_lr: 1e-6}}``."""
    warmup_steps: float = Field(default=0, ge=0)
    """Steps over which the learning rate rises from zero; below 1, their share of all steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of AdamW."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Clips the norm of the model's gradient (a train-only head's is not in it); null does not clip."""
    max_length: int = Field(default=32, gt=0)
    """Tokens a sentence may have in training (paper's code: 32)."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """``auto`` is bf16 on a CUDA GPU that has it, fp16 on another, and fp32 elsewhere. The loss is computed
    in float32 in any case."""
    gradient_checkpointing: bool = False
    """Computes the layers twice instead of keeping what they computed: less memory, about a third slower."""
    torch_compile: bool = False
    """Compiles the encoder (PyTorch's default backend): minutes at the start, then faster on a GPU; dropout draws other
    numbers."""
    workers: int | None = Field(default=None, ge=0)
    """Processes that tokenise batches ahead of training; by default one on a GPU and none on a CPU."""
    eval_steps: int = Field(default=50, gt=0)
    """Dev is scored every so many steps, and at the end; the best step's weights are kept."""
    save_steps: int | None = Field(default=None, gt=0)
    """A checkpoint to resume from is written every so many steps, and at the end; null does with every dev score. The
    newest one stays."""
    early_steps: int | None = Field(default=10, gt=0)
    """In the first 100 steps, dev's alignment and uniformity are written every so many steps; null does not."""
    metric: str | None = None
    """The metric of dev that chooses the best step: ``spearman`` (the default) or ``pearson`` of graded pairs;
    ``ndcg@10`` (the default), ``mrr@10``, ``map@100``, ``accuracy@K``, ``recall@K`` or ``precision@K`` (K: 1, 3, 5, 10,
    100) of a retrieval set. Of several sets, ``NAME/METRIC``; of a size of ``loss.matryoshka``, ``SIZE/METRIC``."""
    patience: int | None = Field(default=None, gt=0)
    """Ends training after so many dev scores without a better one; the schedule stays that of all steps. null does
    not."""
    report_to: list[Name] = []
    """Where losses and dev's metrics are shown as they come: ``tensorboard``, ``wandb``, ``trackio`` and whatever else
    transformers knows."""
    args: dict[str, Any] = {}
    """Any other argument of ``SentenceTransformerTrainingArguments``, e.g. ``{optim: adafactor, run_name: third}``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_steps >= 1 and self.warmup_steps % 1:
            raise ValueError(f"warmup_steps is a number of steps, or a share below 1, not {self.warmup_steps}")
        return self

    def steps(self, rows: list[int]) -> tuple[int, int]:
        """The steps of training on so many rows of each source, and those of its warm-up, as the trainer counts."""
        groups = rows if self.batches == "by_source" else [sum(rows)]
        total = self.max_steps or math.ceil(self.epochs * sum(count // self.batch_size for count in groups))
        return total, math.ceil(total * self.warmup_steps) if self.warmup_steps < 1 else int(self.warmup_steps)


class CardSection(Section):
    """What the model card says beside the records."""

    authors: list[Name] = []
    """Who made the model."""
    team: list[Name] = []
    """Who did what for it, a line each."""
    license: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """Its licence, as the hub names it, e.g. ``apache-2.0``."""
    language: list[Annotated[str, Field(pattern=r"^([a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual)$")]] = []
    """Of the training data, as ISO 639 codes, e.g. ``en``."""
    base_model: str | None = Field(default=None, pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """The hub id of the base, where ``model.base`` is a folder or a package."""
    notes: str = ""
    """A paragraph of your own, in Markdown."""
    examples: bool | None = None
    """Whether to quote the dev pairs on which the model is most confidently wrong; null does where they are public:
    from the hub, from a package, or STS-B itself."""
    samples: bool = False
    """Whether to show the first three rows that were trained on. Set it before training: otherwise none is recorded."""


class Recipe(Section):
    """Everything that determines a run.

    Example:
        >>> from simcse_st import load_recipe
        >>> recipe = load_recipe("quickstart", ["loss.temperature=0.1", "seed=1"])
        >>> recipe.loss.temperature
        0.1
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run folder, ``runs/NAME``; by default the name of the recipe's file."""
    description: str = ""
    """One line for the list of recipes."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seeds dropout and the order of the rows."""
    model: ModelSection
    data: DataSection
    loss: LossSection = LossSection()
    training: TrainingSection = TrainingSection()
    card: CardSection = CardSection()

    @model_validator(mode="after")
    def _check(self) -> Self:
        known, metric = metrics_of(self.data.dev, self.loss.matryoshka or ()), self.training.metric
        if metric not in (None, *known):
            raise ValueError(f"training.metric: data.dev has no metric {metric!r}: {nearest(str(metric), known)}")
        if self.training.batches == "by_source" and len(self.data.sources()) < 2:
            raise ValueError("training.batches: by_source is about several sources: data.train must be a list of them")
        if self.data.kind == "sentences" and (hold_out_of(self.data.dev) or hold_out_of(self.data.test)):
            raise ValueError("hold_out: the single sentences of data.kind=sentences have no positives to find")
        if self.data.kind == "sentences":
            idle = {
                "data.hard_negatives": not self.data.hard_negatives,
                "data.nli": self.data.nli != NLISection(),
                "data.drop_duplicates": self.data.drop_duplicates,
                "loss.hard_negative_weight": self.loss.hard_negative_weight != 1.0,
                "loss.share_hard_negatives": not self.loss.share_hard_negatives,
            }
            if any(idle.values()):
                keys = ", ".join(key for key, is_set in idle.items() if is_set)
                raise ValueError(
                    f"{keys}: data.kind=sentences trains on distinct single sentences, so this would do nothing"
                )
        elif self.model.shared_dropout_mask:
            raise ValueError(
                "model.shared_dropout_mask is about two views of one sentence: it needs data.kind=sentences"
            )
        return self

    def to_yaml(self) -> str:
        """The whole recipe with every default written out, so that a later version's defaults change nothing."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)

    def flat(self) -> dict[str, Any]:  # of keys as --set names them, whose values are YAML's
        """The keys that make a run."""
        flat: dict[str, Any] = {}
        for key, value in self.model_dump(mode="json", exclude={"card", "description"}).items():
            inner = value if isinstance(value, dict) else None
            flat |= {key: value} if inner is None else {f"{key}.{name}": inner[name] for name in inner}
        return flat

    def differences(self, other: Recipe) -> list[str]:
        """The keys in which two recipes differ that a run's result depends on."""
        one, two = self.flat(), other.flat()
        return [key for key in one if one[key] != two[key] and key not in ("training.workers", "training.save_steps")]

    def changed(self, **keys: Any) -> Recipe:
        """The recipe with other values of keys, named ``section__key`` or ``key``."""
        update: dict[str, Any] = {}
        for name, value in keys.items():
            section, _, key = name.partition("__")
            inner = update.get(section) or getattr(self, section)
            update[section] = inner.model_copy(update={key: value}) if key else value
        return self.model_copy(update=update)


AnySection = TypeVar("AnySection", bound=Section)


def checked(section: type[AnySection], **values: Any) -> AnySection:
    """A section of these values.

    Raises:
        InputError: A value has no meaning, or two do not go together.
    """
    try:
        return section(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = re.sub(r"^(Value error, |Input |String )", "", first["msg"])
        key = ".".join(str(part) for part in first["loc"] if not str(part).startswith("<"))  # which form it has
        raise InputError(f"{key} {problem}, not {first['input']!r}" if key else problem) from None
