"""Models loaded for evaluation, with what identifies them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from simcse_st.errors import InputError
from simcse_st.modeling import build_model, check_encoder, model_sha256
from simcse_st.places import Located, check_pooling, locate_model


@dataclass(frozen=True)
class Loaded:
    """A model and what identifies it."""

    name: str
    model: SentenceTransformer
    facts: dict[str, Any]
    known: dict[str, Any] = field(default_factory=dict)
    """Test scores of this very model that their run's record holds, by the checksum of the data."""


def load_model(reference: str | Path | Located, pooling: str | None = None, device: str | None = None) -> Loaded:
    """Loads any model for evaluation.

    Args:
        reference: As :func:`~simcse_st.places.locate_model` takes it, or what that gave.
        pooling: How to read it if it is a bare encoder.
        device: Where to put it.

    Raises:
        InputError: There is no such model, it cannot be loaded, or nothing says how to read a bare encoder.
    """
    found = reference if isinstance(reference, Located) else locate_model(reference)
    check_pooling(found, pooling)
    try:
        if found.own_pooling or found.is_bare:
            model = build_model(found.folder, pooling=found.own_pooling or str(pooling), device=device)
        else:
            model = SentenceTransformer(str(found.folder), device=device, local_files_only=True)
            check_encoder(model, found.folder)
    except InputError as error:
        raise InputError(f"{found.name}: {str(error).removeprefix('model.base: ')}") from error.__cause__
    except Exception as error:  # of many classes, all about what stands in the folder
        raise InputError(f"{found.name} cannot be loaded as a model: {' '.join(str(error).split())}") from error
    facts = {"revision": found.revision, **describe_model(model)}
    known = _scores_of_run(found.run, facts["model_sha256"]) if found.run else {}
    return Loaded(found.name, model, facts, known)


def describe_model(model: SentenceTransformer) -> dict[str, Any]:
    """What identifies a model, whatever it is called."""
    length = model.max_seq_length
    return {
        "model_sha256": model_sha256(model),
        "modules": [_describe_module(module) for module in model],
        "dimension": model.get_embedding_dimension(),
        "max_length": length if length is not None and math.isfinite(length) else None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "precision": str(next(model.parameters()).dtype).removeprefix("torch."),
    }


def _scores_of_run(run: Path, model_sha256: str) -> dict[str, Any]:
    """The test score that a run left, if it is of this very model."""
    try:
        results, manifest = (json.loads((run / name).read_text("utf-8")) for name in ("results.json", "manifest.json"))
        test, data = results["test"], manifest["test"]
        score = {**{key: float(test[key]) for key in ("spearman", "pearson")}, "n": int(test["pairs"])}
        more = {"pairs_sha256": data["pairs_sha256"], "mean_gold": data["mean_gold"], "from": "results.json"}
        return {data["pairs_sha256"]: {**score, **more}} if results["model_sha256"] == model_sha256 else {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{run}: its results.json or manifest.json cannot be read: {error!r}") from None


def _describe_module(module: torch.nn.Module) -> str:
    mode = getattr(module, "pooling_mode", None)
    return f"{type(module).__name__}({mode})" if isinstance(mode, str) else type(module).__name__
