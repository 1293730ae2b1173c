"""The same recipe under several seeds, and against itself without one of its parts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simcse_st.errors import InputError, nearest
from simcse_st.folder import write_json
from simcse_st.recipe import Recipe
from simcse_st.report import Table, plus_minus
from simcse_st.training import train

# What a recipe can be run without: the one key that changes, and its value.
ABLATIONS: dict[str, tuple[str, str, Any]] = {
    "hard-negatives": ("data", "hard_negatives", False),
    "shared-hard-negatives": ("loss", "share_hard_negatives", False),
    "masking": ("loss", "mask_false_negatives", False),
    "head": ("model", "head", "none"),
    "second-dropout-mask": ("model", "shared_dropout_mask", True),
}


def train_seeds(
    recipe: Recipe, seeds: Sequence[int], output: str | Path | None = None, *, overwrite: bool = False
) -> dict[str, Any]:
    """Runs a recipe under several seeds.

    A seed whose run stands finished in its folder is not run again, so that the same call goes on where it stopped.

    Args:
        recipe: What to run.
        seeds: The seeds; of the dropout, the order of the rows and the first weights of a head, not of the sample.
        output: The folder that holds a run folder for each; by default ``runs/NAME-seeds``.
        overwrite: Whether to run all of them again.

    Returns:
        The content of ``seeds.json``: dev and test of each seed's kept step, their mean and standard deviation.

    Raises:
        InputError: As :func:`~simcse_st.training.train`; or a folder holds another recipe's run.
        RunError: A run failed.
    """
    _check_seeds(seeds)
    folder = Path(output) if output else Path("runs") / f"{recipe.name}-seeds"
    runs = [_run(recipe, seed, folder / f"seed-{seed}", overwrite) for seed in seeds]
    record = {
        "recipe": recipe.name,
        "seeds": runs,
        **{split: _spread([run[split] for run in runs]) for split in _SPLITS},
    }
    write_json(folder / "seeds.json", record)
    return record


def ablate(
    recipe: Recipe,
    without: Sequence[str],
    seeds: Sequence[int],
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Runs a recipe with and without some of its parts, under the same seeds, and compares the pairs.

    Args:
        recipe: What to run.
        without: Names of ``ABLATIONS``; each pair differs in that one key.
        seeds: The seeds of both.
        output: The folder; by default ``runs/NAME-ablation``.
        overwrite: Whether to run all of it again; by default runs that stand finished are used.

    Returns:
        The content of ``ablation.json``: for each part and seed, dev and test of the kept steps and dev of every step
        that both scored, with the differences (with minus without), their mean and standard deviation over the seeds.

    Raises:
        InputError: There is no such part, or the recipe is without it already.
        RunError: A run failed.
    """
    _check_seeds(seeds)
    changed = {name: _without(recipe, name) for name in dict.fromkeys(without)}
    if not changed:
        raise InputError(f"--without: name a part; {nearest('', ABLATIONS)}")
    folder = Path(output) if output else Path("runs") / f"{recipe.name}-ablation"
    full = [_run(recipe, seed, folder / "full" / f"seed-{seed}", overwrite) for seed in seeds]
    parts = {}
    for name, ablation in changed.items():
        runs = [_run(ablation, seed, folder / f"without-{name}" / f"seed-{seed}", overwrite) for seed in seeds]
        section, key, value = ABLATIONS[name]
        matched = [_matched(with_, without_) for with_, without_ in zip(full, runs, strict=True)]
        parts[name] = {
            "key": f"{section}.{key}",
            "value": value,
            "seeds": matched,
            "difference": {split: _spread([pair["difference"][split] for pair in matched]) for split in _SPLITS},
            "steps": _over_steps(matched),
        }
    record = {"recipe": recipe.name, "full": full, "without": parts}
    write_json(folder / "ablation.json", record)
    return record


_SPLITS = ("dev", "test")


def seeds_table(record: dict[str, Any]) -> Table:
    """Each seed's scores, and their mean and standard deviation."""
    rows = [
        [str(run["seed"]), str(run["best_step"]), *(f"{run[split]:.2f}" for split in _SPLITS)]
        for run in record["seeds"]
    ]
    rows.append(["mean ± standard deviation", "", *(plus_minus(record[split]) for split in _SPLITS)])
    return Table(f"{record['recipe']}: Spearman x100 of the kept step", ["seed", "kept step", *_SPLITS], rows)


