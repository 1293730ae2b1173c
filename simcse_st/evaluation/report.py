"""Runs and evaluations side by side, and beside what the paper reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simcse_st.errors import InputError
from simcse_st.evaluation.tables import Table, is_stsb, plus_minus

# Gao, Yao & Chen 2021, BERT-base: STS-B dev and test.
REPORTED: tuple[dict[str, Any], ...] = (
    {"name": "paper, supervised BERT-base (reported)", "kind": "supervised", "dev": 86.20, "test": 84.25},
    {"name": "paper, unsupervised BERT-base (reported)", "kind": "unsupervised", "dev": 82.50, "test": 76.85},
)
_SPLITS = ("dev", "test")


def report(places: Sequence[str]) -> dict[str, Any]:
    """Puts runs and evaluations side by side, and beside what the paper reports.

    Args:
        places: Run folders; folders of several seeds or of ablations; ``evaluation.json`` files or their folders. A
            model that is there as a run is not repeated from an evaluation.

    Returns:
        ``systems``: each with ``name``, ``dev``, ``test`` and ``data`` (pairs and their checksum by split) and, where
        known, ``spread`` (over seeds), ``step``, ``steps``, ``alignment``, ``uniformity``, ``recipe`` and ``gap`` (to
        the paper's, dev against dev and test against test). The paper's rows are there if any system was measured on
        all of STS-B.

    Raises:
        InputError: A place holds no record, or one that cannot be read.
    """
    systems: list[dict[str, Any]] = []
    for place in places:
        for system in _systems(Path(place).expanduser()):
            shas = {other.get("model_sha256") for other in systems} - {None}
            if system.get("model_sha256") not in shas or "step" in system:
                systems.append(system)
    if not systems:
        raise InputError("nothing to report: name run folders or evaluation.json files")
    on_stsb = False
    for system in systems:
        gap = gap_to_paper(system.get("kind", ""), system, system["data"])
        on_stsb = on_stsb or _is_stsb(system["data"])
        if gap:
            system["gap"] = {split: gap[split] for split in _SPLITS}
    return {"systems": [*systems, *({**row, "reported": True} for row in REPORTED if on_stsb)]}


def gap_to_paper(kind: str, scores: dict[str, Any], data: dict[str, Any]) -> dict[str, Any] | None:
    """How far a model is from the paper's BERT-base of its kind.

    Args:
        kind: ``supervised`` or ``unsupervised``.
        scores: Spearman x100 by split.
        data: ``n`` and ``mean_gold`` by split; of other data than all of STS-B there is no gap.

    Returns:
        ``dev`` and ``test``, each against the paper's own, with ``name`` and ``paper``, its numbers; or None.
    """
    paper = next((row for row in REPORTED if row["kind"] == kind), None)
    if paper is None or not _is_stsb(data):
        return None
    reported = {split: paper[split] for split in _SPLITS}
    return {**{split: scores[split] - reported[split] for split in _SPLITS}, "name": paper["name"], "paper": reported}


def report_table(record: dict[str, Any]) -> Table:
    """The benchmark table of a report; where not all are measured on the same pairs, it says who is on which."""
    systems = record["systems"]
    sets = {_data_key(system): _sizes(system["data"]) for system in systems if "data" in system}
    letters = dict(zip(sets, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", strict=False))
    rows = []
    for system in systems:
        geometry = [f"{system[key]:.3f}" if system.get(key) is not None else "" for key in ("alignment", "uniformity")]
        gap = [f"{system['gap'][split]:+.2f}" if "gap" in system else "" for split in _SPLITS]
        step = f"{system['step']} of {system['steps']}" if "step" in system else ""
        spread = system.get("spread")
        scores = [plus_minus(spread[split]) if spread else f"{system[split]:.2f}" for split in _SPLITS]
        of_data = [letters.get(_data_key(system), "?") if "data" in system else "STS-B"] if len(sets) > 1 else []
        rows.append([system["name"], *of_data, *scores, *geometry, *gap, step, str(system.get("recipe", ""))])
    heads = ["dev", "test", "alignment", "uniformity", "gap to paper, dev", "gap, test", "kept step", "recipe"]
    if len(sets) > 1:
        over = "; the scores of different data cannot be compared: " + "; ".join(
            f"{letters.get(key, '?')} is {sizes}" for key, sizes in sets.items()
        )
        heads.insert(0, "data")
    else:
        over = f", {next(iter(sets.values()))}" if sets else ""
    return Table(f"Spearman x100 of cosine similarity{over}; alignment and uniformity of dev", ["", *heads], rows)


def _is_stsb(data: dict[str, Any]) -> bool:
    return all(is_stsb(split, data[split]) for split in _SPLITS)


def _data_key(system: dict[str, Any]) -> tuple[str, ...]:
    return tuple(system["data"][split]["pairs_sha256"] for split in _SPLITS) if "data" in system else ()


def _sizes(data: dict[str, Any]) -> str:
    return ", ".join(f"{split} n {data[split]['n']:,}" for split in _SPLITS)


def _systems(place: Path) -> list[dict[str, Any]]:
    record = place if place.is_file() else place / "evaluation.json"
    try:
        if (place / "results.json").is_file():
            return [_of_run(place)]
        if (place / "seeds.json").is_file():
            seeds = _read(place / "seeds.json")
            folders = [place / f"seed-{run['seed']}" for run in seeds["seeds"]]
            return _of_seeds(str(place), seeds["seeds"], folders)
        if (place / "ablation.json").is_file():
            return _of_ablation(place, _read(place / "ablation.json"))
        if record.is_file():
            return [_of_model(model, record) for model in _read(record)["models"]]
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{place}: its records cannot be reported: {error!r}") from None
    raise InputError(f"{place}: no results.json, seeds.json, ablation.json or evaluation.json of a finished command")


def _of_run(folder: Path) -> dict[str, Any]:
    results, manifest = _read(folder / "results.json"), _read(folder / "manifest.json")
    dev = results["dev"]
    return {
        "name": str(folder),
        "kind": "unsupervised" if "sentences" in manifest["train"] else "supervised",
        "model_sha256": results["model_sha256"],
        **{split: float(results[split]["spearman"]) for split in _SPLITS},
        "data": {
            split: {
                "n": int(results[split]["pairs"]),
                "pairs_sha256": manifest[split]["pairs_sha256"],
                "mean_gold": float(manifest[split]["mean_gold"]),
            }
            for split in _SPLITS
        },
        **{key: float(dev[key]) for key in ("alignment", "uniformity") if key in dev},
        "step": results["best_step"],
        "steps": results["total_steps"],
        "recipe": results["recipe"],
    }


def _of_seeds(name: str, runs: list[dict[str, Any]], folders: list[Path]) -> list[dict[str, Any]]:
    """Each seed's run, and their mean."""
    systems = [_of_run(folder) for folder in folders]
    first = systems[0]
    spread = {split: spread_of([run[split] for run in runs]) for split in _SPLITS}
    mean = {
        "name": f"{name}, mean of {len(runs)} seeds",
        "kind": first["kind"],
        **{split: spread[split]["mean"] for split in _SPLITS},
        "spread": spread,
        "data": first["data"],
    }
    return [*systems, mean]


def _of_ablation(place: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    seeds = [run["seed"] for run in record["full"]]
    systems = _of_seeds(f"{place}, full", record["full"], [place / "full" / f"seed-{seed}" for seed in seeds])
    for name, part in record["without"].items():
        runs = [pair["without"] for pair in part["seeds"]]
        folders = [place / f"without-{name}" / f"seed-{seed}" for seed in seeds]
        systems += _of_seeds(f"{place}, without {name}", runs, folders)
    return systems


def _of_model(model: dict[str, Any], record: Path) -> dict[str, Any]:
    tasks = model["tasks"]
    if not {"dev", "test"} <= tasks.keys():
        raise InputError(f"{record}: {model['name']} was not measured on dev and test: run evaluate with these tasks")
    geometry = tasks.get("geometry", {})
    return {
        "name": model["name"],
        "model_sha256": model["model_sha256"],
        **{split: float(tasks[split]["spearman"]) for split in _SPLITS},
        "data": {split: {key: tasks[split][key] for key in ("n", "pairs_sha256", "mean_gold")} for split in _SPLITS},
        **{key: float(geometry[key]) for key in ("alignment", "uniformity") if key in geometry},
    }


def spread_of(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (of a sample; one value has none) and number of values."""
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return {"mean": mean, "sd": (squares / (len(values) - 1)) ** 0.5 if len(values) > 1 else None, "n": len(values)}


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read as a record: {' '.join(str(error).split())}") from None
