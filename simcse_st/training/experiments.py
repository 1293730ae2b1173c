"""The same recipe under several seeds, and against itself without one of its parts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sentence_transformers.util.distributed import get_rank

from simcse_st.errors import InputError, nearest
from simcse_st.folder import ABLATION, SEEDS, check_group, write_json
from simcse_st.training.inputs import check_machine
from simcse_st.loading import load_model
from simcse_st.recipe import ABLATIONS, Recipe, ablated, check_seeds, differences, load_recipe
from simcse_st.evaluation.report import spread_of
from simcse_st.evaluation.tables import Table, plus_minus
from simcse_st.training.train import train


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
        InputError: As :func:`~simcse_st.training.train.train`; or a folder holds another recipe's run.
        RunError: A run failed.
    """
    check_seeds(seeds)
    folder = Path(output) if output else Path("runs") / f"{recipe.name}-seeds"
    check_group(folder, *SEEDS)
    plan = _plan({"": recipe}, seeds, folder, overwrite)
    runs = [_run(*plan["", seed], overwrite) for seed in seeds]
    _check_same(runs, "prepared_sha256")
    spread = {split: spread_of([run[split] for run in runs]) for split in _SPLITS}
    record = {"recipe": recipe.name, "seeds": runs, **spread, **_of_all(runs)}
    _write_once(folder / "seeds.json", record)
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
    check_seeds(seeds)
    changed = {name: ablated(recipe, name) for name in dict.fromkeys(without)}
    if not changed:
        raise InputError(f"--without: name a part; {nearest('', ABLATIONS)}")
    folder = Path(output) if output else Path("runs") / f"{recipe.name}-ablation"
    check_group(folder, *ABLATION)
    names = {"full": recipe, **{f"without-{name}": ablation for name, ablation in changed.items()}}
    plan = _plan(names, seeds, folder, overwrite)
    full = [_run(*plan["full", seed], overwrite) for seed in seeds]
    for name in changed:
        _check_is_there(name, full)
    parts, runs = {}, list(full)
    for name in changed:
        others = [_run(*plan[f"without-{name}", seed], overwrite) for seed in seeds]
        _check_same(others, "prepared_sha256")
        runs += others
        section, key, value = ABLATIONS[name]
        matched = [_matched(with_, without_) for with_, without_ in zip(full, others, strict=True)]
        parts[name] = {
            "key": f"{section}.{key}",
            "value": value,
            "seeds": matched,
            "difference": {split: spread_of([pair["difference"][split] for pair in matched]) for split in _SPLITS},
            "steps": _over_steps(matched),
        }
    record = {"recipe": recipe.name, "full": full, "without": parts, **_of_all(runs)}
    _write_once(folder / "ablation.json", record)
    return record


_SPLITS = ("dev", "test")


def seeds_table(record: dict[str, Any]) -> Table:
    """Each seed's scores, and their mean and standard deviation."""
    rows = [
        [str(run["seed"]), str(run["best_step"]), *(f"{run[split]:.2f}" for split in _SPLITS)]
        for run in record["seeds"]
    ]
    if len(record["seeds"]) > 1:
        rows.append(["mean ± standard deviation", "", *(plus_minus(record[split]) for split in _SPLITS)])
    heads = [f"{split}\nn {record['data'][f'{split}_pairs']:,}" for split in _SPLITS]
    return Table(f"{record['recipe']}: Spearman x100 of the kept step", ["seed", "kept step", *heads], rows)


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
        if len(part["seeds"]) > 1:
            rows.append([f"without {name}", "mean ± sd", "", "", "", "", *spread])
        by_step += [[f"without {name}", str(step["step"]), plus_minus(step, "+")] for step in part["steps"]]
    heads = ["dev", "dev without", "test", "test without", "dev gain", "test gain"]
    count = len(record["full"])
    over = f"mean ± sd over {count} seeds" if count > 1 else "one seed"
    return [
        Table(f"{record['recipe']}: Spearman x100 of the kept steps, same seed in a row", ["", "seed", *heads], rows),
        Table(f"Gain on dev at the same step, {over}", ["", "step", "dev gain"], by_step),
    ]


