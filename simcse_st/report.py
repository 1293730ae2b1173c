"""Records -> tables that can be compared, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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


def _gold_table(models: list[dict[str, Any]]) -> Table:
    bands = models[0]["tasks"]["gold-scores"]
    heads = [f"{band['gold']}\nn {band['n']:,}" for band in bands]
    rows = [
        [model["name"], *("" if band["n"] == 0 else f"{band['median']:.3f}" for band in model["tasks"]["gold-scores"])]
        for model in models
    ]
    return Table("Median cosine of dev pairs by their rounded gold score", ["", *heads], rows)
