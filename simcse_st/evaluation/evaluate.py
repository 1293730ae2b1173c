"""Any models, measured side by side on the same data, each sentence encoded once."""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simcse_st.data.held_out import HUB_SPLIT, HeldOut, check_held_out, load_held_out
from simcse_st.data.sts import GradedPairs
from simcse_st.errors import InputError, RunError, nearest, one_line
from simcse_st.evaluation.figures import check_matplotlib, draw_geometry, draw_gold_cosine, draw_training
from simcse_st.evaluation.records import GROUPS, ON_DEV, TASKS, YEARS, Evaluation, MeasuredModel, MTEBScore
from simcse_st.identity import describe_model
from simcse_st.models import Located, load_model, locate_here, locate_model
from simcse_st.recipes import read_reference
from simcse_st.records import SPLITS, Split
from simcse_st.references import HeldOutReference, HubDataset
from simcse_st.run import EVALUATION, describe_environment, locked, read_record, write_text

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

PROTOCOL = (
    "cosine of L2-normalised embeddings against gold scores, Spearman x100; STS12-16: 'all' is one Spearman over all "
    "subsets of a year together (the paper's), 'mean' and 'wmean' are means over the subsets, plain and by size; "
    "alignment: mean squared distance of dev pairs with gold >= 4 of 5; uniformity: log mean exp(-2 d^2) over all "
    "pairs of distinct dev sentences; retrieval: the second sentence of those dev pairs among all other distinct dev "
    "sentences, ties against the model; a retrieval set as dev or test: cosine, x100, ties by a hash of the passage, a "
    "query's own text left out"
)
_STSB = "sentence-transformers/stsb"


def evaluate(
    models: str | Path | Sequence[str | Path],
    *,
    tasks: str | Iterable[str] = "default",
    dev: HeldOutReference | None = None,
    test: HeldOutReference | None = None,
    senteval: str | Path | None = None,
    output: str | Path | None = None,
    figures: bool = False,
    mteb: Sequence[str] = (),
    device: str | None = None,
    truncate_dims: Sequence[int] = (),
) -> Evaluation:
    """Measures models.

    Args:
        models: Run folders, folders and Hub ids (``owner/name@revision``). ``MODEL:cls``, ``MODEL:mean`` or
            ``MODEL:first_last_avg`` reads a model's encoder so, whatever stands on it.
        tasks: Names of tasks (``dev``, ``test``, ``geometry``, ...) or of groups (``default``, ``sts``, ``all``).
        dev: Graded pairs or a retrieval set; by default that of the run folders' recipe, else STS-B from the Hub.
        test: The same for test.
        senteval: SentEval's folder; by default STS12-16 come from the Hub (there without their subsets).
        output: A folder for ``evaluation.json``; what it says of other tasks of the same models stays.
        figures: Whether to draw pictures into ``output/figures``: cosine against gold score, alignment against
            uniformity, and of run folders the dev score and the loss over the steps.
        mteb: Names of tasks of the MTEB leaderboard to run too.
        device: Where to compute.
        truncate_dims: Sizes to which embeddings are cut for further scores on dev and test, beside those of the run
            folders' ``loss.matryoshka`` that a model has.

    Raises:
        InputError: A task, a model or data that cannot be used.

    Example:
        >>> record = evaluate(["runs/quickstart", "bert-base-uncased:mean"], tasks="test")
        >>> record.models[0].tasks.test.spearman
        81.5
    """
    asked = tasks.split(",") if isinstance(tasks, str) else list(tasks)
    wanted = _task_names(asked)
    names = [models] if isinstance(models, (str, Path)) else list(models)
    if not names:
        raise InputError("no model to evaluate")
    for name in names:
        locate_here(name)
    if figures and output is None:
        raise InputError("figures need an output folder")
    given: dict[Split, HeldOutReference | None] = {"dev": dev, "test": test}
    places = {split: read_reference(place) for split, place in given.items() if place is not None}
    for split, place in places.items():
        check_held_out(place, split)
    path = Path(output) / EVALUATION if output is not None else None
    if path and path.is_dir():
        raise InputError(f"--output: {path} must be a file")
    with locked(path.parent) if path else nullcontext():
        return _evaluate(names, wanted, asked, places, senteval, path, figures, mteb, device, truncate_dims)


