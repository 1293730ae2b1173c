"""Runs and evaluations side by side, and beside what the paper reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from simcse_st.console import Table
from simcse_st.errors import InputError
from simcse_st.evaluation.records import Ablation, Evaluation, MeasuredModel, Seeds, Spread, is_stsb, spread_of
from simcse_st.evaluation.tables import metric_name, named
from simcse_st.records import SPLITS, Record, Split
from simcse_st.run import EVALUATION, Run, open_run, read_record, write_text

Kind = Literal["supervised", "unsupervised"]
# Gao, Yao & Chen 2021, BERT-base: STS-B dev and test.
PAPER: dict[Kind, dict[Split, float]] = {
    "supervised": {"dev": 86.20, "test": 84.25},
    "unsupervised": {"dev": 82.50, "test": 76.85},
}


class Pairs(Record):
    """The graded pairs or queries that a score is of."""

    n: int
    pairs_sha256: str
    mean_gold: float | None = None
    metric: str = "spearman"


class Gap(Record):
    """How far a model is from the paper's BERT-base of its kind."""

    name: str
    paper: dict[Split, float]
    dev: float
    test: float


class System(Record):
    """A row of the report."""

    name: str
    dev: float
    test: float
    kind: Kind | None = None
    model_sha256: str | None = None
    data: dict[Split, Pairs] | None = None
    """Null of the paper's rows, which are on STS-B."""
    spread: dict[Split, Spread] | None = None
    """Over seeds."""
    alignment: float | None = None
    uniformity: float | None = None
    step: int | None = None
    steps: int | None = None
    recipe: str = ""
    gap: Gap | None = None


class Report(Record):
    """``report.json``."""

    FILE: ClassVar = "report.json"

    systems: list[System]


def report(places: Sequence[str | Path], output: str | Path | None = None) -> Report:
    """Puts runs and evaluations side by side, and beside what the paper reports.

    Args:
        places: Run folders; folders of several seeds or of ablations; ``evaluation.json`` files or their folders. A
            model that is there as a run is not repeated from an evaluation.
        output: A folder for ``report.json``, and for the table as Markdown, ``report.md``.

    Returns:
        The systems. The paper's rows are there if any was measured on all of STS-B.
    """
    systems: list[System] = []
    for place in places:
        for system in _systems(Path(place).expanduser()):
            known = {other.model_sha256 for other in systems} - {None}
            if system.model_sha256 not in known or system.step is not None:
                systems.append(system)
    if not systems:
        raise InputError("nothing to report: name run folders or evaluation.json files")
    reported = [System(name=_paper_name(kind), kind=kind, **scores) for kind, scores in PAPER.items()]
    on_stsb = any(_is_stsb(system.data) for system in systems)
    record = Report(systems=[*systems, *(reported if on_stsb else [])])
    if output is not None:
        write_text(Path(output) / "report.md", report_table(record).markdown())
        write_text(Path(output) / record.FILE, record.to_json())
    return record


def gap_to_paper(kind: Kind | None, scores: dict[Split, float], data: dict[Split, Pairs] | None) -> Gap | None:
    """How far a model is from the paper's, dev against dev and test against test.

    Args:
        kind: How it was trained.
        scores: Those of the run, x100.
        data: What the scores are of; of other data than all of STS-B there is no gap.
    """
    if kind is None or not _is_stsb(data):
        return None
    paper = PAPER[kind]
    return Gap(name=_paper_name(kind), paper=paper, **{split: scores[split] - paper[split] for split in SPLITS})


def pairs_of_run(run: Run) -> dict[Split, Pairs]:
    """What a run's scores are of."""
    found: dict[Split, Pairs] = {}
    for split in SPLITS:
        facts, scores = run.manifest.held_out(split), run.results.split(split)
        found[split] = Pairs(
            n=scores.n, pairs_sha256=facts.pairs_sha256, mean_gold=facts.mean_gold, metric=scores.metric
        )
    return found


