"""Pictures of records. Needs matplotlib: ``pip install 'simcse-st[plot]'``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simcse_st.errors import InputError
from simcse_st.evaluation.records import Geometry
from simcse_st.evaluation.tables import metric_name
from simcse_st.records import HistoryEntry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACROSS = 3  # panels side by side


def check_matplotlib() -> None:
    """Makes sure that pictures can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise InputError("figures need matplotlib: pip install 'simcse-st[plot]'") from None


def draw_gold_cosine(models: Mapping[str, Sequence[float]], gold_of_5: Sequence[float], path: Path) -> None:
    """Draws the cosine of every pair against its gold score, with the median of each rounded score.

    Args:
        models: The cosines of each model, by its name.
        gold_of_5: Gold scores from 0 to 5.
        path: The PNG.
    """
    figure, panels = _panels(len(models))
    gold = np.asarray(gold_of_5)
    bands = np.floor(gold + 0.5)
    lowest = min(0.0, *(min(cosines) for cosines in models.values()))
    beside = np.random.default_rng(0).uniform(-0.12, 0.12, len(gold))  # so that equal scores do not hide each other
    for axes, (name, cosines) in zip(panels, models.items(), strict=True):
        similarities = np.asarray(cosines)
        axes.scatter(gold + beside, similarities, s=6, alpha=0.35, linewidths=0, color="tab:blue")
        present = [band for band in range(6) if (bands == band).any()]
        medians = [np.median(similarities[bands == band]) for band in present]
        axes.plot(present, medians, "o-", color="tab:red", label="median of the rounded score")
        ticks = [f"{band}\nn = {(bands == band).sum():,}" for band in range(6)]
        axes.set_xticks(range(6), ticks)
        axes.set(title=_short(name), xlabel=f"gold score, all n = {len(gold):,} pairs", ylabel="cosine similarity")
        axes.set_ylim(lowest - 0.05, 1.05)
        axes.legend(loc="lower right", fontsize="small")
    _save(figure, path)


def draw_training(
    runs: Mapping[str, Sequence[HistoryEntry]], path: Path, metrics: Mapping[str, str] | None = None
) -> None:
    """Draws the dev score and the loss over the steps.

    Args:
        runs: The records of each run's ``history.jsonl``, by its name.
        path: The PNG.
        metrics: The metric of each run's dev, where it is not Spearman.
    """
    figure, panels = _panels(len(runs))
    for axes, (name, history) in zip(panels, runs.items(), strict=True):
        metric = (metrics or {}).get(name, "spearman")
        losses = [(entry.step, entry.loss) for entry in history if entry.loss is not None]
        scores = [(entry.step, entry.dev[metric]) for entry in history if entry.dev]
        best = max(scores[1:] or scores, key=lambda score: score[1])
        (of_loss,) = axes.plot(*zip(*losses, strict=True), color="tab:gray", alpha=0.6, linewidth=1, label="loss")
        axes.set(title=_short(name), xlabel="step", ylabel="training loss")
        axes.set_ylim(bottom=0)
        right = axes.twinx()
        (of_score,) = right.plot(*zip(*scores, strict=True), "o-", color="tab:blue", markersize=4, label="dev score")
        (of_best,) = right.plot(
            *best, "*", color="tab:red", markersize=13, label=f"kept: {best[1]:.2f} at step {best[0]}"
        )
        right.set_ylabel(f"dev, {metric_name(metric)} x100")
        handles = [of_loss, of_score, of_best]
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, fontsize="small")
    _save(figure, path)


def draw_geometry(models: Mapping[str, Geometry], path: Path) -> None:
    """Draws alignment against uniformity of all models; the lower left is best.

    Args:
        models: The results of the task ``geometry`` of each model, by its name.
        path: The PNG.
    """
    figure, (axes,) = _panels(1)
    for name, geometry in models.items():
        axes.scatter(geometry.uniformity, geometry.alignment, s=60, label=_short(name))
    first = next(iter(models.values()))
    axes.set_xlabel(f"uniformity (n = {first.sentences:,} sentences), lower is better")
    axes.set_ylabel(f"alignment (n = {first.pairs:,} pairs), lower is better")
    axes.margins(0.2)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16))
    _save(figure, path)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and looks for a display

    rows, columns = -(-count // _ACROSS), min(count, _ACROSS)
    figure = Figure(figsize=(5.5 * columns, 4.5 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    panels = list(grid.flat)
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count]


def _short(name: str, limit: int = 45) -> str:
    half = limit // 2
    return name if len(name) <= limit else f"{name[:half]}...{name[-half:]}"


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
