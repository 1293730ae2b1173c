"""A run's records -> the model card."""

from __future__ import annotations

import html
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from simcse_st.citations import citations
from simcse_st.evaluation.report import gap_to_paper
from simcse_st.evaluation.tables import is_stsb, plus_minus

_TEMPLATE = "template.md.jinja"
_EXCERPT = 160  # characters of a sentence that is quoted
_SPLITS = ("dev", "test")
CARD = "README.md"  # of a model's folder
PROOF = "simcse_st"  # the metadata's key for what proves a copy


def load_template() -> str:
    """The card's template, as installed or, in a checkout, where it stands at the top of the repository."""
    checkout = Path(__file__).parents[1] / "model_card" / _TEMPLATE
    if checkout.is_file():
        return checkout.read_text(encoding="utf-8")
    return (resources.files("simcse_st.model_card") / _TEMPLATE).read_text(encoding="utf-8")


def render_card(
    template: str,
    recipe: dict[str, Any],
    results: dict[str, Any],
    manifest: dict[str, Any],
    environment: dict[str, Any],
    evaluation: dict[str, Any] | None = None,
    *,
    command: str,
    base_model: str | None = None,
    repo_id: str | None = None,
    seeds: dict[str, Any] | None = None,
    ablation: dict[str, Any] | None = None,
) -> str:
    """Writes the card of a run. Every number in it is one of the records'; what has no record is left out.

    Args:
        template: See :func:`load_template`.
        recipe: The whole recipe.
        results: ``results.json``.
        manifest: ``manifest.json``.
        environment: ``environment.json``.
        evaluation: ``evaluation.json``; its first model is the run's, the others are what it is compared with.
        command: What runs the recipe again.
        base_model: The base's id on the hub, if it has one: a folder of this machine is nobody else's business.
        repo_id: Where the model is published.
        seeds: ``seeds.json`` of the same recipe.
        ablation: ``ablation.json`` of the same recipe.

    Returns:
        Markdown with the hub's metadata block on top.
    """
    engine = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    engine.filters.update(text=markdown_text, number="{:,}".format, spread=plus_minus)
    train, kind = manifest["train"], "unsupervised" if "sentences" in manifest["train"] else "supervised"
    data = {split: {"n": results[split]["pairs"], **manifest[split]} for split in _SPLITS}
    scores = {split: results[split]["spearman"] for split in _SPLITS}
    models = evaluation["models"] if evaluation else []
    model, baselines = (models[0], models[1:]) if models else (None, [])
    tasks: dict[str, Any] = models[0]["tasks"] if models else {}
    shown = {"geometry", "retrieval"} & tasks.keys()
    return engine.from_string(template).render(
        metadata=_metadata(recipe, results, manifest, base_model).to_yaml(),
        card=recipe["card"],
        recipe=recipe,
        results=results,
        train=train,
        kind=kind,
        source=source_name(train["sources"]),
        sources={split: manifest[split]["sources"] for split in ("train", *_SPLITS)},
        samples=train.get("samples") if recipe["card"]["samples"] else None,
        base_model=base_model,
        repo_id=repo_id,
        command=command,
        gap=gap_to_paper(kind, scores, data),
        baselines=baselines,
        compared=[other for other in baselines if shown <= other["tasks"].keys()],
        seeds=seeds,
        ablation=ablation,
        tasks=tasks,
        years=_years(tasks),
        quote=recipe["card"]["examples"] if recipe["card"]["examples"] is not None else _is_public(recipe, data["dev"]),
        model=model,
        stack=" -> ".join(results["modules"]),
        environment=environment,
        citations=citations(_datasets(recipe, manifest, data)),
    )


