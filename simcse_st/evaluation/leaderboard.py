"""Tasks of the MTEB leaderboard. Needs ``pip install 'simcse-st[mteb]'``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from simcse_st.errors import InputError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def find_tasks(names: Sequence[str]) -> list[Any]:
    """MTEB's tasks of these names.

    Raises:
        InputError: mteb is not installed, or has no such task.
    """
    try:
        import mteb
    except ImportError:
        raise InputError("--mteb needs the package mteb: pip install 'simcse-st[mteb]'") from None
    tasks = []
    for name in names:
        try:
            tasks.append(mteb.get_task(name))
        except (KeyError, ValueError) as error:
            raise InputError(f"--mteb: no task {name!r}: {' '.join(str(error).split())[:300]}") from None
    return tasks


def run_tasks(model: SentenceTransformer, tasks: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Runs tasks, as mteb does them.

    Args:
        model: The model.
        tasks: See :func:`find_tasks`.

    Returns:
        Of each task by its name: ``main_score`` (x100) on the task's own splits, the ``metric`` that it is, the data
        set's ``revision`` and mteb's ``version``.

    Raises:
        InputError: A task's data cannot be had, or the model fails on it.
    """
    import mteb

    found = {}
    for task in tasks:
        name = task.metadata.name
        try:
            # Without a cache: it goes by a model's name, which a model of a folder has not.
            (result,) = mteb.evaluate(model, [task], cache=None, show_progress_bar=False).task_results
        except Exception as error:  # of many classes, from the hub's to the task's own
            raise InputError(f"--mteb {name}: {' '.join(str(error).split()) or type(error).__name__}") from error
        found[name] = {
            "main_score": 100 * float(result.get_score()),
            "metric": task.metadata.main_score,
            "revision": result.dataset_revision,
            "version": metadata.version("mteb"),
        }
    return found
