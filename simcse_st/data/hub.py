"""A split of a data set on the Hugging Face Hub -> rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from simcse_st.data.formats import class_namer
from simcse_st.data.rows import Row, progress
from simcse_st.errors import InputError

if TYPE_CHECKING:
    from datasets import DatasetBuilder


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

    def rows(self) -> Iterator[Row]:
        """Reads all rows, with class labels by their names.

        Raises:
            InputError: The hub cannot be reached, or has no such data set, configuration or split for this user.
        """
        import datasets  # seconds to import, and files do not need it

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
        record = {"dataset": self.dataset, "config": self.config, "split": self.split, "revision": _commit(self)}
        return {**record, "files": self.files} if self.files else record

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

    builder = datasets.load_dataset_builder(
        source.dataset, source.config, revision=source.revision, data_files=source.files
    )
    # Offline, the newest copy in the cache is taken whatever the revision.
    from_cache = not str(builder.base_path or "").startswith("hf://")
    if from_cache and source.revision and builder.hash != source.revision:
        raise InputError(
            f"{source.name}: the hub is out of reach, and the copy in the cache is of commit {builder.hash}, which "
            f"may not be the revision {source.revision}: name that commit, or go online"
        )
    return builder


def _commit(source: HubSplit) -> str | None:
    builder = _builder(source)
    base = str(builder.base_path or "")
    return base.rpartition("@")[2].partition("/")[0] if base.startswith("hf://") else builder.hash


def _fail(source: HubSplit, error: Exception) -> NoReturn:
    """One line for the many classes of errors that the libraries raise here, network, access and names alike."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import is_offline_mode

    if isinstance(error, InputError):
        raise error
    reason = " ".join(str(error).split())
    hint = ""
    if isinstance(error, DatasetNotFoundError):
        hint = (
            " A private or gated data set needs access and a token: set HF_TOKEN, or run hf auth login. A file of that "
            "name is not here either."
        )
    elif isinstance(error, OSError) or _is_of_network(error):
        state = "HF_HUB_OFFLINE is set" if is_offline_mode() else "is the network there?"
        hint = (
            f" ({state}) To work offline, load it once online, and it stays in the cache; or give a file: there is "
            "none of that name here."
        )
    raise InputError(f"{source.name}: cannot be read from the Hugging Face Hub: {reason}{hint}") from error


def _is_of_network(error: Exception) -> bool:
    # The HTTP client's own classes are no OSErrors, and which client it is depends on the hub library's version.
    return any("Network" in kind.__name__ or "Transport" in kind.__name__ for kind in type(error).__mro__)
