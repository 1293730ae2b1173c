"""Retrieval sets as dev and test: rows, BEIR's tables, rows held out of the training data."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from helpers import jsonl, sentences
from publisher import ALL, Publisher, names
from simcse_st import InputError, Recipe, Run, evaluate, train
from simcse_st.data import RetrievalSet, load_held_out, load_training_data
from simcse_st.data.held_out import load_data
from simcse_st.evaluation.evaluators import RetrievalEvaluator
from simcse_st.evaluation.report import Pairs, gap_to_paper, report, report_table
from simcse_st.evaluation.tables import run_table
from simcse_st.recipe import DataSection
from simcse_st.references import HoldOut, RetrievalCorpus, RetrievalRows


def rows(count: int, seed: int = 0) -> list[dict]:
    texts = sentences(3 * count, seed)
    parts = zip(texts[:count], texts[count : 2 * count], texts[2 * count :], strict=True)
    return [{"anchor": a, "positive": p, "negative": [n] if i % 3 else []} for i, (a, p, n) in enumerate(parts)]


def stock(held: RetrievalSet) -> InformationRetrievalEvaluator:
    """Sentence Transformers' own evaluator of the same set, its passages by the same ids."""
    mine = RetrievalEvaluator(held)
    queries = {str(number): query for number, query in enumerate(held.queries)}
    corpus = dict(zip(mine.corpus_ids, mine.corpus, strict=True))
    return InformationRetrievalEvaluator(queries, corpus, mine.relevant_docs, write_csv=False)


def test_it_is_sentence_transformers_own_evaluator(tiny_model: SentenceTransformer, tmp_path: Path):
    """More queries than are ranked at a time, several right answers, ties between copies that differ in case."""
    given = rows(300)
    given += [{"anchor": given[i]["anchor"], "positive": given[i + 1]["positive"]} for i in range(20)]
    given += [{"anchor": row["anchor"], "positive": row["positive"].upper()} for row in given[40:60]]
    held = load_held_out(RetrievalRows(retrieval=jsonl(tmp_path / "dev.jsonl", given)), "dev")
    assert isinstance(held, RetrievalSet)
    assert (held.facts.queries, held.facts.relevant) == (300, 340)
    found, expected = RetrievalEvaluator(held)(tiny_model), stock(held)(tiny_model)
    for name in ("ndcg@10", "mrr@10", "map@100", "accuracy@1", "recall@5", "precision@10"):
        assert found[name] / 100 == pytest.approx(expected[f"cosine_{name}"], abs=1e-6), name
    assert 0 < found["ndcg@10"] < 100


def test_ranks_by_hand():
    """One query whose own text is a passage, and does not count."""
    held = RetrievalSet(["q", "r"], ["a", "b", "c", "q"], [{1}, {0, 2}], None)  # type: ignore[arg-type]
    vectors = {"q": 0.0, "r": 0.5, "a": 0.1, "b": 0.3, "c": 0.6}  # angles
    unit = torch.tensor([[math.cos(angle), math.sin(angle)] for angle in vectors.values()])
    found = RetrievalEvaluator(held).score(unit, {text: number for number, text in enumerate(vectors)})
    # q: a, then b, which is right; r: c, which is right, then b, then a, which is right.
    assert found["accuracy@1"] == 50
    assert found["mrr@10"] == pytest.approx(100 * (1 / 2 + 1) / 2)
    assert found["map@100"] == pytest.approx(100 * (1 / 2 + (1 + 2 / 3) / 2) / 2)
    ndcg = [1 / math.log2(3), (1 + 1 / math.log2(4)) / (1 + 1 / math.log2(3))]
    assert found["ndcg@10"] == pytest.approx(100 * sum(ndcg) / 2)
    assert found["recall@1"] == pytest.approx(100 * (0 + 1 / 2) / 2)


def test_beir_s_tables(tmp_path: Path):
    corpus = [{"_id": "p1", "title": "T", "text": "one"}, {"_id": 2, "text": "two"}, {"_id": "p3", "text": "T one"}]
    jsonl(tmp_path / "corpus.jsonl", corpus)
    jsonl(tmp_path / "queries.jsonl", [{"_id": "a", "text": "first"}, {"_id": "b", "text": "second"}])
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\na\tp1\t1\na\t2\t0\n")
    parts = {name: str(tmp_path / f"{name}.jsonl") for name in ("corpus", "queries")}
    held = load_held_out(RetrievalCorpus(**parts, relevant=str(tmp_path / "qrels.tsv")), "test")
    assert isinstance(held, RetrievalSet)
    assert (held.queries, held.passages, held.relevant) == (["first"], ["T one", "two"], [{0}])
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\na\tp9\t1\n")
    with pytest.raises(InputError, match=r"qrels.tsv:2: no passage has the id 'p9'"):
        load_held_out(RetrievalCorpus(**parts, relevant=str(tmp_path / "qrels.tsv")), "test")


