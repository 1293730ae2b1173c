"""An encoder's files: found, fetched, checked to be all there, and made able to encode batches of any texts."""

from __future__ import annotations

import contextlib
import json
import logging
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub  # which imports its parts as they are used

from simcse_st.data.sources import resolve
from simcse_st.errors import InputError, is_out_of_memory, one_line
from simcse_st.recipe import ModelSection
from simcse_st.run import Run

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

logger = logging.getLogger(__name__)


def encoder_path(base: str | Path) -> str:
    """The folder (or hub id) of the encoder alone.

    Args:
        base: As :func:`build_model` takes it.
    """
    base = resolve(str(base))
    folder = Path(base).expanduser()
    if len(base) > 500 or folder.is_file():
        raise InputError(f"{base[:60]!r} is no model folder")
    if not folder.is_dir():
        if folder.is_absolute() or base.startswith(".") or base.count("/") > 1:
            raise InputError(f"there is no folder {base!r}")
        return base
    modules = folder / "modules.json"
    if modules.is_file():
        try:
            first = json.loads(modules.read_text(encoding="utf-8"))[0]
            folder, kind = folder / first["path"], first["type"].rpartition(".")[2]
        except (ValueError, LookupError, TypeError, AttributeError, OSError):
            raise InputError(f"{str(modules)!r} is no list of Sentence Transformers modules") from None
        if kind != "Transformer":
            raise InputError(f"{base!r} begins with {kind}, but only a Transformer can be trained")
    if not (folder / "config.json").is_file():
        hint = f"; it is a run's: its model is {folder / 'model'}" if Run(folder).is_begun else ""
        raise InputError(f"{str(folder)!r} is no model folder: it has no config.json{hint}")
    return str(folder)


def fetch_model(name: str, revision: str | None = None) -> Path:
    """A hub model's files on this disk, in a folder named by the commit.

    Models are loaded from such a folder and not by their names: where ``modules.json`` cannot be fetched, Sentence
    Transformers would read the encoder through its mean without an error.

    Args:
        name: The hub id.
        revision: A commit, tag or branch.
    """
    path = encoder_path(name)
    other = ["*.onnx", "onnx/*", "openvino/*", "*.h5", "*.ot", "*.msgpack", "*.tflite", "coreml/*", "*.gguf"]
    with errors_of_loading(name, path):
        folder = Path(huggingface_hub.snapshot_download(path, revision=revision, ignore_patterns=[*other, "*.bin"]))
        if not list(folder.rglob("*.safetensors")):
            folder = Path(huggingface_hub.snapshot_download(path, revision=revision, ignore_patterns=other))
        return folder


@contextlib.contextmanager
def errors_of_loading(base: str | Path, path: str) -> Iterator[None]:
    """Says in one line what a library raises when a model cannot be loaded.

    Args:
        base: What the user named.
        path: Its folder or hub id.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # Whatever the libraries raise here, they raise it about what they were asked to load: OSError and ValueError
        # with a paragraph of advice, and many others where a file is broken.
        place = "as a folder" if Path(path).is_dir() else "from the Hugging Face Hub, and no such folder is here"
        offline = " (offline: HF_HUB_OFFLINE is set)" if huggingface_hub.is_offline_mode() else ""
        raise InputError(f"{str(base)!r} cannot be loaded {place}{offline}: {one_line(error)}") from error


def tokenizer_at_hand(section: ModelSection) -> Any | None:
    """The tokenizer of a base, where it is on this disk; None, said, where it is not."""
    from transformers import AutoTokenizer

    try:
        path = encoder_path(section.base)
        return AutoTokenizer.from_pretrained(path, revision=section.revision, local_files_only=True)
    except Exception as error:  # of many classes
        logger.warning("lengths  not counted: the tokenizer of %s is not at hand (%s)", section.base, one_line(error))
        return None


def check_encoder(model: SentenceTransformer, folder: Path) -> None:
    """Refuses what loads without an error, and yet is not the model that was meant: what is missing is made up."""
    transformer: Any = model[0]
    if not hasattr(transformer, "auto_model"):
        return
    path, encoder, tokenizer = encoder_path(folder), transformer.auto_model, transformer.tokenizer
    # On the meta device no weights are read: only their names are compared.
    _, loading = type(encoder).from_pretrained(path, output_loading_info=True, device_map="meta")
    missing = [name for name in loading["missing_keys"] if "pooler" not in name]  # which nothing here uses
    if missing:
        raise InputError(
            f"the checkpoint of {path!r} lacks {len(missing)} of the encoder's weights, which would start "
            f"from random values, e.g. {missing[0]}: it belongs to another architecture than its config.json says"
        )
    words = encoder.get_input_embeddings().num_embeddings
    if tokenizer is None or len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
        raise InputError(f"{path!r} has no tokenizer (no tokenizer.json, vocab.txt or the like)")
    if len(tokenizer) > words:
        raise InputError(f"the tokenizer of {path!r} has {len(tokenizer)} tokens, its encoder only {words}")


def make_ready(model: SentenceTransformer) -> list[str]:
    """Mends what keeps a model from encoding batches of any texts; returns what that was, in words.

    Args:
        model: A model on the CPU, where a position too many is an error like any other.
    """
    encoder: Any = model[0]
    if not hasattr(encoder, "auto_model"):
        return []
    mended = []
    if encoder.tokenizer.pad_token is None:
        if encoder.tokenizer.eos_token is None:
            raise InputError("its tokenizer has no padding token, nor one that ends a text to pad with")
        encoder.tokenizer.pad_token = encoder.tokenizer.eos_token
        mended.append(f"padding: {encoder.tokenizer.eos_token}, since its tokenizer has no padding token")
    limit = encoder.max_seq_length
    if not takes(model, limit):
        fits = bisect_left(range(1, 1 + _positions(encoder)), True, key=lambda length: not takes(model, length))
        encoder.max_seq_length = fits
        mended.append(f"max_length: {fits}, since it has no positions for the {limit} tokens that it is saved with")
    return mended


def takes(model: SentenceTransformer, length: int | None) -> bool:
    """Whether a model gives vectors to a text of so many tokens, tried as far as its positions are in a table."""
    import torch

    encoder: Any = model[0]
    if not hasattr(encoder, "auto_model"):
        return True
    length = min(length or _positions(encoder) + 1, _positions(encoder) + 1)
    features = encoder.preprocess(["a " * length], max_length=length)
    try:
        with torch.inference_mode():
            encoder.eval()(features)
    except (IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        return False
    return True


def _positions(encoder: Any) -> int:
    """The longest table of an encoder but that of its words: of its positions, where these are in a table at all."""
    from torch import nn

    tables = [module for module in encoder.auto_model.modules() if isinstance(module, nn.Embedding)]
    words = encoder.auto_model.get_input_embeddings()
    return max((table.num_embeddings for table in tables if table is not words), default=0)