def measure_run(
    name: str,
    model: SentenceTransformer,
    data: Mapping[Split, HeldOut],
    metrics: Mapping[Split, str],
    sizes: Iterable[int] = (),
) -> Evaluation:
    """Measures the kept model of a run by the default tasks, as far as its dev data admit them.

    Args:
        name: What to call it.
        model: The model, as loaded back.
        data: Dev, which chose it, and test, for its one score.
        metrics: The metric of each that counts.
        sizes: To which embeddings are cut for further scores.
    """
    dev = data["dev"]
    tasks = [task for task in GROUPS["default"] if isinstance(dev, GradedPairs) or task not in ON_DEV]
    if isinstance(dev, GradedPairs) and not any(dev.paraphrases()):
        tasks = [task for task in tasks if task not in ("geometry", "retrieval")]
    sets: dict[str, HeldOut] = {split: data[split] for split in SPLITS}
    measured, _ = _measure(name, None, model, tasks, sets, {split: metrics[split] for split in SPLITS}, sizes)
    return _record(sets, [measured], model)


def _task_names(names: Iterable[str]) -> list[str]:
    """The tasks of these names and groups, each once, in the order of ``TASKS``."""
    wanted: set[str] = set()
    for name in names:
        if name not in TASKS and name not in GROUPS:
            raise InputError(f"--tasks: no task {name!r}: {nearest(name, (*TASKS, *GROUPS))}")
        wanted.update(GROUPS.get(name, (name,)))
    if not wanted:
        raise InputError(f"--tasks: none is given; {nearest('', (*TASKS, *GROUPS))}")
    return [task for task in TASKS if task in wanted]


def _evaluate(
    names: Sequence[str | Path],
    tasks: Sequence[str],
    asked: Sequence[str],
    places: dict[Split, HeldOutReference],
    senteval: str | Path | None,
    path: Path | None,
    figures: bool,
    mteb: Sequence[str],
    device: str | None,
    sizes: Sequence[int],
) -> Evaluation:
    earlier = read_record(path, Evaluation) if path and path.exists() else None
    if figures:
        check_matplotlib()
    leaderboard = _find_mteb_tasks(mteb) if mteb else []
    found = [locate_model(name) for name in names]
    data = _load_data(tasks, found, places, senteval)
    if not isinstance(data.get("dev"), (GradedPairs, type(None))):
        tasks = _of_any_dev(tasks, asked)
    metrics: dict[str, str] = {
        split: metric for split in SPLITS if split not in places and (metric := _metric_of_runs(found, split))
    }
    of_runs = {size for model in found if model.run for size in model.run.recipe.loss.matryoshka or ()}
    measured: list[MeasuredModel] = []
    dev_cosines: dict[str, list[float]] = {}
    for located in found:
        model = load_model(located, device)
        name = located.name if located.name not in dev_cosines else f"{located.name} ({len(dev_cosines) + 1})"
        try:
            fitting = {size for size in of_runs if size <= (model.get_embedding_dimension() or 0)}
            every = sorted(fitting.union(sizes), reverse=True)
            one, dev_cosines[name] = _measure(name, located.revision, model, tasks, data, metrics, every)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        if leaderboard:
            scores = _run_mteb_tasks(model, leaderboard)
            one = one.model_copy(update={"tasks": one.tasks.model_copy(update={"mteb": scores})})
        measured.append(one)
        record = _record(data, measured, model)
        if earlier:
            record = _with_earlier(record, earlier)
        if path:
            # After each model: one that fails does not cost the scores of those before it.
            write_text(path, record.to_json())
    if path and figures:
        _draw(record, found, data, dev_cosines, path.parent / "figures")
    return record


