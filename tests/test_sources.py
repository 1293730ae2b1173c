"""Several sources of training data, each with what is its own; batches of all of them or of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import BatchSampler

from helpers import jsonl, loaded, nli, sentences
from simcse_st import InputError, Recipe, load_recipe, train
from simcse_st.references import Columns, NLISection, Sample, SourceFile
from simcse_st.training.batch import BySourceSampler
from simcse_st.training.collator import SimCSECollator

NLI_ROWS = nli(("p", "e1", 0), ("p", "c1", 2), ("p", "c2", 2), ("q", "e2", 0), ("q", "n", 1))


def source(path: Path, **keys: Any) -> SourceFile:
    return SourceFile(file=str(path), **keys)


def test_several_files_are_read_as_one_file_of_all_their_rows(tmp_path: Path):
    # The contradiction of q stands in another file than its entailment.
    more = nli(("q", "c3", 2), ("r", "e3", 0), ("p", "e4", 0))
    each = [jsonl(tmp_path / "one.jsonl", NLI_ROWS), jsonl(tmp_path / "two.jsonl", more)]
    together = loaded(jsonl(tmp_path / "both.jsonl", [*NLI_ROWS, *more]))
    several = loaded(each)
    expected = [("p", "e1", ["c1"]), ("q", "e2", ["c3"]), ("r", "e3", []), ("p", "e4", ["c1"])]
    assert list(several.rows()) == list(together.rows()) == expected
    assert several.facts.prepared_sha256 == together.facts.prepared_sha256
    assert several.source_of.tolist() == [0, 0, 1, 1]
    assert [(one.name, one.rows) for one in several.facts.of_sources] == [("one.jsonl", 2), ("two.jsonl", 2)]
    assert (together.rows_of_sources, together.facts.of_sources) == ([4], [])
    assert several.facts.labels == together.facts.labels == {"entailment": 4, "neutral": 1, "contradiction": 3}


def test_each_source_has_its_own_kind_columns_rule_and_sample(tmp_path: Path):
    jsonl(tmp_path / "nli.jsonl", NLI_ROWS)
    jsonl(tmp_path / "other.jsonl", nli(("s", "e", 0), ("s", "c", 2), ("s", "d", 2)))
    (tmp_path / "faq.csv").write_text("".join(f"t{i},b{i}\n" for i in range(50)))
    jsonl(tmp_path / "pairs.jsonl", [{"anchor": "a", "positive": "b", "negative": ["c"]}])
    own = source(tmp_path / "faq.csv", columns=Columns(anchor=1, positive=2), sample=Sample(rows=5, seed=3))
    every = source(tmp_path / "nli.jsonl", nli=NLISection(hard_negatives="all"))
    data = loaded([every, own, str(tmp_path / "pairs.jsonl"), str(tmp_path / "other.jsonl")])
    rows = list(data.rows())
    alone = loaded(tmp_path / "faq.csv", columns=Columns(anchor=1, positive=2), sample=Sample(rows=5, seed=3))
    assert rows[:5] == list(alone.rows())  # pairs as they are come first
    assert rows[5:] == [
        ("a", "b", ["c"]), ("p", "e1", ["c1", "c2"]), ("q", "e2", []), ("s", "e", ["c"]),
    ]  # fmt: skip
    assert data.source_of.tolist() == [1] * 5 + [2, 0, 0, 3]
    assert [one.rows for one in data.facts.of_sources] == data.rows_of_sources == [2, 5, 1, 1]
    assert data.facts.of_sources[1].sample == Sample(rows=5, seed=3)
    assert data.facts.rows_read == 5 + 50 + 1 + 3
    assert [one.rows for one in data.facts.sources] == [5, 50, 1, 3]
    rule = data.facts.rule
    assert rule.startswith("of source 1: ")
    assert "of source 2, 3: the rows as they are" in rule
    assert "all different contradiction" in rule.split("of source 4")[0]


def test_a_sentence_belongs_to_the_source_that_has_it_first(tmp_path: Path):
    (tmp_path / "one.txt").write_text("a\nb\n")
    jsonl(tmp_path / "two.jsonl", [{"anchor": "b", "positive": "c", "negative": "a"}])
    data = loaded([str(tmp_path / "one.txt"), str(tmp_path / "two.jsonl")], kind="sentences")
    assert list(data.rows()) == [("a",), ("b",), ("c",)]
    assert data.source_of.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            "[{file: a.jsonl, sampel: {rows: 3}}]",
            "unknown key 'data.train.0.sampel': did you mean 'data.train.sample'?",
        ),
        ("[{file: a.jsonl, columns: {anchr: x}}]", "unknown key 'data.train.0.columns.anchr': "),
        (
            "[a.jsonl, {columns: {anchor: x}}]",
            "data.train.1: should be a file, a hub data set, or a mapping with the key",
        ),
        ("[a.jsonl, {file: 3}]", "data.train.1.file: should be a valid string, not the number 3"),
        ("[{dataset: x/y, sample: {rows: 0}}]", "data.train.0.sample.rows: should be greater than 0"),
        ("[]", "data.train: should have at least 1 item, not a list"),
        (
            "{file: a.jsonl, sample: {rows: 3}}",
            "data.train: should be a file, a hub data set, a mapping with the key dataset",
        ),
    ],
)
def test_a_wrong_source_is_named(train: str, message: str):
    with pytest.raises(InputError) as caught:
        load_recipe("quickstart", [f"data.train={train}"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_wrong_in_one_source_is_said_of_it(tmp_path: Path):
    one = jsonl(tmp_path / "one.jsonl", [{"anchor": "a", "positive": "b"}])
    jsonl(tmp_path / "two.jsonl", [{"title": "a", "body": "b"}])
    with pytest.raises(InputError, match=r"two.jsonl:1: found the columns 'title', 'body', but need"):
        loaded([one, str(tmp_path / "two.jsonl")])
    with pytest.raises(InputError, match=r"sample.rows is 9, but .*one.jsonl has 1 usable rows"):
        loaded([source(tmp_path / "one.jsonl", sample=Sample(rows=9)), str(tmp_path / "two.jsonl")])
    # Once by its titles and once by its bodies is not twice.
    columns = [Columns(anchor=name, positive=other) for name, other in (("title", "body"), ("body", "title"))]
    assert len(loaded([source(tmp_path / "two.jsonl", columns=one) for one in columns])) == 2
    with pytest.raises(InputError, match="two.jsonl is named twice"):
        loaded([source(tmp_path / "two.jsonl", columns=columns[0])] * 2)


def batches_of(sampler: BySourceSampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return [*BatchSampler(sampler, sampler.batch_size, drop_last=True)]


def test_every_batch_is_of_one_source_and_every_row_comes_once():
    source_of = np.array([0, 1, 2] * 20 + [1] * 37 + [2] * 3)
    sampler = BySourceSampler(source_of, 8, seed=5)
    sizes = np.bincount(source_of)  # 20, 57, 23
    orders, left = [], []
    for epoch in range(3):
        batches = batches_of(sampler, epoch)
        assert all(len(batch) == 8 and len(set(source_of[batch])) == 1 for batch in batches)
        drawn = [row for batch in batches for row in batch]
        assert len(drawn) == len(set(drawn)) == len(sampler) == sum(size // 8 * 8 for size in sizes)
        order = [int(source_of[batch[0]]) for batch in batches]
        assert sorted(order) == [0] * 2 + [1] * 7 + [2] * 2
        orders.append(order)
        left.append({*range(len(source_of))} - {*drawn})
    assert len({*map(tuple, orders)}) == len({*map(frozenset, left)}) == 3  # in no fixed order, and others left out
    again = BySourceSampler(source_of, 8, seed=5)
    assert batches_of(again, 2) == batches
    assert batches_of(BySourceSampler(source_of, 8, seed=6), 2) != batches


@pytest.fixture
def of_two(tiny_recipe: Recipe, tmp_path: Path) -> Recipe:
    """Sixteen and twenty-six rows of two sources: five batches of eight rows."""
    texts = sentences(90, seed=1)
    files = []
    for name, numbers in (("one", range(16)), ("two", range(16, 42))):
        files.append(
            jsonl(tmp_path / f"{name}.jsonl", [{"anchor": texts[i], "positive": texts[i + 42]} for i in numbers])
        )
    return tiny_recipe.changed(data__train=files, training__batches="by_source")


def test_a_run_sees_batches_of_one_source_alone(of_two: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = {json.loads(line)["anchor"] for line in (tmp_path / "one.jsonl").open()}
    seen: list[list[str]] = []
    collate = SimCSECollator.__call__

    def spy(self: SimCSECollator, features: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append([row["anchor"] for row in features])
        return collate(self, features)

    monkeypatch.setattr(SimCSECollator, "__call__", spy)
    run = train(of_two, tmp_path / "run")
    assert run.results.total_steps == len(seen) == 10  # two epochs
    assert all(len({text in first for text in batch}) == 1 for batch in seen)
    for epoch in (seen[:5], seen[5:]):
        assert sum(batch[0] in first for batch in epoch) == 2
        assert len({text for batch in epoch for text in batch}) == 40
    card = (run.model_path / "README.md").read_text()
    assert "| trained on, of two.jsonl | 26 |" in card
    assert "8 of one source" in card
    assert str(tmp_path) not in card
    assert "'data.train=[one.jsonl, two.jsonl]'" in card


def test_too_few_rows_of_a_source_for_a_batch(of_two: Recipe, tmp_path: Path):
    with pytest.raises(InputError, match=r"data.train.0: 16 pairs are fewer than one batch of 24"):
        train(of_two.changed(training__batch_size=24), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_batches_by_source_take_several():
    with pytest.raises(InputError, match="by_source is about several sources: data.train must be a list"):
        load_recipe("quickstart", ["training.batches=by_source"])


def test_a_card_names_no_folder_of_a_source(of_two: Recipe, tmp_path: Path):
    own = [source(tmp_path / "one.jsonl", sample=Sample(rows=16)), str(tmp_path / "two.jsonl")]
    run = train(of_two.changed(data__train=own), tmp_path / "run")
    card = (run.model_path / "README.md").read_text()
    assert "data.train=[{sample: {rows: 16, seed: 42}, file: one.jsonl}, two.jsonl]" in card
    assert str(tmp_path) not in card
    manifest = (tmp_path / "run" / "manifest.json").read_text()
    assert str(tmp_path) not in manifest


def test_reading_several_sources_takes_no_torch(tmp_path: Path):
    jsonl(tmp_path / "one.jsonl", [{"anchor": "a", "positive": "b"}])
    program = (
        "import sys\nfrom simcse_st.data import load_training_data\nfrom simcse_st.recipe import DataSection\n"
        "load_training_data(DataSection(train=['one.jsonl']))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
