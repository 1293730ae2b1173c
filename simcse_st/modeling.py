"""The stack that is trained and published: Transformer -> Pooling -> Normalize."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
    WeightedLayerPooling,
)
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PretrainedConfig

from simcse_st.errors import InputError
from simcse_st.places import POOLINGS, encoder_path, errors_of_loading


def build_model(
    base: str | Path,
    *,
    pooling: str = "cls",
    head: bool = False,
    dropout: float | None = None,
    max_length: int = 512,
    attention: str | None = None,
    revision: str | None = None,
    device: str | None = None,
) -> SentenceTransformer:
    """Puts pooling and normalisation on an encoder.

    Only stock Sentence Transformers modules are used, so the saved model loads anywhere without ``trust_remote_code``.

    Args:
        base: A hub id, a local folder of a bare encoder, or a local Sentence Transformers folder, of which the
            encoder alone is taken.
        pooling: How token vectors become a sentence vector: ``"cls"`` takes the first token's, ``"mean"`` the mean of
            all, ``"first_last_avg"`` the mean over tokens of the mean of the first and the last layer's outputs (a
            baseline of the paper, table 5).
        head: Puts a linear layer with tanh between pooling and normalisation, which is part of the model (paper,
            table 6, for supervised training).
        dropout: Sets all dropout probabilities of the encoder: hidden states and attention.
        max_length: Tokens a sentence may have; at most what the encoder's positions allow.
        attention: How attention is computed: ``"eager"``, ``"sdpa"`` or ``"flash_attention_2"``, which computes no
            padding; by default transformers chooses.
        revision: Commit, tag or branch of a hub base.
        device: Where to put it; by default a GPU if there is one.

    Returns:
        The model, in float32.

    Raises:
        InputError: There is no such base, it is out of reach, it holds no encoder, or has no dropout to set.
    """
    if pooling not in POOLINGS:
        raise InputError(f"model.pooling is {pooling!r}, but must be {', '.join(POOLINGS)}")
    transformer = _load_encoder(base, revision, dropout, attention, all_layers=pooling == "first_last_avg")
    limit = transformer.max_seq_length
    transformer.max_seq_length = min(max_length, limit) if limit else max_length
    dimension = transformer.get_embedding_dimension()
    modules: list[nn.Module] = [transformer]
    if pooling == "first_last_avg":
        layers = transformer.config.num_hidden_layers
        first_and_last = nn.Parameter(torch.zeros(layers + 1), requires_grad=False)
        first_and_last[[1, layers]] = 1.0  # 0 is the output of the embeddings
        modules.append(WeightedLayerPooling(dimension, layers, layer_start=0, layer_weights=first_and_last))
    modules.append(Pooling(dimension, pooling_mode="cls" if pooling == "cls" else "mean"))
    if head:
        # Initialised like every linear layer of BERT, as in the paper's code.
        weight = torch.empty(dimension, dimension).normal_(std=0.02)
        modules.append(Dense(dimension, dimension, init_weight=weight, init_bias=torch.zeros(dimension)))
    return SentenceTransformer(modules=[*modules, Normalize()], device=device)


def dropout_probabilities(model: SentenceTransformer) -> dict[str, float]:
    """The dropout probabilities of a model's encoder, by their names in its configuration."""
    return _dropouts(model[0].config) if isinstance(model[0], Transformer) else {}


def _dropouts(config: PretrainedConfig) -> dict[str, float]:
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
    length and the prompts; not where they are, nor which release of the libraries wrote them.
    """
    parts = [model.max_seq_length, model.prompts, model.default_prompt_name]
    for module in model:
        parts += [type(module).__name__, getattr(module, "get_config_dict", dict)()]
        if isinstance(module, Transformer):
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
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _load_encoder(
    base: str | Path, revision: str | None, dropout: float | None, attention: str | None, *, all_layers: bool
) -> Transformer:
    path = encoder_path(base)
    chosen = {"attn_implementation": attention} if attention else {}
    config: dict[str, Any] = {"revision": revision}
    if all_layers:
        config["output_hidden_states"] = True
    with errors_of_loading(base, path):
        if dropout is not None:
            names = _dropouts(AutoConfig.from_pretrained(path, revision=revision))
            if not names:
                raise InputError(f"model.dropout: the encoder {str(base)!r} has no dropout that could be set")
            config.update(dict.fromkeys(names, dropout))
        transformer = Transformer(
            path,
            model_kwargs={"dtype": torch.float32, "revision": revision, **chosen},
            processor_kwargs={"revision": revision},
            config_kwargs=config,
        )
        _check_encoder(transformer, path, revision)
        return transformer


def check_encoder(model: SentenceTransformer, folder: Path) -> None:
    """Makes sure that a model's encoder is all in its folder: what is missing would be made up, without an error.

    Raises:
        InputError: Weights or the tokenizer are missing.
    """
    if isinstance(model[0], Transformer):
        _check_encoder(model[0], encoder_path(folder), None)


def load_tokenizer(base: str | Path, revision: str | None = None) -> Any:
    """The tokenizer of a base, without its weights.

    Args:
        base: As for :func:`build_model`.
        revision: Commit, tag or branch of a hub base.

    Raises:
        InputError: There is no such base, or it is out of reach.
    """
    path = encoder_path(base)
    with errors_of_loading(base, path):
        return AutoTokenizer.from_pretrained(path, revision=revision)


def _check_encoder(transformer: Transformer, path: str, revision: str | None) -> None:
    """What loads without an error, and yet is not the model that was meant.

    Raises:
        InputError: Weights that the checkpoint does not have, or a tokenizer that does not belong to it.
    """
    _, loading = AutoModel.from_pretrained(path, revision=revision, output_loading_info=True)
    missing = [name for name in loading["missing_keys"] if "pooler" not in name]  # which nothing here uses
    if missing:
        raise InputError(
            f"model.base: the checkpoint of {path!r} lacks {len(missing)} of the encoder's weights, which would start "
            f"from random values, e.g. {missing[0]}: it belongs to another architecture than its config.json says"
        )
    tokenizer: Any = transformer.tokenizer
    encoder: Any = transformer.auto_model
    words = encoder.get_input_embeddings().num_embeddings
    if tokenizer is None or len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
        raise InputError(f"model.base: {path!r} has no tokenizer (no tokenizer.json, vocab.txt or the like)")
    if len(tokenizer) > words:
        raise InputError(f"model.base: the tokenizer of {path!r} has {len(tokenizer)} tokens, its encoder only {words}")
