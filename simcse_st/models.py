"""A model by its name: found, fetched, built, loaded. Nothing here needs torch until a model is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from simcse_st.console import quiet_bars
from simcse_st.data.sources import resolve
from simcse_st.encoders import check_encoder, encoder_path, errors_of_loading, fetch_model, make_ready, takes
from simcse_st.errors import InputError, nearest, one_line
from simcse_st.identity import describe_modules, dropouts_of, length_of
from simcse_st.recipe import ModelSection, Pooling, checked
from simcse_st.run import Run, run_of

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import nn

logger = logging.getLogger(__name__)

POOLINGS: tuple[str, ...] = get_args(Pooling)


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
    folder = fetch_model(name, revision or None)
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


@dataclass(frozen=True)
class Stack:
    """What a recipe trains, before it is trained.

    Attributes:
        model: It, in float32.
        folder: The files of its base.
        changes: What of the base is not as it is saved, in words.
        is_base: Whether it scores what the base scores as it is saved; a bare encoder is saved as no model at all.
    """

    model: SentenceTransformer
    folder: Path
    changes: list[str]
    is_base: bool


def build_model(base: str | Path | ModelSection, *, device: str | None = None, **settings: Any) -> SentenceTransformer:
    """Makes the model that is trained out of its base.

    A Sentence Transformers model goes on as it is saved but for what the settings say; a bare encoder is read through
    its [CLS]. ``Normalize`` comes last. Only stock Sentence Transformers modules are used, so the saved model loads
    anywhere without ``trust_remote_code``.

    Args:
        base: A hub id, or the folder of a Sentence Transformers model or a bare encoder; or a recipe's section, which
            says all of it.
        device: Where to put it; by default a GPU if there is one.
        **settings: Further keys of :class:`~simcse_st.recipe.ModelSection`: ``pooling``, ``head`` (``"keep"`` for the
            paper's MLP as part of the model), ``prompts``, ``prompt``, ``dropout``, ``max_length``, ``attention``,
            ``revision``.

    Returns:
        The model, in float32.

    Raises:
        InputError: There is no such base, it is out of reach, it cannot be trained, or a setting does not fit it.

    Example:
        >>> build_model("bert-base-uncased", pooling="cls", head="keep")
    """
    section = base if isinstance(base, ModelSection) else checked(ModelSection, base=str(base), **settings)
    return build_stack(section, device).model


def build_stack(section: ModelSection, device: str | None = None) -> Stack:
    """Makes the model that is trained, and says what of its base it changes; see :func:`build_model`."""
    from sentence_transformers.util import get_device_name

    path = encoder_path(section.base)
    folder = Path(resolve(section.base)).expanduser()
    folder = folder if folder.is_dir() else fetch_model(section.base, section.revision)
    encoder_path(folder)
    is_bare = not (folder / "modules.json").is_file()
    quiet_bars()
    with errors_of_loading(section.base, path):
        saved = _load_base(section, folder, is_bare)
        mended = make_ready(saved)
        before = _readings(saved)
        model = _restack(section, saved, is_bare)
        _try_out(section, model)
        now = _readings(model)
    changes = [f"{key}: {now[key]}, saved as {was}" for key, was in before.items() if not is_bare and now[key] != was]
    return Stack(model.to(device or get_device_name()), folder, [*mended, *changes], is_bare or not changes)


def _load_base(section: ModelSection, folder: Path, is_bare: bool) -> SentenceTransformer:
    """The base as it is saved, on the CPU in float32."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer
    from transformers import AutoConfig

    config: dict[str, Any] = {"output_hidden_states": True} if section.pooling == "first_last_avg" else {}
    if section.dropout is not None:
        names = dropouts_of(AutoConfig.from_pretrained(encoder_path(folder)))
        if not names:
            raise InputError(f"model.dropout: the encoder {section.base!r} has no dropout that could be set")
        config.update(dict.fromkeys(names, section.dropout))
    chosen = {"attn_implementation": section.attention} if section.attention else {}
    settings: dict[str, Any] = {"model_kwargs": {"dtype": torch.float32, **chosen}, "config_kwargs": config}
    if is_bare:
        model = SentenceTransformer(modules=[Transformer(str(folder), **settings)], device="cpu")
    else:
        model = SentenceTransformer(str(folder), device="cpu", local_files_only=True, **settings)
    check_encoder(model, folder)
    if model.truncate_dim is not None:
        raise InputError(f"{section.base!r} cuts its vectors to {model.truncate_dim} numbers, which is not supported")
    return model


def _restack(section: ModelSection, saved: SentenceTransformer, is_bare: bool) -> SentenceTransformer:
    """The base's encoder with what the recipe wants on it."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, WeightedLayerPooling
    from torch import nn

    encoder: Any = saved[0]
    modules: list[nn.Module] = list(saved)
    if section.pooling or is_bare:
        mode = section.pooling or _pooling_of(encoder, section.base)
        dimension = encoder.get_embedding_dimension()
        with_prompt = all(module.include_prompt for module in saved if isinstance(module, Pooling))
        modules = [encoder]
        if mode == "first_last_avg":
            layers = encoder.config.num_hidden_layers
            first_and_last = nn.Parameter(torch.zeros(layers + 1), requires_grad=False)
            first_and_last[[1, layers]] = 1.0  # 0 is the output of the embeddings
            modules.append(WeightedLayerPooling(dimension, layers, layer_start=0, layer_weights=first_and_last))
        stock = "mean" if mode == "first_last_avg" else mode
        modules.append(Pooling(dimension, pooling_mode=stock, include_prompt=with_prompt))
    if isinstance(modules[-1], Normalize):
        modules.pop()
    if section.head == "keep":
        dimension = SentenceTransformer(modules=modules, device="cpu").get_embedding_dimension() or 0
        # Initialised like every linear layer of BERT, as in the paper's code.
        weight = torch.empty(dimension, dimension).normal_(std=0.02)
        modules.append(Dense(dimension, dimension, init_weight=weight, init_bias=torch.zeros(dimension)))
    prompts = {key: text or "" for key, text in saved.prompts.items()} if section.prompts is None else section.prompts
    name = (
        (saved.default_prompt_name if saved.default_prompt_name in prompts else None)
        if section.prompt is None
        else section.prompt
    )
    if name and name not in prompts:
        raise InputError(f"model.prompt: no prompt {name!r}: {nearest(name, prompts)}")
    model = SentenceTransformer(
        modules=[*modules, Normalize()],
        prompts=prompts,
        default_prompt_name=name or None,
        similarity_fn_name=saved.similarity_fn_name,
        device="cpu",
    )
    if section.max_length is not None:
        model.max_seq_length = section.max_length
    return model


def _pooling_of(encoder: Any, base: str) -> str:
    """How a bare encoder is read of which the recipe does not say it."""
    tokenizer = encoder.tokenizer
    if tokenizer.cls_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.cls_token_id:
        return "cls"
    raise InputError(
        f"{base!r} is a bare encoder that begins no text with a [CLS]: say how its token vectors become one by "
        "model.pooling, e.g. mean, or lasttoken for a causal one"
    )


def _readings(model: SentenceTransformer) -> dict[str, str]:
    """What a model's numbers depend on beside its weights; not on ``Normalize``, since all scores are of cosines."""
    prompt = model.prompts.get(model.default_prompt_name or "") or None
    modules = [name for name in describe_modules(model) if name != "Normalize"]
    return {"modules": " -> ".join(modules), "max_length": str(length_of(model) or "any"), "prompt": repr(prompt)}


def _try_out(section: ModelSection, model: SentenceTransformer) -> None:
    """Makes sure that a model can do what it is going to be trained and published for."""
    import torch

    limit = getattr(getattr(model[0], "config", None), "max_position_embeddings", None) or 0
    if section.max_length is not None and (0 < limit < section.max_length or not takes(model, section.max_length)):
        raise InputError(f"model.max_length is {section.max_length}, but {section.base!r} takes fewer tokens")
    one, other = model.encode(["A man is eating.", "A man is sleeping."], convert_to_tensor=True)
    if not torch.isfinite(one).all():
        raise InputError(f"{section.base!r} gives vectors that are not finite")
    if torch.allclose(one, other, atol=1e-6):
        raise InputError(
            f"{section.base!r} gives one vector to sentences that begin alike: the first token of a causal model sees "
            "no other; set model.pooling to lasttoken or mean, or to null where the base has its own"
        )


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
        from sentence_transformers.util import get_device_name

        model = SentenceTransformer(str(found.folder), device="cpu", local_files_only=True)
        check_encoder(model, found.folder)
        for line in make_ready(model):
            logger.warning("model    %s: %s", found.name, line)
        return model.to(device or get_device_name())
    except InputError as error:
        raise InputError(f"{found.name}: {error}") from error.__cause__
    except Exception as error:  # of many classes, all about what stands in the folder
        raise InputError(f"{found.name} cannot be loaded as a model: {one_line(error)}") from error
