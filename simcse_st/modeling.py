"""The stack that is trained and published: Transformer -> Pooling -> Normalize."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from huggingface_hub import is_offline_mode
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from simcse_st.errors import InputError


def build_model(
    base: str | Path,
    *,
    pooling: str = "cls",
    max_length: int = 512,
    revision: str | None = None,
    device: str | None = None,
) -> SentenceTransformer:
    """Puts pooling and normalisation on an encoder.

    Only stock Sentence Transformers modules are used, so the saved model loads anywhere without ``trust_remote_code``.

    Args:
        base: A hub id, a local folder of a bare encoder, or a local Sentence Transformers folder, of which the
            encoder alone is taken.
        pooling: How token vectors become a sentence vector: ``"cls"`` takes the first token's.
        max_length: Tokens a sentence may have; at most what the encoder's positions allow.
        revision: Commit, tag or branch of a hub base.
        device: Where to put it; by default a GPU if there is one.

    Returns:
        The model, in float32.

    Raises:
        InputError: There is no such base, it is out of reach, or it holds no encoder.
    """
    path = _encoder_path(base)
    try:
        transformer = Transformer(
            path,
            model_kwargs={"dtype": torch.float32, "revision": revision},
            processor_kwargs={"revision": revision},
            config_kwargs={"revision": revision},
        )
    except (OSError, ValueError) as error:
        # transformers raises these, with a paragraph of advice, for all that can be wrong with a name or a folder.
        place = "as a folder" if Path(path).is_dir() else "from the Hugging Face Hub, and no such folder is here"
        offline = " (offline: HF_HUB_OFFLINE is set)" if is_offline_mode() else ""
        reason = " ".join(str(error).split())
        raise InputError(f"model.base: {str(base)!r} cannot be loaded {place}{offline}: {reason}") from error
    limit = transformer.max_seq_length
    transformer.max_seq_length = min(max_length, limit) if limit else max_length
    dimension = transformer.get_embedding_dimension()
    return SentenceTransformer(
        modules=[transformer, Pooling(dimension, pooling_mode=pooling), Normalize()], device=device
    )


def weights_sha256(model: torch.nn.Module) -> str:
    """SHA-256 over a model's weights (names, types, shapes and values), whatever file or device holds them."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _encoder_path(base: str | Path) -> str:
    """The folder (or hub id) of the encoder itself."""
    folder = Path(base)
    if not folder.is_dir():
        if folder.is_absolute() or str(base).startswith((".", "~")) or str(base).count("/") > 1:
            raise InputError(f"model.base: there is no folder {str(base)!r}")
        return str(base)
    modules = folder / "modules.json"
    if modules.is_file():
        folder = folder / json.loads(modules.read_text(encoding="utf-8"))[0]["path"]
    if not (folder / "config.json").is_file():
        raise InputError(f"model.base: {str(folder)!r} is no model folder: it has no config.json")
    return str(folder)
