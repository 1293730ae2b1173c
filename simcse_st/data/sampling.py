"""What is drawn from rows by a seed: a sample of them, and the pairs that dev and test hold out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from simcse_st.data.columns import Pair, SourcedPair, Texts
from simcse_st.data.files import digest_of, write_arrow
from simcse_st.errors import InputError
from simcse_st.recipe import DataSection
from simcse_st.records import SPLITS, Split
from simcse_st.references import Sample, hold_out_of

if TYPE_CHECKING:
    import pyarrow as pa


@contextmanager
def _waiting(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> Iterator[list[pa.RecordBatch]]:
    """Rows that wait on the disk, where something about all of them must be known before the first is used."""
    import pyarrow as pa

    path = write_arrow(rows, schema)
    with pa.memory_map(str(path)) as file:
        yield pa.ipc.open_stream(file).read_all().to_batches()
    path.unlink()


def _rows_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


def without_held_out(
    pairs: Iterable[SourcedPair],
    name: str,
    data: DataSection,
    held_out: dict[Split, list[Pair]],
    dropped: Counter[str],
) -> Iterator[SourcedPair]:
    """The pairs that are trained on; those that dev and test hold out are put aside, whole anchors at a time.

    A pair that shares a text with one of these is dropped, so that nothing is trained on that is measured.

    Args:
        pairs: All pairs.
        name: What to call the data in an error.
        data: The recipe's section.
        held_out: Gets the pairs of dev and test.
        dropped: Counts both.
    """
    import pyarrow as pa

    text = pa.string()
    schema = pa.schema({"source": pa.int16(), "anchor": text, "positive": text, "negative": pa.list_(text)})
    with _waiting(pairs, schema) as batches:
        of_anchor = Counter(digest_of(anchor) for batch in batches for anchor in batch["anchor"].to_pylist())
        split_of: dict[bytes, Split] = {}
        for split in SPLITS:
            if not (wanted := hold_out_of(getattr(data, split))):
                continue
            needed = wanted.rows(of_anchor.total())
            left, rows = [anchor for anchor in of_anchor if anchor not in split_of], 0
            random.Random(wanted.seed).shuffle(left)
            while rows < needed and left:
                split_of[anchor := left.pop()] = split
                rows += of_anchor[anchor]
            if rows < needed:
                has = f"{of_anchor.total():,} pairs" if split == SPLITS[0] else f"{rows:,} pairs left"
                raise InputError(f"data.{split}: hold_out is {needed}, but {name} has {has}")
            held_out[split] = []
        held: set[bytes] = set()
        for _, anchor, positive, negatives in (row for batch in batches for row in _rows_of(batch)):
            if of_split := split_of.get(digest_of(anchor)):
                held_out[of_split].append((anchor, positive, negatives))
                held.update(digest_of(text) for text in (anchor, positive, *negatives))
                dropped["held_out"] += 1
        for source, anchor, positive, negatives in (row for batch in batches for row in _rows_of(batch)):
            if digest_of(anchor) in split_of:
                continue
            if held.isdisjoint(digest_of(text) for text in (anchor, positive, *negatives)):
                yield source, anchor, positive, negatives
            else:
                dropped["text_of_a_held_out_pair"] += 1


def sampled(rows: Iterable[Texts], name: str, sample: Sample | None) -> Iterable[Texts]:
    """A fixed sample of rows in their order.

    Args:
        rows: All rows.
        name: What to call them in an error.
        sample: Which; None for all.
    """
    return _sampled(rows, name, sample.rows, sample.seed) if sample else rows


def _sampled(rows: Iterable[Texts], name: str, count: int, seed: int) -> Iterator[Texts]:
    import pyarrow as pa

    schema = pa.schema({"source": pa.int16(), "label": pa.int8(), "texts": pa.list_(pa.string())})
    with _waiting(rows, schema) as batches:
        total = sum(batch.num_rows for batch in batches)
        if count > total:
            raise InputError(f"data.sample.rows is {count}, but {name} has {total} usable rows")
        # The standard library's generator: its draws are the same on all platforms and in all versions so far.
        chosen = np.zeros(total, dtype=bool)
        chosen[random.Random(seed).sample(range(total), count)] = True
        number = 0
        for batch in batches:
            drawn = batch.filter(pa.array(chosen[number : number + batch.num_rows]))
            yield from _rows_of(drawn)
            number += batch.num_rows
