"""The command line, ``simcse-st``.

Torch takes seconds to import. So each command first has the light modules refuse what they can, and then goes to work,
where everything is checked again.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simcse_st.errors import InputError, RunError
from simcse_st.console import first_process, print_tables, quiet_libraries, set_environment, without_token

if TYPE_CHECKING:
    from simcse_st.data import Source
    from simcse_st.recipe import Recipe
    from simcse_st.training.train import TrainResult

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
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run, to the same result.")
    ] = False,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="N,...", help="Run under each of these seeds; finished ones are kept."),
    ] = None,
) -> None:
    """Train a model. Without a recipe: the quickstart, which needs no network."""
    from simcse_st.folder import SEEDS, check_folder, check_group
    from simcse_st.recipe import check_combinations, check_same

    if overwrite and resume:
        raise InputError("--resume goes on with a run, --overwrite begins it again: choose one")
    _go_on_with("the same command" if seeds is not None or resume else "the same command and --resume", overwrite)
    chosen = _load_recipe(recipe, base, data, overrides)
    check_combinations(chosen)
    numbers = _numbers(seeds, overrides)
    output = output or Path("runs") / (chosen.name if seeds is None else f"{chosen.name}-seeds")
    if seeds is not None:
        check_group(output, *SEEDS)
    else:
        if first_process():
            check_folder(output, overwrite or resume, resumable=True)
        if resume:
            check_same(output, chosen)
    _check_places(chosen)
    quiet_libraries()

    if numbers:
        from simcse_st.training.experiments import seeds_table, train_seeds

        print_tables([seeds_table(train_seeds(chosen, numbers, output, overwrite=overwrite))])
    else:
        from simcse_st.training import train as training

        _print_result(training.train(chosen, output, overwrite=overwrite, resume=resume))


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
    from simcse_st.folder import ABLATION, check_group
    from simcse_st.recipe import ablated, check_combinations

    _go_on_with("the same command", overwrite)
    chosen = _load_recipe(recipe, base, data, overrides)
    check_combinations(chosen)
    numbers = _numbers(seeds, overrides)
    parts = without.split(",")
    for part in parts:
        ablated(chosen, part)
    output = output or Path("runs") / f"{chosen.name}-ablation"
    check_group(output, *ABLATION)
    _check_places(chosen)
    quiet_libraries()

    from simcse_st.training import experiments

    record = experiments.ablate(chosen, parts, numbers, output, overwrite=overwrite)
    print_tables(experiments.ablation_tables(record))


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
    from simcse_st.data import preparing
    from simcse_st.folder import check_folder

    chosen = _load_recipe(recipe, base, data, overrides)
    output = output or Path("prepared") / chosen.name
    check_folder(output, overwrite)
    _check_places(chosen)
    quiet_libraries()

    folder = preparing.prepare(chosen, output, overwrite=overwrite)
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
    mteb: Annotated[
        str | None, typer.Option("--mteb", metavar="TASK,...", help="Tasks of the MTEB leaderboard to run too.")
    ] = None,
    figures: Annotated[
        bool, typer.Option("--figures", help="Draw pictures too (pip install 'simcse-st[plot]').")
    ] = False,
) -> None:
    """Measure models side by side."""
    from simcse_st.folder import EVALUATION, check_record
    from simcse_st.places import check_poolings, locate_here
    from simcse_st.evaluation.tables import evaluation_tables, task_names

    task_names(tasks.split(","))
    check_poolings([locate_here(model) for model in models], pooling)
    if output is None:
        is_run = len(models) == 1 and (Path(models[0]) / "recipe.yaml").is_file()
        output = Path(models[0]) if is_run else Path("evaluation")
    check_record(output / EVALUATION)
    sources = {split: _graded(place, split) for split, place in (("validation", dev), ("test", test))}
    quiet_libraries()

    from simcse_st.evaluation.evaluate import evaluate as measure

    record = measure(
        models,
        tasks=tasks,
        pooling=pooling,
        dev=sources["validation"],
        test=sources["test"],
        senteval=senteval,
        output=output,
        figures=figures,
        mteb=mteb.split(",") if mteb else (),
    )
    print_tables(evaluation_tables(record))
    print(f"{output / EVALUATION}: every number with what it is over, and the most confident mistakes")


_Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
_RepoId = Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The model on the hub.")]
_Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait for an answer of the hub.")
]


@app.command()
def card(
    run: _Run,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a card.* key of the run's recipe.")
    ] = None,
) -> None:
    """Write a run's model card again, from its records."""
    from simcse_st.card_records import write_card

    print(write_card(run, overrides or ()))


