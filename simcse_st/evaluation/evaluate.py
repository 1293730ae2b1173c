"""Any models, measured side by side on the same data, each sentence encoded once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from simcse_st.data import GradedPairs, Source, load_graded_pairs
from simcse_st.environment import describe_environment
from simcse_st.errors import InputError, RunError
from simcse_st.evaluation.figures import check_matplotlib, draw_geometry, draw_gold_cosine, draw_training
from simcse_st.folder import EVALUATION, check_record, write_json
from simcse_st.evaluation.leaderboard import find_tasks, run_tasks
from simcse_st.loading import describe_model, load_model
from simcse_st.places import Located, check_poolings, locate_model
from simcse_st.data.preparing import source_of
from simcse_st.recipe import load_recipe
from simcse_st.evaluation.scoring import average, score_model
from simcse_st.evaluation.tables import GROUPS, ON_DEV, YEARS, task_names

PROTOCOL = (
    "cosine of L2-normalised embeddings against gold scores, Spearman x100; STS12-16: 'all' is one Spearman over all "
    "subsets of a year together (the paper's), 'mean' and 'wmean' are means over the subsets, plain and by size; "
    "alignment: mean squared distance of dev pairs with gold >= 4 of 5; uniformity: log mean exp(-2 d^2) over all "
    "pairs of distinct dev sentences; retrieval: the second sentence of those dev pairs among all other distinct dev "
    "sentences, ties against the model"
)


def evaluate(
    references: str | Path | Sequence[str | Path],
    *,
    tasks: str | Iterable[str] = "default",
    pooling: str | None = None,
    dev: Source | None = None,
    test: Source | None = None,
    senteval: str | Path | None = None,
    output: str | Path | None = None,
    figures: bool = False,
    mteb: Sequence[str] = (),
    device: str | None = None,
) -> dict[str, Any]:
    """Measures models.

    Args:
        references: Models, as :func:`~simcse_st.places.locate_model` takes them.
        tasks: Names of :data:`~simcse_st.evaluation.tables.TASKS` or ``GROUPS``.
        pooling: How to read those that are bare encoders.
        dev: Graded pairs; by default those of the recipe of the run folders, else STS-B from the hub.
        test: The same for test.
        senteval: SentEval's folder; by default STS12-16 come from the hub (there without their subsets).
        output: A folder for ``evaluation.json``; what it says of the same model and data is used again.
        figures: Whether to draw pictures into ``output/figures``: cosine against gold score, alignment against
            uniformity, and of run folders the dev score and the loss over the steps.
        mteb: Names of tasks of the MTEB leaderboard to run too.
        device: Where to compute.

    Returns:
        The record.

    Raises:
        InputError: A task, a model or data that cannot be used.
    """
    wanted = task_names(tasks.split(",") if isinstance(tasks, str) else tasks)
    names = [references] if isinstance(references, (str, Path)) else list(references)
    if not names:
        raise InputError("no model to evaluate")
    path = Path(output) / EVALUATION if output else None
    if path:
        check_record(path)
    if figures and path is None:
        raise InputError("figures need an output folder")
    if figures:
        check_matplotlib()
    leaderboard = find_tasks(mteb) if mteb else []
    found = [locate_model(name) for name in names]
    check_poolings(found, pooling)
    data = _load_data(wanted, found, dev, test, senteval)
    earlier = _earlier(path) if path and path.exists() else {"models": [], "data": {}}
    measured: list[dict[str, Any]] = []
    dev_cosines: dict[str, list[float]] = {}
    for located in found:
        loaded = load_model(located, pooling, device)
        known = {**_known_scores(earlier["models"], loaded.facts["model_sha256"]), **loaded.known}
        name = loaded.name if loaded.name not in dev_cosines else f"{loaded.name} ({len(dev_cosines) + 1})"
        try:
            results, dev_cosines[name] = score_model(wanted, data, loaded.model, known)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        if leaderboard:
            results["mteb"] = run_tasks(loaded.model, leaderboard)
        measured.append({"name": name, **loaded.facts, "tasks": {**results, **average(results)}})
        record = _with_earlier(_record(data, measured, loaded.model), earlier)
        if path:
            _write(path, record)  # after each: a model that fails does not cost the scores of those before it
    if path and figures:
        _draw(record, found, data, dev_cosines, path.parent / "figures")
    return record


def measure_run(
    name: str, model: SentenceTransformer, dev: GradedPairs, test: GradedPairs, test_scores: dict[str, float]
) -> dict[str, Any]:
    """Measures the kept model of a run by the default tasks, as far as its dev data admit them.

    Args:
        name: What to call it.
        model: The model, as loaded back.
        dev: The pairs that chose it.
        test: The pairs of its one test score.
        test_scores: That score.

    Returns:
        A record as :func:`evaluate` gives it.
    """
    alike = any(dev.paraphrases())
    tasks = [task for task in GROUPS["default"] if alike or task not in ("geometry", "retrieval")]
    data = {"dev": dev, "test": test}
    sha = test.facts["pairs_sha256"]
    correlation = {key: test_scores[key] for key in ("spearman", "pearson")}
    more = {"n": len(test), "pairs_sha256": sha, "mean_gold": test.facts["mean_gold"], "from": "results.json"}
    known = {sha: {**correlation, **more}}
    results, _ = score_model(tasks, data, model, known)
    return _record(data, [{"name": name, "revision": None, **describe_model(model), "tasks": results}], model)


def _record(data: dict[str, GradedPairs], models: list[dict[str, Any]], model: SentenceTransformer) -> dict[str, Any]:
    return {
        "protocol": PROTOCOL,
        "data": {name: pairs.facts for name, pairs in data.items()},
        "models": models,
        "environment": describe_environment(model.device, models[-1]["precision"]),
    }


def _load_data(
    tasks: Sequence[str],
    found: Sequence[Located],
    dev: Source | None,
    test: Source | None,
    senteval: str | Path | None,
) -> dict[str, GradedPairs]:
    sources: dict[str, Source] = {}
    if {"dev", *ON_DEV} & set(tasks):
        sources["dev"] = dev if dev is not None else _source_of_runs(found, "dev")
    if "test" in tasks:
        sources["test"] = test if test is not None else _source_of_runs(found, "test")
    for task in YEARS:
        if task in tasks and senteval is None:
            sources[task] = Source(f"mteb/{task}-sts", split="test")
        elif task in tasks:
            sources[task] = _in_senteval(senteval, f"{task.upper()}-en-test")
    if "sick-r" in tasks:
        if senteval is None:
            raise InputError(
                "sick-r: give SentEval's folder by --senteval: mteb/sickr-sts on the hub holds all pairs of SICK, the "
                "paper's number is of the test set alone"
            )
        sources["sick-r"] = _in_senteval(senteval, "SICK/SICK_test_annotated.txt")
    data = {}
    for name, source in sources.items():
        try:
            data[name] = load_graded_pairs(source)
        except InputError as error:
            of_run = {"dev": dev, "test": test}.get(name, source) is None and any(model.run for model in found)
            hint = f" (which the run's recipe names; another is given by --{name})" if of_run else ""
            raise InputError(f"{error}{hint}") from None
    return data


def _in_senteval(folder: str | Path | None, inside: str) -> Source:
    """A part of SentEval, whether its folder is the whole, its data, or what holds the years."""
    root = Path(str(folder)).expanduser()
    for between in ("", "STS", "downstream", "downstream/STS", "data/downstream", "data/downstream/STS"):
        if (root / between / inside).exists():
            return Source(root / between / inside)
    raise InputError(f"--senteval: {root} has no {inside}, nor has downstream or downstream/STS in it")


def _source_of_runs(found: Sequence[Located], split: str) -> Source:
    """Where the run folders among these have their pairs from; without any, STS-B on the hub.

    Raises:
        InputError: They have them from different places.
    """
    default = {"dev": "validation", "test": "test"}[split]
    sources: dict[Source, Path] = {}
    for model in found:
        if model.run:
            source = source_of(getattr(load_recipe(model.run / "recipe.yaml").data, split), default)
            sources.setdefault(source, model.run)
    if len(sources) > 1:
        (one, first), (other, second), *_ = sources.items()
        raise InputError(
            f"{first} is measured on {one.name}, {second} on {other.name}: say by --{split} which of them for all"
        )
    return next(iter(sources), Source("sentence-transformers/stsb", split=default))


def _earlier(path: Path) -> dict[str, Any]:
    """The record that stands there already."""
    try:
        record = dict(json.loads(path.read_text("utf-8")))
        texts = [facts["pairs_sha256"] for facts in record["data"].values()]
        for model in record["models"]:
            texts.append(model["model_sha256"])
            for scores in model["tasks"].values():
                if "pairs_sha256" in scores:
                    texts.append(scores["pairs_sha256"])
                    float(scores.get("spearman", scores.get("all")))
        if all(isinstance(text, str) for text in texts):
            return record
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    raise InputError(f"{path} is no record of this command: delete it, or choose another --output")


def _with_earlier(record: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Adds what an earlier record says of the same models on the same data, so that tasks can be run one by one."""
    both = record["data"].keys() & earlier["data"].keys()
    if any(record["data"][name]["pairs_sha256"] != earlier["data"][name]["pairs_sha256"] for name in both):
        return record
    tasks = {model["model_sha256"]: model["tasks"] for model in earlier["models"]}
    for model in record["models"]:
        model["tasks"] = {**tasks.get(model["model_sha256"], {}), **model["tasks"]}
    return {**record, "data": {**earlier["data"], **record["data"]}}


