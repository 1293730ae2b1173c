"""A model by its name: found, fetched, built, loaded, described. Nothing here needs torch until a model is loaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import huggingface_hub  # which imports its parts as they are used

from simcse_st.console import quiet_bars
from simcse_st.data.sources import resolve
from simcse_st.errors import InputError, one_line
from simcse_st.recipe import ModelSection, checked
from simcse_st.records import ModelFacts
from simcse_st.run import Run, run_of

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer
    from torch import nn
    from transformers import PretrainedConfig

POOLINGS: tuple[str, ...] = get_args(ModelSection.model_fields["pooling"].annotation)


@dataclass(frozen=True)
class Located:
    """Where a model is, before it is loaded.

    Attributes:
        name: What to call it.
        folder: Its files.
        own_pooling: How to read its encoder, whatever stands on it; "" for as it is saved.
        revision: The commit, of a model from the hub.
        run: The run that it is of.
    """

    name: str
    folder: Path
    own_pooling: str = ""
    revision: str | None = None
    run: Run | None = None


def locate_model(reference: str | Path) -> Located:
    """Finds a model, and fetches it if it is on the hub.

    Args:
        reference: A run folder, a folder, ``package:NAME/PATH`` or a hub id, with ``@REVISION`` if need be. ``:cls``,
            ``:mean`` or ``:first_last_avg`` behind it reads its encoder so, whatever stands on it.
    """
    if here := locate_here(reference):
        return here
    place, own_pooling = _parts(reference)
    name, _, revision = place.partition("@")
    folder = _fetch_model(name, revision or None)
    if not own_pooling and not (folder / "modules.json").is_file():
        raise InputError(f"{name} is a bare encoder: say how its token vectors become one, e.g. as {name}:mean")
    return Located(str(reference), folder, own_pooling, folder.name)


def locate_here(reference: str | Path) -> Located | None:
    """Finds a model on this disk; None if only the hub can have it.

    Args:
        reference: As :func:`locate_model` takes it.
    """
    place, own_pooling = _parts(reference)
    path = Path(resolve(place)).expanduser()
    if not place or path.is_file():
        raise InputError(f"{place!r} is no model")
    if not path.is_dir():
        encoder_path(place.partition("@")[0])
        return None
    name = str(reference) if not path.is_absolute() or place != str(path) else "/".join([*path.parts[-2:]])
    name = f"{name}:{own_pooling}" if own_pooling and not name.endswith(f":{own_pooling}") else name
    if Run(path).is_begun:
        if not Run(path).is_finished:
            raise InputError(f"{place} is a run folder without a model: that run did not end")
        return Located(name, path / "model", own_pooling, run=Run(path))
    if not (path / "modules.json").is_file() and not (path / "config.json").is_file():
        raise InputError(f"{place} holds no model: it has neither modules.json nor config.json")
    if not own_pooling and not (path / "modules.json").is_file():
        raise InputError(f"{name} is a bare encoder: say how its token vectors become one, e.g. as {name}:mean")
    return Located(name, path, own_pooling, run=run_of(path))


def _parts(reference: str | Path) -> tuple[str, str]:
    """The place and the pooling that a reference names."""
    place, _, own_pooling = str(reference).rpartition(":")
    return (place, own_pooling) if own_pooling in POOLINGS else (str(reference), "")


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
            folder = folder / json.loads(modules.read_text(encoding="utf-8"))[0]["path"]
        except (ValueError, LookupError, TypeError, OSError):
            raise InputError(f"{str(modules)!r} is no list of Sentence Transformers modules") from None
    if not (folder / "config.json").is_file():
        raise InputError(f"{str(folder)!r} is no model folder: it has no config.json")
    return str(folder)


def _fetch_model(name: str, revision: str | None = None) -> Path:
    """A hub model's files on this disk, in a folder named by the commit.

    Models are loaded from such a folder and not by their names: where ``modules.json`` cannot be fetched, Sentence
    Transformers would read the encoder through its mean without an error.

    Args:
        name: The hub id.
        revision: A commit, tag or branch.
    """
    path = encoder_path(name)
    other = ["*.onnx", "onnx/*", "openvino/*", "*.h5", "*.ot", "*.msgpack", "*.tflite", "coreml/*", "*.gguf"]
    with _errors_of_loading(name, path):
        folder = Path(huggingface_hub.snapshot_download(path, revision=revision, ignore_patterns=[*other, "*.bin"]))
        if not list(folder.rglob("*.safetensors")):
            folder = Path(huggingface_hub.snapshot_download(path, revision=revision, ignore_patterns=other))
        return folder


@contextlib.contextmanager
def _errors_of_loading(base: str | Path, path: str) -> Iterator[None]:
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


def build_model(base: str | Path | ModelSection, *, device: str | None = None, **settings: Any) -> SentenceTransformer:
    """Puts pooling and normalisation on an encoder.

    Only stock Sentence Transformers modules are used, so the saved model loads anywhere without ``trust_remote_code``.

    Args:
        base: A hub id, a local folder of a bare encoder, or a local Sentence Transformers folder, of which the encoder
            alone is taken; or a recipe's section, which says all of it.
        device: Where to put it; by default a GPU if there is one.
        **settings: Further keys of :class:`~simcse_st.recipe.ModelSection`: ``pooling``, ``head`` (``"keep"`` for the
            paper's MLP as part of the model), ``dropout``, ``max_length``, ``attention``, ``revision``.

    Returns:
        The model, in float32.

    Raises:
        InputError: There is no such base, it is out of reach, it holds no encoder, or has no dropout to set.

    Example:
        >>> build_model("bert-base-uncased", pooling="cls", head="keep")
    """
    section = base if isinstance(base, ModelSection) else checked(ModelSection, base=str(base), **settings)
    quiet_bars()
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, WeightedLayerPooling
    from torch import nn

    transformer = _load_encoder(section)
    limit = transformer.max_seq_length
    transformer.max_seq_length = min(section.max_length, limit) if limit else section.max_length
    dimension = transformer.get_embedding_dimension()
    modules: list[nn.Module] = [transformer]
    if section.pooling == "first_last_avg":
        layers = transformer.config.num_hidden_layers
        first_and_last = nn.Parameter(torch.zeros(layers + 1), requires_grad=False)
        first_and_last[[1, layers]] = 1.0  # 0 is the output of the embeddings
        modules.append(WeightedLayerPooling(dimension, layers, layer_start=0, layer_weights=first_and_last))
    modules.append(Pooling(dimension, pooling_mode="cls" if section.pooling == "cls" else "mean"))
    if section.head == "keep":
        # Initialised like every linear layer of BERT, as in the paper's code.
        weight = torch.empty(dimension, dimension).normal_(std=0.02)
        modules.append(Dense(dimension, dimension, init_weight=weight, init_bias=torch.zeros(dimension)))
    return SentenceTransformer(modules=[*modules, Normalize()], device=device)


def load_model(found: Located, device: str | None = None) -> SentenceTransformer:
    """Loads a model that was found.

    Args:
        found: See :func:`locate_model`.
        device: Where to put it.
    """
    quiet_bars()
    try:
        if found.own_pooling:
            return build_model(found.folder, pooling=found.own_pooling, device=device)
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(found.folder), device=device, local_files_only=True)
        check_encoder(model, found.folder)
        return model
    except InputError as error:
        raise InputError(f"{found.name}: {error}") from error.__cause__
    except Exception as error:  # of many classes, all about what stands in the folder
        raise InputError(f"{found.name} cannot be loaded as a model: {one_line(error)}") from error


def describe_model(model: SentenceTransformer) -> ModelFacts:
    """What identifies a model, whatever it is called."""
    length = model.max_seq_length
    return ModelFacts(
        model_sha256=model_sha256(model),
        modules=[_describe_module(module) for module in model],
        dimension=model.get_embedding_dimension() or 0,
        max_length=length if length is not None and math.isfinite(length) else None,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        precision=str(next(model.parameters()).dtype).removeprefix("torch."),
    )


def _describe_module(module: nn.Module) -> str:
    mode = getattr(module, "pooling_mode", None)
    return f"{type(module).__name__}({mode})" if isinstance(mode, str) else type(module).__name__


def dropout_probabilities(model: SentenceTransformer) -> dict[str, float]:
    """The dropout probabilities of a model's encoder, by their names in its configuration."""
    encoder: Any = model[0]
    return _dropouts(encoder.config) if hasattr(encoder, "auto_model") else {}


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
    parts: list[Any] = [model.max_seq_length, model.prompts, model.default_prompt_name]
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


def _load_encoder(section: ModelSection) -> Transformer:
    import torch
    from sentence_transformers.sentence_transformer.modules import Transformer
    from transformers import AutoConfig

    path = encoder_path(section.base)
    chosen = {"attn_implementation": section.attention} if section.attention else {}
    config: dict[str, Any] = {"revision": section.revision}
    if section.pooling == "first_last_avg":
        config["output_hidden_states"] = True
    with _errors_of_loading(section.base, path):
        if section.dropout is not None:
            names = _dropouts(AutoConfig.from_pretrained(path, revision=section.revision))
            if not names:
                raise InputError(f"model.dropout: the encoder {section.base!r} has no dropout that could be set")
            config.update(dict.fromkeys(names, section.dropout))
        transformer = Transformer(
            path,
            model_kwargs={"dtype": torch.float32, "revision": section.revision, **chosen},
            processor_kwargs={"revision": section.revision},
            config_kwargs=config,
        )
        _check_encoder(transformer, path, section.revision)
        return transformer


def check_encoder(model: SentenceTransformer, folder: Path) -> None:
    """Makes sure that a model's encoder is all in its folder: what is missing would be made up, without an error."""
    if hasattr(model[0], "auto_model"):
        _check_encoder(model[0], encoder_path(folder), None)


def load_tokenizer(section: ModelSection) -> Any:
    """The tokenizer of a base, without its weights."""
    from transformers import AutoTokenizer

    path = encoder_path(section.base)
    with _errors_of_loading(section.base, path):
        return AutoTokenizer.from_pretrained(path, revision=section.revision)


def _check_encoder(transformer: Any, path: str, revision: str | None) -> None:
    """Refuses what loads without an error, and yet is not the model that was meant."""
    encoder, tokenizer = transformer.auto_model, transformer.tokenizer
    # On the meta device no weights are read: only their names are compared.
    _, loading = type(encoder).from_pretrained(path, revision=revision, output_loading_info=True, device_map="meta")
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