@app.command()
def push(
    run: _Run,
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
    from simcse_st.publishing.hub import check_names, connect
    from simcse_st.card_records import load_run

    check_names(repo_id, revision, create_pr)
    load_run(run)
    connect(timeout)
    quiet_libraries()

    from simcse_st.publishing import push as pushing

    record = pushing.push(
        run, repo_id, private=private, revision=revision, create_pr=create_pr, dry_run=dry_run, timeout=timeout
    )
    if dry_run:
        print_tables([pushing.files_table(record)])


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
        typer.Option("--test", metavar="FILE_OR_DATASET", help="The pairs of its test score, if nothing names them."),
    ] = None,
    timeout: _Timeout = 60.0,
) -> None:
    """Prove that a published model is the one that was measured."""
    from simcse_st.publishing.hub import check_repo_id, connect
    from simcse_st.card_records import load_run

    check_repo_id(repo_id)
    if run is not None:
        load_run(run)
    connect(timeout)
    source = _graded(test, "test")
    quiet_libraries()

    from simcse_st.publishing import verify as verifying

    failed = False
    for check in verifying.verify(repo_id, revision=revision, run=run, test=source, timeout=timeout):
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
    from simcse_st.folder import write_json

    record = reporting.report(places)
    table = reporting.report_table(record)
    print_tables([table])
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
            (output / "report.md").write_text(table.markdown(), encoding="utf-8")
            write_json(output / "report.json", record)
        except OSError as error:
            raise InputError(f"--output: cannot write to {str(output)!r}: {error.strerror}") from None


@app.command()
def recipes() -> None:
    """List the recipes that ship with the package."""
    from simcse_st.recipe import shipped_recipes

    listed = shipped_recipes()
    width = max(map(len, listed))
    for name, description in listed.items():
        print(f"{name:<{width}}  {description}")


def _go_on_with(command: str, overwrite: bool) -> None:
    """Notes what goes on with a run that is interrupted from here on."""
    global _going_on
    _going_on = f"; {command}{', without --overwrite,' if overwrite else ''} goes on"


def _load_recipe(name: str, base: str | None, data: str | None, overrides: list[str] | None) -> Recipe:
    from simcse_st.recipe import load_recipe

    # The flags are the two keys that everyone changes, and drop what the recipe says of its own base and data alone.
    # JSON is YAML that leaves no name to be read as something else.
    short = []
    if base is not None:
        short += [f"model.base={json.dumps(base)}", "model.sha256=null", "model.revision=null", "card.base_model=null"]
    if data is not None:
        short += [f"data.train={json.dumps(data)}", "data.sample=null", "card.language=[]"]
    own = [override.partition("=")[0].strip() for override in overrides or ()]
    if short or any(key.startswith(("model.base", "data.train")) for key in own):
        short.append("card.license=null")  # which is about the recipe's own base and data
    return load_recipe(name, [*short, *(overrides or ())])


def _check_places(recipe: Recipe) -> None:
    """Makes sure that the files and folders which a recipe names are there.

    Raises:
        InputError: One is not.
    """
    from simcse_st.places import encoder_path, resolve
    from simcse_st.data.preparing import source_of

    encoder_path(resolve(recipe.model.base))
    for split, reference in (("train", recipe.data.train), ("validation", recipe.data.dev), ("test", recipe.data.test)):
        _check_there(source_of(reference, split))


def _graded(place: str | None, split: str) -> Source | None:
    """The graded pairs that an option names."""
    if place is None:
        return None
    from simcse_st.data import Source
    from simcse_st.places import resolve

    source = Source(resolve(place), split=split)
    _check_there(source)
    return source


def _check_there(source: Source) -> None:
    """Makes sure that its files are there, if it is of files; a folder is looked into later.

    Raises:
        InputError: One is not.
    """
    from simcse_st.data.sources import is_folder

    if not isinstance(source.reference, str) or not is_folder(Path(source.reference).expanduser()):
        source.paths()


def _numbers(seeds: str | None, overrides: list[str] | None) -> list[int]:
    from simcse_st.recipe import check_seeds

    if seeds is None:
        return []
    if twice := [override for override in overrides or () if override.partition("=")[0].strip() == "seed"]:
        raise InputError(f"--set {twice[0]}: the seeds of these runs are --seeds {seeds}")
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise InputError(f"--seeds {seeds}: give whole numbers with commas between them, e.g. 42,43,44") from None
    check_seeds(numbers)
    return numbers


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


def _print_result(result: TrainResult) -> None:
    from simcse_st.evaluation.tables import run_table

    print_tables([run_table(result.results)])
    if not first_process():
        return
    scores, seen = result.results, result.results["batches"]
    masked = f", {seen['masked_cells']:,} cells masked" if seen["masked_cells"] else ""
    with contextlib.suppress(BrokenPipeError):
        print(
            f"{scores['train_seconds']:.0f} s of training, {scores['sentences_per_second']:.0f} sentences/s\n"
            f"an anchor saw {seen['mean_negatives']:.1f} negatives on average, "
            f"{seen['fewest_negatives']} to {seen['most_negatives']}{masked}\n"
            f"model: {result.folder / 'model'}"
        )
        sys.stdout.flush()
