"""Records -> tables, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from simcse_st.console import Table
from simcse_st.evaluation.records import YEARS, Ablation, Evaluation, MeasuredModel, Seeds, Tasks, is_stsb
from simcse_st.records import SPLITS, Results, Scores, Split


def run_table(results: Results) -> Table:
    """A run's scores before and after training."""
    scores = [("before training", results.base)]
    if results.untrained:
        scores = [("the base as saved", results.base), (f"{results.stack}, untrained", results.untrained)]
    after: dict[Split, float] = {split: results.split(split).value for split in SPLITS}
    rows = [[name, *(f"{of[split]:.2f}" for split in SPLITS)] for name, of in [*scores, ("after", after)]]
    rows.append(["change", *(f"{after[split] - results.base[split]:+.2f}" for split in SPLITS)])
    for name, scores_of in further(results):
        pairs = [scores_of.get(split) for split in SPLITS]
        rows.append([name, *(f"{pair[1]:.2f} ({pair[1] - pair[0]:+.2f})" if pair else "" for pair in pairs)])
    kinds = named(results.split(split).metric for split in SPLITS)
    title = f"{kinds} x100, weights of step {results.best_step} of {results.total_steps}"
    if results.planned_steps:
        title += f" ({results.planned_steps} were planned)"
    return Table(title, ["", *(f"{split} ({_size(results.split(split))})" for split in SPLITS)], rows)


def further(results: Results) -> list[tuple[str, dict[Split, tuple[float, float]]]]:
    """The scores of a run on its other sets and at its other sizes.

    Returns:
        What each is, and that of the base and of the kept model on dev and test, where they have it.
    """
    found: dict[str, dict[Split, tuple[float, float]]] = {}
    for split in SPLITS:
        before = results.base_metrics.get(split, {})
        for name in _beside(results.split(split)):
            if name in before:
                scores = before[name], results.split(split).metrics[name]
                found.setdefault(metric_name(name), {})[split] = scores
    return list(found.items())


def _beside(scores: Scores) -> list[str]:
    """Of each other set and size, the metric that is shown: the one that counts or else that of its kind."""
    usual = (scores.metric.rpartition("/")[2], "spearman", "ndcg@10")
    parts = dict.fromkeys(name.rpartition("/")[0] for name in scores.metrics)
    each = [[f"{part}/{name}".lstrip("/") for name in usual] for part in parts]
    shown = (next((name for name in names if name in scores.metrics), "") for names in each)
    return [name for name in shown if name and name != scores.metric]


def named(metrics: Iterable[str]) -> str:
    """What scores are, e.g. ``nDCG@10 and Spearman``."""
    return " and ".join(dict.fromkeys(map(metric_name, metrics)))


def metric_name(metric: str) -> str:
    """A metric as tables print it: ``Spearman``, ``nDCG@10 of faq``, ``Spearman at 64 dimensions``."""
    *prefixes, base = metric.split("/")
    name, at, k = base.partition("@")
    words = [f"at {prefix} dimensions" if prefix.isdecimal() else f"of {prefix}" for prefix in prefixes]
    return " ".join([f"{_METRICS.get(name, name)}{at}{k}", *words])


def _size(scores: Scores) -> str:
    return f"{scores.n:,} {'queries' if '@' in scores.metric else 'pairs'}"


def run_summary(results: Results) -> str:
    """What a run's training took, and what its loss saw."""
    seen = results.batches
    masked = f", {seen.masked_cells:,} cells masked" if seen.masked_cells else ""
    return (
        f"{results.train_seconds:.0f} s of training, {results.sentences_per_second:.0f} sentences/s\n"
        f"an anchor saw {seen.mean_negatives or 0:.1f} negatives on average, "
        f"{seen.fewest_negatives} to {seen.most_negatives}{masked}"
    )


_METRICS = {"spearman": "Spearman", "pearson": "Pearson", "ndcg": "nDCG", "mrr": "MRR", "map": "MAP"}

# Of each column: its head, the task, and where in its result the number and the number of what it is over stand.
_COLUMNS: tuple[tuple[str, str, str, str, str], ...] = (
    ("dev", "dev", "value", "n", ".2f"),
    ("test", "test", "value", "n", ".2f"),
    ("alignment", "geometry", "alignment", "pairs", ".3f"),
    ("uniformity", "geometry", "uniformity", "sentences", ".3f"),
    ("recall@1", "retrieval", "recall_at_1", "n", ".3f"),
    ("recall@5", "retrieval", "recall_at_5", "n", ".3f"),
    ("MRR", "retrieval", "mrr", "n", ".3f"),
)


