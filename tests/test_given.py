"""Rows that a program hands over instead of a file's name."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from helpers import nli, stop_at
from publisher import ALL, Publisher, names
from simcse_st import InputError, Recipe, evaluate, train, write_card
from simcse_st.data import load_training_data
from simcse_st.data.sts import load_graded_pairs
from simcse_st.recipe import DataSection
from simcse_st.references import Given
from simcse_st.run import Run, open_run


def rows_of(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(str(recipe.data.train)).read_text().splitlines()]


def graded(recipe: Recipe, split: str) -> list[dict[str, Any]]:
    with open(str(getattr(recipe.data, split))) as file:
        return [{"sentence1": a, "sentence2": b, "score": float(score)} for a, b, score in csv.reader(file)]


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


FORMS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "dataset": Dataset.from_list,
    "streaming": lambda rows: Dataset.from_list(rows).to_iterable_dataset(num_shards=3),
    "formatted": lambda rows: Dataset.from_list(rows).with_format("numpy"),
    "mappings": list,
    "generator": iter,
    "columns": columns,
    "lists": lambda rows: tuple(columns(rows).values()),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_data(form: str, tiny_recipe: Recipe):
    from_file = load_training_data(tiny_recipe.data)
    given = load_training_data(DataSection(train=Given(FORMS[form](rows_of(tiny_recipe)))))
    assert given.facts.prepared_sha256 == from_file.facts.prepared_sha256
    assert given.facts.rows_read == len(from_file) == 40
    names = ("sentence1", "sentence2", "score")
    pairs = load_graded_pairs(Given(FORMS[form](graded(tiny_recipe, "dev")), names))
    assert pairs.facts.pairs_sha256 == load_graded_pairs(tiny_recipe.data.dev).facts.pairs_sha256


def test_labels_of_a_dataset_go_by_their_names():
    """Here 0 is a contradiction, which SNLI numbers otherwise."""
    rows = nli(("p", "it is so", 1), ("p", "it is not", 0), ("q", "maybe", 2))
    kind = ClassLabel(names=["contradiction", "entailment", "neutral"])
    features = Features({"premise": Value("string"), "hypothesis": Value("string"), "label": kind})
    given = load_training_data(DataSection(train=Given(Dataset.from_list(rows, features=features))))
    assert list(given.rows()) == [("p", "it is so", ["it is not"])]


def test_a_run_on_given_rows_is_the_run_on_their_file(
    tiny_recipe: Recipe, tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
):
    whole = train(tiny_recipe, tmp_path / "file")
    given = {
        "data": Dataset.from_list(rows_of(tiny_recipe)).to_iterable_dataset(),
        "dev": graded(tiny_recipe, "dev"),
        "test": tuple(columns(graded(tiny_recipe, "test")).values()),
    }
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_recipe, tmp_path / "given", **given)
    run = train(tiny_recipe, tmp_path / "given", resume=True, **given)
    assert (run.folder / "history.jsonl").read_text() == (whole.folder / "history.jsonl").read_text()
    assert run.results.weights_sha256 == whole.results.weights_sha256
    assert run.results.test == whole.results.test
    assert run.recipe.data.train == run.recipe.data.test == "given to train()"
    # What the recipe said of its own data is not said of these.
    assert tiny_recipe.card.language == ["en"]
    assert (run.recipe.card.language, run.recipe.card.license) == ([], None)
    other = {**given, "data": rows_of(tiny_recipe)[:32]}
    with pytest.raises(InputError, match=r"exists already"):
        train(tiny_recipe, tmp_path / "given", **other)

    # Its pairs are kept, so that it can be measured again, published and proven.
    (measured,) = evaluate([run.folder], tasks="dev,test", output=tmp_path / "evaluation").models
    assert measured.tasks.test
    assert measured.tasks.test.spearman == pytest.approx(run.results.test.spearman, abs=1e-6)
    write_card(run.folder, ["card.license=mit"])
    pushed = publisher("alice/given", run_folder=str(run.folder))
    assert "commit" in pushed, pushed
    checks = publisher("alice/given", run=str(run.folder))
    assert names(checks) == ALL
    assert open_run(run.folder).manifest.train.sources[0].name == "given to train()"


def test_dev_and_test_are_given_in_any_form(tiny_recipe: Recipe, tmp_path: Path):
    pairs = [{"anchor": row["anchor"], "positive": row["positive"]} for row in rows_of(tiny_recipe)[:9]]
    run = train(
        tiny_recipe.changed(training__max_steps=3),
        tmp_path / "run",
        data=str(tiny_recipe.data.train),
        dev={"sets": {"sts": graded(tiny_recipe, "dev"), "found": {"retrieval": pairs}, "file": tiny_recipe.data.test}},
        test={"hold_out": 5},
    )
    whole = train(tiny_recipe.changed(training__max_steps=3), tmp_path / "whole")
    assert run.results.base_metrics["dev"]["sts/spearman"] == whole.results.base["dev"]
    assert run.results.base_metrics["dev"]["file/spearman"] == pytest.approx(whole.results.base["test"], abs=1e-9)
    assert sorted(path.name for path in (run.folder / "dev").iterdir()) == ["found.jsonl", "sts.jsonl"]
    assert (run.results.test.metric, run.results.test.n) == ("ndcg@10", 5)
    (again,) = evaluate([run.folder], tasks="dev,test").models
    assert again.tasks.dev is not None
    for name in ("sts/spearman", "found/ndcg@10", "file/spearman"):
        assert again.tasks.dev.metrics[name] == pytest.approx(run.results.dev.metrics[name], abs=1e-6)
    with pytest.raises(InputError, match="dev.hold_out should be greater than 0"):
        train(tiny_recipe, tmp_path / "other", dev={"hold_out": -1})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a.jsonl", "a.jsonl: no such file"),
        (7, "must be a data set, rows or columns, not 7"),
        ([{"anchor": "a", "positive": "b"}, ["a", "b"]], r"row 1: must be a mapping of columns to values, not \['a'"),
        ([{1: "a"}], "row 0: must be a mapping of columns to values"),
        ([], "there is no row in it"),
        ({"anchor": ["a"], "positive": []}, r"lists of the same length, not \{'anchor': 1, 'positive': 0\}"),
        ({"anchor": "ab", "positive": "cd"}, "lists of the same length"),
        ({"anchor": 1}, "every column must be a list"),
        (([], [], [], []), "a tuple has the lists 'anchor', 'positive', 'negative', and no more"),
        ([{"anchor": "a", "positve": "b"}], "row 0: found the columns 'anchor', 'positve'"),
        ([{"anchor": "a", "positive": 3}], "row 0: "),
        (DatasetDict(train=Dataset.from_dict({"anchor": ["a"], "positive": ["b"]})), "found the column.*train"),
    ],
)
def test_rows_that_cannot_be_used(rows: Any, message: str, tiny_recipe: Recipe, tmp_path: Path):
    with pytest.raises(InputError, match=message) as caught:
        train(tiny_recipe, tmp_path / "run", data=rows)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert not Run(tmp_path / "run").is_begun
