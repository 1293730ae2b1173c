"""The card: nothing in it that is not in the records, whatever stands in the data."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData

from simcse_st import InputError, Recipe, Run, load_recipe, train, write_card
from simcse_st.card import compose_card, markdown_text
from simcse_st.evaluation.evaluators import HeldOutEvaluator
from simcse_st.evaluation.records import AblatedPart, Ablation, Evaluation, SameData, SeedRun, Seeds, Spread
from simcse_st.identity import weights_sha256
from simcse_st.records import Manifest, Record, Results

HOSTILE = [
    "a | b | c", "two\nlines", "old\rends\r\n", "`code` ```fence```", "<b>bold</b> <script>alert(1)</script>",
    "# heading", "emoji 🧪 and 東京", "مرحبا بالعالم", "x" * 10_000, "[link](http://x.example) ![i](y)",
    "$math$ and ~~strike~~ __u__",
    "--- \u2028 *** &amp; &#124; \\| trailing\\", "null\x00byte", "it's \"quoted\" &#x27;",
    "1. item", "\u202ebackwards",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "tiny"


@pytest.fixture
def finished(folder: Path, tiny_recipe: Recipe) -> Run:
    """A finished run, made once; not to be changed."""
    if not folder.exists():
        train(tiny_recipe, folder)
    return Run(folder)


@pytest.fixture
def own(finished: Run, tmp_path: Path) -> Run:
    """A copy of it, whose card quotes dev pairs."""
    copy = tmp_path / "own" / "tiny"
    shutil.copytree(finished.folder, copy)
    (copy / "recipe.yaml").write_text(finished.recipe.changed(card__examples=True).to_yaml())
    return Run(copy)


def change(run: Run, kind: type[Record], change: Callable[[Any], None]) -> Run:
    """Changes a record of a run; gives the run anew."""
    values = json.loads(run.read(kind).to_json())
    change(values)
    run.write(kind.model_validate(values))
    return Run(run.folder)


def tables(card: str) -> list[list[list[str]]]:
    """The tables of a card as rows of the texts of their cells, as a Markdown library sees them."""
    found: list[list[list[str]]] = []
    tokens = MarkdownIt("commonmark").enable("table").parse(card.split("---\n", 2)[2])
    for number, token in enumerate(tokens):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("th_open", "td_open"):
            inline = tokens[number + 1]
            found[-1][-1].append("".join(child.content for child in inline.children or []))
    return found


def test_the_card_of_a_run_says_what_its_records_say(finished: Run):
    card = (finished.model_path / "README.md").read_text()
    assert card == compose_card(finished)
    results, evaluation = finished.results, finished.read(Evaluation).models[0].tasks
    scores = tables(card)[0]
    assert scores[1] == ["before training", f"{results.base['dev']:.2f}", f"{results.base['test']:.2f}"]
    assert scores[2] == ["this model", f"{results.dev.spearman:.2f}", f"{results.test.spearman:.2f}"]
    assert len(scores) == 3  # on 50 pairs there is no gap to the paper
    assert f"{evaluation.geometry.alignment:.3f}" in card
    assert f"{evaluation.retrieval.mrr:.3f}" in card
    assert "40 sentence pairs, 65.0% of which have a hard negative" in card
    assert finished.manifest.train.prepared_sha256 in card
    assert finished.manifest.train.sources[0].sha256 in card
    assert str(finished.folder.parent) not in card

    data = ModelCard(card).data
    assert data.library_name == "sentence-transformers"
    assert data.pipeline_tag == "sentence-similarity"
    assert data.model_name == "tiny"
    values = {(result.dataset_args["role"], result.metric_type): result.metric_value for result in data.eval_results}
    assert values["test", "spearman_cosine"] == results.test.spearman / 100
    assert values["dev", "pearson_cosine"] == results.dev.pearson / 100


def test_what_has_no_record_is_left_out(own: Run):
    (own.folder / "evaluation.json").unlink()
    bare = compose_card(own)
    assert "## Geometry" not in bare
    assert "## Evaluation" not in bare
    assert "## Limitations" not in bare
    assert "## Architecture" not in bare
    assert "None" not in bare
    assert "undefined" not in bare


def test_on_stsb_the_card_states_the_gap_to_the_paper(own: Run):
    def as_on_stsb(manifest: dict) -> None:
        manifest["dev"].update(mean_gold=2.364, pairs=1500)
        manifest["test"].update(mean_gold=2.608, pairs=1379)

    def score(results: dict) -> None:
        results["dev"].update(spearman=82.05, n=1500)
        results["test"].update(spearman=78.75, n=1379)

    scores = tables(compose_card(change(change(own, Manifest, as_on_stsb), Results, score)))[0]
    paper = ["paper, supervised BERT-base (reported)", "86.20", "84.25"]
    assert scores[3:] == [paper, ["gap to the paper", "-4.15", "-5.50"]]


def test_dev_pairs_of_a_user_s_file_are_not_quoted(own: Run):
    sentence = own.read(Evaluation).models[0].tasks.mistakes.underrated[0].sentence1
    assert sentence in compose_card(own)
    unsaid = own.recipe.changed(card__examples=None)
    private = compose_card(own, recipe=unsaid)
    assert sentence not in private
    assert "## Limitations" not in private
    source = {"dataset": "owner/name", "split": "dev", "revision": "0"}
    public = change(own, Manifest, lambda manifest: manifest["dev"].update(sources=[source]))
    assert sentence in compose_card(public, recipe=unsaid)


def test_the_card_s_own_keys(own: Run):
    team = ["C. Collector, *data*", "D. | Developer", "1. O'Neill"]
    recipe = own.recipe.changed(
        card__authors=["A. Author", "B. Author"],
        card__license="apache-2.0",
        card__language=["en", "de"],
        card__notes="Made for *us*.",
        card__team=team,
    )
    card = compose_card(own, recipe=recipe)
    data = ModelCard(card).data
    assert (data.license, data.language) == ("apache-2.0", ["en", "de"])
    assert "A. Author, B. Author" in card
    assert "Made for *us*." in card
    items = [token.content for token in MarkdownIt().parse(card.partition("## Team")[2]) if token.type == "inline"]
    assert [html.unescape(item) for item in items] == team


def test_the_metadata_are_those_of_sentence_transformers_own_cards(finished: Run):
    stock = SentenceTransformerModelCardData(local_files_only=True)
    data = ModelCard(compose_card(finished)).data
    assert data.library_name == stock.library_name
    assert data.pipeline_tag == stock.pipeline_tag
    assert data.tags[: len(stock.tags)] == stock.tags
    assert {"generated_from_trainer", "dataset_size:40", "loss:SimCSELoss"} <= set(data.tags)
    assert data.metrics == ["spearman_cosine", "pearson_cosine"]
    assert {result.task_type for result in data.eval_results} == {"semantic-similarity"}
    assert data["simcse_st"] == {
        "stack": "Transformer -> Pooling(cls) -> Normalize",
        "weights_sha256": finished.results.weights_sha256,
        "files": finished.results.files,
    }
    assert data["simcse_st"]["files"].keys() >= {"modules.json", "model.safetensors", "1_Pooling/config.json"}
    assert "README.md" not in data["simcse_st"]["files"]
    assert data.eval_results[0].dataset_args == {
        "role": "dev",
        "pairs": 50,
        "pairs_sha256": finished.manifest.dev.pairs_sha256,
    }


def put_groups_beside(run: Run) -> None:
    """Puts the records of two seeds and of an ablation beside a run."""
    manifest = run.manifest
    data = SameData(
        prepared_sha256=manifest.train.prepared_sha256,
        dev_pairs=manifest.dev.pairs,
        test_pairs=manifest.test.pairs,
        dev_pairs_sha256=manifest.dev.pairs_sha256,
        test_pairs_sha256=manifest.test.pairs_sha256,
    )
    rest = {"best_step": 1, "dev_of_step": {}, "hard_negatives": 1, "masked_cells": 0, "data": data, "packages": {}}
    runs = [SeedRun(seed=seed, dev=1.5, test=70.0, **rest) for seed in (1, 2)]
    spread, of_test = Spread(mean=1.5, sd=0.25, n=2), Spread(mean=70.0, sd=1.0, n=2)
    part = AblatedPart(
        key="data.hard_negatives", value=False, seeds=[], difference={"dev": spread, "test": spread}, steps=[]
    )
    about = {"recipe": "tiny", "data": data, "packages": {}}
    seeds = Seeds(seeds=runs, dev=spread, test=of_test, **about)
    ablation = Ablation(full=runs, without={"hard-negatives": part}, **about)
    for record, name, first in ((seeds, "seeds", "seed-1"), (ablation, "ablation", "full/seed-1")):
        group = Run(run.folder.with_name(f"{run.folder.name}-{name}"))
        group.write(record)
        (group.folder / first).mkdir(parents=True)
        (group.folder / first / "recipe.yaml").write_text(run.recipe.changed(seed=1, name="tiny-seed-1").to_yaml())


def test_what_it_is_compared_with(own: Run):
    def compare(evaluation: dict) -> None:
        (mine,) = evaluation["models"]
        other = json.loads(json.dumps(mine))
        other.update(name="acme/other:mean", revision="0" * 40, model_sha256="0")
        other["tasks"]["dev"]["spearman"], other["tasks"]["test"]["spearman"] = 12.345, -6.789
        other["tasks"]["geometry"]["uniformity"] = -1.25
        # Nobody else can have what is in a folder, and of other pairs there is no comparison.
        local = {**other, "name": "a/folder", "revision": None}
        elsewhere = {**other, "name": "acme/elsewhere", "tasks": json.loads(json.dumps(other["tasks"]))}
        elsewhere["tasks"]["dev"]["pairs_sha256"] = "0"
        evaluation["models"] += [other, local, elsewhere]
        mine["tasks"]["sts12"] = {"all": 70.1, "mean": 60.0, "pearson_all": 1.0, "n": 3108}
        mine["tasks"]["sick-r"] = {"spearman": 72.3, "pearson": 1.0, "n": 4927}

    put_groups_beside(own)
    run = change(change(own, Evaluation, compare), Results, lambda results: results.update(base_model="acme/base"))
    card = compose_card(run, "alice/m")
    found = tables(card)
    assert found[0][2] == ["acme/other:mean", "12.35" if f"{12.345:.2f}" == "12.35" else "12.34", "-6.79"]
    assert [row[0] for row in found[0][1:]] == ["before training", "acme/other:mean", "this model"]
    assert ["measure", "this model", "acme/other:mean", "n"] in [table[0] for table in found]
    assert any(row[0].startswith("uniformity") and row[2] == "-1.250" for table in found for row in table)
    assert ["", "SICK-R"] not in [table[0] for table in found]
    assert ["", "STS12", "SICK-R"] in [table[0] for table in found]
    assert ["hard negatives", "data.hard_negatives", "+1.50 ± 0.25", "+1.50 ± 0.25"] in [
        row for table in found for row in table
    ]
    assert "Under 2 seeds (1, 2) the recipe gives dev 1.50 ± 0.25 and test 70.00 ± 1.00" in card
    assert 'SentenceTransformer("alice/m")' in card
    assert "from [acme/base](https://huggingface.co/acme/base)" in card
    assert ModelCard(card).data.base_model == "acme/base"


def test_groups_of_other_recipes_or_data_are_not_this_run_s(own: Run):
    put_groups_beside(own)
    assert "Under 2 seeds" in compose_card(own)
    other = own.recipe.changed(loss__temperature=0.1)
    assert "Under 2 seeds" not in compose_card(own, recipe=other)
    assert "## Ablations" not in compose_card(own, recipe=other)
    for part, key in (("train", "prepared_sha256"), ("dev", "pairs_sha256"), ("test", "pairs_sha256")):
        before = own.manifest.model_dump()[part][key]
        changed = change(own, Manifest, lambda manifest: manifest[part].update({key: "0" * 64}))  # noqa: B023
        assert "Under 2 seeds" not in compose_card(changed)
        back = change(own, Manifest, lambda manifest: manifest[part].update({key: before}))  # noqa: B023
        assert "Under 2 seeds" in compose_card(back)


def test_citations_are_of_what_is_in_it(own: Run):
    def from_the_hub(manifest: dict) -> None:
        manifest["train"]["sources"] = [{"dataset": "stanfordnlp/snli", "split": "train", "revision": "0"}]
        manifest["test"]["sources"] = [{"dataset": "sentence-transformers/stsb", "split": "test", "revision": "0"}]

    assert "bowman" not in compose_card(own)
    card = compose_card(change(own, Manifest, from_the_hub))
    keys = re.findall(r"^@inproceedings{(.*),$", card, re.MULTILINE)
    assert keys == [
        "gao-etal-2021-simcse",
        "reimers-gurevych-2019-sentence",
        "cer-etal-2017-semeval",
        "bowman-etal-2015-large",
    ]
    assert ModelCard(card).data.datasets == ["stanfordnlp/snli"]


def test_training_sentences_are_shown_on_request_only(own: Run, tiny_recipe: Recipe, tmp_path: Path):
    first = (Path(tiny_recipe.data.train).read_text().splitlines())[:3]
    rows = [json.loads(line) for line in first]
    assert rows[0]["anchor"] not in compose_card(own)
    shown = (train(tiny_recipe.changed(card__samples=True), tmp_path / "run").model_path / "README.md").read_text()
    table = next(table for table in tables(shown) if table[0] == ["anchor", "positive", "hard negatives"])
    assert table[1:] == [[row["anchor"], row["positive"], " / ".join(row["negative"])] for row in rows]
    assert rows[0]["negative"] == []  # none in row 0


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_training_sentences_of_any_kind_break_nothing(text: str, own: Run):
    def show(manifest: dict) -> None:
        manifest["train"]["samples"] = [[text, text, []], [text, text, [text, text]]]
        manifest["train"]["sources"][0]["file"] = text

    before = len(tables(compose_card(own)))
    card = compose_card(change(own, Manifest, show), recipe=own.recipe.changed(card__samples=True))
    found = tables(card)
    table = next(table for table in found if table[0] == ["anchor", "positive", "hard negatives"])
    assert [len(row) for row in table] == [3, 3, 3]
    assert table[1][2] == ""
    assert len(found) == before + 1
    assert "<script>" not in card
    assert ModelCard(card).data.model_name == "tiny"


def test_the_command_runs_the_same_recipe(finished: Run, tiny_recipe: Recipe):
    card = (finished.model_path / "README.md").read_text()
    command = shlex.split(card.partition("```bash\n")[2].partition("```")[0].replace("\\\n", ""))
    assert command[:2] == ["simcse-st", "train"]
    again = load_recipe(command[2], command[4::2])
    assert set(command[3::2]) == {"--set"}
    # Where things are is this machine's business, and what a local base is called, too.
    assert (again.data.train, again.data.dev, again.data.test) == ("train.jsonl", "dev.csv", "test.csv")
    assert again.model.base == "path/to/the/base"
    same = {
        "data": tiny_recipe.data,
        "model": tiny_recipe.model,
        "description": tiny_recipe.description,
        "card": tiny_recipe.card,
    }
    assert again.model_copy(update=same) == tiny_recipe
    assert tiny_recipe.model.base not in card
    assert Path(tiny_recipe.model.base).name not in card


def test_the_kept_step_s_scores_stand_everywhere(tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Dev 70, 80, 60: the card says 80, in text and metadata, written during the run or after it."""
    scores, weights = iter([50.0, 70.0, 80.0, 60.0]), {}
    score = HeldOutEvaluator.__call__

    def scripted(self: HeldOutEvaluator, model, *arguments, **options):
        metrics = score(self, model, *arguments, **options)
        if self.texts[0] != scripted.first:
            return metrics
        value = next(scores)
        weights[value] = weights_sha256(model)
        return {**metrics, "spearman": value}

    scripted.first = Path(tiny_recipe.data.dev).read_text().partition(",")[0]
    monkeypatch.setattr(HeldOutEvaluator, "__call__", scripted)
    training = tiny_recipe.training.model_copy(update={"max_steps": 9, "eval_steps": 3, "early_steps": None})
    result = train(tiny_recipe.model_copy(update={"training": training}), tmp_path / "run")
    assert not list(scores)
    during = (tmp_path / "run" / "model" / "README.md").read_text()
    assert write_card(tmp_path / "run").read_text() == during
    assert "| **this model** | **80.00** |" in during
    assert "The weights are those of step 6 of 9" in during
    values = {(r.dataset_args["role"], r.metric_type): r.metric_value for r in ModelCard(during).data.eval_results}
    assert values["dev", "spearman_cosine"] == 0.8
    assert "70.00" not in during
    assert "60.00" not in during
    assert weights_sha256(result.load_model("cpu")) == weights[80.0] != weights[60.0]
    assert ModelCard(during).data["simcse_st"]["weights_sha256"] == weights[80.0]