def test_a_hold_out_shares_no_text_with_what_is_trained_on(tmp_path: Path):
    given = rows(60)
    given += [{"anchor": given[i]["anchor"], "positive": f"another {i}"} for i in range(30)]  # anchors of two pairs
    given += [{"anchor": f"new {i}", "positive": given[i]["positive"]} for i in range(60)]  # positives of two anchors
    path = jsonl(tmp_path / "all.jsonl", given)
    data = DataSection(train=path, dev=HoldOut(hold_out=20), test=HoldOut(hold_out=10, seed=1))
    training, held = load_data(data)
    trained = set(training.texts())
    for split in ("dev", "test"):
        assert isinstance(held[split], RetrievalSet)
        assert trained.isdisjoint(held[split].texts())
    assert 20 <= len(training.held_out["dev"]) <= 21
    assert not {row[0] for row in training.held_out["dev"]} & {row[0] for row in training.held_out["test"]}
    dropped = training.facts.dropped
    assert dropped["held_out"] == sum(map(len, training.held_out.values()))
    assert dropped["text_of_a_held_out_pair"] > 0
    assert training.facts.pairs == 150 - dropped["held_out"] - dropped["text_of_a_held_out_pair"]
    again = load_data(data)
    assert again[0].facts.prepared_sha256 == training.facts.prepared_sha256
    assert again[1]["dev"].facts == held["dev"].facts
    # As a run keeps it, it is the same set.
    held["dev"].write(tmp_path / "dev.jsonl")
    back = load_held_out(RetrievalRows(retrieval=str(tmp_path / "dev.jsonl")), "dev")
    assert back.facts.pairs_sha256 == held["dev"].facts.pairs_sha256
    with pytest.raises(InputError, match=r"data.dev: hold_out is 500, but .*all.jsonl has 150 pairs"):
        load_training_data(data.model_copy(update={"dev": HoldOut(hold_out=500)}))


@pytest.fixture
def held_recipe(tiny_recipe: Recipe, tmp_path: Path) -> Recipe:
    path = jsonl(tmp_path / "pairs.jsonl", rows(120))
    return tiny_recipe.changed(
        data__train=path, data__dev=HoldOut(hold_out=30), data__test=HoldOut(hold_out=20), training__metric="mrr@10"
    )


def test_a_run_without_graded_pairs(held_recipe: Recipe, tmp_path: Path):
    run = train(held_recipe, tmp_path / "run")
    dev = {entry.step: entry.dev["mrr@10"] for entry in run.history() if entry.dev}
    best = max(value for step, value in dev.items() if step)
    assert run.results.dev.metric == run.results.test.metric == "mrr@10"
    assert run.results.dev.value == best == dev[run.results.best_step]
    assert (run.results.dev.n, run.results.test.n) == (30, 20)
    assert run.results.base["dev"] == dev[0]
    held = load_held_out(run.held_out("dev"), "dev")
    assert held.facts.pairs_sha256 == run.manifest.dev.pairs_sha256
    again = stock(held)(run.load_model())  # type: ignore[arg-type]
    assert again["cosine_mrr@10"] * 100 == pytest.approx(best, abs=1e-4)
    card = (run.model_path / "README.md").read_text()
    assert "| | dev (30 queries) | test (20 queries) |" in card
    assert f"**{run.results.test.value:.2f}**" in card
    assert "MRR@10 x100 of retrieval by cosine similarity." in card
    assert "type: cosine_mrr@10" in card
    assert str(tmp_path) not in card
    # Measured again, from the copy of the set that the run keeps.
    Path(str(held_recipe.data.train)).unlink()
    tasks = evaluate([run.folder], output=tmp_path / "again").models[0].tasks
    assert tasks.test is not None
    assert tasks.test.metrics["mrr@10"] == pytest.approx(run.results.test.value, abs=1e-6)
    with pytest.raises(InputError, match="--tasks: geometry is of one set of graded pairs"):
        evaluate([run.folder], tasks="geometry")


def test_what_is_published_is_proven(held_recipe: Recipe, tmp_path: Path, publisher: Publisher):
    run = train(held_recipe.changed(card__license="mit"), tmp_path / "run")
    assert isinstance(answer := publisher("alice/m", run_folder=str(run.folder)), dict), answer
    checks = publisher("alice/m", run=str(run.folder))
    assert names(checks) == ALL
    score = f"{run.results.test.value:.4f}"
    assert checks[-1][2] == f"MRR@10 x100 {score} on 20 queries of test, in the card {score}; 4 more as stated"
    # For anyone else, who has the set.
    answer = publisher("alice/m", token="")
    assert answer == "InputError: the card's test score is on pairs.jsonl: say where that set is, by --test"
    told = f"{{retrieval: {run.folder / 'test.jsonl'}}}"
    assert names(publisher("alice/m", token="", test=told)) == ALL


