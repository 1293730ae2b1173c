"""``train(recipe) -> Run``: what can be refused is refused here, before torch is imported."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simcse_st.card import load_template
from simcse_st.console import first_process
from simcse_st.data.held_out import load_data
from simcse_st.errors import InputError
from simcse_st.recipe import DataSection, Recipe, checked
from simcse_st.references import Given, Section, form_of
from simcse_st.run import Run, check_free, locked
from simcse_st.training.prepare import check_places

logger = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    output: str | Path | None = None,
    *,
    data: Any = None,
    dev: Any = None,
    test: Any = None,
    overwrite: bool = False,
    resume: bool = False,
) -> Run:
    """Runs a recipe: trains, keeps the weights of the best dev score, scores test once on them.

    Args:
        recipe: What to do, see :func:`~simcse_st.recipes.load_recipe`.
        output: The run folder; by default ``runs/NAME``.
        data: Rows in the place of ``data.train``: a ``datasets.Dataset`` (also streaming), an iterable of mappings of
            columns to values, a mapping of columns to lists, or a tuple of the lists of anchors, positives and, if
            there are any, hard negatives; or the name of a file or data set. What the recipe says of its own data,
            ``card.language`` and ``card.license``, goes.
        dev: Graded pairs in the place of ``data.dev``, in the same forms; a tuple has the first sentences, the second
            and the scores. ``{"retrieval": rows}`` is a retrieval set of pairs or triplets, ``{"hold_out": 500}`` and
            the like are as in a recipe, and ``{"sets": {"a": ..., "b": ...}}`` are several. The run keeps what was
            given beside its records, so that it can be measured and proven again.
        test: The same in the place of ``data.test``.
        overwrite: Whether an earlier run in that folder may be replaced.
        resume: Goes on with a run of this recipe that stands there unfinished, from its last checkpoint, to the result
            that it would have had; on a CPU bit by bit. Without one it begins; of a finished one it gives the result.

    Returns:
        The finished run, with its scores in ``run.results`` and its model in ``run.load_model()``.

    Raises:
        InputError: Something in the recipe, the data or the base model cannot be used. No folder has been made.
        RunError: Training went wrong, or the saved weights are not those of the best score.
        KeyboardInterrupt: It was stopped, after a step, with a checkpoint.

    Example:
        >>> run = train(load_recipe("quickstart"), "runs/first")
        >>> run.results.base["test"], run.results.test.spearman
        (74.1, 81.5)
    """
    if overwrite and resume:
        raise InputError("--resume goes on with a run, --overwrite begins it again: choose one")
    given = {split: _given(one) for split, one in (("dev", dev), ("test", test)) if one is not None}
    if data is not None:
        given["train"] = data if isinstance(data, (str, Section)) else Given(data)
        recipe = recipe.changed(card__language=[], card__license=None)
    recipe = recipe.changed(data=checked(DataSection, **{**dict(recipe.data), **given}))
    checked(Recipe, **dict(recipe))  # a copy with other values may hold what a recipe must not
    run = Run(Path(output) if output else Path("runs") / recipe.name)
    if resume:
        check_same(run, recipe)
    check_places(recipe)
    load_template()  # a card that cannot be made is known before hours are spent
    with locked(run.folder):
        if resume and _is_there(run, recipe):
            return run
        if first_process():
            check_free(run.folder, overwrite or resume, resumable=True)
        read = load_data(recipe.data)
        from simcse_st.training.session import run_recipe  # and with it torch

        run_recipe(recipe, run.folder, read, resume=resume)
    return Run(run.folder)


def _given(one: Any) -> Any:  # what a recipe's key takes
    """Dev or test as a program hands it over."""
    if isinstance(one, (str, Section)):
        return one
    if isinstance(one, Mapping) and "sets" in one and isinstance(one["sets"], Mapping):
        return {"sets": {name: _given(inner) for name, inner in one["sets"].items()}}
    if isinstance(one, Mapping) and "retrieval" in one:
        rows = one["retrieval"]
        return {**one, "retrieval": rows if isinstance(rows, (str, Section)) else Given(rows)}
    if isinstance(one, Mapping) and form_of(one):
        return dict(one)
    return Given(one, ("sentence1", "sentence2", "score"))


def check_same(run: Run, recipe: Recipe) -> None:
    """Makes sure that a run which is to go on is one of this recipe, if any stands there."""
    if run.is_begun and (differing := run.recipe.differences(recipe)):
        raise InputError(
            f"--resume: {run.folder} is a run of another recipe: {', '.join(differing)}; "
            "choose another --output, or begin it again with --overwrite"
        )


def _is_there(run: Run, recipe: Recipe) -> bool:
    """Whether the run stands there finished."""
    if not run.is_finished:
        return False
    shutil.rmtree(run.checkpoints, ignore_errors=True)  # of a run that was cut short at its very end
    logger.info("resume   %s is finished: its results stand", run.folder)
    if run.recipe.card != recipe.card:
        logger.warning("resume   card.* has changed: simcse-st card %s --set card.KEY=VALUE changes it", run.folder)
    return True
