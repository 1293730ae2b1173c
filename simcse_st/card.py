"""A run's records -> the model card."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData


def render_card(
    recipe: dict[str, Any], results: dict[str, Any], manifest: dict[str, Any], environment: dict[str, Any]
) -> str:
    """Writes the card of a run. Every number in it is one of the records'.

    Args:
        recipe: The whole recipe.
        results: ``results.json``.
        manifest: ``manifest.json``.
        environment: ``environment.json``.

    Returns:
        Markdown with the hub's metadata block on top.
    """
    template = (resources.files("simcse_st.model_card") / "template.md.jinja").read_text(encoding="utf-8")
    environment_of_template = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    base = recipe["model"]["base"]
    metadata = ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "sentence-similarity", "feature-extraction", "simcse"],
        # A package or a folder of this machine is no name that the hub could look up.
        base_model=None if base.startswith(("package:", ".", "/", "~")) else base,
        model_name=recipe["name"],
        eval_results=[
            EvalResult(
                task_type="semantic-similarity",
                task_name="Semantic Similarity",
                dataset_type=split,
                dataset_name=_source_name(manifest[split]["source"]),
                metric_type="spearman_cosine",
                metric_name="Spearman of cosine x100",
                metric_value=results[split]["spearman"],
            )
            for split in ("dev", "test")
        ],
    )
    return environment_of_template.from_string(template).render(
        metadata=metadata.to_yaml(),
        recipe=recipe,
        results=results,
        train=manifest["train"],
        source=_source_name(manifest["train"]["source"]),
        environment=environment,
    )


def _source_name(source: dict[str, Any]) -> str:
    return str(source.get("dataset") or source["file"])