def ablation_tables(record: dict[str, Any]) -> list[Table]:
    """The matched differences: of the kept steps, and of dev at every step that both scored."""
    rows, by_step = [], []
    for name, part in record["without"].items():
        for pair in part["seeds"]:
            cells = [f"{pair[kind][split]:.2f}" for split in _SPLITS for kind in ("full", "without")]
            rows.append(
                [f"without {name}", str(pair["seed"]), *cells, *(f"{pair['difference'][s]:+.2f}" for s in _SPLITS)]
            )
        spread = [plus_minus(part["difference"][split], "+") for split in _SPLITS]
        rows.append([f"without {name}", "mean ± sd", "", "", "", "", *spread])
        by_step += [[f"without {name}", str(step["step"]), plus_minus(step, "+")] for step in part["steps"]]
    heads = ["dev", "dev without", "test", "test without", "dev gain", "test gain"]
    count = len(record["full"])
    return [
        Table(f"{record['recipe']}: Spearman x100 of the kept steps, same seed in a row", ["", "seed", *heads], rows),
        Table(f"Gain on dev at the same step, mean ± sd over {count} seeds", ["", "step", "dev gain"], by_step),
    ]


def _check_seeds(seeds: Sequence[int]) -> None:
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise InputError(f"--seeds: give different whole numbers, e.g. 42,43,44, not {list(seeds)}")


def _without(recipe: Recipe, name: str) -> Recipe:
    if name not in ABLATIONS:
        raise InputError(f"--without: no part {name!r}: {nearest(name, ABLATIONS)}")
    section, key, value = ABLATIONS[name]
    if getattr(getattr(recipe, section), key) == value:
        raise InputError(f"--without {name}: {recipe.name} has {section}.{key}={value!r} already")
    changed = getattr(recipe, section).model_copy(update={key: value})
    return recipe.model_copy(update={section: changed, "name": f"{recipe.name}-without-{name}"})


def _run(recipe: Recipe, seed: int, folder: Path, overwrite: bool) -> dict[str, Any]:
    """Runs a recipe under a seed unless that run stands there finished; gives its scores."""
    seeded = recipe.model_copy(update={"seed": seed, "name": f"{recipe.name}-seed-{seed}"})
    if overwrite or not _is_finished(seeded, folder):
        # What an interrupted run of the same recipe left is no loss.
        train(seeded, folder, overwrite=overwrite or (folder / "recipe.yaml").is_file())
    results = json.loads((folder / "results.json").read_text("utf-8"))
    history = map(json.loads, (folder / "history.jsonl").read_text("utf-8").splitlines())
    return {
        "seed": seed,
        "best_step": results["best_step"],
        **{split: results[split]["spearman"] for split in _SPLITS},
        "dev_of_step": {entry["step"]: entry["dev"]["spearman"] for entry in history if "dev" in entry},
    }


def _is_finished(recipe: Recipe, folder: Path) -> bool:
    if not (folder / "recipe.yaml").is_file():
        return False
    if (folder / "recipe.yaml").read_text("utf-8") != recipe.to_yaml():
        raise InputError(f"{folder} holds a run of another recipe: choose another --output, or --overwrite")
    return (folder / "results.json").is_file() and (folder / "model" / "README.md").is_file()


def _matched(full: dict[str, Any], without: dict[str, Any]) -> dict[str, Any]:
    steps = sorted(full["dev_of_step"].keys() & without["dev_of_step"].keys())
    return {
        "seed": full["seed"],
        "full": {split: full[split] for split in _SPLITS},
        "without": {split: without[split] for split in _SPLITS},
        "difference": {split: full[split] - without[split] for split in _SPLITS},
        "dev_difference_of_step": {step: full["dev_of_step"][step] - without["dev_of_step"][step] for step in steps},
    }


def _over_steps(matched: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean difference at every step but the first, where nothing is trained yet."""
    steps = sorted(set.intersection(*(set(pair["dev_difference_of_step"]) for pair in matched)) - {0})
    return [{"step": step, **_spread([pair["dev_difference_of_step"][step] for pair in matched])} for step in steps]


def _spread(values: list[float]) -> dict[str, Any]:
    """Mean and standard deviation (of a sample); one value has none."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": deviation, "n": len(values)}