def _measure(
    name: str,
    revision: str | None,
    model: SentenceTransformer,
    tasks: Sequence[str],
    data: dict[str, HeldOut],
    metrics: Mapping[str, str] | None = None,
    sizes: Iterable[int] = (),
) -> tuple[MeasuredModel, list[float]]:
    from simcse_st.evaluation.evaluators import score_model, with_average  # and with it torch

    results, cosines = score_model(tasks, data, model, metrics, sizes)
    facts = dict(describe_model(model))
    return MeasuredModel(name=name, revision=revision, **facts, tasks=with_average(results)), cosines


def _of_any_dev(tasks: Sequence[str], asked: Sequence[str]) -> list[str]:
    """The tasks that do not need graded pairs; those that do are refused where they are asked for by name."""
    if named := [name for name in asked if name in ON_DEV]:
        raise InputError(f"--tasks: {named[0]} is of one set of graded pairs, which dev is not")
    return [task for task in tasks if task not in ON_DEV]


def _record(data: Mapping[str, HeldOut], models: list[MeasuredModel], model: SentenceTransformer) -> Evaluation:
    return Evaluation(
        protocol=PROTOCOL,
        data={name: pairs.facts for name, pairs in data.items()},
        models=list(models),
        environment=describe_environment(model.device, models[-1].precision),
    )


def _load_data(
    tasks: Sequence[str], found: Sequence[Located], places: dict[Split, HeldOutReference], senteval: str | Path | None
) -> dict[str, HeldOut]:
    wanted: dict[str, HeldOutReference | Path] = {}
    if {"dev", *ON_DEV} & set(tasks):
        wanted["dev"] = places.get("dev") or _of_runs(found, "dev")
    if "test" in tasks:
        wanted["test"] = places.get("test") or _of_runs(found, "test")
    for year in (task for task in YEARS if task in tasks):
        on_hub = HubDataset(dataset=f"mteb/{year}-sts", split="test")
        wanted[year] = _in_senteval(senteval, f"{year.upper()}-en-test") if senteval else on_hub
    if "sick-r" in tasks:
        if senteval is None:
            raise InputError(
                "sick-r: give SentEval's folder by --senteval: mteb/sickr-sts on the hub holds all pairs of SICK, the "
                "paper's number is of the test set alone"
            )
        wanted["sick-r"] = _in_senteval(senteval, "SICK/SICK_test_annotated.txt")
    data: dict[str, HeldOut] = {}
    for name, reference in wanted.items():
        try:
            data[name] = load_held_out(reference, "dev" if name == "dev" else "test")
        except InputError as error:
            of_run = name in SPLITS and name not in places and any(model.run for model in found)
            hint = f" (which the run's recipe names; another is given by --{name})" if of_run else ""
            raise InputError(f"{error}{hint}") from None
    return data


def _in_senteval(folder: str | Path, inside: str) -> Path:
    """A part of SentEval, whether its folder is the whole, its data, or what holds the years."""
    root = Path(folder).expanduser()
    for between in ("", "STS", "downstream", "downstream/STS", "data/downstream", "data/downstream/STS"):
        if (root / between / inside).exists():
            return root / between / inside
    raise InputError(f"--senteval: {root} has no {inside}, nor has downstream or downstream/STS in it")


def _of_runs(found: Sequence[Located], split: Split) -> HeldOutReference:
    """Where the run folders among these have their pairs from, which must be one place; without any, STS-B."""
    places: dict[str, tuple[HeldOutReference, Path]] = {}
    for model in found:
        if model.run:
            reference = model.run.held_out(split)
            key = os.path.normpath(reference) if isinstance(reference, str) else str(reference)
            places.setdefault(key, (reference, model.run.folder))
    if len(places) > 1:
        (one, first), (other, second), *_ = places.values()
        raise InputError(f"{first} is measured on {one}, {second} on {other}: say by --{split} which of them for all")
    stsb = (HubDataset(dataset=_STSB, split=HUB_SPLIT[split]), None)
    return next(iter(places.values()), stsb)[0]


