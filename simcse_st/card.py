"""A run's records -> its model card, ``model/README.md``."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from simcse_st.data.sources import PACKAGE_SCHEME
from simcse_st.errors import InputError
from simcse_st.evaluation.records import (
    Ablation,
    Evaluation,
    MeasuredModel,
    SameData,
    Seeds,
    Tasks,
    is_stsb,
)
from simcse_st.evaluation.report import gap_to_paper, pairs_of_run
from simcse_st.evaluation.tables import further, metric_name
from simcse_st.recipe import Recipe
from simcse_st.recipes import load_recipe, shipped_recipes
from simcse_st.records import SPLITS, GradedFacts, HeldOutFacts, Scores, Source, Split
from simcse_st.references import RETRIEVAL, HeldOutSets, is_public
from simcse_st.run import CARD, RECIPE, Run, locked, open_run, write_text

_EXCERPT = 160  # characters of a sentence that is quoted
PROOF = "simcse_st"  # the metadata's key for what proves a copy
SET, SIZE = "set", "dimensions"  # arguments of a score, for which of several sets it is of, and which size
# The entries of citations.bib for a dataset, by a part of its name.
_CITED = {
    "snli": ("bowman-etal-2015-large",),
    "multi_nli": ("williams-etal-2018-broad",),
    "mnli": ("williams-etal-2018-broad",),
    "all-nli": ("bowman-etal-2015-large", "williams-etal-2018-broad"),
    "nli-for-simcse": ("bowman-etal-2015-large", "williams-etal-2018-broad"),
    "nli_for_simcse": ("bowman-etal-2015-large", "williams-etal-2018-broad"),
    "stsb": ("cer-etal-2017-semeval",),
    "matryoshka": ("kusupati-etal-2022-matryoshka",),
}


def write_card(run: Run | str | Path, overrides: Iterable[str] = ()) -> Path:
    """Writes the model card of a finished run from the records in its folder.

    Args:
        run: The run, or its folder.
        overrides: ``card.KEY=VALUE``, to be changed in the run's recipe; all other keys made the run, and stay.

    Returns:
        The card.

    Raises:
        InputError: It is no finished run, a record in it cannot be read, or another key is to be changed.
        RunError: The card cannot be written.

    Example:
        >>> write_card("runs/quickstart", ["card.authors=[A. Author]"])
        PosixPath('runs/quickstart/model/README.md')
    """
    run = run if isinstance(run, Run) else open_run(run, for_card=True)
    overrides = list(overrides)
    for override in overrides:
        if not override.startswith("card."):
            raise InputError(f"--set {override}: the run is made; only card.KEY=VALUE can be changed")
    with locked(run.folder):
        return render_card(run, load_recipe(run.folder / RECIPE, overrides) if overrides else None)


def render_card(run: Run, recipe: Recipe | None = None) -> Path:
    """Writes the card in a run folder that this process holds; with a recipe, also that."""
    pushes = run.pushes()
    text = compose_card(run, pushes[0].repo if pushes else None, recipe)
    if recipe:
        write_text(run.folder / RECIPE, recipe.to_yaml())
    write_text(run.model_path / CARD, text)
    return run.model_path / CARD


def load_template() -> str:
    """The card's template."""
    return _resource("template.md.jinja")


def _resource(name: str) -> str:
    """A file of ``model_card``: as installed or, in a checkout, where it stands at the top of the repository."""
    checkout = Path(__file__).parents[1] / "model_card" / name
    if checkout.is_file():
        return checkout.read_text(encoding="utf-8")
    return (resources.files("simcse_st.model_card") / name).read_text(encoding="utf-8")


