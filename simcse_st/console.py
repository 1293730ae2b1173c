"""What stands on the terminal: tables, this program's log, and nothing of the libraries'."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm


def set_environment() -> None:
    """Sets what libraries read as they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else a warning for every forked worker
    # oneDNN keeps what it prepared for the last 1024 shapes, and no two batches are alike in theirs. Kept among the
    # activations of a CPU, that leaves ever more holes between them; a pass needs a few for as long as it lasts.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def quiet_libraries() -> None:
    """Leaves the terminal to this program: its log, the training bar, and the libraries' warnings."""
    # What they warn of here is said in our own words: no card's metadata, a copy from the cache.
    # And what the hub's client says of each try names the addresses that it sends to, with what signs them.
    for name in ("huggingface_hub", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logger = logging.getLogger("simcse_st")
    handler = _Lines(sys.stderr)
    handler.setFormatter(_Message())
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if first_process() else logging.ERROR)
    logger.propagate = False

    logging.getLogger("transformers.modeling_utils").addFilter(_is_no_inventory)
    if not sys.warnoptions:  # or whoever asked for them gets them
        warnings.simplefilter("ignore", FutureWarning)  # of one library to another: nobody at a terminal can follow it


def quiet_bars() -> None:
    """Has transformers draw no bar for each file that it reads or writes, where this program has the terminal.

    To be called as a model is about to be loaded: by itself it would import transformers, which takes a second.
    """
    if any(isinstance(handler, _Lines) for handler in logging.getLogger("simcse_st").handlers):
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()


def _is_no_inventory(record: logging.LogRecord) -> bool:
    """Whether a record is more than the list of the weights that a checkpoint has too many or too few.

    Too few are an error here, or said to be random; and too many has every checkpoint of another task.
    """
    text = record.getMessage()
    listed = "LOAD REPORT" in text or "tied weights mapping" in text
    return not listed or "MISMATCH" in text or "CONVERSION" in text


class _Lines(logging.StreamHandler):
    """Writes above a bar, and each line in one piece with its end: an interrupt cuts none short."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _Message(logging.Formatter):
    """The message alone, without this machine's token, should the hub have put it into an answer."""

    def format(self, record: logging.LogRecord) -> str:
        return without_token(record.getMessage())


def progress(
    description: str, total: int | None = None, items: Iterable[Any] | None = None, unit: str = "it"
) -> tqdm[Any]:
    """A bar, on a terminal, for what takes more than two seconds; passes the items on, if there are any."""
    return tqdm(
        items, description, total, unit=unit, unit_scale=unit == "B", delay=2, disable=None, leave=False,
        dynamic_ncols=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A table: a line on what it shows, the names of the columns, and rows of text."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The table as GitHub renders it, under its title."""
        lines = [self.columns, ["---", *["---:" for _ in self.columns[1:]]], *self.rows]
        cells = ([" ".join(text.replace("|", "\\|").split()) for text in line] for line in lines)
        return "\n".join([self.title, "", *(f"| {' | '.join(line)} |" for line in cells), ""])


def print_tables(tables: Sequence[Table]) -> None:
    """Prints tables as wide as the terminal, in the process that speaks."""
    if not first_process():
        return
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 160  # a file has no edge to wrap at
    with contextlib.suppress(BrokenPipeError):  # a reader that has seen enough does not make the command a failure
        for table in tables:
            drawn = RichTable(title=Text(table.title))
            for number, column in enumerate(table.columns):
                drawn.add_column(Text(column), justify="right" if number else "left", overflow="fold")
            for row in table.rows:
                drawn.add_row(*map(Text, row))
            console.print(drawn)
        sys.stdout.flush()


def first_process() -> bool:
    """Whether this is the process that speaks, of those that torchrun or accelerate started."""
    return os.environ.get("RANK", "0") == "0"


def without_token(text: str) -> str:
    """The text without this machine's token, should a library have put it in."""
    if "huggingface_hub.utils" not in sys.modules:  # so that none can have
        return text
    from huggingface_hub import get_token

    return text.replace(get_token() or "\0", "(token)")
