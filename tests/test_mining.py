"""Hard negatives that a model finds: every row stays, and no positive is among them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.util import mine_hard_negatives
from transformers import BertConfig, BertForSequenceClassification

from helpers import jsonl, nli, sentences
from simcse_st import InputError, mine
from simcse_st.cli import _run
from simcse_st.mining import nearest
from simcse_st.mining.mine import Mined


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs among which anchors and positives recur, some with hard negatives of their own."""
    texts, draw = sentences(count, seed), random.Random(seed)
    rows = []
    for _ in range(count):
        anchor, positive, own = draw.choice(texts), draw.choice(texts), draw.sample(texts, draw.choice([0, 0, 1, 2]))
        rows.append({"anchor": anchor, "positive": positive, "negative": own})
    return rows


def brute_force(
    rows: list[dict],
    model: SentenceTransformer,
    corpus: list[str],
    k: int,
    margin: float | None,
    limit: float | None,
    first: int,
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """The negatives of each anchor among all passages, and what each filter takes of them."""
    positives: dict[str, list[str]] = {}
    for row in rows:
        positives.setdefault(row["anchor"], []).append(row["positive"])
    passages = list(dict.fromkeys([*corpus, *(row["positive"] for row in rows)]))
    vector = {text: model.encode([text], normalize_embeddings=True)[0] for text in {*positives, *passages}}
    taken = dict.fromkeys(("anchor_or_positive", "relative_margin", "max_score", "first"), 0)
    found = {}
    for anchor, own in positives.items():
        score = {text: float(vector[anchor] @ vector[text]) for text in passages}
        worst = min(score[text] for text in own)
        left = []
        for text in passages:
            if text == anchor or text in own:
                taken["anchor_or_positive"] += 1
            elif margin is not None and score[text] > worst - abs(worst) * margin:
                taken["relative_margin"] += 1
            elif limit is not None and score[text] > limit:
                taken["max_score"] += 1
            else:
                left.append(text)
        left.sort(key=lambda text: -score[text])
        taken["first"] += min(first, len(left))
        found[anchor] = left[first : first + k]
    return found, taken


@pytest.mark.parametrize(
    ("margin", "limit", "first"), [(0.05, None, 0), (None, 0.6, 2), (0.3, 0.8, 1), (None, None, 0)]
)
def test_it_finds_what_a_loop_over_all_finds(
    margin: float | None, limit: float | None, first: int, tiny_model: SentenceTransformer, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(nearest, "_PASSAGES", 7)
    monkeypatch.setattr(nearest, "_ANCHORS", 5)
    rows, corpus = pairs(40), sentences(30, seed=9)
    mined = mine(
        rows, tiny_model, corpus=corpus, negatives=4, relative_margin=margin, max_score=limit, first=first, last=60,
        output=tmp_path / "mined",
    )  # fmt: skip
    expected, taken = brute_force(rows, tiny_model, corpus, 4, margin, limit, first)
    assert len(mined) == len(rows)
    got = {}
    for row, out in zip(rows, mined, strict=True):
        assert (out["anchor"], out["positive"]) == (row["anchor"], row["positive"])
        assert out["negative"][: len(row["negative"])] == row["negative"]  # its own come first
        new = [text for text in expected[row["anchor"]] if text not in row["negative"]]
        assert out["negative"][len(row["negative"]) :] == new
        got[len(new)] = got.get(len(new), 0) + 1
    manifest = Mined.model_validate_json((tmp_path / "mined" / "manifest.json").read_text())
    assert manifest.taken == taken
    assert manifest.candidates == len({row["anchor"] for row in rows}) * manifest.passages
    assert {int(number): count for number, count in manifest.rows_with_mined.items()} == got
    lines = [json.loads(line) for line in (tmp_path / "mined" / "train.jsonl").open()]
    assert lines == list(mined)
    examples = [json.loads(line) for line in (tmp_path / "mined" / "examples.jsonl").open()]
    assert len(examples) == 10
    assert sorted(path.name for path in (tmp_path / "mined").iterdir()) == [
        "examples.jsonl",
        "manifest.json",
        "train.jsonl",
    ]


@pytest.mark.parametrize("seed", range(5))
def test_no_negative_is_the_anchor_or_a_positive_of_it(seed: int, tiny_model: SentenceTransformer):
    rows = pairs(60, seed)
    mined = mine(rows, tiny_model, relative_margin=None, negatives=5, keep_own=False)
    positives: dict[str, set[str]] = {}
    for row in rows:
        positives.setdefault(row["anchor"], set()).add(row["positive"])
    assert [(row["anchor"], row["positive"]) for row in mined] == [(row["anchor"], row["positive"]) for row in rows]
    for row in mined:
        assert not {row["anchor"], *positives[row["anchor"]]} & set(row["negative"])
        assert len(row["negative"]) == len(set(row["negative"])) == 5


@pytest.mark.parametrize(("first", "last"), [(0, None), (2, 20)])
def test_where_sentence_transformers_keeps_an_anchor_it_finds_the_same(
    first: int, last: int | None, tiny_model: SentenceTransformer
):
    rows = [{"anchor": row["anchor"], "positive": row["positive"]} for row in pairs(80)]
    stock = mine_hard_negatives(
        Dataset.from_list(rows), tiny_model, num_negatives=3, relative_margin=0.05, range_min=first, range_max=last,
        output_format="labeled-pair", verbose=False,
    )  # fmt: skip
    expected: dict[str, list[str]] = {row["anchor"]: [] for row in rows}
    for row in stock:
        if row["label"] == 0:
            expected[row["anchor"]].append(row["positive"])
    found = {row["anchor"]: row["negative"] for row in mine(rows, tiny_model, first=first, last=last)}
    assert found == expected
    assert {len(each) for each in found.values()} >= {0, 3}


def test_a_cross_encoder_ranks_anew(tiny_base: Path, tiny_model: SentenceTransformer, tmp_path: Path):
    config = BertConfig.from_pretrained(tiny_base, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    tiny_model.tokenizer.save_pretrained(tmp_path / "judge")
    judge = CrossEncoder(str(tmp_path / "judge"))
    # No anchor is a passage: before 6.3 the stock function took it for a negative of itself here.
    rows = [{"anchor": f"of {row['anchor']}", "positive": row["positive"]} for row in pairs(30)]
    stock = mine_hard_negatives(
        Dataset.from_list(rows), tiny_model, cross_encoder=judge, num_negatives=2, relative_margin=0.01,
        output_format="labeled-pair", verbose=False,
    )  # fmt: skip
    expected: dict[str, list[str]] = {row["anchor"]: [] for row in rows}
    for row in stock:
        if row["label"] == 0:
            expected[row["anchor"]].append(row["positive"])
    mined = mine(rows, tiny_model, cross_encoder=tmp_path / "judge", negatives=2, relative_margin=0.01)
    assert {row["anchor"]: row["negative"] for row in mined} == expected
    config.num_labels = 3
    BertForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    with pytest.raises(InputError, match="judge: must give a pair one score, not 3"):
        mine(rows, tiny_model, cross_encoder=tmp_path / "judge")


@pytest.mark.parametrize("block", [1, 2, 4])
def test_it_goes_on_where_it_was_interrupted(
    block: int, tiny_model: SentenceTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nearest, "_PASSAGES", 7)
    rows = pairs(40)
    whole = mine(rows, tiny_model, output=tmp_path / "whole")
    save, calls = nearest._save, []

    def interrupted(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) > block:  # after a block was merged, and before it was said that it is
            raise KeyboardInterrupt
        return save(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(nearest, "_save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mine(rows, tiny_model, output=tmp_path / "mined")
    with pytest.raises(InputError, match="mined exists already: choose another --output, go on with --resume"):
        mine(rows, tiny_model, output=tmp_path / "mined")
    with pytest.raises(InputError, match="--resume: prepared_sha256.* is not what it was"):
        mine(rows[:-1], tiny_model, output=tmp_path / "mined", resume=True)
    mined = mine(rows, tiny_model, output=tmp_path / "mined", resume=True)
    assert list(mined) == list(whole)
    names = ("train.jsonl", "manifest.json", "examples.jsonl")
    assert all((tmp_path / "mined" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in names)
    # Of a finished one it gives the result.
    assert list(mine(rows, tiny_model, output=tmp_path / "mined", resume=True)) == list(whole)
    for other, name in (({"negatives": 2}, "looked_at, negatives"), ({"corpus": ["a b"]}, "passages_sha256")):
        with pytest.raises(InputError, match=rf"--resume: .*mined is of another call \({name} differs\)"):
            mine(rows, tiny_model, output=tmp_path / "mined", resume=True, **other)
    # One that is replaced does not look finished before it is.
    with monkeypatch.context() as patch:
        patch.setattr(nearest, "_save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mine(rows, tiny_model, output=tmp_path / "mined", overwrite=True)
    assert [path.name for path in (tmp_path / "mined").iterdir()] == [".search"]
    assert list(mine(rows, tiny_model, output=tmp_path / "mined", resume=True)) == list(whole)


def test_the_command(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    rows = nli(("p one", "e", 0), ("p one", "c", 2), ("q two", "f", 0), ("r three", "g", 0))
    data = jsonl(tmp_path / "nli.jsonl", rows)
    (tmp_path / "more.txt").write_text("some other text\nand one more\n")
    command = ["mine", data, "--with", f"{tiny_base}:mean", "--output", str(tmp_path / "mined")]
    extra = ["--corpus", str(tmp_path / "more.txt"), "--relative-margin", "none", "--negatives", "2"]
    monkeypatch.setattr("sys.argv", ["simcse-st", *command, *extra])
    assert not _run()
    out = capsys.readouterr()
    assert "3 rows, 5 passages" in out.out
    assert "captions paraphrase each other: look at examples.jsonl" in out.err
    written = [json.loads(line) for line in (tmp_path / "mined" / "train.jsonl").open()]
    assert written[0]["negative"][0] == "c"
    assert [len(row["negative"]) for row in written] == [3, 2, 2]
    manifest = json.loads((tmp_path / "mined" / "manifest.json").read_text())
    assert manifest["corpus"][0]["file"] == "more.txt"
    assert str(tmp_path) not in json.dumps({**manifest, "model": ""})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--negatives", "0"], "negatives should be greater than 0, not 0"),
        (["--relative-margin", "abc"], "--relative-margin abc: give a number, or none"),
        (["--relative-margin", "1.5"], "relative_margin should be less than 1, not 1.5"),
        (["--range", "5"], "--range 5: give two whole numbers with a colon between them"),
        (["--range", "5:6", "--negatives", "3"], "--range 5:6 leaves no room for 3 negatives"),
        (["--set", "loss.temperature=1"], "--set loss.temperature=1: only data.KEY=VALUE means something here"),
        (["--set", "data.colums={}"], "unknown key 'data.colums'"),
        (["--set", "data.kind=sentences"], "data.kind=sentences: single sentences have no positives"),
        (["--corpus", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--overwrite", "--resume"], "--resume goes on with a call, --overwrite begins it again"),
        (["--cross-encoder", "nowhere/at-all"], "--cross-encoder nowhere/at-all: "),
    ],
)
def test_what_cannot_be_used_is_said(
    options: list[str], message: str, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    data = jsonl(tmp_path / "pairs.jsonl", pairs(20))
    command = ["mine", data, "--with", f"{tiny_base}:mean", "--output", str(tmp_path / "mined"), *options]
    monkeypatch.setattr("sys.argv", ["simcse-st", *command])
    assert _run() == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]
    assert not (tmp_path / "mined").exists()