def test_a_card_that_cannot_be_written_fails_the_command(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("simcse_st.card.load_template", lambda: "{{ results.nothing }}")
    with pytest.raises(InputError, match="its records do not make a card"):
        train(tiny_recipe, tmp_path / "run")
    with pytest.raises(InputError, match="its records do not make a card"):
        write_card(tmp_path / "run")


def test_the_card_s_keys_are_changed_afterwards(finished: Run, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    before = (run / "recipe.yaml").read_text()
    card = write_card(run, ["card.license=mit", "card.authors=[A. Author]"]).read_text()
    assert ModelCard(card).data.license == "mit"
    after = load_recipe(run / "recipe.yaml")
    assert (after.card.license, after.card.authors) == ("mit", ["A. Author"])
    assert write_card(run).read_text() == card
    for override, message in [
        ("seed=1", "--set seed=1: the run is made; only card.KEY=VALUE can be changed"),
        ("card.samples=true", "card.samples: no rows were recorded: it must be set before training"),
        ("card.licence=mit", "unknown key 'card.licence': did you mean 'card.license'"),
        ("card.license=Apache 2.0", "card.license: "),
        ("card.language=[english]", "card.language"),
        ("card.notes='a <!-- b'", "card.notes: a comment <!-- is not closed by -->"),
        ('card.notes="a\\n```\\nb"', "card.notes: a code block is not closed"),
    ]:
        with pytest.raises(InputError, match=re.escape(message)):
            write_card(run, [override])
    assert write_card(run, ["card.license=null", "card.authors=[]"])
    assert (run / "recipe.yaml").read_text() == before


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_sentences_of_any_kind_are_shown_and_break_nothing(text: str, own: Run):
    pair = {"sentence1": text, "sentence2": text, "gold": 0.5, "cosine": 0.9}

    def quote(evaluation: dict) -> None:
        evaluation["models"][0]["tasks"]["mistakes"] = {"overrated": [pair], "underrated": [pair]}

    before = len(tables(compose_card(own)))
    card = compose_card(change(own, Evaluation, quote))
    found = tables(card)
    assert len(found) == before
    assert found[-1][0] == ["gold (0 to 5)", "cosine", "sentence", "sentence"]
    for row in found[-1][1:]:
        assert row[:2] == ["0.5", "0.90"]
        assert len(row) == 4
        shown = row[2].strip("\u2068\u2069")
        expected = " ".join(re.sub("[\x00\u2028\u202e]", " ", text).split())
        assert shown == (expected if len(expected) <= 160 else f"{expected[:157]}...")
    assert "<script>" not in card
    assert ModelCard(card).data.model_name == "tiny"


def test_the_card_is_written_again_from_the_records(finished: Run, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    card = run / "model" / "README.md"
    before = card.read_text()
    card.unlink()
    assert write_card(run) == card
    assert card.read_text() == before
    # An evaluation of another model is not this card's.
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation["models"][0]["model_sha256"] = "0"
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    assert "## Geometry" not in write_card(run).read_text()
    (run / "results.json").write_text("{}")
    with pytest.raises(InputError, match="results.json: not a record of this command: recipe: Field required"):
        write_card(run)
    (run / "results.json").unlink()
    with pytest.raises(InputError, match="is of a run that did not end"):
        write_card(run)
    with pytest.raises(InputError, match="nowhere is no run folder: it has no recipe.yaml"):
        write_card(tmp_path / "nowhere")
    assert not list(run.rglob("*.part"))


def test_right_to_left_text_is_isolated():
    arabic = HOSTILE[7].split()[0]
    assert markdown_text(arabic) == f"\u2068{arabic}\u2069"
    assert markdown_text("plain") == "plain"
