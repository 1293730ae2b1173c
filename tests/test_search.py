"""Exact search by any models side by side, with the embeddings kept on the disk."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from helpers import jsonl, sentences
from simcse_st import InputError, Recipe, search, train
from simcse_st.cli import _run
from simcse_st.evaluation import search as searching

TEXTS = sentences(300, seed=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "simcse-st" / "index"


def brute_force(folder: Path, query: str, texts: list[str], top: int) -> list[tuple[str, float]]:
    model = SentenceTransformer(str(folder))
    vectors = model.encode(texts, normalize_embeddings=True)
    scores = (vectors @ model.encode([query], normalize_embeddings=True)[0]).round(6)
    return [(texts[number], float(scores[number])) for number in np.argsort(-scores, kind="stable")[:top]]


@pytest.fixture
def saved(tiny_model: SentenceTransformer, tmp_path: Path) -> Path:
    tiny_model.save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


def test_it_finds_what_numpy_finds_in_its_order(saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(searching, "_BLOCK", 64)
    queries = [TEXTS[7], "some other words", TEXTS[200]]
    found = search(saved, TEXTS, queries, top=20)
    for query, answers in zip(queries, found, strict=True):
        (of_model,) = answers.by_model.values()
        expected = brute_force(saved, query, TEXTS, 20)
        assert [one.text for one in of_model] == [text for text, _ in expected]
        assert [one.score for one in of_model] == pytest.approx([score for _, score in expected], abs=1e-5)
    (kept,) = cache.iterdir()
    # The second time nothing is embedded but the query.
    before = kept.stat().st_mtime_ns
    monkeypatch.setattr(searching, "_embed", None)
    assert search(saved, TEXTS, queries, top=20) == found
    assert kept.stat().st_mtime_ns == before


def test_of_equally_near_sentences_the_first_comes_first(saved: Path):
    # The encoder cannot tell these: it does not know how many spaces there are.
    texts = ["b c", "a  b", "a   b", "a b", "c d", "a b c"]
    (found,) = search(saved, texts, ["a b"], top=2)
    (answers,) = found.by_model.values()
    assert [one.text for one in answers] == ["a  b", "a   b"]


def test_a_run_and_another_model_side_by_side(tiny_recipe: Recipe, tiny_base: Path, tmp_path: Path, cache: Path):
    run = train(tiny_recipe.changed(training__max_steps=2), tmp_path / "run")
    (found,) = search([run.folder, f"{tiny_base}:mean"], "dev", ["a b c"], top=3)
    assert len(found.by_model) == 2
    assert all(len(answers) == 3 for answers in found.by_model.values())
    assert len([*(run.folder / "index").iterdir()]) == len([*cache.iterdir()]) == 1
    dev = {text for line in Path(str(tiny_recipe.data.dev)).read_text().splitlines() for text in line.split(",")[:2]}
    assert {one.text for answers in found.by_model.values() for one in answers} <= dev
    table = searching.answers_table(found)
    assert (table.title, len(table.columns), len(table.rows)) == ("a b c", 3, 3)
    train(tiny_recipe.changed(training__max_steps=1), tmp_path / "run", overwrite=True)
    assert not (run.folder / "index").exists()


def test_two_models_of_one_name_are_both_shown(saved: Path, tiny_base: Path, tmp_path: Path):
    other = tmp_path / "other" / saved.parent.name / "model"
    model = SentenceTransformer(str(saved))
    model.truncate_dim = 4
    model.save_pretrained(str(other))
    (found,) = search([saved, other], TEXTS, ["a b c"], top=3)
    assert len(found.by_model) == 2
    one, two = found.by_model
    assert two == f"{one} (2)"
    first, second = found.by_model.values()
    assert first != second


def test_the_command(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    data = jsonl(tmp_path / "pairs.jsonl", [{"anchor": TEXTS[i], "positive": TEXTS[i + 20]} for i in range(20)])
    (tmp_path / "queries.txt").write_text(f"{TEXTS[3]}\n\nsome words\n")
    command = ["simcse-st", "search", str(saved), "--in", data, "--json", "--top", "2"]
    monkeypatch.setattr("sys.argv", [*command, TEXTS[25], "--queries", str(tmp_path / "queries.txt")])
    assert not _run()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["query"] for line in lines] == [TEXTS[25], TEXTS[3], "some words"]
    for line in lines:
        (answers,) = line["by_model"].values()
        assert len(answers) == 2
        assert line["query"] in (answers[0]["text"], "some words")
    # Queries that come in by the standard input.
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TEXTS[1]}\n\n{TEXTS[2]}"))
    assert not _run()
    assert [json.loads(line)["query"] for line in capsys.readouterr().out.splitlines()] == [TEXTS[1], TEXTS[2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--in", "nowhere.txt", "a"], "nowhere.txt: no such file"),
        (["--in", "dev", "a"], "is no run, which alone has a dev: name a file"),
        (["--in", "DATA", "--top", "0", "a"], "--top 0: ask for one answer at least"),
        (["--in", "DATA", " "], "a query must be a sentence, not blank"),
        (["--in", "DATA", "--queries", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["--in", "DATA", "--beside", "nowhere/model:cls/x", "a"], "nowhere/model"),
    ],
)
def test_what_cannot_be_used_is_said(
    arguments: list[str], message: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    data = tmp_path / "sentences.txt"
    data.write_text("a b\nc d\n")
    monkeypatch.setattr(
        "sys.argv", ["simcse-st", "search", str(saved), *[str(data) if one == "DATA" else one for one in arguments]]
    )
    assert _run() == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "cache").exists()  # known before anything is embedded


def test_a_broken_index_is_named(saved: Path, cache: Path):
    search(saved, TEXTS, ["a"])
    (kept,) = cache.iterdir()
    np.save(kept, np.zeros((2, 3), dtype=np.float32))
    with pytest.raises(InputError, match="is not the index that its name says: delete it"):
        search(saved, TEXTS, ["a"])
