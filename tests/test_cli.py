"""The command line: answers at once, one line for what is wrong, exit codes."""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tqdm import tqdm
from transformers import BertConfig, BertForMaskedLM

from simcse_st import InputError, SimCSELoss, build_model, cli, load_recipe
from simcse_st.console import Table, print_tables, quiet_libraries

TORCH_FREE = """
import sys
from simcse_st import cli
sys.argv = {argv!r}
try:
    cli.main()
finally:
    heavy = {{"torch", "transformers", "sentence_transformers", "datasets"}} & set(sys.modules)
    assert not heavy, heavy
    constants = sys.modules.get("huggingface_hub.constants")  # which reads its settings as it is imported
    assert constants is None or constants.HF_HUB_DISABLE_PROGRESS_BARS
"""


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the logs as other tests read them."""
    for name, keys in {
        "simcse_st": ("handlers", "level", "propagate"),
        "huggingface_hub": ("level",),
        "datasets": ("level",),
    }.items():
        for key in keys:
            monkeypatch.setattr(logging.getLogger(name), key, getattr(logging.getLogger(name), key))
    monkeypatch.setattr(logging.getLogger("transformers.modeling_utils"), "filters", [])


def run(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["simcse-st", *argv])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["recipes"], 0),
        (["train", "--help"], 0),
        (["train", "no-such-recipe"], 2),
        (["train", "--set", "loss.temprature=1"], 2),
        (["train", "--ovewrite"], 2),
        (["train", "--data", "no-such.jsonl"], 2),
        (["train", "--base", "./no-such"], 2),
        (["train", "--set", "data.dev=no-such.tsv"], 2),
        (["train", "--seeds", "x"], 2),
        (["train", "--seeds", "1,1"], 2),
        (["train", "--output", "/dev/null"], 2),
        (["train", "--overwrite", "--resume"], 2),
        (["train", "--set", "loss.mini_batch_size=8", "--set", "loss.chunk_size=8"], 2),
        (["train", "--set", "loss.mini_batch_size=8", "--set", "loss.mlm_weight=0.1"], 2),
        (["train", "--set", "loss.mini_batch_size=8", "--set", "loss.mini_batch_num_tokens=64"], 2),
        (["train", "--set", "model.shared_dropout_mask=true"], 2),
        (["prepare", "quickstart", "--output", "/dev/null"], 2),
        (["trian"], 2),
        (["prepare", "quickstart", "--data", "no-such.jsonl"], 2),
        (["ablate", "quickstart", "--without", "no-such"], 2),
        (["evaluate", "./no-such"], 2),
        (["evaluate", "owner/name", "--tasks", "no-such"], 2),
        (["evaluate", "owner/name", "--test", "no-such.tsv"], 2),
        (["evaluate", "owner/name", "--output", "/dev/null"], 2),
        (["card", "no-such"], 2),
        (["push", "no-such", "owner/name"], 2),
        (["push", "no-such", "no-owner"], 2),
        (["verify", "no-owner"], 2),
        (["verify", "owner/name", "--timeout", "0"], 2),
        (["verify", "owner/name", "--run", "no-such"], 2),
        (["verify", "owner/name", "--test", "no-such.tsv"], 2),
        (["report", "no-such"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_help_and_bad_arguments_do_not_import_torch(argv: list[str], code: int):
    program = TORCH_FREE.format(argv=["simcse-st", *argv])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "AssertionError" not in done.stderr
    assert done.returncode == code
    if code:
        assert done.stdout == ""
        assert done.stderr.startswith("simcse-st: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["train", "--output", "run", "--resume"],
            "run is a run of another recipe: seed; choose another --output, or ",
        ),
        (["train", "--output", "notes", "--seeds", "1"], "notes is a file"),
        (["train", "--output", "other", "--seeds", "1"], "other holds other things ('mine.txt')"),
        (["ablate", "--without", "hard-negatives", "quickstart", "--output", "other"], "other holds other things"),
    ],
)
def test_what_stands_in_the_folder_is_looked_at_before_torch_is_imported(argv: list[str], message: str, tmp_path: Path):
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(load_recipe("quickstart", ["seed=1"]).to_yaml())
    (tmp_path / "other" / "mine.txt").write_text("")
    (tmp_path / "notes").write_text("")
    program = TORCH_FREE.format(argv=["simcse-st", *argv])
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_importing_the_package_does_not_import_torch():
    program = "import sys, simcse_st; assert simcse_st.__version__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_recipes_are_listed_with_what_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    assert run(["recipes"], monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "allnli", "nli-sup", "pairs",
        "quickstart",
        "sentences", "snli-sup", "snli-sup-no-hard-negatives", "snli-sup-plus", "snli-unsup",
        "snli-unsup-same-mask", "wiki-unsup",
    ]  # fmt: skip
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in lines)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "snli"], "no recipe 'snli': did you mean "),
        (["train", "my.yaml"], "my.yaml: cannot read this recipe: No such file or directory"),
        (["train", "--data", "none.jsonl"], "none.jsonl: no such file"),
        (["train", "--data", ""], "--set: data.train: should have at least 1 character, not the text ''"),
        (["train", "--data", "{x}"], "{x}: no such file"),
        (["train", "--data", "empty.jsonl"], "empty.jsonl: there is no row in it"),
        (["train", "--data", "csv.jsonl"], "csv.jsonl:1: not a JSON object"),
        (
            ["train", "--data", "label.jsonl"],
            "label.jsonl:1: label is 3, but must be entailment, neutral or contradiction",
        ),
        (["train", "--data", "one.jsonl"], "data.train: 1 pairs are fewer than one batch of 64"),
        (["train", "--base", "./nowhere"], "there is no folder './nowhere'"),
        (
            ["train", "--base", "nobody/nothing"],
            "'nobody/nothing' cannot be loaded from the Hugging Face Hub",
        ),
        (
            ["train", "--set", "training.epochs=x"],
            "--set: training.epochs: should be a valid number, not the text 'x'",
        ),
        (["train", "--set", "training.precision=fp16"], "training.precision is fp16, which needs a GPU"),
        (["train", "--output", "mine"], "mine exists already"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_unusable_input_is_one_line_and_exit_code_2(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    Path("csv.jsonl").write_text("premise,hypothesis,label\na,b,0\n")
    Path("label.jsonl").write_text('{"premise": "a", "hypothesis": "b", "label": 3}\n')
    Path("one.jsonl").write_text('{"premise": "a", "hypothesis": "b", "label": "entailment"}\n')
    Path("mine").mkdir()
    Path("mine/thesis.tex").touch()

    assert run(argv, monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"simcse-st: {message}")
    assert captured.err.count("\n") == 1
    assert not Path("runs").exists()


def test_without_arguments_there_is_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    assert run([], monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.strip().startswith("train") for line in lines)


@pytest.mark.slow
def test_ctrl_c_says_so_and_where_the_records_are(tmp_path: Path):
    command = [sys.executable, "-m", "simcse_st", "train", "--set", "training.epochs=50"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        history = tmp_path / "runs" / "quickstart" / "history.jsonl"
        for _ in range(1200):
            if process.poll() is not None or (history.exists() and history.read_text().count("loss") > 1):
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "simcse-st: interrupted; the same command and --resume goes on" in errors
    assert "runs/quickstart keeps what was recorded" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_sigterm_before_training_ends_as_ctrl_c_does(tmp_path: Path):
    command = [sys.executable, "-m", "simcse_st", "train"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        first = process.stderr.readline()  # what it is going to train on; it scores the base next
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, first + errors
    assert errors.splitlines()[-1] == "simcse-st: interrupted; the same command and --resume goes on"
    assert "Traceback" not in errors
    assert not (tmp_path / "runs").exists()


def test_a_line_of_the_log_is_written_in_one_piece_where_a_bar_stood(monkeypatch: pytest.MonkeyPatch, logs: None):
    class Pieces(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    pieces: list[str] = []
    monkeypatch.setattr(sys, "stderr", Pieces())
    quiet_libraries()
    with tqdm(total=2, ncols=40):
        drawn = len(pieces)
        logging.getLogger("simcse_st.training.train").info("step 1 of 2")
        line = pieces.index("step 1 of 2\n", drawn)
        assert line > drawn  # what clears the bar
        assert not "".join(pieces[drawn:line]).strip()
        assert "0/2" in "".join(pieces[line:])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_another_is_dealt_with_is_no_traceback(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def app(**kwargs: object) -> None:
        raise KeyboardInterrupt  # out of typer, which was busy with the first

    monkeypatch.setattr(cli, "app", app)
    assert run(["train"], monkeypatch) == 130
    assert capsys.readouterr().err.startswith("simcse-st: interrupted")
    assert signal.getsignal(number) == signal.SIG_DFL  # one more, as the process ends, is silent too


def test_what_a_checkpoint_has_too_many_is_silent_and_what_does_not_fit_is_not(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: None
):
    said: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    folder = shutil.copytree(tiny_base, tmp_path / "model")
    BertForMaskedLM(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    build_model(folder)
    assert any("LOAD REPORT" in text and "UNEXPECTED" in text for text in said)
    quiet_libraries()
    said.clear()
    build_model(folder)
    SimCSELoss(build_model(tiny_base), mlm_weight=0.1)  # whose head it lacks
    assert said == []
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 64', '"intermediate_size": 63'))
    with pytest.raises(InputError, match="cannot be loaded"):
        build_model(folder)
    assert any("LOAD REPORT" in text and "MISMATCH" in text for text in said)


def test_the_flags_drop_what_belongs_to_the_recipe_s_own_base_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    Path("d.csv").write_text("a,b,1\nc,d,2\n")
    Path("pairs.jsonl").write_text('{"anchor": "a", "positive": "b"}\n' * 9)
    files = ["--set", "data.dev=d.csv", "--set", "data.test=d.csv"]
    # The sample of 100,000 rows is for the recipe's own data; what is wrong here is the batch of 128.
    assert run(["train", "snli-sup", "--data", "pairs.jsonl", *files], monkeypatch) == 2
    assert "9 pairs are fewer than one batch of 128" in capsys.readouterr().err
    # The checksum is for the recipe's own base; what is wrong here is that there is no such folder.
    assert run(["train", "--base", "./nowhere"], monkeypatch) == 2
    assert "there is no folder './nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, True),
        ({"overrides": ["seed=1"]}, True),
        ({"base": "bert-base-uncased"}, False),
        ({"data": "pairs.jsonl"}, False),
        ({"overrides": ["data.train=pairs.jsonl"]}, False),
        ({"overrides": ["model.base=bert-base-uncased"]}, False),
    ],
)
def test_a_licence_is_of_the_recipe_s_own_base_and_data(options: dict, kept: bool):
    recipe = load_recipe("quickstart", **options)
    assert (recipe.card.license == "apache-2.0") == kept
    chosen = [*options.pop("overrides", []), "card.license=mit"]
    again = load_recipe("quickstart", **{**options, "overrides": chosen})
    assert again.card.license == "mit"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    assert run(["--debug", "train", "none.yaml"], monkeypatch) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["evaluate", "x", "--tasks", "devv"], "--tasks: no task 'devv': did you mean 'dev'"),
        (["evaluate", "./nowhere", "--dev", "d.csv", "--test", "d.csv"], "there is no folder './nowhere'"),
        (["evaluate", ".", "--dev", "none.csv"], ". holds no model: it has neither modules.json nor config.json"),
        (["evaluate", "x", "--output", "d.csv"], "--output: d.csv is a file, but must name a folder"),
        (["report", "nowhere"], "nowhere: no results.json, seeds.json, ablation.json or evaluation.json"),
        (["ablate", "quickstart", "--without", "negatives"], "--without: no part 'negatives': did you mean "),
        (["ablate", "quickstart", "--without", "hard-negatives", "--seeds", "1,x"], "--seeds 1,x: give whole numbers"),
        (["train", "--seeds", "1,2", "--set", "seed=3"], "--set seed=3: the seeds of these runs are --seeds 1,2"),
        (["train", "--seeds", ""], "--seeds : give whole numbers with commas"),
        (["train", "--seeds", "1,1"], "--seeds: give different whole numbers"),
        (["prepare", "quickstart", "--data", "none.tsv"], "none.tsv: no such file"),
        (["prepare", "quickstart", "--set", "data.strct=false"], "--set: unknown key 'data.strct': did you mean"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_other_commands_say_what_is_wrong_too(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    Path("d.csv").write_text("a,b,5\nc,d,2\n")
    assert run(argv, monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"simcse-st: {message}")
    assert captured.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.csv"]


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture):
    names = ["m[red]x", "[bold]", "m[/x]", "a:smile:"]
    print_tables([Table("[title]", ["", "n\n[1]"], [[name, "1"] for name in names])])
    out = capsys.readouterr().out
    assert all(text in out for text in (*names, "[title]", "[1]"))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="no oneDNN of its own for GELU")
@pytest.mark.parametrize(("chosen", "missed", "hit"), [(None, 60, 60), ("1024", 30, 90)])
def test_onednn_keeps_few_shapes_unless_told(chosen: str | None, missed: int, hit: int):
    """Thirty shapes, each computed twice in a row, and all once more: with a few kept, all are prepared anew."""
    program = """
from simcse_st.console import set_environment
set_environment()
import torch
for _ in range(2):
    for rows in range(64, 94):
        for _ in range(2):
            torch.nn.functional.gelu(torch.ones(rows, 64))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONEDNN_")}
    environment |= {"ONEDNN_VERBOSE": "profile_create"} | (
        {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": chosen} if chosen else {}
    )
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert (output.count("create:cache_miss"), output.count("create:cache_hit")) == (missed, hit)
