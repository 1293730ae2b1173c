"""The card: nothing in it that is not in the records, whatever stands in the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from simcse_st import InputError, Recipe, train
from simcse_st.card import load_template, markdown_text, render_card
from simcse_st.publishing import write_card

HOSTILE = [
    "a | b | c", "two\nlines", "old\rends\r\n", "`code` ```fence```", "<b>bold</b> <script>alert(1)</script>", "# heading",
    "emoji 🧪 and 東京", "مرحبا بالعالم", "x" * 10_000, "[link](http://x.example) ![i](y)", "$math$ and ~~strike~~ __u__",
    "--- \u2028 *** &amp; &#124; \\| trailing\\", "null\x00byte",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "tiny"


@pytest.fixture
def records(folder: Path, tiny_recipe: Recipe) -> dict:
    """The records of a finished run, made once."""
    if not folder.exists():
        train(tiny_recipe, folder)
    read = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in ("results", "manifest", "environment", "evaluation")
    }
    recipe = tiny_recipe.model_dump(mode="json")
    recipe["card"]["examples"] = True
    return {"recipe": recipe, **read}


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


def test_the_card_of_a_run_says_what_its_records_say(records: dict, folder: Path):
    card = (folder / "model" / "README.md").read_text()
    records["recipe"]["card"]["examples"] = None
    assert card == render_card(load_template(), **records)
    results, evaluation = records["results"], records["evaluation"]["models"][0]["tasks"]
    scores = tables(card)[0]
    assert scores[2] == ["this model", f"{results['dev']['spearman']:.2f}", f"{results['test']['spearman']:.2f}"]
    assert len(scores) == 3  # on 50 pairs there is no gap to the paper
    assert f"{evaluation['geometry']['alignment']:.3f}" in card
    assert f"{evaluation['retrieval']['mrr']:.3f}" in card
    assert "40 sentence pairs, 65.0% of which have a hard negative" in card
    assert records["manifest"]["train"]["prepared_sha256"] in card
    assert records["manifest"]["train"]["sources"][0]["sha256"] in card
    assert str(folder.parent) not in card

    data = ModelCard(card).data
    assert data.library_name == "sentence-transformers"
    assert data.pipeline_tag == "sentence-similarity"
    assert data.model_name == "tiny"
    values = {(result.dataset_type, result.metric_type): result.metric_value for result in data.eval_results}
    assert values["test", "spearman_cosine"] == results["test"]["spearman"]
    assert values["dev", "pearson_cosine"] == results["dev"]["pearson"]


def test_what_has_no_record_is_left_out(records: dict):
    bare = render_card(load_template(), **{**records, "evaluation": None})
    assert "## Geometry" not in bare
    assert "## Limitations" not in bare
    assert "## Architecture" not in bare
    assert "None" not in bare
    assert "undefined" not in bare


def test_on_stsb_the_card_states_the_gap_to_the_paper(records: dict):
    results = json.loads(json.dumps(records["results"]))
    results["dev"].update(spearman=82.05, pairs=1500)
    results["test"].update(spearman=78.75, pairs=1379)
    manifest = json.loads(json.dumps(records["manifest"]))
    manifest["dev"]["mean_gold"], manifest["test"]["mean_gold"] = 2.364, 2.608
    scores = tables(render_card(load_template(), **{**records, "results": results, "manifest": manifest}))[0]
    assert scores[3:] == [["paper, supervised BERT-base (reported)", "86.20", "84.25"], ["gap", "-4.15", "-5.50"]]


def test_dev_pairs_of_a_user_s_file_are_not_quoted(records: dict):
    recipe, manifest = records["recipe"], json.loads(json.dumps(records["manifest"]))
    pair = records["evaluation"]["models"][0]["tasks"]["mistakes"]["underrated"][0]
    assert pair["sentence1"] in render_card(load_template(), **records)
    recipe["card"]["examples"] = None
    private = render_card(load_template(), **records)
    assert pair["sentence1"] not in private
    assert "## Limitations" not in private
    manifest["dev"]["sources"] = [{"dataset": "owner/name", "split": "dev", "revision": "0"}]
    assert pair["sentence1"] in render_card(load_template(), **{**records, "manifest": manifest})


def test_the_card_s_own_keys(records: dict):
    own = {
        **records["recipe"]["card"],
        "authors": ["A. Author", "B. Author"],
        "license": "apache-2.0",
        "language": ["en", "de"],
        "notes": "Made for *us*.",
    }
    card = render_card(load_template(), **{**records, "recipe": {**records["recipe"], "card": own}})
    data = ModelCard(card).data
    assert (data.license, data.language) == ("apache-2.0", ["en", "de"])
    assert "A. Author, B. Author" in card
    assert "Made for *us*." in card


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_sentences_of_any_kind_are_shown_and_break_nothing(text: str, records: dict):
    evaluation = json.loads(json.dumps(records["evaluation"]))
    pair = {"sentence1": text, "sentence2": text, "gold": 0.5, "cosine": 0.9}
    evaluation["models"][0]["tasks"]["mistakes"] = {"overrated": [pair], "underrated": [pair]}
    card = render_card(load_template(), **{**records, "evaluation": evaluation})
    found = tables(card)
    assert len(found) == len(tables(render_card(load_template(), **records)))
    assert found[-1][0] == ["gold (0 to 5)", "cosine", "", ""]
    for row in found[-1][1:]:
        assert row[:2] == ["0.5", "0.90"]
        assert len(row) == 4
        shown = row[2].strip("\u2068\u2069")
        expected = " ".join(text.replace("\x00", " ").replace("\u2028", " ").split())
        assert shown == (expected if len(expected) <= 160 else f"{expected[:157]}...")
    assert "<script>" not in card
    assert ModelCard(card).data.model_name == "tiny"


def test_the_card_is_written_again_from_the_records(records: dict, folder: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(folder, run)
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
    with pytest.raises(InputError, match="its records do not make a card|results.json"):
        write_card(run)
    (run / "results.json").unlink()
    with pytest.raises(InputError, match="results.json: cannot be read as a record"):
        write_card(run)
    with pytest.raises(InputError, match="nowhere is no folder of a finished run"):
        write_card(tmp_path / "nowhere")
    assert not list(run.rglob("*.part"))


def test_right_to_left_text_is_isolated():
    arabic = HOSTILE[7].split()[0]
    assert markdown_text(arabic) == f"\u2068{arabic}\u2069"
    assert markdown_text("plain") == "plain"
