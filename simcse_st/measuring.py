"""Any models, measured side by side on the same data, each sentence encoded once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from simcse_st.data import GradedPairs, Source, load_graded_pairs
from simcse_st.environment import describe_environment
from simcse_st.errors import InputError, RunError, nearest
from simcse_st.evaluation import embed
from simcse_st.figures import check_matplotlib, draw_geometry, draw_gold_cosine, draw_training
from simcse_st.leaderboard import find_tasks, run_tasks
from simcse_st.loading import describe_model, load_model
from simcse_st.metrics import alignment, by_gold_score, correlations, mistakes, retrieval, sts_year, uniformity
from simcse_st.modeling import POOLINGS
from simcse_st.preparing import source_of
from simcse_st.recipe import load_recipe

YEARS = ("sts12", "sts13", "sts14", "sts15", "sts16")
ON_DEV = ("geometry", "retrieval", "gold-scores", "mistakes")
TASKS = ("dev", "test", *ON_DEV, *YEARS, "sick-r")
GROUPS: dict[str, tuple[str, ...]] = {
    "default": ("dev", "test", *ON_DEV),
    "sts": (*YEARS, "test", "sick-r"),
    "all": TASKS,
}
PROTOCOL = (
    "cosine of L2-normalised embeddings against gold scores, Spearman x100; STS12-16: 'all' is one Spearman over all "
    "subsets of a year together (the paper's), 'mean' and 'wmean' are means over the subsets, plain and by size; "
    "alignment: mean squared distance of dev pairs with gold >= 4 of 5; uniformity: log mean exp(-2 d^2) over all "
    "pairs of distinct dev sentences; retrieval: the second sentence of those dev pairs among all other distinct dev "
    "sentences, ties against the model"
)
RECORD = "evaluation.json"


def evaluate(
    references: Sequence[str],
    *,
    tasks: Iterable[str] = ("default",),
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
        references: Models, as :func:`~simcse_st.loading.load_model` takes them.
        tasks: Names of ``TASKS`` or ``GROUPS``.
        pooling: How to read those that are bare encoders.
        dev: Graded pairs; by default those of the first run folder's recipe, else STS-B from the hub.
        test: The same for test.
        senteval: The folder that holds SentEval's ``STS12-en-test`` ... and ``SICK``; by default STS12-16 and SICK-R
            come from the hub (there without their subsets).
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
    wanted = task_names(tasks)
    if not references:
        raise InputError("no model to evaluate")
    if pooling and pooling not in POOLINGS:
        raise InputError(f"--pooling {pooling}: {nearest(pooling, POOLINGS)}")
    if figures:
        if not output:
            raise ValueError("figures need an output folder")
        check_matplotlib()
    leaderboard = find_tasks(mteb) if mteb else []
    data = _load_data(wanted, references, dev, test, senteval)
    path = Path(output) / RECORD if output else None
    earlier = _earlier(path) if path and path.is_file() else {"models": [], "data": {}}
    measured: list[dict[str, Any]] = []
    dev_cosines: dict[str, list[float]] = {}
    for reference in references:
        loaded = load_model(reference, pooling, device)
        known = {**_known_scores(earlier["models"], loaded.facts["model_sha256"]), **loaded.known}
        name = loaded.name if loaded.name not in dev_cosines else f"{loaded.name} ({len(dev_cosines) + 1})"
        results, dev_cosines[name] = _measure(wanted, data, loaded.model, known)
        if leaderboard:
            results["mteb"] = run_tasks(loaded.model, leaderboard)
        measured.append({"name": name, **loaded.facts, "tasks": results})
    record = _with_earlier(_record(data, measured, loaded.model), earlier)
    if path:
        _write(path, record)
    if path and figures:
        _draw(record, references, data, dev_cosines, path.parent / "figures")
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
    known = {sha: {**correlation, "n": len(test), "pairs_sha256": sha, "from": "results.json"}}
    results, _ = _measure(tasks, data, model, known)
    return _record(data, [{"name": name, "revision": None, **describe_model(model), "tasks": results}], model)


def _record(data: dict[str, GradedPairs], models: list[dict[str, Any]], model: SentenceTransformer) -> dict[str, Any]:
    return {
        "protocol": PROTOCOL,
        "data": {name: pairs.facts for name, pairs in data.items()},
        "models": models,
        "environment": describe_environment(model.device, "fp32"),
    }


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


def _load_data(
    tasks: Sequence[str],
    references: Sequence[str],
    dev: Source | None,
    test: Source | None,
    senteval: str | Path | None,
) -> dict[str, GradedPairs]:
    sources: dict[str, Source] = {}
    if {"dev", *ON_DEV} & set(tasks):
        sources["dev"] = dev or _source_of_run(references, "dev")
    if "test" in tasks:
        sources["test"] = test or _source_of_run(references, "test")
    for task in (*YEARS, "sick-r"):
        if task in tasks and senteval is None:
            sources[task] = Source(f"mteb/{task.replace('-', '')}-sts", split="test")
        elif task in tasks:
            inside = "SICK/SICK_test_annotated.txt" if task == "sick-r" else f"{task.upper()}-en-test"
            sources[task] = Source(str(Path(str(senteval)) / inside))
            if not Path(sources[task].name).exists():
                raise InputError(f"--senteval: {sources[task].name}: no such file or folder")
    return {name: load_graded_pairs(source) for name, source in sources.items()}


def _source_of_run(references: Sequence[str], split: str) -> Source:
    """Where the first of these that is a run folder has its pairs from, else STS-B on the hub."""
    default = {"dev": "validation", "test": "test"}[split]
    for reference in references:
        recipe = Path(reference).expanduser() / "recipe.yaml"
        if recipe.is_file():
            return source_of(getattr(load_recipe(recipe).data, split), default)
    return Source("sentence-transformers/stsb", split=default)


def _earlier(path: Path) -> dict[str, Any]:
    """The record that stands there already."""
    try:
        record = dict(json.loads(path.read_text("utf-8")))
        models = [(model["tasks"].items(), model["model_sha256"]) for model in record["models"]]
        data = [facts["pairs_sha256"] for facts in record["data"].values()]
        if all(isinstance(value, str) for value in [*data, *(sha for _, sha in models)]):
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
                    known[scores["pairs_sha256"]] = {"from": RECORD, **scores}
    return known


def _measure(
    tasks: Sequence[str], data: dict[str, GradedPairs], model: SentenceTransformer, known: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], list[float]]:
    """All results of one model, and the cosines of the dev pairs. A set that is known already is not scored again."""
    of_record = {
        name: known[pairs.facts["pairs_sha256"]]
        for name, pairs in data.items()
        if name in tasks and pairs.facts["pairs_sha256"] in known
    }
    needed = [name for name in data if name not in of_record or (name == "dev" and set(ON_DEV) & set(tasks))]
    place = {text: number for number, text in enumerate(_sentences(data[name] for name in needed))}
    embeddings = embed(model, list(place)) if place else torch.empty(0)
    results: dict[str, Any] = {}
    for name in (name for name in data if name in tasks):
        pairs = data[name]
        if name in of_record:
            results[name] = of_record[name]
            continue
        cosines = _cosines(pairs, place, embeddings)
        scores = (
            sts_year(pairs.scores, cosines, pairs.subsets) if name in YEARS else correlations(pairs.scores, cosines)
        )
        results[name] = {**scores, "pairs_sha256": pairs.facts["pairs_sha256"]}
    if set(ON_DEV) & set(tasks):
        results.update(_measure_on_dev(tasks, data["dev"], place, embeddings))
    if set(GROUPS["sts"]) <= results.keys():
        of_tasks = [results[task].get("all", results[task].get("spearman")) for task in GROUPS["sts"]]
        results["average"] = {"all": sum(of_tasks) / len(of_tasks), "over": list(GROUPS["sts"])}
    return results, _cosines(data["dev"], place, embeddings) if "dev" in needed else []


def _measure_on_dev(
    tasks: Sequence[str], dev: GradedPairs, place: dict[str, int], embeddings: Tensor
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    numbers = [number for number, same in enumerate(dev.paraphrases()) if same]
    pairs = [(place[dev.sentences1[number]], place[dev.sentences2[number]]) for number in numbers]
    sentences = [place[text] for text in _sentences([dev])]
    if {"geometry", "retrieval"} & set(tasks) and not pairs:
        raise InputError("geometry and retrieval need dev pairs with gold >= 4 of 5: there is none")
    if "geometry" in tasks:
        first, second = (list(side) for side in zip(*pairs, strict=True))
        results["geometry"] = {
            "alignment": alignment(embeddings[first], embeddings[second]),
            "pairs": len(pairs),
            "uniformity": uniformity(embeddings[sentences]),
            "sentences": len(sentences),
        }
    if "retrieval" in tasks:
        results["retrieval"] = _retrieval(dev, pairs, sentences, embeddings)
    if {"gold-scores", "mistakes"} & set(tasks):
        cosines, gold = _cosines(dev, place, embeddings), dev.gold_of_5()
        if "gold-scores" in tasks:
            results["gold-scores"] = by_gold_score(gold, cosines)
        if "mistakes" in tasks:
            results["mistakes"] = {
                kind: [_pair(dev, gold, cosines, number) for number in found]
                for kind, found in mistakes(gold, cosines).items()
            }
    return results


def _retrieval(
    dev: GradedPairs, pairs: list[tuple[int, int]], sentences: list[int], embeddings: Tensor
) -> dict[str, Any]:
    """Retrieval over the dev sentences, with what annotators said of the answers that came first."""
    number = {place: index for index, place in enumerate(sentences)}
    asked = [(number[first], number[second]) for first, second in pairs if first != second]
    queries, answers = (list(side) for side in zip(*asked, strict=True))
    found = retrieval(embeddings[sentences], queries, answers)
    texts = list(_sentences([dev]))
    graded: dict[frozenset[str], float] = {}
    for first, second, gold in zip(dev.sentences1, dev.sentences2, dev.gold_of_5(), strict=True):
        graded[frozenset((first, second))] = gold
    tops = [graded.get(frozenset((texts[q], texts[top]))) for q, top in zip(queries, found.pop("top1"), strict=True)]
    judged = [gold for gold in tops if gold is not None]
    return {**found, "top1_judged": len(judged), "top1_judged_at_most_1": sum(gold <= 1 for gold in judged)}


def _pair(dev: GradedPairs, gold: list[float], cosines: list[float], number: int) -> dict[str, Any]:
    return {
        "sentence1": dev.sentences1[number],
        "sentence2": dev.sentences2[number],
        "gold": gold[number],
        "cosine": cosines[number],
    }


def _cosines(pairs: GradedPairs, place: dict[str, int], embeddings: Tensor) -> list[float]:
    first, second = ([place[text] for text in side] for side in (pairs.sentences1, pairs.sentences2))
    return (embeddings[first] * embeddings[second]).sum(dim=1).tolist()


def _sentences(sets: Iterable[GradedPairs]) -> list[str]:
    """All distinct sentences."""
    return list(dict.fromkeys(text for pairs in sets for text in (*pairs.sentences1, *pairs.sentences2)))


def _draw(
    record: dict[str, Any],
    references: Sequence[str],
    data: dict[str, GradedPairs],
    dev_cosines: dict[str, list[float]],
    folder: Path,
) -> None:
    if all(dev_cosines.values()) and dev_cosines:
        draw_gold_cosine(dev_cosines, data["dev"].gold_of_5(), folder / "gold_cosine.png")
    geometry = {model["name"]: model["tasks"]["geometry"] for model in record["models"] if "geometry" in model["tasks"]}
    if geometry:
        draw_geometry(geometry, folder / "alignment_uniformity.png")
    histories = {
        reference: [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for reference in references
        if (path := Path(reference).expanduser() / "history.jsonl").is_file()
    }
    if histories:
        draw_training(histories, folder / "training.png")


def _write(path: Path, record: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error
