"""A finished run -> its model card, and what is published with it."""

from __future__ import annotations

import json
import os.path
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from simcse_st.card import CARD, load_template, render_card
from simcse_st.errors import InputError, RunError
from simcse_st.folder import write_text
from simcse_st.places import PACKAGE_SCHEME
from simcse_st.recipe import Recipe, flat_keys, load_recipe, shipped_recipes

PUSHED = "push.json"


@dataclass(frozen=True)
class Run:
    """The records of a finished run.

    Attributes:
        folder: The run folder.
        recipe: Its recipe.
        results: ``results.json``.
        manifest: ``manifest.json``.
        environment: ``environment.json``.
    """

    folder: Path
    recipe: Recipe
    results: dict[str, Any]
    manifest: dict[str, Any]
    environment: dict[str, Any]

    @property
    def model(self) -> Path:
        """The folder of the model."""
        return self.folder / "model"

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """``evaluation.json`` with the run's own model first, if it is of that very model."""
        path = self.folder / "evaluation.json"
        return _of_run(read_record(path), self.results) if path.is_file() else None


def load_run(folder: str | Path, overrides: Iterable[str] = ()) -> Run:
    """Reads a finished run.

    Args:
        folder: Its folder.
        overrides: ``card.KEY=VALUE``; all other keys made the run, and stay.

    Raises:
        InputError: It is no such folder, a record in it cannot be read, or another key is to be changed.
    """
    folder = Path(os.path.abspath(folder)) if Path(folder).name in ("", "..") else Path(folder)
    if not (folder / "recipe.yaml").is_file() or not (folder / "model" / "modules.json").is_file():
        raise InputError(f"{folder} is no folder of a finished run: it needs recipe.yaml and model/")
    if not (folder / "results.json").is_file():
        raise InputError(f"{folder} is of a run that did not end: go on with it by simcse-st train ... --resume")
    overrides = list(overrides)
    for override in overrides:
        if not override.startswith("card."):
            raise InputError(f"--set {override}: the run is made; only card.KEY=VALUE can be changed")
    recipe = load_recipe(folder / "recipe.yaml", overrides)
    records = {name: read_record(folder / f"{name}.json") for name in ("results", "manifest", "environment")}
    if recipe.card.samples and "samples" not in records["manifest"].get("train", {}):
        raise InputError("card.samples: no rows were recorded: it must be set before training")
    return Run(folder, recipe, **records)


def write_card(folder: str | Path, overrides: Iterable[str] = ()) -> Path:
    """Writes a run's model card from the records in its folder.

    Args:
        folder: The folder of a finished run.
        overrides: ``card.KEY=VALUE``, to be changed in the run's recipe.

    Returns:
        The card, ``model/README.md``.

    Raises:
        InputError: It is no such folder, a record in it cannot be read, or another key is to be changed.
        RunError: The card cannot be written.
    """
    run = load_run(folder, overrides)
    pushed = read_pushes(run.folder)
    text = compose_card(run, pushed[0]["repo"] if pushed else None)
    card = run.model / CARD
    try:
        if overrides:
            write_text(run.folder / "recipe.yaml", run.recipe.to_yaml())
        write_text(card, text)
    except OSError as error:
        raise RunError(f"{error.filename}: cannot be written: {error.strerror}") from error
    return card


def compose_card(run: Run, repo_id: str | None = None) -> str:
    """The text of a run's card.

    Args:
        run: The run.
        repo_id: Where it is published.

    Raises:
        InputError: Its records do not make a card.
    """
    _check_notes(run.recipe.card.notes)
    try:
        return render_card(
            load_template(),
            run.recipe.model_dump(mode="json"),
            run.results,
            run.manifest,
            run.environment,
            run.evaluation,
            command=_command(run),
            base_model=run.results["base_model"] or run.recipe.card.base_model,
            repo_id=repo_id,
            seeds=_beside(run, "seeds", run.folder.parent),
            ablation=_beside(run, "ablation", run.folder.parent.parent),
        )
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, jinja2.TemplateError) as error:
        raise InputError(f"{run.folder}: its records do not make a card: {error!r}") from error


def read_record(path: Path) -> dict[str, Any]:
    """Reads a JSON record.

    Raises:
        InputError: It is not there, or no JSON object.
    """
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read as a record: {' '.join(str(error).split())}") from None


