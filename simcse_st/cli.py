"""The command line, ``simcse-st``: parses, calls, prints. What is wrong is said by the functions that it calls."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from simcse_st.console import first_process, print_tables, quiet_libraries, set_environment, without_token
from simcse_st.errors import InputError, RunError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_debug = False
_going_on = ""


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
    quiet_libraries()


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
_Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait for an answer of the hub.")
]
_RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
_RepoId = Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The model on the hub.")]


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
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run, to the same result.")
    ] = False,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="N,...", help="Run under each of these seeds; finished ones are kept."),
    ] = None,
) -> None:
    """Train a model. Without a recipe: the quickstart, which needs no network."""
    from simcse_st.recipes import load_recipe

    _go_on_with("the same command" if seeds is not None or resume else "the same command and --resume", overwrite)
    chosen = load_recipe(recipe, overrides or (), base=base, data=data)
    # After the recipe, whose errors come fast.
    from simcse_st.evaluation.tables import run_summary, run_table, seeds_table
    from simcse_st.training import experiments
    from simcse_st.training import train as training

    if seeds is not None:
        numbers = _seeds(seeds, overrides)
        print_tables([seeds_table(experiments.train_seeds(chosen, numbers, output, overwrite=overwrite))])
        return
    run = training.train(chosen, output, overwrite=overwrite, resume=resume)
    if not first_process():
        return
    print_tables([run_table(run.results)])
    _print(f"{run_summary(run.results)}\nmodel: {run.model_path}")


@app.command()
def ablate(
    recipe: _RecipeName,
    without: Annotated[
        str, typer.Option("--without", metavar="PART,...", help="What to leave out, e.g. hard-negatives.")
    ],
    seeds: Annotated[str, typer.Option("--seeds", metavar="N,...", help="The seeds of both runs of a pair.")] = "42",
    base: _Base = None,
    data: _Data = None,
    overrides: _Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="The folder; by default runs/NAME-ablation.")
    ] = None,
    overwrite: _Overwrite = False,
) -> None:
    """Run a recipe with and without a part of it."""
    from simcse_st.evaluation.tables import ablation_tables
    from simcse_st.recipes import load_recipe
    from simcse_st.training import experiments

    _go_on_with("the same command", overwrite)
    chosen = load_recipe(recipe, overrides or (), base=base, data=data)
    numbers = _seeds(seeds, overrides)
    print_tables(ablation_tables(experiments.ablate(chosen, without.split(","), numbers, output, overwrite=overwrite)))


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
    """Write down what a recipe would train on."""
    from simcse_st.recipes import load_recipe
    from simcse_st.run import Run
    from simcse_st.training import prepare as preparing

    chosen = load_recipe(recipe, overrides or (), base=base, data=data)
    folder = preparing.prepare(chosen, output, overwrite=overwrite)
    (written,) = Run(folder).read(preparing.PreparedManifest).outputs
    _print(f"{folder / written.file}: {written.rows:,} rows, SHA-256 {written.sha256}")


@app.command()
def mine(
    data: Annotated[str, typer.Argument(metavar="FILE_OR_DATASET", help="Pairs or triplets, in any form.")],
    model: Annotated[str, typer.Option("--with", metavar="MODEL", help="What finds them, as evaluate takes it.")],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="The folder of what is written.")],
    corpus: Annotated[
        str | None, typer.Option("--corpus", metavar="FILE", help="Sentences to look through beside the positives.")
    ] = None,
    negatives: Annotated[int, typer.Option("--negatives", metavar="N", help="How many an anchor gets at most.")] = 3,
    relative_margin: Annotated[
        str,
        typer.Option("--relative-margin", metavar="X", help="By which share a positive must beat them, or none."),
    ] = "0.05",
    max_score: Annotated[
        float | None, typer.Option("--max-score", metavar="X", help="How similar they may be at most.")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option("--range", metavar="A:B", help="Where in the ranking, after the first A and up to B.")
    ] = None,
    cross_encoder: Annotated[
        str | None, typer.Option("--cross-encoder", metavar="MODEL", help="Scores what was found again.")
    ] = None,
    keep_own: Annotated[bool, typer.Option("--keep-own/--drop-own", help="Whether a row's own ones stay.")] = True,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="data.KEY=VALUE", help="How to read the data.")
    ] = None,
    overwrite: _Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted call.")] = False,
) -> None:
    """Find hard negatives for pairs; every row stays."""
    _go_on_with("the same command and --resume", overwrite)
    from simcse_st.mining import mine as mining
    from simcse_st.recipes import load_recipe
    from simcse_st.run import read_record

    for override in overrides or ():
        if not override.strip().startswith("data."):
            raise InputError(f"--set {override}: only data.KEY=VALUE means something here")
    first, last = _range(ranks)
    section = load_recipe("quickstart", overrides or (), data=data).data
    mining.mine(
        section.model_copy(update={"expect": None}),
        model,
        corpus=corpus,
        negatives=negatives,
        relative_margin=None if relative_margin == "none" else _number("--relative-margin", relative_margin),
        max_score=max_score,
        first=first,
        last=last,
        cross_encoder=cross_encoder,
        keep_own=keep_own,
        output=output,
        overwrite=overwrite,
        resume=resume,
    )
    mined = read_record(output / mining.Mined.FILE, mining.Mined)
    print_tables([mining.mined_table(mined)])
    _print(f"{output / mining.MINED_FILE}: {mined.rows:,} rows; look at {output / mining.EXAMPLES_FILE} first")


@app.command()
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(help="Run folders, folders or hub ids; MODEL:cls or MODEL:mean reads its encoder so."),
    ],
    tasks: Annotated[
        str, typer.Option("--tasks", metavar="TASK,...", help="Names of tasks or groups (default, sts, all).")
    ] = "default",
    dev: Annotated[
        str | None,
        typer.Option("--dev", metavar="FILE_OR_DATASET", help="In the place of STS-B dev; also {retrieval: FILE}."),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option("--test", metavar="FILE_OR_DATASET", help="In the place of STS-B test; also {retrieval: FILE}."),
    ] = None,
    senteval: Annotated[
        Path | None, typer.Option("--senteval", metavar="DIR", help="SentEval's folder with STS12-en-test and so on.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Folder of evaluation.json; by default that of a single run."),
    ] = None,
    mteb: Annotated[
        str | None, typer.Option("--mteb", metavar="TASK,...", help="Tasks of the MTEB leaderboard to run too.")
    ] = None,
    truncate_dims: Annotated[
        str | None,
        typer.Option("--truncate-dims", metavar="N,...", help="Score dev and test with embeddings cut to these sizes."),
    ] = None,
    figures: Annotated[
        bool, typer.Option("--figures", help="Draw pictures too (pip install 'simcse-st[plot]').")
    ] = False,
) -> None:
    """Measure models side by side."""
    from simcse_st.evaluation import evaluate as evaluating
    from simcse_st.evaluation.tables import evaluation_tables
    from simcse_st.run import EVALUATION, Run

    single = len(models) == 1 and Run(Path(models[0])).is_begun
    output = output or Path(models[0] if single else "evaluation")
    record = evaluating.evaluate(
        models,
        tasks=tasks,
        dev=dev,
        test=test,
        senteval=senteval,
        output=output,
        figures=figures,
        mteb=mteb.split(",") if mteb else (),
        truncate_dims=_numbers("--truncate-dims", truncate_dims) if truncate_dims else (),
    )
    print_tables(evaluation_tables(record))
    _print(f"{output / EVALUATION}: every number with what it is over, and the most confident mistakes")


@app.command()
def search(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run folder, folder or hub id.")],
    queries: Annotated[
        list[str] | None, typer.Argument(metavar="[QUERY]...", help="What to look for; without any, each line typed.")
    ] = None,
    sentences: Annotated[
        str, typer.Option("--in", metavar="FILE_OR_DATASET", help="Where to look; of a run also dev or test.")
    ] = "dev",
    beside: Annotated[
        list[str] | None, typer.Option("--beside", metavar="MODEL", help="Another model, side by side.")
    ] = None,
    queries_file: Annotated[
        Path | None, typer.Option("--queries", metavar="FILE", help="A file of queries, one a line.")
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", help="How many answers.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a query.")] = False,
) -> None:
    """Find the sentences nearest to a query."""
    from simcse_st.evaluation import search as searching

    asked = [*(queries or ()), *(_lines(queries_file) if queries_file else ())]
    searching.check_asked(asked, top)
    indexes = searching.open_indexes([model, *(beside or ())], sentences)
    for query in asked or _typed():
        found = searching.answer(indexes, query, top)
        if as_json:
            _print(found.model_dump_json())
        else:
            print_tables([searching.answers_table(found)])


@app.command()
def card(
    run: _RunFolder,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a card.* key of the run's recipe.")
    ] = None,
) -> None:
    """Write a run's model card again, from its records."""
    from simcse_st.card import write_card

    _print(str(write_card(run, overrides or ())))


