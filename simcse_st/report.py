"""Records -> tables that can be compared, for the terminal and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simcse_st.errors import InputError

# Gao, Yao & Chen 2021, tables 1 and D.1 (BERT-base): STS-B dev and test.
REPORTED = (
    {"name": "paper, supervised BERT-base (reported)", "kind": "supervised", "dev": 86.20, "test": 84.25},
    {"name": "paper, unsupervised BERT-base (reported)", "kind": "unsupervised", "dev": 82.50, "test": 76.85},
)
_STSB = {"dev": 1500, "test": 1379}


@dataclass(frozen=True)
class Table:
    """A table: a line on what it shows, the names of the columns, and rows of text."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The table as GitHub renders it, under its title."""
        lines = [self.columns, ["---", *["---:" for _ in self.columns[1:]]], *self.rows]
        return "\n".join([self.title, "", *(f"| {' | '.join(map(_cell, line))} |" for line in lines), ""])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def run_table(results: dict[str, Any]) -> Table:
    """A run's scores before and after training."""
    rows = []
    for split in ("dev", "test"):
        before, after = results["base"][split], results[split]["spearman"]
        label = f"{split} ({results[split]['pairs']:,} pairs)"
        rows.append([label, f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}"])
    title = f"Spearman x100, weights of step {results['best_step']} of {results['total_steps']}"
    return Table(title, ["", "before", "after", "change"], rows)


# Of each column: its head, and where its number and the number of what it is over stand in a model's results.
_Column = tuple[str, Callable[[dict[str, Any]], float], Callable[[dict[str, Any]], int], str]
_COLUMNS: tuple[_Column, ...] = (
    ("dev", lambda r: r["dev"]["spearman"], lambda r: r["dev"]["n"], ".2f"),
    ("test", lambda r: r["test"]["spearman"], lambda r: r["test"]["n"], ".2f"),
    ("alignment", lambda r: r["geometry"]["alignment"], lambda r: r["geometry"]["pairs"], ".3f"),
    ("uniformity", lambda r: r["geometry"]["uniformity"], lambda r: r["geometry"]["sentences"], ".3f"),
    ("recall@1", lambda r: r["retrieval"]["recall@1"], lambda r: r["retrieval"]["n"], ".3f"),
    ("recall@5", lambda r: r["retrieval"]["recall@5"], lambda r: r["retrieval"]["n"], ".3f"),
    ("MRR", lambda r: r["retrieval"]["mrr"], lambda r: r["retrieval"]["n"], ".3f"),
)
_YEARS = ("sts12", "sts13", "sts14", "sts15", "sts16")


def evaluation_tables(record: dict[str, Any]) -> list[Table]:
    """The tables of an evaluation's record: scores, geometry and retrieval; the years of STS; similarity by gold."""
    models = record["models"]
    found = [column for column in _COLUMNS if all(_has(column, model["tasks"]) for model in models)]
    tables = []
    only_test = [head for head, *_ in found] == ["test"] and _YEARS[0] in models[0][
        "tasks"
    ]  # it stands among the years
    if found and not only_test:
        heads = [f"{head}\nn {size(models[0]['tasks']):,}" for head, _, size, _ in found]
        rows = [
            [model["name"], *(format(value(model["tasks"]), form) for _, value, _, form in found)] for model in models
        ]
        title = "Spearman x100 of cosine similarity; alignment and uniformity: lower is better"
        tables.append(Table(title, ["", *heads], rows))
    tables += _sts_tables(models)
    if "mteb" in models[0]["tasks"]:
        tables.append(_mteb_table(models))
    if "gold-scores" in models[0]["tasks"]:
        tables.append(_gold_table(models))
    return tables


def _has(column: _Column, results: dict[str, Any]) -> bool:
    try:
        column[1](results)
    except KeyError:
        return False
    return True


def _sts_tables(models: list[dict[str, Any]]) -> list[Table]:
    years = [year for year in _YEARS if year in models[0]["tasks"]]
    if not years:
        return []
    more = [task for task in ("test", "sick-r") if task in models[0]["tasks"]]
    names = {"test": "STS-B", "sick-r": "SICK-R"}
    heads = [f"{names.get(task, task.upper())}\nn {models[0]['tasks'][task]['n']:,}" for task in (*years, *more)]
    rows = []
    for model in models:
        tasks = model["tasks"]
        scores = [tasks[year]["all"] for year in years] + [tasks[task]["spearman"] for task in more]
        rows.append([model["name"], *(f"{score:.2f}" for score in scores)])
        if "average" in tasks:
            rows[-1].append(f"{tasks['average']['all']:.2f}")
    if "average" in models[0]["tasks"]:
        heads.append("average")
    title = "Spearman x100, 'all': one over all subsets of a year together, as in the paper"
    return [Table(title, ["", *heads], rows)]


def _mteb_table(models: list[dict[str, Any]]) -> Table:
    tasks = models[0]["tasks"]["mteb"]
    heads = [f"{name}\n{task['metric']}" for name, task in tasks.items()]
    rows = [
        [model["name"], *(f"{model['tasks']['mteb'][name]['main_score']:.2f}" for name in tasks)] for model in models
    ]
    return Table("MTEB, the main score of each task, x100", ["", *heads], rows)


def _gold_table(models: list[dict[str, Any]]) -> Table:
    bands = models[0]["tasks"]["gold-scores"]
    heads = [f"{band['gold']}\nn {band['n']:,}" for band in bands]
    rows = [
        [model["name"], *("" if band["n"] == 0 else f"{band['median']:.3f}" for band in model["tasks"]["gold-scores"])]
        for model in models
    ]
    return Table("Median cosine of dev pairs by their rounded gold score", ["", *heads], rows)


def plus_minus(spread: dict[str, Any], sign: str = "") -> str:
    """``mean ± standard deviation``, the latter only where there is one."""
    deviation = "" if spread["sd"] is None else f" ± {spread['sd']:.2f}"
    return f"{spread['mean']:{sign}.2f}{deviation}"


def report(places: Sequence[str]) -> dict[str, Any]:
    """Puts runs and evaluations side by side, and beside what the paper reports.

    Args:
        places: Run folders; folders of :func:`~simcse_st.experiments.train_seeds`; ``evaluation.json`` files or their
            folders.

    Returns:
        ``systems``: each with ``name``, ``dev``, ``test``, ``n`` and, where known, ``step``, ``alignment``,
        ``uniformity``, ``recipe``, ``gap`` (to the paper's, dev against dev and test against test). The paper's rows
        are there if any system was measured on all of STS-B.

    Raises:
        InputError: A place holds no record.
    """
    systems = [system for place in places for system in _systems(Path(place).expanduser())]
    if not systems:
        raise InputError("nothing to report: name run folders or evaluation.json files")
    comparable = [system for system in systems if system["n"] == _STSB]
    for system in comparable:
        gap = gap_to_paper(system.get("kind", ""), system, system["n"])
        if gap:
            system["gap"] = {split: gap[split] for split in _STSB}
    reported = [{**row, "n": _STSB, "reported": True} for row in REPORTED] if comparable else []
    return {"systems": [*systems, *reported]}


def gap_to_paper(kind: str, scores: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any] | None:
    """How far a model is from the paper's BERT-base of its kind.

    Args:
        kind: ``supervised`` or ``unsupervised``.
        scores: Spearman x100 by split.
        sizes: Pairs by split; of other data than all of STS-B there is no gap.

    Returns:
        ``dev`` and ``test``, each against the paper's own, with ``name`` and ``paper``, its numbers; or None.
    """
    paper = next((row for row in REPORTED if row["kind"] == kind), None)
    if paper is None or sizes != _STSB:
        return None
    reported = {split: float(str(paper[split])) for split in _STSB}
    return {**{split: scores[split] - reported[split] for split in _STSB}, "name": paper["name"], "paper": reported}


def report_table(record: dict[str, Any]) -> Table:
    """The benchmark table of a report."""
    sizes = {tuple(system["n"].values()) for system in record["systems"]}
    one_size = len(sizes) == 1
    rows = []
    for system in record["systems"]:
        scores = [f"{system[split]:.2f}" for split in _STSB]
        if not one_size:
            scores = [f"{score} (n {system['n'][split]:,})" for score, split in zip(scores, _STSB, strict=True)]
        geometry = [f"{system[key]:.3f}" if system.get(key) is not None else "" for key in ("alignment", "uniformity")]
        gap = [f"{system['gap'][split]:+.2f}" if "gap" in system else "" for split in _STSB]
        step = f"{system['step']} of {system['steps']}" if "step" in system else ""
        rows.append([system["name"], *scores, *geometry, *gap, step, str(system.get("recipe", ""))])
    heads = ["dev", "test", "alignment", "uniformity", "gap to paper, dev", "gap, test", "kept step", "recipe"]
    over = "".join(f", {split} n {size:,}" for split, size in record["systems"][0]["n"].items()) if one_size else ""
    return Table(f"Spearman x100 of cosine similarity{over}; alignment and uniformity of dev", ["", *heads], rows)


def _systems(place: Path) -> list[dict[str, Any]]:
    if (place / "results.json").is_file():
        return [_of_run(place)]
    if (place / "seeds.json").is_file():
        return [_of_run(run) for run in sorted(place.glob("seed-*")) if (run / "results.json").is_file()]
    record = place if place.is_file() else place / "evaluation.json"
    if not record.is_file():
        raise InputError(f"{place}: no results.json, seeds.json or evaluation.json of a finished command")
    return [_of_model(model, record) for model in _read(record)["models"]]


def _of_run(folder: Path) -> dict[str, Any]:
    results, manifest = _read(folder / "results.json"), _read(folder / "manifest.json")
    dev = results["dev"]
    return {
        "name": str(folder),
        "kind": "unsupervised" if "sentences" in manifest["train"] else "supervised",
        **{split: results[split]["spearman"] for split in _STSB},
        "n": {split: results[split]["pairs"] for split in _STSB},
        **{key: dev[key] for key in ("alignment", "uniformity") if key in dev},
        "step": results["best_step"],
        "steps": results["total_steps"],
        "recipe": results["recipe"],
    }


def _of_model(model: dict[str, Any], record: Path) -> dict[str, Any]:
    tasks = model["tasks"]
    if not {"dev", "test"} <= tasks.keys():
        raise InputError(f"{record}: {model['name']} was not measured on dev and test: run evaluate with these tasks")
    geometry = tasks.get("geometry", {})
    return {
        "name": model["name"],
        **{split: tasks[split]["spearman"] for split in _STSB},
        "n": {split: tasks[split]["n"] for split in _STSB},
        **{key: geometry[key] for key in ("alignment", "uniformity") if key in geometry},
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read as a record: {' '.join(str(error).split())}") from None
