"""Rows and texts on disk: memory holds a batch of them, or sixteen bytes for each."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from simcse_st.errors import RunError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_BATCH = 10_000
_in_use: list[tempfile.TemporaryDirectory[str]] = []
Item = TypeVar("Item")


class Spool:
    """Rows in an Arrow file of their own, written once and read any number of times.

    The file goes when this object goes.

    Args:
        schema: The columns.
        rows: Tuples with a value for each column.

    Attributes:
        names: The names of the columns.

    Raises:
        RunError: The temporary folder is full or cannot be written.
    """

    def __init__(self, schema: pa.Schema, rows: Iterable[tuple[Any, ...]]) -> None:
        import pyarrow as pa

        self.names: list[str] = schema.names
        self._count = 0
        with _errors_of_writing():
            self._folder = tempfile.TemporaryDirectory(prefix="simcse-st-", ignore_cleanup_errors=True)
            self.path = Path(self._folder.name) / "rows.arrow"
            sink = pa.OSFile(str(self.path), "wb")
        with sink, pa.ipc.new_stream(sink, schema) as writer:
            for batch in batches(rows):
                self._count += len(batch)
                columns = list(map(list, zip(*batch, strict=True)))
                with _errors_of_writing():
                    writer.write_batch(pa.record_batch(columns, schema=schema))

    def __len__(self) -> int:
        """The number of rows."""
        return self._count

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """All rows in their order."""
        import pyarrow as pa

        # Read and not mapped: what is mapped stays in the process's memory until the system wants it back.
        with pa.OSFile(str(self.path), "rb") as source, pa.ipc.open_stream(source) as batches:
            for batch in batches:
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def dataset(self) -> Dataset:
        """The rows as a data set, mapped from the file, which then stays until the process ends."""
        from datasets import Dataset

        _in_use.append(self._folder)  # worker processes open it by its name
        return Dataset.from_file(str(self.path))


class Texts:
    """Any number of texts on disk, each to be had by its number."""

    def __init__(self) -> None:
        with _errors_of_writing():
            self._file = tempfile.TemporaryFile(prefix="simcse-st-", buffering=1 << 20)  # noqa: SIM115  (closed with it)
        self._ends = array("Q", [0])

    def append(self, text: str) -> None:
        """Adds one at the end."""
        data = text.encode()
        with _errors_of_writing():
            self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))

    def __getitem__(self, number: int) -> str:
        """The text of that number."""
        begin, end = self._ends[number], self._ends[number + 1]
        self._file.seek(begin)
        return self._file.read(end - begin).decode()


class Digests:
    """Digests of texts in the order they are added, to tell equal texts without holding them.

    A digest has 128 bits: that two of ten million different texts share one has a chance of 1e-25.
    """

    SIZE = 16

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._bytes = bytearray()
        for text in texts:
            self.add(text)

    def add(self, *texts: str) -> None:
        """Adds the digest of a text, or one of several texts together."""
        digest = hashlib.blake2b(digest_size=self.SIZE)
        for text in texts:
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        self._bytes += digest.digest()

    def array(self) -> np.ndarray:
        """All of them, shape ``(texts,)``, as fixed strings of 16 bytes."""
        return np.frombuffer(self._bytes, dtype=f"S{self.SIZE}")

    def first(self) -> np.ndarray:
        """Which of them are the first of their kind, shape ``(texts,)``, boolean."""
        digests = self.array()
        mask = np.zeros(len(digests), dtype=bool)
        # Part by part, by the first four bits, since sorting makes copies.
        parts = np.frombuffer(self._bytes, dtype=np.uint8)[:: self.SIZE] >> 4
        for part in range(16):
            of_part = np.flatnonzero(parts == part)
            mask[of_part[np.unique(digests[of_part], return_index=True)[1]]] = True
        return mask

    def sha256(self) -> str:
        """One checksum over all of them in their order."""
        return hashlib.sha256(self._bytes).hexdigest()

    def distinct(self) -> int:
        """How many different ones there are."""
        return int(self.first().sum())


@contextlib.contextmanager
def _errors_of_writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        folder = tempfile.gettempdir()
        raise RunError(
            f"cannot write to the temporary folder {folder}: {error.strerror or error}; set TMPDIR to another"
        ) from error


def batches(items: Iterable[Item], size: int = _BATCH) -> Iterator[list[Item]]:
    """The items in lists of a size, the last one shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