def evaluation_tables(record: Evaluation) -> list[Table]:
    """The tables of an evaluation: scores, geometry and retrieval; the years of STS; similarity by gold."""
    models = record.models
    first = models[0].tasks
    tables = []
    found = [column for column in _COLUMNS if _all(models, column[1])]
    in_years = [head for head, *_ in found] == ["test"] and first.task(YEARS[0])
    if found and not in_years:  # where it is the only one, test stands among the years
        heads = [f"{head}\nn {getattr(first.task(task), size):,}" for head, task, _, size, _ in found]
        of_sets = [scores.metric for split in SPLITS if (scores := first.split(split))] or ["spearman"]
        title = f"{named(of_sets)} x100 of cosine similarity; alignment and uniformity: lower is better"
        cells = [[f"{getattr(m.tasks.task(task), key):{form}}" for _, task, key, _, form in found] for m in models]
        tables.append(_table(title, models, heads, cells))
    beside = [(split, name) for split in SPLITS if (scores := first.split(split)) for name in _beside(scores)]
    if beside:
        heads = [f"{split}\n{metric_name(name)}" for split, name in beside]
        each = [[(model.tasks.split(split), name) for split, name in beside] for model in models]
        cells = [[f"{of.metrics[name]:.2f}" if of and name in of.metrics else "" for of, name in row] for row in each]
        tables.append(_table("Other sets and sizes of embeddings, x100", models, heads, cells))
    tables += _sts_tables(models)
    if _all(models, "mteb"):
        tasks = first.mteb or {}
        heads = [f"{name}\n{task.metric}" for name, task in tasks.items()]
        cells = [[f"{(model.tasks.mteb or {})[name].main_score:.2f}" for name in tasks] for model in models]
        tables.append(_table("MTEB, the main score of each task, x100", models, heads, cells))
    if _all(models, "gold-scores"):
        heads = [f"{band.gold}\nn {band.n:,}" for band in first.gold_scores or ()]
        cells = [
            ["" if band.median is None else f"{band.median:.3f}" for band in model.tasks.gold_scores or ()]
            for model in models
        ]
        tables.append(_table("Median cosine of dev pairs by their rounded gold score", models, heads, cells))
    if len(models) == 1 and first.mistakes:
        pairs = [*first.mistakes.overrated[:3], *first.mistakes.underrated[:3]]
        rows = [[f"{pair.gold:.1f}", f"{pair.cosine:.2f}", pair.sentence1, pair.sentence2] for pair in pairs]
        title = f"{models[0].name}: the dev pairs on which it is most confidently wrong"
        tables.append(Table(title, ["gold", "cosine", "", ""], rows))
    return tables


def _all(models: list[MeasuredModel], task: str) -> bool:
    return all(model.tasks.task(task) is not None for model in models)


def _table(title: str, models: list[MeasuredModel], heads: list[str], cells: list[list[str]]) -> Table:
    rows = [[model.name, *of_model] for model, of_model in zip(models, cells, strict=True)]
    return Table(title, ["", *heads], rows)


def _sts_tables(models: list[MeasuredModel]) -> list[Table]:
    shown = [task for task in (*YEARS, "sick-r") if _all(models, task)]
    if not shown:
        return []
    first = models[0].tasks
    if YEARS[0] in shown and all(model.tasks.score("test") is not None for model in models):
        shown.insert(shown.index("sick-r") if "sick-r" in shown else len(shown), "test")
    named = first.test and is_stsb("test", first.test.n, first.test.mean_gold)
    names = {"test": "STS-B" if named else "test"}
    heads = [f"{names.get(task, task.upper())}\nn {first.task(task).n:,}" for task in shown]
    score: Callable[[Tasks, str], str] = lambda tasks, task: f"{tasks.score(task):.2f}"  # noqa: E731
    cells = [[score(model.tasks, task) for task in shown] for model in models]
    if first.average:
        heads.append("average")
        for model, row in zip(models, cells, strict=True):
            row.append(f"{model.tasks.average.all:.2f}" if model.tasks.average else "")
    title = "Spearman x100; of a year 'all': one over all its subsets together, as in the paper"
    return [_table(title, models, heads, cells)]


def seeds_table(record: Seeds) -> Table:
    """Each seed's scores, and their mean and standard deviation."""
    rows = [[str(run.seed), str(run.best_step), f"{run.dev:.2f}", f"{run.test:.2f}"] for run in record.seeds]
    if len(record.seeds) > 1:
        rows.append(["mean ± standard deviation", "", record.dev.text(), record.test.text()])
    heads = [f"dev\nn {record.data.dev_pairs:,}", f"test\nn {record.data.test_pairs:,}"]
    return Table(
        f"{record.recipe}: {named(record.data.metrics.values())} x100 of the kept step",
        ["seed", "kept step", *heads],
        rows,
    )


def ablation_tables(record: Ablation) -> list[Table]:
    """The matched differences: of the kept steps, and of dev at every step that both scored."""
    rows, by_step = [], []
    for name, part in record.without.items():
        for pair in part.seeds:
            cells = [f"{scores[split]:.2f}" for split in SPLITS for scores in (pair.full, pair.without)]
            gains = [f"{pair.difference[split]:+.2f}" for split in SPLITS]
            rows.append([f"without {name}", str(pair.seed), *cells, *gains])
        if len(part.seeds) > 1:
            spread = [part.difference[split].text("+") for split in SPLITS]
            rows.append([f"without {name}", "mean ± sd", "", "", "", "", *spread])
        by_step += [[f"without {name}", str(step.step), step.text("+")] for step in part.steps]
    heads = ["dev", "dev without", "test", "test without", "dev gain", "test gain"]
    count = len(record.full)
    over = f"mean ± sd over {count} seeds" if count > 1 else "one seed"
    scores = named(record.data.metrics.values())
    return [
        Table(f"{record.recipe}: {scores} x100 of the kept steps, same seed in a row", ["", "seed", *heads], rows),
        Table(f"Gain on dev at the same step, {over}", ["", "step", "dev gain"], by_step),
    ]
