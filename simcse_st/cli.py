"""The command line, ``simcse-st``. Imports torch only in the commands that need it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simcse_st.errors import InputError, RunError

if TYPE_CHECKING:
    from simcse_st.recipe import Recipe
    from simcse_st.training import TrainResult

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_debug = False


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"simcse-st {metadata.version('simcse-st')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """SimCSE sentence embeddings with hard negatives: train, measure, publish."""
    global _debug
    _debug = debug


_RecipeName = Annotated[str, typer.Argument(help="A shipped recipe's name, or the path of one of your own (.yaml).")]
_Base = Annotated[
    str | None, typer.Option("--base", metavar="MODEL", help="Hub id or folder to start from (model.base).")
]
_Data = Annotated[str | None, typer.Option("--data", metavar="FILE_OR_DATASET", help="What to train on (data.train).")]
_Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change any key of the recipe, e.g. loss.temperature=0.1."),
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier call left in that folder.")]


@app.command()
def train(
    recipe: _RecipeName = "quickstart",
    base: _Base = None,
    data: _Data = None,
    overrides: _Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="The run folder; by default runs/NAME.")
    ] = None,
    overwrite: _Overwrite = False,
) -> None:
    """Train a model. Without a recipe: the quickstart, which needs no network."""
    chosen = _load_recipe(recipe, base, data, overrides)
    _quiet_libraries()

    from tqdm.contrib.logging import logging_redirect_tqdm

    import simcse_st.training

    with logging_redirect_tqdm([logging.getLogger("simcse_st")]):
        result = simcse_st.training.train(chosen, output, overwrite=overwrite)
    if _first_process():
        with contextlib.suppress(BrokenPipeError):  # a reader that has seen enough does not make the run a failure
            _print_result(result)
            sys.stdout.flush()


@app.command()
def prepare(
    recipe: _RecipeName,
    base: _Base = None,
    data: _Data = None,
    overrides: _Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="The folder; by default prepared/NAME.")
    ] = None,
    overwrite: _Overwrite = False,
) -> None:
    """Write down what a recipe would train on: the rows, the counts, the checksums."""
    chosen = _load_recipe(recipe, base, data, overrides)
    _quiet_libraries()

    import simcse_st.preparing

    folder = simcse_st.preparing.prepare(chosen, output, overwrite=overwrite)
    written = json.loads((folder / "manifest.json").read_text("utf-8"))["outputs"][0]
    print(f"{folder / written['file']}: {written['rows']:,} rows, SHA-256 {written['sha256']}")


@app.command()
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(help="Run folders, folders or hub ids; MODEL:cls or MODEL:mean reads its encoder so."),
    ],
    tasks: Annotated[
        str, typer.Option("--tasks", metavar="TASK,...", help="Names of tasks or groups (default, sts, all).")
    ] = "default",
    pooling: Annotated[str | None, typer.Option("--pooling", help="How to read bare encoders: cls, mean.")] = None,
    dev: Annotated[
        str | None, typer.Option("--dev", metavar="FILE_OR_DATASET", help="Graded pairs in the place of STS-B dev.")
    ] = None,
    test: Annotated[
        str | None, typer.Option("--test", metavar="FILE_OR_DATASET", help="Graded pairs in the place of STS-B test.")
    ] = None,
    senteval: Annotated[
        Path | None, typer.Option("--senteval", metavar="DIR", help="SentEval's folder with STS12-en-test and so on.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Folder of evaluation.json; by default that of a single run."),
    ] = None,
) -> None:
    """Measure models side by side: STS, alignment and uniformity, retrieval."""
    _quiet_libraries()

    from simcse_st.data import Source
    from simcse_st.measuring import RECORD
    from simcse_st.measuring import evaluate as measure
    from simcse_st.recipe import resolve
    from simcse_st.report import evaluation_tables

    if output is None:
        is_run = len(models) == 1 and (Path(models[0]) / "recipe.yaml").is_file()
        output = Path(models[0]) if is_run else Path("evaluation")
    record = measure(
        models,
        tasks=tasks.split(","),
        pooling=pooling,
        dev=Source(resolve(dev), split="validation") if dev else None,
        test=Source(resolve(test), split="test") if test else None,
        senteval=senteval,
        output=output,
    )
    for table in evaluation_tables(record):
        _print_table(table.title, table.columns, table.rows)
    print(f"{output / RECORD}: every number with what it is over, and the most confident mistakes")


@app.command()
def recipes() -> None:
    """List the recipes that ship with the package."""
    from simcse_st.recipe import shipped_recipes

    listed = shipped_recipes()
    width = max(map(len, listed))
    for name, description in listed.items():
        print(f"{name:<{width}}  {description}")


def _load_recipe(name: str, base: str | None, data: str | None, overrides: list[str] | None) -> Recipe:
    from simcse_st.recipe import load_recipe

    # The flags are the two keys that everyone changes, and drop what the recipe says of its own base and data alone.
    # JSON is YAML that leaves no name to be read as something else.
    short = []
    if base is not None:
        short += [f"model.base={json.dumps(base)}", "model.sha256=null", "model.revision=null"]
    if data is not None:
        short += [f"data.train={json.dumps(data)}", "data.sample=null"]
    return load_recipe(name, [*short, *(overrides or ())])


def main() -> None:
    """Runs the command line; ends the process with 0, 1 (a run failed), 2 (unusable input) or 130 (interrupted)."""
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
    except (typer.TyperException, InputError) as error:
        code = _fail(error, 2)
    except RunError as error:
        code = _fail(error, 1)
    if code == 130:  # what typer makes of Ctrl-C
        print("simcse-st: interrupted", file=sys.stderr)
    sys.exit(code)


def _fail(error: Exception, code: int) -> int:
    if _debug:
        import traceback

        traceback.print_exception(error)
    if not _first_process():
        return code
    message = getattr(error, "format_message", error.__str__)()
    print(f"simcse-st: {' '.join(message.split())}", file=sys.stderr)
    return code


def _first_process() -> bool:
    """Whether this is the process that speaks, of those that torchrun or accelerate started."""
    return os.environ.get("RANK", "0") == "0"


def _quiet_libraries() -> None:
    """Leaves the terminal to this program: its log, the training bar, and the libraries' warnings."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else a warning for every forked worker
    logger = logging.getLogger("simcse_st")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if _first_process() else logging.ERROR)
    logger.propagate = False

    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file has no edge to wrap at
    console.print(table)


def _print_result(result: TrainResult) -> None:
    scores = result.results
    rows = []
    for split in ("dev", "test"):
        before, after = scores["base"][split], scores[split]["spearman"]
        label = f"{split} ({scores[split]['pairs']:,} pairs)"
        rows.append([label, f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}"])
    title = f"Spearman x100, weights of step {scores['best_step']} of {scores['total_steps']}"
    _print_table(title, ["", "before", "after", "change"], rows)
    seen = scores["batches"]
    masked = f", {seen['masked_cells']:,} cells masked" if seen["masked_cells"] else ""
    print(
        f"{scores['train_seconds']:.0f} s of training, {scores['sentences_per_second']:.0f} sentences/s\n"
        f"an anchor saw {seen['mean_negatives']:.1f} negatives on average, "
        f"{seen['fewest_negatives']} to {seen['most_negatives']}{masked}\n"
        f"model: {result.folder / 'model'}"
    )