def _plan(
    recipes: dict[str, Recipe], seeds: Sequence[int], folder: Path, overwrite: bool
) -> dict[tuple[str, int], tuple[Recipe, Path]]:
    """Every run with its folder, all of them checked before the first is begun."""
    plan = {}
    for name, recipe in recipes.items():
        check_machine(recipe, int(os.environ.get("WORLD_SIZE", "1")))  # as the launcher of several processes says
        for seed in seeds:
            seeded = recipe.model_copy(update={"seed": seed, "name": f"{recipe.name}-seed-{seed}"})
            plan[name, seed] = (seeded, folder / name / f"seed-{seed}")
            if not overwrite:
                _is_finished(*plan[name, seed])
    return plan


def _check_is_there(name: str, full: list[dict[str, Any]]) -> None:
    """Leaving out what is not there is no ablation, and costs as many runs."""
    if name in ("hard-negatives", "shared-hard-negatives") and not full[0]["hard_negatives"]:
        raise InputError(f"--without {name}: the data have no hard negatives, so both runs would be the same")
    if name == "masking" and not any(run["masked_cells"] for run in full):
        raise InputError("--without masking: nothing was masked in these runs, so the others would be the same")


def _of_all(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What all runs have in common: the pairs they are scored on, and the versions of the last.

    Raises:
        InputError: They are scored on different pairs.
    """
    _check_same(runs, "dev_pairs_sha256", "test_pairs_sha256")
    return {"data": runs[0]["data"], "packages": runs[-1]["packages"]}


def _write_once(path: Path, record: dict[str, Any]) -> None:
    """Writes a record; of several processes that train together, the first does."""
    if get_rank() == 0:
        write_json(path, record)


def _check_same(runs: list[dict[str, Any]], *keys: str) -> None:
    for key in keys:
        if len({run["data"][key] for run in runs}) > 1:
            raise InputError(f"the runs differ in {key}: the data have changed in between; run all with --overwrite")


def _run(recipe: Recipe, folder: Path, overwrite: bool) -> dict[str, Any]:
    """Runs a recipe unless that run stands there finished; gives its scores."""
    if overwrite or not _is_finished(recipe, folder):
        interrupted = folder.exists() and not overwrite
        train(recipe, folder, overwrite=overwrite, resume=interrupted)
    try:
        results, manifest, environment = (
            json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("results", "manifest", "environment")
        )
        history = map(json.loads, (folder / "history.jsonl").read_text("utf-8").splitlines())
        return {
            "seed": recipe.seed,
            "best_step": results["best_step"],
            **{split: float(results[split]["spearman"]) for split in _SPLITS},
            "dev_of_step": {entry["step"]: float(entry["dev"]["spearman"]) for entry in history if "dev" in entry},
            "hard_negatives": manifest["train"].get("hard_negatives", 0),
            "masked_cells": results["batches"]["masked_cells"],
            "data": {
                "prepared_sha256": manifest["train"]["prepared_sha256"],
                **{f"{split}_pairs": results[split]["pairs"] for split in _SPLITS},
                **{f"{split}_pairs_sha256": manifest[split]["pairs_sha256"] for split in _SPLITS},
            },
            "packages": environment["packages"],
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: its records cannot be read ({error!r}): delete it, or use --overwrite") from None


def _is_finished(recipe: Recipe, folder: Path) -> bool:
    """Whether a run of this recipe stands there, with the very model that it scored.

    Raises:
        InputError: Another recipe's run stands there, or its model is not the one that was scored.
    """
    if not (folder / "recipe.yaml").is_file():
        return False
    if differences(load_recipe(folder / "recipe.yaml"), recipe):
        raise InputError(f"{folder} holds a run of another recipe: choose another --output, or --overwrite")
    if not (folder / "results.json").is_file() or not (folder / "model" / "README.md").is_file():
        return False
    if not load_model(folder).known:
        raise InputError(f"{folder}: its model is not the one that its results.json is about: use --overwrite")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # of a run that was killed at its very end
    return True


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
    return [{"step": step, **spread_of([pair["dev_difference_of_step"][step] for pair in matched])} for step in steps]
