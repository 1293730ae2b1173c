"""A finished run -> what others get to see of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simcse_st.card import load_template, render_card
from simcse_st.errors import InputError, RunError
from simcse_st.recipe import Recipe, load_recipe, resolve


def write_card(folder: str | Path) -> Path:
    """Writes a run's model card from the records in its folder.

    Args:
        folder: The folder of a finished run.

    Returns:
        The card, ``model/README.md``.

    Raises:
        InputError: It is no such folder, or a record in it cannot be read.
        RunError: The card cannot be written.
    """
    folder = Path(folder)
    if not (folder / "recipe.yaml").is_file() or not (folder / "model" / "modules.json").is_file():
        raise InputError(f"{folder} is no folder of a finished run: it needs recipe.yaml and model/")
    recipe = load_recipe(folder / "recipe.yaml")
    needed = {name: _record(folder / f"{name}.json") for name in ("results", "manifest", "environment")}
    evaluation = folder / "evaluation.json"
    try:
        text = render_card(
            load_template(),
            recipe.model_dump(mode="json"),
            **needed,
            evaluation=_of_run(_record(evaluation), needed["results"]) if evaluation.is_file() else None,
            base_model=_base_on_the_hub(recipe),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: its records do not make a card: {error!r}") from error
    card = folder / "model" / "README.md"
    try:
        unfinished = card.with_suffix(".part")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(card)
    except OSError as error:
        raise RunError(f"{card}: cannot be written: {error.strerror}") from error
    return card


def _record(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read as a record: {' '.join(str(error).split())}") from None


def _of_run(evaluation: dict[str, Any], results: dict[str, Any]) -> dict[str, Any] | None:
    """The evaluation with the run's own model first, if it is of that very model."""
    own = [model for model in evaluation["models"] if model["model_sha256"] == results["model_sha256"]]
    return {**evaluation, "models": own} if own else None


def _base_on_the_hub(recipe: Recipe) -> str | None:
    """The base's id, unless it is a folder: what this machine calls it is nobody else's business."""
    return None if Path(resolve(recipe.model.base)).expanduser().exists() else recipe.model.base