def test_a_public_set_is_proven_by_anyone(tiny_recipe: Recipe, tmp_path: Path, publisher: Publisher):
    place = RetrievalRows(retrieval="package:simcse_st/data/quickstart/train.jsonl")
    run = train(tiny_recipe.changed(data__test=place, card__license="mit"), tmp_path / "run")
    assert isinstance(answer := publisher("alice/m", run_folder=str(run.folder)), dict), answer
    assert names(publisher("alice/m", token="")) == ALL


def test_tables_say_what_the_scores_are(held_recipe: Recipe, tmp_path: Path):
    run = train(held_recipe, tmp_path / "run")
    (dev, test) = run.results.dev, run.results.test
    title = run_table(run.results).title
    assert title.startswith("MRR@10 x100, weights of step")
    table = report_table(report([run.folder]))
    assert table.title.startswith("MRR@10 x100 of cosine similarity")
    assert table.rows[0][1:3] == [f"{dev.value:.2f}", f"{test.value:.2f}"]
    # Evaluated again, by the metric that the run was measured by.
    tasks = evaluate([run.folder], output=tmp_path / "again").models[0].tasks
    assert (tasks.dev.metric, tasks.test.metric) == ("mrr@10", "mrr@10")


def test_pearson_is_not_compared_with_the_paper_s_spearman():
    """Which both would be of all of STS-B."""
    sizes = {"dev": (1500, 2.364), "test": (1379, 2.608)}
    for metric, known in (("spearman", True), ("pearson", False)):
        data = {s: Pairs(n=n, pairs_sha256="", mean_gold=mean, metric=metric) for s, (n, mean) in sizes.items()}
        assert bool(gap_to_paper("supervised", {"dev": 80.0, "test": 79.0}, data)) == known


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ("{retrieval: a.jsonl, colums: {}}", "unknown key 'data.dev.colums': did you mean 'data.dev.columns'"),
        ("{retrieval: nowhere.jsonl}", "nowhere.jsonl: no such file"),
        ("{hold_out: 5}", "hold_out: a set that is held out of training data stands in a recipe"),
    ],
)
def test_a_set_told_on_the_command_line(told: str, says: str, tmp_path: Path, minilm: Path):
    with pytest.raises(InputError, match=re.escape(says)):
        evaluate([minilm], tasks="dev", dev=told, output=tmp_path / "record")
    assert not (tmp_path / "record").exists()


def test_what_cannot_be_is_refused_without_torch(tmp_path: Path):
    path = jsonl(tmp_path / "pairs.jsonl", rows(20))
    command = [sys.executable, "-X", "importtime", "-m", "simcse_st", "train", "quickstart", "--data", path]
    for options, says in (
        (["training.metric=ndcg@11", "data.dev={hold_out: 5}"], "data.dev has no metric 'ndcg@11': did you mean"),
        (["training.metric=mrr@10"], "data.dev has no metric 'mrr@10': known: 'pearson', 'spearman'"),
        (["data.dev={hold_out: 500}"], f"data.dev: hold_out is 500, but {path} has 20 pairs"),
        (["data.dev={hold_out: 5}", "data.kind=sentences"], "hold_out: the single sentences of"),
        (["data.dev={hold_outs: 5}"], "data.dev"),
    ):
        sets = [part for option in options for part in ("--set", option)]
        done = subprocess.run([*command, *sets], cwd=tmp_path, capture_output=True, text=True)
        error = done.stderr.splitlines()[-1]
        assert done.returncode == 2, done.stderr
        assert says in error
        assert not any(line.endswith("| torch") for line in done.stderr.splitlines())
        assert not (tmp_path / "runs").exists()


def test_rows_from_a_program(tiny_recipe: Recipe, tmp_path: Path):
    dev = rows(20, seed=5)
    file = tiny_recipe.changed(data__dev=RetrievalRows(retrieval=jsonl(tmp_path / "dev.jsonl", dev)))
    one = train(file, tmp_path / "one")
    two = train(tiny_recipe, tmp_path / "two", dev={"retrieval": dev})
    assert one.results.dev == two.results.dev
    assert one.results.weights_sha256 == two.results.weights_sha256
    assert one.results.test.metric == "spearman"
    assert Run(tmp_path / "two").held_out("dev") == RetrievalRows(retrieval=str(tmp_path / "two" / "dev.jsonl"))
    assert json.loads((tmp_path / "two" / "dev.jsonl").read_text().splitlines()[0])["anchor"] == dev[0]["anchor"]
