"""The names of what is measured; records -> tables, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from simcse_st.errors import InputError, nearest

YEARS = ("sts12", "sts13", "sts14", "sts15", "sts16")
ON_DEV = ("geometry", "retrieval", "gold-scores", "mistakes")
TASKS = ("dev", "test", *ON_DEV, *YEARS, "sick-r")
GROUPS: dict[str, tuple[str, ...]] = {
    "default": ("dev", "test", *ON_DEV),
    "sts": (*YEARS, "test", "sick-r"),
    "all": TASKS,
}


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


def task_names(names: Iterable[str]) -> list[str]:
    """The tasks of these names and groups, each once, in the order of ``TASKS``.

    Raises:
        InputError: There is no such task.
    """
    wanted: set[str] = set()
    for name in names:
        if name not in TASKS and name not in GROUPS:
            raise InputError(f"--tasks: no task {name!r}: {nearest(name, (*TASKS, *GROUPS))}")
        wanted.update(GROUPS.get(name, (name,)))
    if not wanted:
        raise InputError(f"--tasks: none is given; {nearest('', (*TASKS, *GROUPS))}")
    return [task for task in TASKS if task in wanted]


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


def evaluation_tables(record: dict[str, Any]) -> list[Table]:
    """The tables of an evaluation's record: scores, geometry and retrieval; the years of STS; similarity by gold."""
    models = record["models"]
    found = [column for column in _COLUMNS if all(_has(column, model["tasks"]) for model in models)]
    tables = []
    in_years = [head for head, *_ in found] == ["test"] and YEARS[0] in models[0]["tasks"]
    if found and not in_years:  # where it is the only one, test stands among the years
        heads = [f"{head}\nn {size(models[0]['tasks']):,}" for head, _, size, _ in found]
        rows = [
            [model["name"], *(format(value(model["tasks"]), form) for _, value, _, form in found)] for model in models
        ]
        title = "Spearman x100 of cosine similarity; alignment and uniformity: lower is better"
        tables.append(Table(title, ["", *heads], rows))
    tables += _sts_tables(models)
    if all("mteb" in model["tasks"] for model in models):
        tables.append(_mteb_table(models))
    if all("gold-scores" in model["tasks"] for model in models):
        tables.append(_gold_table(models))
    if len(models) == 1 and "mistakes" in models[0]["tasks"]:
        tables.append(_mistakes_table(models[0]))
    return tables


def _has(column: _Column, results: dict[str, Any]) -> bool:
    try:
        column[1](results)
    except KeyError:
        return False
    return True


def _sts_tables(models: list[dict[str, Any]]) -> list[Table]:
    shown = [task for task in (*YEARS, "sick-r") if all(task in model["tasks"] for model in models)]
    if not shown:
        return []
    if YEARS[0] in shown and all("test" in model["tasks"] for model in models):
        shown.insert(shown.index("sick-r") if "sick-r" in shown else len(shown), "test")
    first = models[0]["tasks"]
    names = {"test": "STS-B" if is_stsb("test", first["test"]) else "test"} if "test" in shown else {}
    heads = [f"{names.get(task, task.upper())}\nn {first[task]['n']:,}" for task in shown]
    rows = []
    for model in models:
        tasks = model["tasks"]
        rows.append([model["name"], *(f"{tasks[task].get('all', tasks[task].get('spearman')):.2f}" for task in shown)])
        rows[-1] += [f"{tasks['average']['all']:.2f}"] if "average" in first else []
    heads += ["average"] if "average" in first else []
    title = "Spearman x100; of a year 'all': one over all its subsets together, as in the paper"
    return [Table(title, ["", *heads], rows)]


def _mistakes_table(model: dict[str, Any]) -> Table:
    found = model["tasks"]["mistakes"]
    rows = [
        [f"{pair['gold']:.1f}", f"{pair['cosine']:.2f}", pair["sentence1"], pair["sentence2"]]
        for kind in ("overrated", "underrated")
        for pair in found[kind][:3]
    ]
    return Table(f"{model['name']}: the dev pairs on which it is most surely wrong", ["gold", "cosine", "", ""], rows)


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


# The mean gold score of 5 over all of STS-B, by which to know it whatever file it comes from.
_STSB = {"dev": (1500, 2.3639), "test": (1379, 2.6079)}


def is_stsb(split: str, scores: dict[str, Any]) -> bool:
    """Whether a score is of all of STS-B's dev or test.

    Args:
        split: ``dev`` or ``test``.
        scores: With ``n``, the number of pairs, and ``mean_gold``, the mean of their gold scores on the scale 0 to 5.
    """
    size, mean = _STSB[split]
    return bool(scores["n"] == size and abs(scores.get("mean_gold", 0.0) - mean) < 0.01)