def compose_card(run: Run, repo_id: str | None = None, recipe: Recipe | None = None) -> str:
    """The text of a run's card. Every number in it is one of the records'; what has no record is left out.

    Args:
        run: The run.
        repo_id: Where the model is published.
        recipe: The run's recipe, if other than the one in its folder.

    Returns:
        Markdown with the Hub's metadata block on top.
    """
    recipe = recipe or run.recipe
    _check_notes(recipe.card.notes)
    train, results = run.manifest.train, run.results
    if recipe.card.samples and train.samples is None:
        raise InputError("card.samples: no rows were recorded: it must be set before training")
    evaluation = _evaluation_of(run)
    models = evaluation.models if evaluation else []
    model, baselines = (models[0], models[1:]) if models else (None, [])
    tasks = model.tasks if model else Tasks()
    engine = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    engine.filters.update(text=markdown_text, number="{:,}".format, metric=metric_name)
    base_model = results.base_model or recipe.card.base_model
    examples = recipe.card.examples
    scores: dict[Split, float] = {split: results.split(split).value for split in SPLITS}
    try:
        return engine.from_string(load_template()).render(
            metadata=_metadata(run, recipe, base_model).to_yaml(),
            card=recipe.card,
            recipe=recipe,
            results=results,
            base_changes=run.manifest.base_changes,
            train=train,
            kind=train.kind,
            source=source_name(train.sources),
            sources={"train": train.sources},
            samples=train.samples if recipe.card.samples else None,
            base_model=base_model,
            repo_id=repo_id,
            command=_command(run, recipe),
            further=further(results),
            held_out={split: run.manifest.held_out(split) for split in SPLITS},
            gap=gap_to_paper(train.kind, scores, pairs_of_run(run)),
            baselines=baselines,
            compared=[other for other in baselines if _has_what_is_shown(other, tasks)],
            seeds=_group_of(run, recipe, Seeds, run.folder.parent, "seeds"),
            ablation=_group_of(run, recipe, Ablation, run.folder.parent.parent, "ablation"),
            tasks=tasks,
            years=_years(tasks),
            quote=_is_public(recipe, run.manifest.dev) if examples is None else examples,
            model=model,
            environment=run.environment,
            citations=_citations(run, recipe),
        )
    except jinja2.TemplateError as error:
        raise InputError(f"{run.folder}: its records do not make a card: {error}") from error


def _check_notes(notes: str) -> None:
    """Refuses what is left open in the notes: it would swallow the card behind them."""
    if notes.count("<!--") > notes.count("-->"):
        raise InputError("card.notes: a comment <!-- is not closed by -->")
    if len(re.findall(r"^ {0,3}(```|~~~)", notes, re.MULTILINE)) % 2:
        raise InputError("card.notes: a code block is not closed")


def _evaluation_of(run: Run) -> Evaluation | None:
    """The evaluation with the run's own model first, then those that others can have, if on the same pairs."""
    evaluation = run.read(Evaluation) if run.has(Evaluation) else None
    own = [model for model in evaluation.models if model.model_sha256 == run.results.model_sha256] if evaluation else []
    if evaluation is None or not own:
        return None
    others = [model for model in evaluation.models if model is not own[0] and _is_comparable(model, own[0])]
    return evaluation.model_copy(update={"models": [own[0], *others]})


def _is_comparable(model: MeasuredModel, own: MeasuredModel) -> bool:
    """Whether a model is public, and measured on the same pairs by the same metric.

    A folder's name is its owner's business.
    """
    if not model.revision and not model.name.startswith(PACKAGE_SCHEME):
        return False
    scores = [(model.tasks.split(split), own.tasks.split(split)) for split in SPLITS]
    return all(
        one and other and one.pairs_sha256 == other.pairs_sha256 and other.metric in one.metrics
        for one, other in scores
    )


def _has_what_is_shown(model: MeasuredModel, tasks: Tasks) -> bool:
    shown = [name for name in ("geometry", "retrieval") if tasks.task(name)]
    return all(model.tasks.task(name) for name in shown)


def _group_of(
    run: Run, recipe: Recipe, kind: type[Seeds] | type[Ablation], around: Path, name: str
) -> Seeds | Ablation | None:
    """The record of several runs of this recipe: what this run is one of, or what stands beside it."""
    for folder in (around, run.folder.with_name(f"{run.folder.name}-{name}")):
        runs = sorted(folder.glob("seed-*" if kind is Seeds else "full/seed-*"))
        if Run(folder).has(kind) and runs and _settings(Run(runs[0]).recipe) == _settings(recipe):
            record = Run(folder).read(kind)
            if _is_on_data_of(record.data, run):
                return record
    return None


def _is_on_data_of(data: SameData, run: Run) -> bool:
    manifest = run.manifest
    mine = (manifest.train.prepared_sha256, manifest.dev.pairs_sha256, manifest.test.pairs_sha256)
    return mine == (data.prepared_sha256, data.dev_pairs_sha256, data.test_pairs_sha256)


def _settings(recipe: Recipe) -> object:
    """What two runs of one recipe have in common."""
    return recipe.model_dump(exclude={"name", "seed", "description", "card"})