def _known_scores(earlier: list[dict[str, Any]], model_sha256: str) -> dict[str, dict[str, Any]]:
    """What an earlier record says of the same model, by the checksum of the pairs."""
    known = {}
    for model in earlier:
        if model["model_sha256"] == model_sha256:
            for scores in model["tasks"].values():
                if "pairs_sha256" in scores:
                    known[scores["pairs_sha256"]] = {"from": EVALUATION, **scores}
    return known


def _draw(
    record: dict[str, Any],
    found: Sequence[Located],
    data: dict[str, GradedPairs],
    dev_cosines: dict[str, list[float]],
    folder: Path,
) -> None:
    geometry = {model["name"]: model["tasks"]["geometry"] for model in record["models"] if "geometry" in model["tasks"]}
    histories = {model.name: _history(model.run / "history.jsonl") for model in found if model.run}
    try:
        if dev_cosines and all(dev_cosines.values()):
            draw_gold_cosine(dev_cosines, data["dev"].gold_of_5(), folder / "gold_cosine.png")
        if geometry:
            draw_geometry(geometry, folder / "alignment_uniformity.png")
        if histories:
            draw_training(histories, folder / "training.png")
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {error.strerror}") from error


def _history(path: Path) -> list[dict[str, Any]]:
    try:
        history = [dict(json.loads(line)) for line in path.read_text("utf-8").splitlines()]
        if any("loss" in entry for entry in history) and any("dev" in entry for entry in history):
            return history
        raise ValueError("it holds no loss or no dev score")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be drawn: {' '.join(str(error).split())}") from None


def _write(path: Path, record: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error