def read_pushes(folder: Path) -> list[dict[str, Any]]:
    """What was published of a run, the last first and of each place the last.

    Raises:
        InputError: The record is damaged.
    """
    path = folder / PUSHED
    if not path.is_file():
        return []
    try:
        record = dict(json.loads(path.read_text("utf-8")))
        pushes = [record, *record.pop("earlier")]
        for push in pushes:
            texts = [push[key] for key in ("repo", "revision", "commit", "stack", "weights_sha256")]
            checksums = [entry["sha256"] for entry in push["files"].values()]
            float(push["scores"]["test"])
            if not all(isinstance(text, str) for text in texts + checksums):
                raise ValueError("a text is none")
        return pushes
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error!r}): delete it; the next push writes it anew") from None


def _check_notes(notes: str) -> None:
    """What is left open in the notes would swallow the card behind them."""
    if notes.count("<!--") > notes.count("-->"):
        raise InputError("card.notes: a comment <!-- is not closed by -->")
    if len(re.findall(r"^ {0,3}(```|~~~)", notes, re.MULTILINE)) % 2:
        raise InputError("card.notes: a code block is not closed")


def _of_run(evaluation: dict[str, Any], results: dict[str, Any]) -> dict[str, Any] | None:
    """The evaluation with the run's own model first, then those that others can have, if on the same pairs."""
    models = evaluation["models"]
    own = next((model for model in models if model["model_sha256"] == results["model_sha256"]), None)
    if own is None:
        return None
    others = [model for model in models if model is not own and _is_public(model) and _on_same_pairs(model, own)]
    return {**evaluation, "models": [own, *others]}


def _is_public(model: dict[str, Any]) -> bool:
    """Whether it is on the hub or in a package: what a folder of this machine is called is nobody else's business."""
    return bool(model["revision"]) or str(model["name"]).startswith(PACKAGE_SCHEME)


def _on_same_pairs(model: dict[str, Any], own: dict[str, Any]) -> bool:
    sets = [[one["tasks"].get(split, {}).get("pairs_sha256") for split in ("dev", "test")] for one in (model, own)]
    return sets[0] == sets[1] and None not in sets[0]


def _beside(run: Run, kind: str, around: Path) -> dict[str, Any] | None:
    """The record of several runs of this recipe: what this run is one of, or what stands beside it."""
    for folder in (around, run.folder.with_name(f"{run.folder.name}-{kind}")):
        path = folder / f"{kind}.json"
        runs = sorted(folder.glob("seed-*" if kind == "seeds" else "full/seed-*"))
        if path.is_file() and runs and _settings(load_recipe(runs[0] / "recipe.yaml")) == _settings(run.recipe):
            record = read_record(path)
            if all(record["data"][key] == value for key, value in _checksums(run.manifest).items()):
                return record
    return None


def _checksums(manifest: dict[str, Any]) -> dict[str, str]:
    """What identifies a run's data, as the records of several runs have it."""
    pairs = {f"{split}_pairs_sha256": manifest[split]["pairs_sha256"] for split in ("dev", "test")}
    return {"prepared_sha256": manifest["train"]["prepared_sha256"], **pairs}


def _settings(recipe: Recipe) -> dict[str, Any]:
    """What two runs of one recipe have in common."""
    return recipe.model_dump(exclude={"name", "seed", "description", "card"})


def _command(run: Run) -> str:
    """The command that runs a recipe again: the shipped recipe that is nearest, and what differs from it."""
    wanted = flat_keys(run.recipe)
    if run.results["base_model"] is None and not wanted["model.base"].startswith(PACKAGE_SCHEME):
        wanted["model.base"] = "path/to/the/base"  # not even its name
    for split in ("train", "dev", "test"):
        reference = wanted[f"data.{split}"]
        if "file" in run.manifest[split]["sources"][0]:
            several = isinstance(reference, list)
            wanted[f"data.{split}"] = [*map(_elsewhere, reference)] if several else _elsewhere(reference)
    differing = {}
    for name in shipped_recipes():
        shipped = flat_keys(load_recipe(name))
        differing[name] = {key: value for key, value in wanted.items() if value != shipped[key]}
    nearest = min(differing, key=lambda name: len(differing[name]))
    processes = run.environment["devices"]
    start = f"torchrun --nproc-per-node {processes} -m simcse_st" if processes > 1 else "simcse-st"
    options = [shlex.quote(f"{key}={_as_yaml(value)}") for key, value in differing[nearest].items()]
    return " \\\n  --set ".join([f"{start} train {nearest}", *options])


def _elsewhere(reference: str) -> str:
    """A file or folder by its name alone: where it is on this machine is nobody else's business."""
    return reference if reference.startswith(PACKAGE_SCHEME) else Path(reference).name


def _as_yaml(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*(:\w[\w./-]*)?", value)
    words = ("true", "false", "null")
    return value if plain and value.lower() not in words else json.dumps(value, ensure_ascii=False)