@app.command()
def push(
    run: _RunFolder,
    repo_id: _RepoId,
    private: Annotated[bool, typer.Option("--private", help="If it is to be made: make it private.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="BRANCH", help="The branch to commit to; by default main.")
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all, list the files, change nothing.")] = False,
    timeout: _Timeout = 60.0,
) -> None:
    """Publish a run's model and prove the published copy."""
    from simcse_st.publishing import push as pushing

    pushed = pushing.push(
        run, repo_id, private=private, revision=revision, create_pr=create_pr, dry_run=dry_run, timeout=timeout
    )
    if dry_run:
        print_tables([pushing.files_table(pushed)])


@app.command()
def verify(
    repo_id: _RepoId,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REV", help="A commit, branch or tag; by default main.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN", help="The run it was pushed from; by default looked for in runs/."),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option("--test", metavar="FILE_OR_DATASET", help="The set of its test score, if nothing names it."),
    ] = None,
    timeout: _Timeout = 60.0,
) -> None:
    """Prove that a published model is the one that was measured."""
    from simcse_st.publishing import verify as verifying

    failed = False
    for check in verifying.verify(repo_id, revision=revision, run=run, test=test, timeout=timeout):
        print(check, flush=True)
        failed = failed or not check.passed
    if failed:
        raise RunError(f"{repo_id} is not proven to be the model that was measured")


@app.command()
def report(
    places: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders and evaluation.json files.")],
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="Write report.md and report.json there.")
    ] = None,
) -> None:
    """Put runs and models into one table."""
    from simcse_st.evaluation import report as reporting

    print_tables([reporting.report_table(reporting.report(places, output))])


