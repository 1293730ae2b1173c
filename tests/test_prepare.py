"""What is trained on, written down and proven."""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import jsonl, nli
from simcse_st import InputError, RunError, load_recipe, prepare

GRADED = "a b,c d,5\ne f,g h,1\ni j,k l,0\n"


@pytest.fixture
def keys(tiny_base: Path, tmp_path: Path) -> list[str]:
    """What makes any recipe local and small."""
    (tmp_path / "graded.csv").write_text(GRADED)
    graded = tmp_path / "graded.csv"
    return [f"model.base={tiny_base}", f"data.dev={graded}", f"data.test={graded}", "data.sample=null"]


def test_rows_and_manifest_are_written(keys: list[str], tmp_path: Path):
    rows = nli(
        ("p", "entailed", 0), ("p", "no", 2), ("q", "a much longer hypothesis than the others", 0), ("q", "?", -1)
    )
    source = jsonl(tmp_path / "mine.jsonl", rows)
    folder = prepare(load_recipe("snli-sup", [*keys, f"data.train={source}"]), tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "recipe.yaml", "train.jsonl"]
    lines = (folder / "train.jsonl").read_bytes()
    assert lines == (
        b'{"anchor": "p", "positive": "entailed", "negative": ["no"]}\n'
        b'{"anchor": "q", "positive": "a much longer hypothesis than the others", "negative": []}\n'
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256(lines).hexdigest()
    assert manifest["outputs"] == [{"file": "train.jsonl", "rows": 2, "sha256": digest}]
    train = manifest["train"]
    original = (tmp_path / "mine.jsonl").read_bytes()
    assert train["sources"] == [
        {"file": "mine.jsonl", "bytes": len(original), "sha256": hashlib.sha256(original).hexdigest(), "rows": 4}
    ]
    assert (train["rows_read"], train["dropped"]["no_consensus"], train["prepared_sha256"]) == (4, 1, digest)
    # 34 letters and two special tokens where 32 fit.
    assert train["truncation"] == {
        "max_length": 32,
        "texts": 5,
        "texts_truncated": 1,
        "tokens": 56,
        "tokens_truncated": 4,
        "unknown_tokens": 0,
        "texts_unknown": 0,
        "tokenizer": train["truncation"]["tokenizer"],
    }
    assert train["truncation"]["tokenizer"].startswith("tiny-bert")
    assert manifest["packages"]["simcse-st"]
    assert (manifest["dev"]["pairs"], manifest["dev"]["scale"]) == (3, 5.0)
    assert str(tmp_path) not in (folder / "manifest.json").read_text()

    again = prepare(load_recipe("snli-sup", [*keys, f"data.train={folder / 'train.jsonl'}"]), tmp_path / "again")
    assert (again / "train.jsonl").read_bytes() == lines


def test_what_makes_numbers_doubtful_is_counted_and_said(
    keys: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    rows = [
        {"anchor": "c d", "positive": "a b", "negative": ["c d", "e f"]},  # a pair of dev, turned around
        {"anchor": "g h", "positive": "z", "negative": ["e f", "z"]},  # another, as anchor and hard negative
        {"anchor": "k l", "positive": "k l"},
        {"anchor": "i j", "positive": "中文", "negative": []},  # unknown to the tokenizer
    ]
    recipe = load_recipe("snli-sup", [*keys, f"data.train={jsonl(tmp_path / 'mine.jsonl', rows)}"])
    train = json.loads((prepare(recipe, tmp_path / "out") / "manifest.json").read_text())["train"]
    assert (train["anchors_as_positives"], train["own_hard_negatives"]) == (1, 2)
    assert train["overlap"]["dev"] == {"sentences": 6, "of_sentences": 6, "pairs": 2, "of_pairs": 3}
    assert (train["truncation"]["texts_unknown"], train["truncation"]["unknown_tokens"] >= 1) == (1, True)
    for line in (
        "6 of 6 sentences of dev stand in the training data, and 2 of its 3 pairs in one row",
        "1 anchors are their own positive",
        "2 hard negatives are their row's anchor or positive: data.drop_duplicates leaves them out",
        "1 texts are nothing else",
    ):
        assert line in caplog.text
    cleaned = recipe.changed(data__drop_duplicates=True)
    train = json.loads((prepare(cleaned, tmp_path / "cleaned") / "manifest.json").read_text())["train"]
    assert (train["own_hard_negatives"], train["dropped"]["hard_negatives_like_anchor_or_positive"]) == (0, 2)
    assert train["hard_negatives"] == 2


def test_preparing_needs_no_base(keys: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture):
    source = jsonl(tmp_path / "mine.jsonl", [{"anchor": "a", "positive": "b"}])
    recipe = load_recipe("snli-sup", [*keys, f"data.train={source}", "model.base=nobody/has-this"])
    manifest = json.loads((prepare(recipe, tmp_path / "out") / "manifest.json").read_text())
    assert "truncation" not in manifest["train"]
    assert manifest["train"]["pairs"] == 1
    assert "lengths  not counted: the tokenizer of nobody/has-this is not at hand" in caplog.text


@pytest.mark.real_data
@pytest.mark.slow
@pytest.mark.parametrize("source", ["stsb/train.csv", "nli/snli_dev.jsonl"])
def test_overlap_of_real_data_is_what_an_independent_count_finds(
    source: str, keys: list[str], shared_data: Path, tmp_path: Path
):
    stsb = {
        split: list(csv.reader((shared_data / "stsb" / f"{split}.csv").open(encoding="utf-8")))
        for split in ("train", "dev", "test")
    }
    if source.startswith("stsb"):
        rows = [{"anchor": first, "positive": second} for first, second, _ in stsb["train"]]
        train = jsonl(tmp_path / "pairs.jsonl", rows)
        together = [{first, second} for first, second, _ in stsb["train"]]
    else:
        train = str(shared_data / source)
        labelled = [json.loads(line) for line in Path(train).read_text("utf-8").splitlines()]
        together = [{row["premise"], row["hypothesis"]} for row in labelled if row["label"] == "entailment"]
        contradicted: dict[str, str] = {}
        for row in labelled:
            if row["label"] == "contradiction":
                contradicted.setdefault(row["premise"], row["hypothesis"])
        anchors = {row["premise"] for row in labelled if row["label"] == "entailment"}
        together += [{premise, other} for premise, other in contradicted.items() if premise in anchors]
    texts = set().union(*together)
    keys = [
        *keys,
        f"data.train={train}",
        *(f"data.{split}={shared_data / 'stsb' / f'{split}.csv'}" for split in ("dev", "test")),
    ]
    found = json.loads((prepare(load_recipe("snli-sup", keys), tmp_path / "out") / "manifest.json").read_text())
    for split in ("dev", "test"):
        sentences = {text for row in stsb[split] for text in row[:2]}
        expected = {
            "sentences": len([text for text in sentences if text in texts]),
            "of_sentences": len(sentences),
            "pairs": len([row for row in stsb[split] if set(row[:2]) in together]),
            "of_pairs": len(stsb[split]),
        }
        print(source, split, expected)
        assert found["train"]["overlap"][split] == expected


def test_sentences_are_written_too(keys: list[str], tmp_path: Path):
    source = jsonl(tmp_path / "mine.jsonl", nli(("p", "x", 0), ("p", "y", 1)))
    folder = prepare(load_recipe("snli-unsup", [*keys, f"data.train={source}"]), tmp_path / "out")
    assert (folder / "train.jsonl").read_text() == '{"sentence": "p"}\n{"sentence": "x"}\n{"sentence": "y"}\n'


def test_a_folder_is_replaced_only_when_asked(keys: list[str], tmp_path: Path):
    recipe = load_recipe("snli-sup", [*keys, f"data.train={jsonl(tmp_path / 'm.jsonl', nli(('p', 'e', 0)))}"])
    prepare(recipe, tmp_path / "out")
    with pytest.raises(InputError, match="out exists already"):
        prepare(recipe, tmp_path / "out")
    (tmp_path / "out" / "train.jsonl").write_text("old")
    prepare(recipe, tmp_path / "out", overwrite=True)
    assert "anchor" in (tmp_path / "out" / "train.jsonl").read_text()


def test_what_the_user_keeps_in_the_folder_stays(keys: list[str], tmp_path: Path):
    (tmp_path / "out").mkdir()
    source = jsonl(tmp_path / "out" / "mine.jsonl", nli(("p", "e", 0)))
    recipe = load_recipe("snli-sup", [*keys, f"data.train={source}"])
    with pytest.raises(InputError, match="out exists already"):
        prepare(recipe, tmp_path / "out")
    (tmp_path / "out" / "recipe.yaml").touch()
    (tmp_path / "out" / "history.jsonl").write_text("of an earlier run")
    prepare(recipe, tmp_path / "out", overwrite=True)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["manifest.json", "mine.jsonl", "recipe.yaml", "train.jsonl"]


def test_years_of_sts_may_be_dev_and_test(keys: list[str], tmp_path: Path):
    folder = tmp_path / "STS12-en-test"
    folder.mkdir()
    (folder / "STS.input.x.txt").write_text("a\tb\nc\td\n")
    (folder / "STS.gs.x.txt").write_text("1\n2\n")
    source = jsonl(tmp_path / "m.jsonl", nli(("p", "e", 0)))
    settings = [*keys, f"data.train={source}", f"data.dev={folder}", f"data.test={folder}"]
    manifest = json.loads((prepare(load_recipe("snli-sup", settings), tmp_path / "out") / "manifest.json").read_text())
    assert (manifest["dev"]["pairs"], manifest["dev"]["subsets"]) == (2, {"x": 2})


def test_a_disk_that_is_full_is_an_error_and_leaves_no_half_file(
    keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = load_recipe("snli-sup", [*keys, f"data.train={jsonl(tmp_path / 'm.jsonl', nli(('p', 'e', 0)))}"])
    from simcse_st.data import TrainingData

    def full(self: TrainingData, path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrainingData, "write", full)
    with pytest.raises(RunError, match="out: cannot be written: No space left on device"):
        prepare(recipe, tmp_path / "out")
    assert not list((tmp_path / "out").glob("train*"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(RunError, match="cannot write to the temporary folder .*nowhere: No such file .*; set TMPDIR"):
        prepare(recipe, tmp_path / "other")


@pytest.mark.parametrize(
    ("expect", "message"),
    [
        ({}, None),
        ({"pairs": 2, "pairs_with_hard_negative": 1, "rows_read": 3}, None),
        ({"pairs": 3}, "data.expect.pairs is 3, but of mine.jsonl it is 2"),
        ({"pairs_with_hard_negative": 2}, "data.expect.pairs_with_hard_negative is 2, but of mine.jsonl it is 1"),
        ({"sha256": "00000000...0000"}, "data.expect.sha256 is 00000000...0000, but of mine.jsonl it is [0-9a-f]{64}"),
        ({"prepared_sha256": "0" * 64}, "data.expect.prepared_sha256 is 0{64}, but of mine.jsonl it is [0-9a-f]{64}"),
        ({"sentences": 4}, "data.expect.sentences is 4, but mine.jsonl has none"),
        ({"pairs": 3, "source": "other.jsonl"}, None),
        ({"pairs": 3, "source": "./mine.jsonl"}, "data.expect.pairs is 3, but of ./mine.jsonl it is 2"),
    ],
)
def test_what_a_recipe_expects_is_compared(
    expect: dict, message: str | None, keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "mine.jsonl", nli(("p", "e", 0), ("p", "c", 2), ("q", "e", 0)))
    text = json.dumps({"source": "mine.jsonl", **expect})
    recipe = load_recipe("snli-sup", [*keys, "data.train=mine.jsonl", f"data.expect={text}"])
    if message is None:
        prepare(recipe, tmp_path / "out")
        return
    with pytest.raises(InputError, match=message):
        prepare(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_expectation_does_not_lapse_for_a_list(keys: list[str], tmp_path: Path):
    source = jsonl(tmp_path / "mine.jsonl", nli(("p", "e", 0)))
    expect = "data.expect={source: mine.jsonl, pairs: 7}"
    recipe = load_recipe("snli-sup", [*keys, f"data.train=[{source}]", expect])
    with pytest.raises(InputError, match="data.expect is about one source, but data.train is a list"):
        prepare(recipe, tmp_path / "out")


def test_a_checksum_may_be_given_by_its_ends(keys: list[str], tmp_path: Path):
    source = jsonl(tmp_path / "mine.jsonl", nli(("p", "e", 0)))
    digest = hashlib.sha256((tmp_path / "mine.jsonl").read_bytes()).hexdigest()
    for ends in (f"{digest[:8]}...{digest[-4:]}", digest):
        expect = json.dumps({"source": "mine.jsonl", "sha256": ends})
        prepare(
            load_recipe("snli-sup", [*keys, f"data.train={source}", f"data.expect={expect}"]),
            tmp_path / "out", overwrite=True,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["snli-sup", "snli-unsup"])
def test_another_file_of_the_published_sample_s_name_is_refused(name: str, keys: list[str], tmp_path: Path):
    source = jsonl(tmp_path / "snli_train_100k.jsonl", nli(("p", "e", 0)))
    with pytest.raises(
        InputError, match=r"data.expect.sha256 is 0927a0b1\.\.\.7f88, but of snli_train_100k.jsonl it is"
    ):
        prepare(load_recipe(name, [*keys, f"data.train={source}"]), tmp_path / "out")


def test_keys_that_would_do_nothing_are_refused(keys: list[str]):
    for key in ("data.drop_duplicates=true", "data.nli.hard_negatives=all", "data.hard_negatives=false"):
        name = key.split("=")[0]
        section = ".".join(name.split(".")[:2])
        with pytest.raises(InputError, match=f"{section}: data.kind=sentences trains on distinct single sentences"):
            load_recipe("snli-unsup", [*keys, "data.train=x.txt", key])


def test_the_command_says_what_it_did(keys: list[str], tmp_path: Path):
    (tmp_path / "mine.csv").write_text('1,p,e,entailment\n2,p,"c,0"\n3,p,"c, c",contradiction\n4,q,f,-\n')
    columns = "data.columns={premise: 2, hypothesis: 3, label: 4}"
    settings = [f"--set={key}" for key in (*keys, columns, "data.strict=false")]
    command = [
        sys.executable,
        "-m",
        "simcse_st",
        "prepare",
        "snli-sup",
        "--data",
        "mine.csv",
        "--output",
        "out",
        *settings,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    digest = hashlib.sha256((tmp_path / "out" / "train.jsonl").read_bytes()).hexdigest()
    assert done.stdout == f"out/train.jsonl: 1 rows, SHA-256 {digest}\n"
    assert done.stderr.splitlines() == [
        "columns  without a header; in the first row column 2 is 'p', column 3 is 'e', column 4 is 'entailment'",
        "expect   is about snli_train_100k.jsonl, so nothing is expected of mine.csv",
        "dev      graded.csv: read without a header: columns 1, 2 and 3",
        "test     graded.csv: read without a header: columns 1, 2 and 3",
        "columns  '1' hold no text role and are left out",
        "data     1 pairs of 4 rows; 1 (100.0%) have a hard negative, 1 hard negatives in all",
        "dropped  1 no consensus, 1 broken",
        "unusable mine.csv:2: 3 fields where 4 belong",
        "lengths  0 of 3 texts (0.0%) are longer than 32 tokens; 0 tokens are cut off",
    ]


GROWTH = """
import resource, sys
from simcse_st.data import load_training_data
from simcse_st.recipe import DataSection
data = load_training_data(DataSection(train=sys.argv[1], kind=sys.argv[2]))
print(len(data), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "sentences"])
def test_memory_does_not_hold_the_rows(kind: str, tmp_path: Path):
    peaks = []
    for rows in (5_000, 200_000):
        path = tmp_path / f"{rows}.jsonl"
        with path.open("w") as file:
            for row in range(rows):
                premise = f"premise {row // 3} {'with the same many words ' * 12}"
                file.write(
                    json.dumps(
                        {"premise": premise, "hypothesis": f"hypothesis {row} {'of words ' * 20}", "label": row % 3}
                    )
                    + "\n"
                )
        command = [sys.executable, "-c", GROWTH, str(path), kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        count, peak = map(float, done.stdout.split())
        assert count == (rows + 2) // 3 if kind == "pairs" else rows // 3 + rows
        peaks.append(peak)
    # The texts of the large file are 108 MB; in memory, as Python objects with their rows, 200 MB and more.
    assert peaks[1] - peaks[0] < 50