def _metadata(run: Run, recipe: Recipe, base_model: str | None) -> ModelCardData:
    """The metadata block: the fields of Sentence Transformers' own cards, and what proves a copy to be this model."""
    train, results = run.manifest.train, run.results
    datasets = [source.dataset for source in train.sources if source.dataset]
    data = ModelCardData(
        language=recipe.card.language or None,
        license=recipe.card.license,
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=[
            "sentence-transformers", "sentence-similarity", "feature-extraction", "dense", "generated_from_trainer",
            f"dataset_size:{train.rows}", "loss:SimCSELoss", "simcse",
        ],
        base_model=base_model,
        datasets=list(dict.fromkeys(datasets)) or None,
        metrics=list(
            dict.fromkeys(
                _typed(metric.rpartition("/")[2]) for split in SPLITS for metric in _stated(results.split(split))
            )
        ),
        model_name=recipe.name,
        eval_results=[
            _eval_result(run, split, metric, getattr(recipe.data, split))
            for split in SPLITS
            for metric in _stated(results.split(split))
        ],
    )  # fmt: skip
    data[PROOF] = {"stack": results.stack, "weights_sha256": results.weights_sha256, "files": results.files}
    return data


def _eval_result(run: Run, split: Split, metric: str, reference: object) -> EvalResult:
    """A score with what it takes to get it again: the pairs' place, if it is public, and their checksum."""
    *prefixes, name = metric.split("/")
    size = next((int(prefix) for prefix in prefixes if prefix.isdecimal()), None)
    of_set = next((prefix for prefix in prefixes if not prefix.isdecimal()), "")
    facts, scores = run.manifest.held_out(split).parts[of_set], run.results.split(split)
    reference = reference.sets[of_set] if isinstance(reference, HeldOutSets) else reference
    source = facts.sources[0]
    graded = isinstance(facts, GradedFacts)
    told: dict[str, Any] = {SET: of_set} if of_set else {}
    if str(reference).startswith(PACKAGE_SCHEME):
        told["source"] = reference
    elif isinstance(reference, RETRIEVAL) and is_public(reference):  # whose parts no field has room for
        told["source"] = reference.model_dump(mode="json", exclude_defaults=True)
    return EvalResult(
        task_type="semantic-similarity" if graded else "information-retrieval",
        task_name="Semantic Similarity" if graded else "Information Retrieval",
        dataset_type=source.dataset or "-".join(filter(None, ["sts" if graded else "retrieval", split, of_set])),
        dataset_name=source_name(facts.sources),
        dataset_config=source.config,
        dataset_split=source.split,
        dataset_revision=source.revision,
        dataset_args={
            "role": split,
            "pairs" if graded else "queries": facts.pairs if graded else facts.queries,
            "pairs_sha256": facts.pairs_sha256,
            **told,
        },
        metric_type=_typed(name),
        metric_name=_typed(name).replace("_", " ").title() + (f" at {size} dimensions" if size else ""),
        metric_args={SIZE: size} if size else None,
        metric_value=scores.metrics[metric] / 100,
    )


def _stated(scores: Scores) -> list[str]:
    """The metrics that the metadata state: the one that counts, and the usual ones of its kind."""
    usual = ("spearman", "pearson", "ndcg@10", "mrr@10", "map@100", "accuracy@1", "recall@10")
    order = {name: number for number, name in enumerate(usual)}
    shown = [name for name in scores.metrics if name.rpartition("/")[2] in order]
    shown.sort(key=lambda name: (name.count("/"), order[name.rpartition("/")[2]]))
    return list(dict.fromkeys([scores.metric, *shown]))


def _typed(metric: str) -> str:
    """A metric's name in the metadata, as Sentence Transformers' own cards have it."""
    return f"cosine_{metric}" if "@" in metric else f"{metric}_cosine"


def _years(tasks: Tasks) -> list[tuple[str, float]]:
    """The paper's seven sets, as far as they were measured, and their average."""
    names = ("sts12", "sts13", "sts14", "sts15", "sts16", "sick-r")
    found = [(name.upper(), score) for name in names if (score := tasks.score(name)) is not None]
    return [*found, ("average with STS-B", tasks.average.all)] if tasks.average else found


