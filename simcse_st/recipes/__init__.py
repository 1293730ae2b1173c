"""Recipes out of YAML and ``key=value``, and what is said when they are wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from simcse_st.errors import InputError, nearest
from simcse_st.recipe import Recipe
from simcse_st.references import HeldOutReference


def shipped_recipes() -> dict[str, str]:
    """The recipes that come with the package.

    Returns:
        Each recipe's description by its name, in order of name.
    """
    files = resources.files("simcse_st.recipes").iterdir()
    names = sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
    return {name: load_recipe(name).description for name in names}


def load_recipe(
    name: str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    base: str | None = None,
    data: str | None = None,
) -> Recipe:
    """Loads a shipped recipe by its name, or any recipe by its path.

    A recipe that begins with ``extends: NAME`` is that recipe but for the keys that it gives itself.

    Args:
        name: ``"snli-sup"`` or ``"path/to/recipe.yaml"``.
        overrides: ``"key=value"`` with dotted keys, whose values are read as YAML, e.g.
            ``"data.sample={rows: 1000}"``; or a mapping of such keys to values, e.g. ``{"training.epochs": 1}``.
        base: Short for ``model.base``; drops what the recipe says of its own base: checksum, revision, licence.
        data: Short for ``data.train``; drops what the recipe says of its own data: sample, language, licence.

    Returns:
        The validated recipe.

    Raises:
        InputError: No such recipe, not YAML, an unknown key (with the nearest ones), a wrong type or value.
    """
    where, values, origin = _load(str(name))
    values.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", Path(str(name)).stem).strip("._-") or "run")
    given = overrides if isinstance(overrides, Mapping) else dict(map(_parse_override, overrides))
    for key, value in {**_short(base, data, given), **given}.items():
        _apply(values, key, str(value) if isinstance(value, Path) else value)
        origin[key] = "--set"
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise InputError(_describe(error, origin, where)) from None


def read_reference(told: HeldOutReference | str) -> HeldOutReference:
    """A held-out set as a recipe names it, where it is told in YAML, e.g. ``{retrieval: FILE}``."""
    if not isinstance(told, str) or not told.lstrip().startswith("{"):
        return told
    return load_recipe("quickstart", {"data.dev": _parse(told, told)}).data.dev


def _short(base: str | None, data: str | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The overrides that ``base`` and ``data`` are short for."""
    short: dict[str, Any] = {}
    if base is not None:
        short |= {"model.base": base, "model.sha256": None, "model.revision": None, "card.base_model": None}
    if data is not None:
        short |= {"data.train": data, "data.sample": None, "card.language": []}
    if short or any(key.startswith(("model.base", "data.train")) for key in overrides):
        short["card.license"] = None  # which is about the recipe's own base and data
    return short


def _load(name: str, extending: tuple[str, ...] = ()) -> tuple[str, dict[str, Any], dict[str, str]]:  # YAML's values
    """What to call a recipe in an error, its values, and where each key was written."""
    where, text = _read(name)
    values = _parse(text, where)
    if not isinstance(values, dict):
        raise InputError(f"{where}: a recipe is a mapping of keys to values, this is {_kind(values)}")
    origin = dict.fromkeys(_keys(values), where)
    parent = values.pop("extends", None)
    if parent is None:
        return where, values, origin
    if not isinstance(parent, str) or parent in (name, *extending):
        raise InputError(f"{where}: extends: must be another recipe's name or path, not {_kind(parent)}")
    _, below, origin_below = _load(parent, (name, *extending))
    for key in ("name", "description"):  # which are the other recipe's own
        below.pop(key, None)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        below[key] = {**below[key], **value} if both else value
    return where, below, {**origin_below, **origin}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars (PyYAML reads 1.1: ``5e-5`` as text, ``no`` as false), and no key twice."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (the base class declares it so)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _read(name: str) -> tuple[str, str]:
    """The recipe's text, and what to call it in an error."""
    if name.endswith((".yaml", ".yml")):
        try:
            return name, Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{name}: not UTF-8 text (byte {error.start})") from None
        except OSError as error:
            raise InputError(f"{name}: cannot read this recipe: {error.strerror}") from None
    shipped = resources.files("simcse_st.recipes") / f"{name}.yaml"
    if "/" in name or not shipped.is_file():
        known = (file.name.removesuffix(".yaml") for file in resources.files("simcse_st.recipes").iterdir())
        hint = nearest(name, (stem for stem in known if "." not in stem and not stem.startswith("_")))
        raise InputError(f"no recipe {name!r}: {hint} (a recipe of your own is named by its path, ending in .yaml)")
    return f"recipe {name}", shipped.read_text(encoding="utf-8")