@app.command()
def recipes() -> None:
    """List the recipes that ship with the package."""
    from simcse_st.recipes import shipped_recipes

    listed = shipped_recipes()
    width = max(map(len, listed))
    for name, description in listed.items():
        _print(f"{name:<{width}}  {description}")


def _go_on_with(command: str, overwrite: bool) -> None:
    """Notes what goes on with a run that is interrupted from here on."""
    global _going_on
    _going_on = f"; {command}{', without --overwrite,' if overwrite else ''} goes on"


def _seeds(seeds: str, overrides: list[str] | None) -> list[int]:
    """The seeds of ``--seeds``."""
    if twice := [override for override in overrides or () if override.partition("=")[0].strip() == "seed"]:
        raise InputError(f"--set {twice[0]}: the seeds of these runs are --seeds {seeds}")
    return _numbers("--seeds", seeds)


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text}: give whole numbers with commas between them, e.g. 42,43,44") from None


def _lines(path: Path) -> list[str]:
    """The lines of a file that are not blank."""
    try:
        return [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}") from None


def _typed() -> Iterator[str]:
    """The lines of the standard input that are not blank, with a prompt on a terminal."""
    while True:
        if sys.stdin.isatty():
            print("query> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.strip()


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{option} {text}: give a number, or none") from None


def _range(text: str | None) -> tuple[int, int | None]:
    """The two ends of ``--range``."""
    first, colon, last = (text or "0:").partition(":")
    try:
        if not colon:
            raise ValueError
        return int(first or 0), int(last) if last else None
    except ValueError:
        raise InputError(f"--range {text}: give two whole numbers with a colon between them, e.g. 10:100") from None


def _print(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # a reader that has seen enough does not make the command a failure
        print(text, flush=True)


def main() -> None:
    """Runs the command line; ends the process with 0, 1 (a run failed), 2 (unusable input) or 130 (interrupted)."""
    set_environment()
    with contextlib.suppress(ValueError):  # not in the main thread, which alone gets signals
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = _run()
    except KeyboardInterrupt:  # once more, while the first was dealt with
        code = 130
    with contextlib.suppress(ValueError):  # what is left can be cut short without a word
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
    if code == 130 and first_process():
        print(f"simcse-st: interrupted{_going_on}", file=sys.stderr)
    sys.exit(code)


def _run() -> int:
    """What is asked for; gives the exit code."""
    try:
        return app(args=sys.argv[1:] or ["--help"], standalone_mode=False)  # 130: what typer makes of Ctrl-C
    except (typer.TyperException, InputError) as error:
        return _fail(error, 2)
    except RunError as error:
        return _fail(error, 1)
    except Exception:  # a fault of the program
        import traceback

        print(without_token(traceback.format_exc()), file=sys.stderr, end="")
        return 1


def _fail(error: Exception, code: int) -> int:
    if _debug:
        import traceback

        print(without_token("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    if not first_process():
        return code
    message = getattr(error, "format_message", error.__str__)()
    print(without_token(f"simcse-st: {' '.join(message.split())}"), file=sys.stderr)
    return code