def _citations(run: Run, recipe: Recipe) -> list[str]:
    """BibTeX entries: of the method, of the library, and of the datasets that are known."""
    manifest, expect = run.manifest, recipe.data.expect
    names = ["stsb" for split in SPLITS for one in manifest.held_out(split).parts.values() if _is_stsb(split, one)]
    inputs = [manifest.train.sources, *(manifest.held_out(split).sources for split in SPLITS)]
    for source in (source for sources in inputs for source in sources):
        if source.dataset:
            names += [source.dataset, *(file.file for file in source.files or ())]
        elif expect and expect.source == source.file:  # a file that is known, and was checked
            names.append(source.file)
    names += ["matryoshka"] if recipe.loss.matryoshka else []
    entries = bibtex()
    cited = [key for name in sorted(names) for part, keys in _CITED.items() if part in name for key in keys]
    return [entries[key] for key in dict.fromkeys(["gao-etal-2021-simcse", "reimers-gurevych-2019-sentence", *cited])]


def bibtex() -> dict[str, str]:
    """The entries of ``citations.bib`` by their keys."""
    return {re.findall(r"{(.*?),", entry)[0]: entry for entry in _resource("citations.bib").strip().split("\n\n")}


def _is_stsb(split: Split, facts: HeldOutFacts) -> bool:
    return isinstance(facts, GradedFacts) and is_stsb(split, facts.pairs, facts.mean_gold)


def _is_public(recipe: Recipe, dev: HeldOutFacts) -> bool:
    """Whether anyone may read the dev pairs; what is in a file of the user's may be for nobody else."""
    packaged = str(recipe.data.dev).startswith(PACKAGE_SCHEME)
    return packaged or dev.sources[0].dataset is not None or _is_stsb("dev", dev)


def source_name(sources: list[Source]) -> str:
    """What to call a source: its dataset or its first file."""
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return " ".join(f"{sources[0].name}{more}".split())


def _command(run: Run, recipe: Recipe) -> str:
    """The command that runs a recipe again: the shipped recipe that is nearest, and what differs from it."""
    wanted = recipe.flat()
    if run.results.base_model is None and not wanted["model.base"].startswith(PACKAGE_SCHEME):
        wanted["model.base"] = "path/to/the/base"  # not even its name
    for split, facts in (("train", run.manifest.train), ("dev", run.manifest.dev), ("test", run.manifest.test)):
        wanted[f"data.{split}"] = _by_name(wanted[f"data.{split}"], {source.dataset for source in facts.sources})
    differing = {}
    for name in shipped_recipes():
        shipped = load_recipe(name).flat()
        differing[name] = {key: value for key, value in wanted.items() if value != shipped[key]}
    nearest = min(differing, key=lambda name: len(differing[name]))
    processes = run.environment.devices
    start = f"torchrun --nproc-per-node {processes} -m simcse_st" if processes > 1 else "simcse-st"
    options = [shlex.quote(f"{key}={_as_yaml(value)}") for key, value in differing[nearest].items()]
    return " \\\n  --set ".join([f"{start} train {nearest}", *options])


def _by_name(reference: Any, datasets: set[str | None]) -> Any:
    """A file or folder by its name alone, since the card would publish the path; one of these datasets as it is."""
    if isinstance(reference, list):
        return [_by_name(one, datasets) for one in reference]
    if isinstance(reference, dict):
        named = ("file", "retrieval", "corpus", "queries", "relevant")
        if sets := reference.get("sets"):
            return {"sets": {name: _by_name(one, datasets) for name, one in sets.items()}}
        return {key: _by_name(value, datasets) if key in named and value else value for key, value in reference.items()}
    return reference if reference in datasets or reference.startswith(PACKAGE_SCHEME) else Path(reference).name


def _as_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_as_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_as_yaml(key)}: {_as_yaml(one)}' for key, one in value.items() if one is not None)}}}"
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*(:\w[\w./-]*)?", value)
    words = ("true", "false", "null")
    return value if plain and value.lower() not in words else json.dumps(value, ensure_ascii=False)


def markdown_text(text: str) -> str:
    """Any text as Markdown that shows it and nothing else, on one line, also in a table; shortened if it is long."""
    line = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", " ", text).split())
    line = line if len(line) <= _EXCERPT else f"{line[: _EXCERPT - 3]}..."
    # An underscore inside a word is no emphasis, and file names are easier to read with theirs.
    special = r"[\\`*{}\[\]()#+!|~$^:-]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    escaped = re.sub(special, lambda match: f"&#{ord(match[0])};", html.escape(line, quote=False))
    escaped = re.sub(r"^(\d+)([.)])", lambda match: f"{match[1]}&#{ord(match[2])};", escaped)  # or it begins a list
    # Isolated, so that right-to-left text does not turn around what stands beside it.
    return f"\u2068{escaped}\u2069" if re.search("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]", line) else escaped