def report_table(record: Report) -> Table:
    """The benchmark table of a report; where not all are measured on the same pairs, it says who is on which."""
    sets = {_data_key(system): _sizes(system.data) for system in record.systems if system.data}
    letters = dict(zip(sets, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", strict=False))
    rows = []
    for system in record.systems:
        geometry = [f"{value:.3f}" if value is not None else "" for value in (system.alignment, system.uniformity)]
        gap = [f"{value:+.2f}" for value in (system.gap.dev, system.gap.test)] if system.gap else ["", ""]
        step = f"{system.step} of {system.steps}" if system.step is not None else ""
        plain = [f"{system.dev:.2f}", f"{system.test:.2f}"]
        scores = [system.spread[split].text() for split in SPLITS] if system.spread else plain
        of_data = [letters.get(_data_key(system), "?") if system.data else "STS-B"] if len(sets) > 1 else []
        rows.append([system.name, *of_data, *scores, *geometry, *gap, step, system.recipe])
    heads = ["dev", "test", "alignment", "uniformity", "gap to paper, dev", "gap, test", "kept step", "recipe"]
    if len(sets) > 1:
        over = "; the scores of different data cannot be compared: " + "; ".join(
            f"{letters.get(key, '?')} is {sizes}" for key, sizes in sets.items()
        )
        heads.insert(0, "data")
    else:
        over = f", {next(iter(sets.values()))}" if sets else ""
    kinds = named(one.metric for system in record.systems for one in (system.data or {}).values()) or "Spearman"
    return Table(f"{kinds} x100 of cosine similarity{over}; alignment and uniformity of dev", ["", *heads], rows)


def _paper_name(kind: Kind) -> str:
    return f"paper, {kind} BERT-base (reported)"


def _is_stsb(data: dict[Split, Pairs] | None) -> bool:
    return data is not None and all(
        one.metric == "spearman" and is_stsb(split, one.n, one.mean_gold) for split, one in data.items()
    )


def _data_key(system: System) -> tuple[str, ...]:
    return (
        tuple(f"{system.data[split].pairs_sha256} {system.data[split].metric}" for split in SPLITS)
        if system.data
        else ()
    )


def _sizes(data: dict[Split, Pairs]) -> str:
    named = {split: "" if one.metric == "spearman" else f"{metric_name(one.metric)} " for split, one in data.items()}
    return ", ".join(f"{split} {named[split]}n {data[split].n:,}" for split in SPLITS)


def _systems(place: Path) -> list[System]:
    run = Run(place)
    if run.is_finished:
        return [_of_run(run), *_of_sizes(run)]
    if run.has(Seeds):
        return _of_seeds(str(place), [place / f"seed-{one.seed}" for one in run.read(Seeds).seeds])
    if run.has(Ablation):
        ablation = run.read(Ablation)
        groups = {"full": "full", **{f"without-{name}": f"without {name}" for name in ablation.without}}
        return [
            system
            for folder, label in groups.items()
            for system in _of_seeds(f"{place}, {label}", [place / folder / f"seed-{one.seed}" for one in ablation.full])
        ]
    record = place if place.is_file() else place / EVALUATION
    if record.is_file() and not run.is_begun:
        return [_of_model(model, record) for model in read_record(record, Evaluation).models]
    raise InputError(f"{place}: no results.json, seeds.json, ablation.json or evaluation.json of a finished command")


def _of_run(run: Run) -> System:
    results, data, kind = run.results, pairs_of_run(run), run.manifest.train.kind
    scores: dict[Split, float] = {split: results.split(split).value for split in SPLITS}
    return System(
        name=str(run.folder),
        kind=kind,
        model_sha256=results.model_sha256,
        **scores,
        data=data,
        alignment=results.dev.metrics.get("alignment"),
        uniformity=results.dev.metrics.get("uniformity"),
        step=results.best_step,
        steps=results.total_steps,
        recipe=results.recipe,
        gap=gap_to_paper(kind, scores, data),
    )


def _of_sizes(run: Run) -> list[System]:
    """A row for each size to which its embeddings can be cut, by the same metric on the same pairs."""
    systems = []
    sizes = {part: None for name in run.results.test.metrics for part in name.split("/") if part.isdecimal()}
    for size in sizes:
        scores: dict[str, Any] = {}
        for split in SPLITS:
            *of_set, name = run.results.split(split).metric.split("/")
            parts = [*(part for part in of_set if not part.isdecimal()), size, name]
            scores[split] = run.results.split(split).metrics["/".join(parts)]
        rest = {"name": f"{run.folder}, {size} dimensions", "alignment": None, "uniformity": None, "gap": None}
        systems.append(_of_run(run).model_copy(update=rest | scores))
    return systems


def _of_seeds(name: str, folders: list[Path]) -> list[System]:
    """Each seed's run, and their mean."""
    systems = [_of_run(open_run(folder)) for folder in folders]
    spread: dict[Split, Spread] = {
        "dev": spread_of([system.dev for system in systems]),
        "test": spread_of([system.test for system in systems]),
    }
    scores = {split: spread[split].mean for split in SPLITS}
    first = systems[0]
    mean = System(
        name=f"{name}, mean of {len(systems)} seeds",
        kind=first.kind,
        **scores,
        spread=spread,
        data=first.data,
        gap=gap_to_paper(first.kind, scores, first.data),
    )
    return [*systems, mean]


def _of_model(model: MeasuredModel, record: Path) -> System:
    scores = {split: model.tasks.split(split) for split in SPLITS}
    if not scores["dev"] or not scores["test"]:
        raise InputError(f"{record}: {model.name} was not measured on dev and test: run evaluate with these tasks")
    data = {
        split: Pairs(n=score.n, pairs_sha256=score.pairs_sha256, mean_gold=score.mean_gold, metric=score.metric)
        for split, score in scores.items()
        if score
    }
    geometry = model.tasks.geometry
    return System(
        name=model.name,
        model_sha256=model.model_sha256,
        dev=scores["dev"].value,
        test=scores["test"].value,
        data=data,
        alignment=geometry.alignment if geometry else None,
        uniformity=geometry.uniformity if geometry else None,
    )
