"""The same recipe under several seeds, and against itself without one of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simcse_st.console import first_process
from simcse_st.errors import InputError, nearest
from simcse_st.evaluation.records import (
    AblatedPart,
    Ablation,
    MatchedRuns,
    SameData,
    SeedRun,
    Seeds,
    SpreadAtStep,
    spread_of,
)
from simcse_st.recipe import Recipe, checked
from simcse_st.records import SPLITS, Record, Split
from simcse_st.run import Run, check_group, locked
from simcse_st.training.train import train

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
) -> Seeds:
    """Runs a recipe under several seeds.

    A seed whose run stands finished in its folder is not run again, so that the same call goes on where it stopped.

    Args:
        recipe: What to run.
        seeds: The seeds; of the dropout, the order of the rows and the first weights of a head, not of the sample.
        output: The folder that holds a run folder for each; by default ``runs/NAME-seeds``.
        overwrite: Whether to run all of them again.

    Returns:
        ``seeds.json``: dev and test of each seed's kept step, their mean and standard deviation.

    Raises:
        InputError: As :func:`~simcse_st.training.train.train`; or a folder holds another recipe's run.
        RunError: A run failed.
    """
    check_seeds(seeds)
    group = Run(Path(output) if output else Path("runs") / f"{recipe.name}-seeds")
    check_group(group.folder, Seeds.FILE, "seed-")
    plan = _plan({"": recipe}, seeds, group.folder, overwrite)
    with locked(group.folder):
        runs = [_run(*plan["", seed], overwrite) for seed in seeds]
        _check_same(runs, "prepared_sha256")
        spread = {"dev": spread_of([run.dev for run in runs]), "test": spread_of([run.test for run in runs])}
        record = Seeds(recipe=recipe.name, seeds=runs, **spread, data=_data_of(runs), packages=runs[-1].packages)
        _write_once(group, record)
    return record


def ablate(
    recipe: Recipe,
    without: Sequence[str],
    seeds: Sequence[int],
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
) -> Ablation:
    """Runs a recipe with and without some of its parts, under the same seeds, and compares the pairs.

    Args:
        recipe: What to run.
        without: Names of ``ABLATIONS``; each pair differs in that one key.
        seeds: The seeds of both.
        output: The folder; by default ``runs/NAME-ablation``.
        overwrite: Whether to run all of it again; by default runs that stand finished are used.

    Returns:
        ``ablation.json``: for each part and seed, dev and test of the kept steps and dev of every step that both
        scored, with the differences (with minus without), their mean and standard deviation over the seeds.

    Raises:
        InputError: There is no such part, or the recipe is without it already.
        RunError: A run failed.
    """
    check_seeds(seeds)
    changed = {name: ablated(recipe, name) for name in dict.fromkeys(without)}
    if not changed:
        raise InputError(f"--without: name a part; {nearest('', ABLATIONS)}")
    group = Run(Path(output) if output else Path("runs") / f"{recipe.name}-ablation")
    check_group(group.folder, Ablation.FILE, "full", "without-")
    names = {"full": recipe, **{f"without-{name}": other for name, other in changed.items()}}
    plan = _plan(names, seeds, group.folder, overwrite)
    with locked(group.folder):
        full = [_run(*plan["full", seed], overwrite) for seed in seeds]
        for name in changed:
            _check_is_there(name, full)
        parts, runs = {}, list(full)
        for name in changed:
            others = [_run(*plan[f"without-{name}", seed], overwrite) for seed in seeds]
            _check_same(others, "prepared_sha256")
            runs += others
            parts[name] = _compared(name, full, others)
        record = Ablation(recipe=recipe.name, full=full, without=parts, data=_data_of(runs), packages=runs[-1].packages)
        _write_once(group, record)
    return record


def ablated(recipe: Recipe, name: str) -> Recipe:
    """The recipe without one of its parts.

    Args:
        recipe: The whole recipe.
        name: One of ``ABLATIONS``.
    """
    if name not in ABLATIONS:
        raise InputError(f"--without: no part {name!r}: {nearest(name, ABLATIONS)}")
    section, key, value = ABLATIONS[name]
    if getattr(getattr(recipe, section), key) == value:
        raise InputError(f"--without {name}: {recipe.name} has {section}.{key}={value!r} already")
    changed = recipe.changed(**{f"{section}__{key}": value, "name": f"{recipe.name}-without-{name}"})
    return checked(Recipe, **changed.model_dump())


def check_seeds(seeds: Sequence[int]) -> None:
    """Makes sure that runs can be told apart by these."""
    fit = all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    if not seeds or not fit or len(set(seeds)) < len(seeds):
        raise InputError(f"--seeds: give different whole numbers from 0 to 4294967295, not {list(seeds)}")


def _plan(
    recipes: dict[str, Recipe], seeds: Sequence[int], folder: Path, overwrite: bool
) -> dict[tuple[str, int], tuple[Recipe, Path]]:
    """Every run with its folder, all of them checked before the first is begun."""
    plan = {}
    for name, recipe in recipes.items():
        for seed in seeds:
            seeded = recipe.changed(seed=seed, name=f"{recipe.name}-seed-{seed}")
            plan[name, seed] = (seeded, folder / name / f"seed-{seed}")
            if not overwrite:
                _is_finished(*plan[name, seed])
    return plan


def _is_finished(recipe: Recipe, folder: Path) -> bool:
    """Whether a run of this recipe stands there, with the very model that it scored."""
    run = Run(folder)
    if run.is_begun and run.recipe.differences(recipe):
        raise InputError(f"{folder} holds a run of another recipe: choose another --output, or --overwrite")
    if not run.is_finished:
        return False
    run.check_model_files()
    return True


def _check_is_there(name: str, full: list[SeedRun]) -> None:
    """Leaving out what is not there is no ablation, and costs as many runs."""
    if name in ("hard-negatives", "shared-hard-negatives") and not full[0].hard_negatives:
        raise InputError(f"--without {name}: the data have no hard negatives, so both runs would be the same")
    if name == "masking" and not any(run.masked_cells for run in full):
        raise InputError("--without masking: nothing was masked in these runs, so the others would be the same")


def _data_of(runs: list[SeedRun]) -> SameData:
    """The pairs that all runs are scored on."""
    _check_same(runs, "dev_pairs_sha256", "test_pairs_sha256")
    return runs[0].data


def _check_same(runs: list[SeedRun], *keys: str) -> None:
    for key in keys:
        if len({getattr(run.data, key) for run in runs}) > 1:
            raise InputError(f"the runs differ in {key}: the data have changed in between; run all with --overwrite")


def _write_once(group: Run, record: Record) -> None:
    """Writes a record; of several processes that train together, the first does."""
    if first_process():
        group.write(record)


def _run(recipe: Recipe, folder: Path, overwrite: bool) -> SeedRun:
    """Runs a recipe unless that run stands there finished; gives its scores."""
    if overwrite or not _is_finished(recipe, folder):
        train(recipe, folder, overwrite=overwrite, resume=Run(folder).is_begun and not overwrite)
    run = Run(folder)
    results, manifest = run.results, run.manifest
    return SeedRun(
        seed=recipe.seed,
        best_step=results.best_step,
        dev=results.dev.value,
        test=results.test.value,
        dev_of_step={entry.step: entry.dev[results.dev.metric] for entry in run.history() if entry.dev},
        hard_negatives=manifest.train.hard_negatives,
        masked_cells=results.batches.masked_cells,
        data=SameData(
            prepared_sha256=manifest.train.prepared_sha256,
            dev_pairs=results.dev.n,
            test_pairs=results.test.n,
            dev_pairs_sha256=manifest.dev.pairs_sha256,
            test_pairs_sha256=manifest.test.pairs_sha256,
            metrics={split: results.split(split).metric for split in SPLITS},
        ),
        packages=run.environment.packages,
    )


def _compared(name: str, full: list[SeedRun], others: list[SeedRun]) -> AblatedPart:
    section, key, value = ABLATIONS[name]
    matched = [_matched(with_, without) for with_, without in zip(full, others, strict=True)]
    # At every step but the first, where nothing is trained yet.
    steps = sorted(set.intersection(*(set(pair.dev_difference_of_step) for pair in matched)) - {0})
    return AblatedPart(
        key=f"{section}.{key}",
        value=value,
        seeds=matched,
        difference={split: spread_of([pair.difference[split] for pair in matched]) for split in SPLITS},
        steps=[
            SpreadAtStep(step=step, **dict(spread_of([pair.dev_difference_of_step[step] for pair in matched])))
            for step in steps
        ],
    )


def _matched(full: SeedRun, without: SeedRun) -> MatchedRuns:
    scores: list[dict[Split, float]] = [{"dev": run.dev, "test": run.test} for run in (full, without)]
    steps = sorted(full.dev_of_step.keys() & without.dev_of_step.keys())
    return MatchedRuns(
        seed=full.seed,
        full=scores[0],
        without=scores[1],
        difference={split: scores[0][split] - scores[1][split] for split in SPLITS},
        dev_difference_of_step={step: full.dev_of_step[step] - without.dev_of_step[step] for step in steps},
    )
