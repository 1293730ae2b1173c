"""A run's records -> the model card."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

_TEMPLATE = "template.md.jinja"


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
    *,
    base_model: str | None = None,
) -> str:
    """Writes the card of a run. Every number in it is one of the records'.

    Args:
        template: See :func:`load_template`.
        recipe: The whole recipe.
        results: ``results.json``.
        manifest: ``manifest.json``.
        environment: ``environment.json``.
        base_model: The base's id on the hub, if it has one: a folder of this machine is nobody else's business.

    Returns:
        Markdown with the hub's metadata block on top.
    """
    engine = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    metadata = ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "sentence-similarity", "feature-extraction", "simcse"],
        base_model=base_model,
        model_name=recipe["name"],
        eval_results=[
            EvalResult(
                task_type="semantic-similarity",
                task_name="Semantic Similarity",
                dataset_type=split,
                dataset_name=_source_name(manifest[split]["sources"]),
                metric_type="spearman_cosine",
                metric_name="Spearman of cosine x100",
                metric_value=results[split]["spearman"],
            )
            for split in ("dev", "test")
        ],
    )
    return engine.from_string(template).render(
        metadata=metadata.to_yaml(),
        recipe=recipe,
        results=results,
        train=manifest["train"],
        source=_source_name(manifest["train"]["sources"]),
        environment=environment,
    )


def _source_name(sources: list[dict[str, Any]]) -> str:
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{sources[0].get('dataset') or sources[0]['file']}{more}"
