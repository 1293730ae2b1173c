"""Names of models -> loaded models, with what identifies them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from simcse_st.errors import InputError
from simcse_st.modeling import POOLINGS, build_model, fetch_model, model_sha256
from simcse_st.recipe import resolve


@dataclass(frozen=True)
class Loaded:
    """A model and what identifies it."""

    name: str
    model: SentenceTransformer
    facts: dict[str, Any]
    known: dict[str, Any] = field(default_factory=dict)
    """Test scores of this very model that their run's record holds, by the checksum of the data."""


def load_model(reference: str, pooling: str | None = None, device: str | None = None) -> Loaded:
    """Loads any model for evaluation.

    Args:
        reference: A run folder, a folder, ``package:NAME/PATH`` or a hub id. ``:cls``, ``:mean`` or
            ``:first_last_avg`` behind it reads its encoder so, whatever stands on it.
        pooling: How to read it if it is a bare encoder.
        device: Where to put it.

    Raises:
        InputError: There is no such model, or it is a bare encoder and nothing says how to read it.
    """
    place, _, own_pooling = reference.rpartition(":")
    if own_pooling not in POOLINGS:
        place, own_pooling = reference, ""
    folder, revision, known = _find(place)
    if own_pooling:
        model = build_model(folder, pooling=own_pooling, device=device)
    elif (folder / "modules.json").is_file():
        model = _load_stack(folder, device)
    elif pooling:
        model = build_model(folder, pooling=pooling, device=device)
    else:
        raise InputError(
            f"{reference} is a bare encoder: say how its token vectors become one, by --pooling mean or as "
            f"{reference}:mean"
        )
    name = f"{Path(place).name}:{own_pooling}".rstrip(":") if Path(place).is_absolute() else reference
    facts = {"revision": revision, **describe_model(model)}
    return Loaded(name, model, facts, known if known.pop("model_sha256", None) == facts["model_sha256"] else {})


def describe_model(model: SentenceTransformer) -> dict[str, Any]:
    """What identifies a model, whatever it is called."""
    return {
        "model_sha256": model_sha256(model),
        "modules": [_describe_module(module) for module in model],
        "dimension": model.get_embedding_dimension(),
        "max_length": model.max_seq_length,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _find(place: str) -> tuple[Path, str | None, dict[str, Any]]:
    """The folder of a model, the commit if it is from the hub, and the scores that its run left."""
    path = Path(resolve(place)).expanduser()
    if not path.is_dir():
        folder = fetch_model(str(place))
        return folder, folder.name, {}
    if not (path / "recipe.yaml").is_file():
        return path, None, {}
    if not (path / "model" / "modules.json").is_file() or not (path / "results.json").is_file():
        raise InputError(f"{place} is a run folder without a model: that run did not end")
    try:
        results, manifest = (json.loads((path / name).read_text("utf-8")) for name in ("results.json", "manifest.json"))
        test, pairs_sha256 = results["test"], manifest["test"]["pairs_sha256"]
        score = {"spearman": test["spearman"], "pearson": test["pearson"], "n": test["pairs"]}
        known = {pairs_sha256: {**score, "pairs_sha256": pairs_sha256, "from": "results.json"}}
        return path / "model", None, {"model_sha256": results["model_sha256"], **known}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{place}: its results.json or manifest.json cannot be read: {error!r}") from None


def _load_stack(folder: Path, device: str | None) -> SentenceTransformer:
    try:
        return SentenceTransformer(str(folder), device=device, local_files_only=True)
    except Exception as error:  # of many classes, all about what stands in the folder
        raise InputError(f"{folder} cannot be loaded as a model: {' '.join(str(error).split())}") from error


def _describe_module(module: torch.nn.Module) -> str:
    mode = getattr(module, "pooling_mode", None)
    return f"{type(module).__name__}({mode})" if isinstance(mode, str) else type(module).__name__