def _parse(text: str, where: str) -> Any:
    try:
        value = yaml.load(text, _Loader)
        json.dumps(value, default=str)  # not possible for a mapping that holds itself
        return value
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        # Beside its own errors PyYAML lets through those of int() and float(), of keys that are lists, of deep nesting.
        raise InputError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _parse_override(override: str) -> tuple[str, Any]:
    """The key and the value of one ``key=value``."""
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        raise InputError(f"--set {override!r}: write it as key=value, e.g. --set loss.temperature=0.1")
    return key, _parse(text, f"--set {key}")


def _apply(values: dict[str, Any], key: str, value: Any) -> None:
    """Writes one value into the nested ones; of a whole section, as a recipe that extends another does."""
    *sections, last = key.split(".")
    section: Any = values
    for part in sections:
        if section.get(part) is None:  # absent, or written out as null
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            # `data.train.split=x` over a plain `data.train: name`: say so instead of failing in a library.
            raise InputError(f"--set {key}: {part!r} holds {section!r} here, which has no keys of its own")
    whole = not sections and isinstance(value, dict) and isinstance(section.get(last), dict)
    section[last] = {**section[last], **value} if whole else value


def _keys(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def _describe(error: ValidationError, origin: dict[str, str], where: str) -> str:
    """One line for the first thing that is wrong with a recipe."""
    # A misspelt key is also a missing one, and the first is what helps. Of a key that takes several types, the one that
    # was meant has more right than its type.
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda one: (one["type"] == "missing", one["type"].endswith("_type"), -len(one["loc"])))
    # Which form of a reference or member of a union was tried is no part of the key.
    path = [
        str(part) for part in first["loc"] if not re.fullmatch(r"<\w+>|str|int|constrained-\w+|list\[.*\]", str(part))
    ]
    key = ".".join(path)
    # Where the key itself was written, or else the section that it stands in.
    written = [name for name in origin if f"{key}.".startswith(f"{name}.")]
    place = origin[max(written, key=len)] if written else where
    if first["type"] == "extra_forbidden":
        *above, leaf = path
        prefix, sections = "".join(f"{part}." for part in above if not part.isdigit()), list(_sections(Recipe))
        same_leaf = [f"{begin}{leaf}" for begin, section in sections if leaf in section.model_fields]
        known = {name for begin, section in sections if begin == prefix for name in section.model_fields}
        hint = f"did you mean {same_leaf[0]!r}?" if same_leaf else nearest(leaf, known, prefix)
        return f"{place}: unknown key {key!r}: {hint}"
    if not path:  # about several keys
        return f"{place}: {first['msg'].removeprefix('Value error, ')}"
    if first["type"] == "missing":
        return f"{place}: the key {key!r} is missing"
    if first["type"] == "value_error":
        return f"{place}: {key}: {first['msg'].removeprefix('Value error, ')}"
    problem = re.sub(r"^(Input|String|Value|List|Dictionary) | after validation, not \d+$", "", first["msg"])
    problem = "should be a mapping" if first["type"] == "model_type" else problem
    return f"{place}: {key}: {problem}, not {_kind(first['input'])}"


def _sections(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """A section and those below it, with what stands before their keys."""
    yield prefix, section
    for name, field in section.model_fields.items():
        for kind in _types(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _sections(kind, f"{prefix}{name}.")


def _types(annotation: Any) -> Iterator[Any]:
    """What an annotation is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _types(part)


def _kind(value: Any) -> str:
    names = {
        bool: "true/false",
        int: "the number",
        float: "the number",
        str: "the text",
        dict: "a mapping",
        list: "a list",
    }
    name = names.get(type(value), "nothing" if value is None else type(value).__name__)
    return name if isinstance(value, (dict, list)) or value is None else f"{name} {value!r}"