def _metric_of_runs(found: Sequence[Located], split: Split) -> str | None:
    """The metric by which the runs among these were measured, if it is one."""
    metrics = {model.run.results.split(split).metric for model in found if model.run}
    return metrics.pop() if len(metrics) == 1 else None


def _with_earlier(record: Evaluation, earlier: Evaluation) -> Evaluation:
    """Adds what an earlier record says of the same models on the same data, so that tasks can be run one by one."""
    both = record.data.keys() & earlier.data.keys()
    if any(record.data[name].pairs_sha256 != earlier.data[name].pairs_sha256 for name in both):
        return record
    before = {model.model_sha256: model.tasks for model in earlier.models}
    models = []
    for model in record.models:
        known = before.get(model.model_sha256)
        fresh = {name: value for name, value in model.tasks if value is not None}
        models.append(model.model_copy(update={"tasks": known.model_copy(update=fresh)}) if known else model)
    return record.model_copy(update={"models": models, "data": {**earlier.data, **record.data}})


def _draw(
    record: Evaluation,
    found: Sequence[Located],
    data: dict[str, HeldOut],
    dev_cosines: dict[str, list[float]],
    folder: Path,
) -> None:
    geometry = {model.name: model.tasks.geometry for model in record.models if model.tasks.geometry}
    histories = {model.name: model.run.history() for model in found if model.run}
    for name, history in histories.items():
        if not any(entry.loss is not None for entry in history) or not any(entry.dev for entry in history):
            raise InputError(f"{name}: its history cannot be drawn: it holds no loss or no dev score")
    try:
        dev = data.get("dev")
        if isinstance(dev, GradedPairs) and dev_cosines and all(dev_cosines.values()):
            draw_gold_cosine(dev_cosines, dev.gold_of_5(), folder / "gold_cosine.png")
        if geometry:
            draw_geometry(geometry, folder / "alignment_uniformity.png")
        if histories:
            chosen = {model.name: model.run.results.dev.metric for model in found if model.run}
            draw_training(histories, folder / "training.png", chosen)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {error.strerror}") from error


def _find_mteb_tasks(names: Sequence[str]) -> list[Any]:
    """MTEB's tasks of these names."""
    try:
        import mteb
    except ImportError:
        raise InputError("--mteb needs the package mteb: pip install 'simcse-st[mteb]'") from None
    tasks = []
    for name in names:
        try:
            tasks.append(mteb.get_task(name))
        except (KeyError, ValueError) as error:
            raise InputError(f"--mteb: no task {name!r}: {one_line(error)[:300]}") from None
    return tasks


def _run_mteb_tasks(model: SentenceTransformer, tasks: Sequence[Any]) -> dict[str, MTEBScore]:
    """Runs tasks, as mteb does them."""
    import mteb

    found = {}
    for task in tasks:
        name = task.metadata.name
        try:
            # Without a cache: it goes by a model's name, which a model of a folder has not.
            (result,) = mteb.evaluate(model, [task], cache=None, show_progress_bar=False).task_results
        except Exception as error:  # of many classes, from the hub's to the task's own
            raise InputError(f"--mteb {name}: {one_line(error)}") from error
        found[name] = MTEBScore(
            main_score=100 * float(result.get_score()),
            metric=task.metadata.main_score,
            dataset=task.metadata.dataset["path"],
            revision=result.dataset_revision,
            parts={
                f"{part.get('hf_subset', 'default')}_{split}": 100 * float(part["main_score"])
                for split, parts in result.scores.items()
                for part in parts
            },
            version=metadata.version("mteb"),
        )
    return found