def _metadata(
    recipe: dict[str, Any], results: dict[str, Any], manifest: dict[str, Any], base_model: str | None
) -> ModelCardData:
    """The metadata block: the fields of Sentence Transformers' own cards, and what proves a copy to be this model."""
    card, train = recipe["card"], manifest["train"]
    datasets = [source["dataset"] for source in train["sources"] if "dataset" in source]
    size = train["sentences"] if "sentences" in train else train["pairs"]
    data = ModelCardData(
        language=card["language"] or None,
        license=card["license"],
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=[
            "sentence-transformers", "sentence-similarity", "feature-extraction", "dense", "generated_from_trainer",
            f"dataset_size:{size}", "loss:SimCSELoss", "simcse",
        ],
        base_model=base_model,
        datasets=list(dict.fromkeys(datasets)) or None,
        metrics=["spearman_cosine", "pearson_cosine"],
        model_name=recipe["name"],
        eval_results=[
            _eval_result(split, metric, results[split], manifest[split], recipe["data"][split])
            for split in _SPLITS
            for metric in ("spearman", "pearson")
        ],
    )  # fmt: skip
    data[PROOF] = {
        "stack": " -> ".join(results["modules"]),
        "weights_sha256": results["weights_sha256"],
        "files": results["files"],
    }
    return data


def read_proof(data: Any) -> dict[str, Any] | None:
    """What a card's metadata say of the model beside its scores, if they are of this package.

    Args:
        data: The metadata.

    Returns:
        ``stack``, ``weights_sha256`` and ``files``, the SHA-256 of each by its path.
    """
    proof = data.get(PROOF)
    complete = isinstance(proof, dict) and {"stack", "weights_sha256", "files"} <= proof.keys()
    return proof if complete and isinstance(proof["files"], dict) else None


def _eval_result(split: str, metric: str, scores: dict[str, Any], data: dict[str, Any], reference: Any) -> EvalResult:
    """A score with what it takes to get it again: the pairs' place, if it is public, and their checksum."""
    source = data["sources"][0]
    packaged = {"source": reference} if str(reference).startswith("package:") else {}
    return EvalResult(
        task_type="semantic-similarity",
        task_name="Semantic Similarity",
        dataset_type=source.get("dataset", f"sts-{split}"),
        dataset_name=source_name(data["sources"]),
        dataset_config=source.get("config"),
        dataset_split=source.get("split"),
        dataset_revision=source.get("revision"),
        dataset_args={"role": split, "pairs": scores["pairs"], "pairs_sha256": data["pairs_sha256"], **packaged},
        metric_type=f"{metric}_cosine",
        metric_name=f"{metric.title()} of cosine x100",
        metric_value=scores[metric],
    )


def _years(tasks: dict[str, Any]) -> list[tuple[str, float]]:
    """The paper's seven sets, as far as they were measured, and their average."""
    sets = [(task, tasks[task]) for task in ("sts12", "sts13", "sts14", "sts15", "sts16", "sick-r") if task in tasks]
    found = [(task.upper(), scores["all"] if "all" in scores else scores["spearman"]) for task, scores in sets]
    return [*found, ("average with STS-B", tasks["average"]["all"])] if "average" in tasks else found


def _datasets(recipe: dict[str, Any], manifest: dict[str, Any], data: dict[str, Any]) -> list[str]:
    """The names of the data sets in it, by which to cite them."""
    names = ["stsb" for split in _SPLITS if is_stsb(split, data[split])]
    expect = recipe["data"]["expect"]
    for source in (source for part in ("train", *_SPLITS) for source in manifest[part]["sources"]):
        if "dataset" in source:
            names += [source["dataset"], *(file["file"] for file in source.get("files", ()))]
        elif expect and expect["source"] == source["file"]:  # a file that is known, and was checked
            names.append(source["file"])
    return sorted(names)


def _is_public(recipe: dict[str, Any], dev: dict[str, Any]) -> bool:
    """Whether anyone may read the dev pairs; what is in a file of the user's may be for nobody else."""
    packaged = str(recipe["data"]["dev"]).startswith("package:")
    return packaged or "dataset" in dev["sources"][0] or is_stsb("dev", dev)


def source_name(sources: list[dict[str, Any]]) -> str:
    """What to call a source: its data set or its first file."""
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return " ".join(f"{sources[0].get('dataset') or sources[0]['file']}{more}".split())


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
