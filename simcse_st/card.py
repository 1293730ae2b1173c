"""A run's records -> the model card."""

from __future__ import annotations

import html
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from simcse_st.report import gap_to_paper
from simcse_st.tables import is_stsb

_TEMPLATE = "template.md.jinja"
_EXCERPT = 160  # characters of a sentence that is quoted


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
    base_model: str | None = None,
) -> str:
    """Writes the card of a run. Every number in it is one of the records'; what has no record is left out.

    Args:
        template: See :func:`load_template`.
        recipe: The whole recipe.
        results: ``results.json``.
        manifest: ``manifest.json``.
        environment: ``environment.json``.
        evaluation: ``evaluation.json``; its first model is the run's.
        base_model: The base's id on the hub, if it has one: a folder of this machine is nobody else's business.

    Returns:
        Markdown with the hub's metadata block on top.
    """
    engine = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    engine.filters.update(text=markdown_text, number="{:,}".format)
    train, kind = manifest["train"], "unsupervised" if "sentences" in manifest["train"] else "supervised"
    data = {split: {"n": results[split]["pairs"], **manifest[split]} for split in ("dev", "test")}
    scores = {split: results[split]["spearman"] for split in ("dev", "test")}
    return engine.from_string(template).render(
        metadata=_metadata(recipe, results, manifest, base_model).to_yaml(),
        card=recipe["card"],
        recipe=recipe,
        results=results,
        train=train,
        kind=kind,
        source=source_name(train["sources"]),
        sources={split: manifest[split]["sources"] for split in ("train", "dev", "test")},
        base_model=base_model,
        gap=gap_to_paper(kind, scores, data),
        tasks=evaluation["models"][0]["tasks"] if evaluation else {},
        quote=recipe["card"]["examples"] if recipe["card"]["examples"] is not None else _is_public(recipe, data["dev"]),
        model=evaluation["models"][0] if evaluation else None,
        environment=environment,
    )


def _metadata(
    recipe: dict[str, Any], results: dict[str, Any], manifest: dict[str, Any], base_model: str | None
) -> ModelCardData:
    """The metadata block, with the fields that Sentence Transformers' own cards have."""
    card = recipe["card"]
    datasets = [source["dataset"] for source in manifest["train"]["sources"] if "dataset" in source]
    return ModelCardData(
        language=card["language"] or None,
        license=card["license"],
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "sentence-similarity", "feature-extraction", "dense", "simcse"],
        base_model=base_model,
        datasets=datasets or None,
        metrics=["spearman_cosine", "pearson_cosine"],
        model_name=recipe["name"],
        eval_results=[
            EvalResult(
                task_type="semantic-similarity",
                task_name="Semantic Similarity",
                dataset_type=split,
                dataset_name=source_name(manifest[split]["sources"]),
                metric_type=f"{metric}_cosine",
                metric_name=f"{metric.title()} of cosine x100",
                metric_value=results[split][metric],
            )
            for split in ("dev", "test")
            for metric in ("spearman", "pearson")
        ],
    )


def _is_public(recipe: dict[str, Any], dev: dict[str, Any]) -> bool:
    """Whether anyone may read the dev pairs; what is in a file of the user's may be for nobody else."""
    packaged = str(recipe["data"]["dev"]).startswith("package:")
    return packaged or "dataset" in dev["sources"][0] or is_stsb("dev", dev)


def source_name(sources: list[dict[str, Any]]) -> str:
    """What to call a source: its data set or its first file."""
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{sources[0].get('dataset') or sources[0]['file']}{more}"


def markdown_text(text: str) -> str:
    """Any text as Markdown that shows it and nothing else, on one line, also in a table; shortened if it is long."""
    line = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", text).split())
    line = line if len(line) <= _EXCERPT else f"{line[: _EXCERPT - 3]}..."
    escaped = re.sub(r"([\\`*_{}\[\]()#+!|~$^:-])", lambda match: f"&#{ord(match[1])};", html.escape(line))
    # Isolated, so that right-to-left text does not turn around what stands beside it.
    return f"\u2068{escaped}\u2069" if re.search("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]", line) else escaped
