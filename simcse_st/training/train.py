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
from simcse_st.recipe import Recipe, checked
from simcse_st.references import Given, RetrievalRows
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
            there are any, hard negatives. What the recipe says of its own data, ``card.language`` and
            ``card.license``, goes.
        dev: Graded pairs in the place of ``data.dev``, in the same forms; a tuple has the first sentences, the second
            and the scores. ``{"retrieval": rows}`` is a retrieval set of pairs or triplets. The run keeps it beside its
            records, so that it can be measured and proven again.
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
    if data is not None:
        recipe = recipe.changed(data__train=Given(data), card__language=[], card__license=None)
    for split, pairs in (("dev", dev), ("test", test)):
        if pairs is not None:
            recipe = recipe.changed(**{f"data__{split}": _given(pairs)})
    checked(Recipe, **recipe.model_dump())  # a copy with other values may hold what a recipe must not
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


def _given(rows: Any) -> Given | RetrievalRows:
    """Dev or test as a program hands it over."""
    if isinstance(rows, Mapping) and rows.keys() == {"retrieval"}:
        return RetrievalRows(retrieval=Given(rows["retrieval"]))
    return Given(rows, ("sentence1", "sentence2", "score"))


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
