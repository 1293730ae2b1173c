"""What identifies a model, whatever it is called: its modules, its sizes, and checksums."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simcse_st.records import ModelFacts

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer
    from torch import nn
    from transformers import PretrainedConfig


def describe_model(model: SentenceTransformer) -> ModelFacts:
    """What identifies a model, whatever it is called."""
    return ModelFacts(
        model_sha256=model_sha256(model),
        modules=describe_modules(model),
        dimension=model.get_embedding_dimension() or 0,
        max_length=length_of(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        precision=str(next(model.parameters()).dtype).removeprefix("torch."),
    )


def length_of(model: SentenceTransformer) -> int | None:
    """The tokens that a model takes at most; None where it takes any number, for which tokenizers say 1e30."""
    length = model.max_seq_length
    return length if length is not None and length < _ANY_LENGTH else None


_ANY_LENGTH = 10**9


def describe_modules(model: SentenceTransformer) -> list[str]:
    """A model's modules, each by its class and, of a pooling, its mode."""
    return [_describe_module(module) for module in model]


def _describe_module(module: nn.Module) -> str:
    mode = getattr(module, "pooling_mode", None)
    return f"{type(module).__name__}({mode})" if isinstance(mode, str) else type(module).__name__


def dropout_probabilities(model: SentenceTransformer) -> dict[str, float]:
    """The dropout probabilities of a model's encoder, by their names in its configuration."""
    encoder: Any = model[0]
    return dropouts_of(encoder.config) if hasattr(encoder, "auto_model") else {}


def dropouts_of(config: PretrainedConfig) -> dict[str, float]:
    """The dropout probabilities of a configuration, by their names in it."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if re.search(r"dropout|pdrop", name) and not re.search(r"classif|summary|pooler", name)
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over a model's weights (names, types, shapes and values), whatever file or device holds them."""
    return tensors_sha256(model.state_dict())


def model_sha256(model: SentenceTransformer) -> str:
    """SHA-256 over all that makes a model's embeddings.

    These are the weights, the kinds and settings of the modules, the encoder's configuration, the tokenizer, the
    length, the prompts and the size to which embeddings are cut; not where they are, nor which release of the
    libraries wrote them.
    """
    parts: list[Any] = [model.max_seq_length, model.prompts, model.default_prompt_name]
    if model.truncate_dim is not None:
        parts.append(model.truncate_dim)
    module: Any
    for module in model:
        parts += [type(module).__name__, getattr(module, "get_config_dict", dict)()]
        if hasattr(module, "auto_model"):
            config = module.config.to_dict()
            parts += [
                {key: config[key] for key in config.keys() - _NOT_OF_THE_MODEL},
                _tokenizer_state(module.tokenizer),
            ]
    text = json.dumps([weights_sha256(model), *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


_NOT_OF_THE_MODEL = {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}


def _tokenizer_state(tokenizer: Any) -> Any:
    """How a tokenizer splits texts, without what a call sets: its padding and truncation."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return sorted(tokenizer.get_vocab().items()) if tokenizer is not None else None
    state = json.loads(backend.to_str())
    return {key: value for key, value in state.items() if key not in ("padding", "truncation")}


def tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over tensors: names, types, shapes and values."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
