"""Single sentences for unsupervised training, out of plain text or of any other training data."""

from __future__ import annotations

from pathlib import Path

from simcse_st.data.prepared import TrainingData, sha256_of_lines
from simcse_st.data.rows import progress
from simcse_st.data.sources import Source
from simcse_st.data.spool import Digests, Spool
from simcse_st.data.table import Reading, read_table
from simcse_st.errors import InputError

SENTENCE_RULE = (
    "every distinct text of the rows (exact string, first occurrence first, row by row: premise and hypothesis, or "
    "anchor, positive and hard negatives); rows without consensus and blank texts are dropped"
)


def load_sentences(source: Source | str | Path, reading: Reading | None = None) -> TrainingData:
    """Reads the distinct sentences of any training data.

    Args:
        source: Plain text, one sentence a line; rows with a column ``text`` or ``sentence``; or what
            :func:`~simcse_st.data.load_pairs` reads, of which all texts are taken.
        reading: How to read the rows.

    Returns:
        Rows with the one column ``sentence``.

    Raises:
        InputError: A row that cannot be used, with its place; or no sentence at all.
    """
    import pyarrow as pa

    source = source if isinstance(source, Source) else Source(source)
    table = read_table(source, reading or Reading(), sentences=True)
    digests = Digests(text for _, texts in table for text in texts)
    first = digests.first()
    if not len(first):
        rows = table.facts["rows_read"]
        raise InputError(f"{source.name}: none of its {rows} rows holds a sentence to train on")
    schema = pa.schema({"sentence": pa.string()})
    texts = (text for _, texts in table for text in texts)
    spool = Spool(schema, ((text,) for text, is_first in zip(texts, first, strict=True) if is_first))
    facts = {
        **table.facts,
        "texts": len(first),
        "duplicate_texts": len(first) - len(spool),
        "rule": SENTENCE_RULE,
        "sentences": len(spool),
    }
    data = TrainingData(spool, facts)
    facts["prepared_sha256"] = sha256_of_lines(progress(data.lines(), "hashing", len(data)))
    return data
