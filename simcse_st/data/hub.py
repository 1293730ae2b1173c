"""A split of a data set on the Hugging Face Hub -> rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import huggingface_hub  # which imports its parts as they are used; files need none

from simcse_st.data.formats import FORMATS, class_namer, file_format, read_file
from simcse_st.data.rows import Row, RowError, file_sha256, progress
from simcse_st.errors import InputError

if TYPE_CHECKING:
    from datasets import DatasetBuilder


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set on the hub.

    Attributes:
        dataset: Its id.
        config: Its configuration, where it has several.
        split: The split.
        revision: A commit, tag or branch; by default the newest commit.
        files: The files to read, by name or pattern; by default those its own configuration names.
        streaming: Whether to read it over the network as it goes, and keep no copy.
    """

    dataset: str
    config: str | None
    split: str | None
    revision: str | None
    files: str | None
    streaming: bool

    @property
    def name(self) -> str:
        """What to call it in an error."""
        files = f" ({self.files})" if self.files else ""
        return f"{self.dataset}[{self.split}]{files}"

    def rows(self, *, header: bool = True) -> Iterator[Row | RowError]:
        """Reads all rows, with class labels by their names; named files as the files of this disk are read.

        Args:
            header: Of named files: whether tables name their columns.

        Raises:
            InputError: The hub cannot be reached, or has no such data set, configuration or split for this user.
        """
        if self.files:
            folder, paths = _fetched(self)
            for path in paths:
                yield from read_file(path, f"{self.dataset}/{path.relative_to(folder)}", header=header)
            return
        if not header:
            raise InputError(f"{self.name}: data.columns by numbers is for CSV and TSV; here columns have names")
        import datasets  # seconds to import, and files do not need it

        if self.split is None:
            raise InputError(f"{self.dataset}: name the split to read")
        try:
            builder = _builder(self)
            if self.streaming:
                split = builder.as_streaming_dataset(self.split)
            else:
                builder.download_and_prepare()
                split = builder.as_dataset(self.split)
            features = split.features or {}
            total = None if self.streaming else len(split)
            tables = split.with_format("arrow").iter(batch_size=1000)
        except Exception as error:
            _fail(self, error)
        named = class_namer({n: kind.names for n, kind in features.items() if isinstance(kind, datasets.ClassLabel)})
        rows = (cells for table in self._read(tables) for cells in table.to_pylist())
        for number, cells in enumerate(progress(rows, f"reading {self.name}", total)):
            yield Row(f"{self.name} row ", number, named(cells))

    def record(self) -> dict[str, Any]:
        """What identifies it in a manifest; the revision is the commit that was read."""
        if self.files:
            folder, paths = _fetched(self)
            files = [{"file": str(path.relative_to(folder)), "sha256": file_sha256(path)} for path in paths]
            return {"dataset": self.dataset, "revision": folder.name, "files": files}
        config = _builder(self).config.name
        return {"dataset": self.dataset, "config": config, "split": self.split, "revision": _commit(self)}

    def _read(self, tables: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from tables
        except Exception as error:
            _fail(self, error)


@lru_cache(maxsize=16)
def _builder(source: HubSplit) -> DatasetBuilder:
    """Finds the data set on the hub or, offline, in the cache.

    Raises:
        InputError: What is in the cache may be another revision than the one that is wanted.
    """
    import datasets

    builder = datasets.load_dataset_builder(source.dataset, source.config, revision=source.revision)
    if builder.name == "csv":
        # By default pandas takes "None", "NA" and other words for missing cells.
        builder = datasets.load_dataset_builder(
            source.dataset, source.config, revision=source.revision, keep_default_na=False
        )
    # Out of reach of the hub, the newest copy in the cache is taken, whatever its revision.
    from_cache = not str(builder.base_path or "").startswith("hf://")
    if from_cache and not huggingface_hub.is_offline_mode():
        logger.warning("the hub is out of reach: %s is read from the cache, commit %s", source.name, builder.hash)
    if from_cache and source.revision and builder.hash != source.revision:
        raise InputError(
            f"{source.name}: the hub is out of reach, and the copy in the cache is of commit {builder.hash}, which "
            f"may not be the revision {source.revision}: name that commit, or go online"
        )
    return builder


@lru_cache(maxsize=16)
def _fetched(source: HubSplit) -> tuple[Path, list[Path]]:
    """The named files of a data set on this disk, and their folder, which is named by the commit.

    Raises:
        InputError: There is none, or they are out of reach.
    """
    assert source.files
    if source.streaming:
        raise InputError(f"{source.name}: files are read whole: leave streaming out")
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                source.dataset, repo_type="dataset", revision=source.revision, allow_patterns=[source.files]
            )
        )
    except Exception as error:
        _fail(source, error)
    paths = sorted(path for path in folder.glob(source.files) if path.is_file())
    if not paths:
        raise InputError(f"{source.name}: the data set has no file of this name or pattern")
    for path in paths:
        if file_format(path) is None:
            raise InputError(f"{source.name}: {path.name} is of no known format: {', '.join(FORMATS)}")
    return folder, paths


def _commit(source: HubSplit) -> str | None:
    builder = _builder(source)
    base = str(builder.base_path or "")
    return base.rpartition("@")[2].partition("/")[0] if base.startswith("hf://") else builder.hash


def _fail(source: HubSplit, error: Exception) -> NoReturn:
    """One line for the many classes of errors that the libraries raise here, network, access and names alike."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, InputError):
        raise error
    reasons = [" ".join(str(error).split())]
    cause = error.__cause__
    while cause is not None:  # "An error occurred while generating the dataset" says less than what it was
        reasons.append(" ".join(str(cause).split()))
        cause = cause.__cause__
    hint = ""
    if isinstance(error, (DatasetNotFoundError, RepositoryNotFoundError, GatedRepoError)):
        hint = (
            " Is the name spelt right? A private or gated data set needs access and a token: set HF_TOKEN, or run hf "
            "auth login. A file of that name is not here either."
        )
    elif _is_of_network(error):
        state = "HF_HUB_OFFLINE is set" if huggingface_hub.is_offline_mode() else "is the network there?"
        hint = (
            f" ({state}) To work offline, load it once online, and it stays in the cache; or give a file: there is "
            "none of that name here."
        )
    reason = ": ".join(dict.fromkeys(filter(None, reasons)))
    raise InputError(f"{source.name}: cannot be read from the Hugging Face Hub: {reason}{hint}") from error


def _is_of_network(error: Exception) -> bool:
    if huggingface_hub.is_offline_mode() or isinstance(error, (ConnectionError, TimeoutError)):
        return True
    # The HTTP client's own classes are no OSErrors, and which client it is depends on the hub library's version.
    return any("Network" in kind.__name__ or "Transport" in kind.__name__ for kind in type(error).__mro__)
