"""Reading training and graded data: what is made of good files, and what is said about bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcse_st import InputError
from simcse_st.data import Source, load_graded_pairs, load_pairs, truncation


def write(path: Path, text: str | bytes) -> Source:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Source(str(path))


def jsonl(path: Path, rows: list[dict]) -> Source:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def nli(*rows: tuple[str, str, object]) -> list[dict]:
    return [{"premise": p, "hypothesis": h, "label": label} for p, h, label in rows]


def test_first_contradiction_of_the_same_premise_is_the_hard_negative(tmp_path: Path):
    rows = nli(
        ("P", "c-other-case", 2), ("p", "e1", "entailment"), ("p", "n", 1), ("q", "e2", 0), ("p", "dropped", -1),
        ("p", "dropped too", "-"), ("p", "c1", "contradiction"), ("p", "e3", 0), ("p", "c2", 2), ("p", "no label", None),
    )  # fmt: skip
    pairs = load_pairs(jsonl(tmp_path / "nli.jsonl", rows))
    assert list(zip(pairs.anchors, pairs.positives, pairs.negatives, strict=True)) == [
        ("p", "e1", ["c1"]), ("q", "e2", []), ("p", "e3", ["c1"]),
    ]  # fmt: skip
    facts = pairs.facts
    assert (facts["rows_read"], facts["rows_without_consensus"], facts["pairs"]) == (10, 3, 3)
    assert (facts["pairs_with_hard_negative"], facts["hard_negatives"]) == (2, 2)
    assert facts["share_with_hard_negative"] == pytest.approx(2 / 3)
    assert pairs.dataset().column_names == ["anchor", "positive", "negative"]
    assert pairs.dataset()[1] == {"anchor": "q", "positive": "e2", "negative": []}


labelled = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "y", "z", "w"]), st.sampled_from([0, 1, 2, -1])), min_size=1
)


@given(rows=labelled)
def test_the_rule_holds_for_any_rows(rows: list[tuple[str, str, int]], tmp_path_factory: pytest.TempPathFactory):
    source = jsonl(tmp_path_factory.mktemp("nli") / "rows.jsonl", nli(*rows))
    expected = []
    for premise, hypothesis, label in rows:
        if label == 0:
            contradictions = [h for p, h, kind in rows if p == premise and kind == 2]
            expected.append((premise, hypothesis, contradictions[:1]))
    if not expected:
        with pytest.raises(InputError, match=r"no pair|no row"):
            load_pairs(source)
        return
    pairs = load_pairs(source)
    assert list(zip(pairs.anchors, pairs.positives, pairs.negatives, strict=True)) == expected


def test_triplets_are_taken_as_they_are(tmp_path: Path):
    rows = [
        {"anchor": "a", "positive": "b", "negative": ["c", None, ""], "id": 7},
        {"anchor": "d", "positive": "e"},
        {"anchor": "f", "positive": "g", "negative": "h", "negative_1": "i"},
    ]
    pairs = load_pairs(jsonl(tmp_path / "triplets.jsonl", rows))
    assert pairs.negatives == [["c"], [], ["h", "i"]]
    assert pairs.facts["columns_left_out"] == ["id"]
    assert load_pairs(Source(str(tmp_path / "triplets.jsonl")), hard_negatives=False).negatives == [[], [], []]


def test_the_papers_csv_is_read_by_its_column_names(tmp_path: Path):
    pairs = load_pairs(write(tmp_path / "nli.csv", 'sent0,sent1,hard_neg\n"a, b",c,d\ne,f,\n'))
    assert (pairs.anchors, pairs.positives, pairs.negatives) == (["a, b", "e"], ["c", "f"], [["d"], []])


def test_columns_of_any_row_are_looked_at(tmp_path: Path):
    rows = [{"anchor": "a", "positive": "b"}, {"anchor": "c", "positive": "d", "negatives": ["e"], "negative_2": "f"}]
    pairs = load_pairs(jsonl(tmp_path / "rows.jsonl", rows))
    assert pairs.negatives == [[], ["f"]]
    assert pairs.facts["columns_left_out"] == ["negatives"]


def test_a_sample_is_fixed_by_its_seed_and_keeps_the_order(tmp_path: Path):
    pairs = [{"anchor": f"a{i}", "positive": f"b{i}"} for i in range(50)]
    source = jsonl(tmp_path / "pairs.jsonl", pairs)
    first = load_pairs(source, sample_rows=10, sample_seed=1)
    assert first.anchors == load_pairs(source, sample_rows=10, sample_seed=1).anchors
    assert first.anchors != load_pairs(source, sample_rows=10, sample_seed=2).anchors
    # The very rows, so that another platform or release that draws others is noticed.
    assert first.anchors == ["a4", "a7", "a8", "a16", "a24", "a28", "a30", "a31", "a36", "a41"]
    with pytest.raises(InputError, match="rows is 51, but .* has 50 usable rows"):
        load_pairs(source, sample_rows=51)


def test_truncation_counts_texts_and_tokens(tiny_model):
    # A letter is a token; [CLS] and [SEP] are two more.
    facts = truncation(tiny_model.tokenizer, ["abc", "abcdef", "abcdefgh"], max_length=6)
    assert facts == {"max_length": 6, "texts": 3, "texts_truncated": 2, "tokens": 23, "tokens_truncated": 6}


def test_graded_pairs_with_and_without_a_header(tmp_path: Path):
    plain = load_graded_pairs(write(tmp_path / "plain.csv", '"A, b.",C.,5.0\nD,E,0\n'))
    header = load_graded_pairs(write(tmp_path / "header.csv", 'sentence1,sentence2,score\n"A, b.",C.,5.0\nD,E,0\n'))
    lines = load_graded_pairs(
        jsonl(
            tmp_path / "l.jsonl",
            [{"sentence1": s, "sentence2": t, "score": g} for s, t, g in (("A, b.", "C.", 5), ("D", "E", 0))],
        )
    )
    for graded in (plain, header, lines):
        assert (graded.sentences1, graded.sentences2, graded.scores) == (["A, b.", "D"], ["C.", "E"], [5.0, 0.0])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", "", "t.jsonl: there is no row in it"),
        ("t.jsonl", "premise,hypothesis,label\na,b,0\n", r"t.jsonl:1: not a JSON object.*is it a CSV\? then name it .csv"),
        ("t.jsonl", '{"anchor": "a", "positive": "b"}\n{"anchor": \n', "t.jsonl:2: not a JSON object on one line"),
        ("t.jsonl", '["a", "b"]\n', "t.jsonl:1: a row must be a JSON object"),
        ("t.jsonl", '{"words": "a"}\n', "t.jsonl:1: found the columns words, but need premise, hypothesis and label"),
        ("t.jsonl", '{"text": "a"}\n', "single sentences make no pairs: set data.kind=sentences"),
        ("t.jsonl", '{"anchor": "a", "anchor": "b"}\n', "t.jsonl:1: not a JSON object on one line .a key stands twice"),
        ("t.jsonl", '{"anchor": "a", "positive": "\\ud800"}\n', "t.jsonl:1: positive is .*must be a sentence"),
        ("t.jsonl", '{"anchor": ' + "1" * 5000 + "}\n", "t.jsonl:1: not a JSON object on one line .Exceeds the limit"),
        ("t.jsonl", "[" * 100_000 + "\n", "t.jsonl:1: not a JSON object on one line .*recursion"),
        ("t.csv", '{"anchor": "a", "positive": "b"}\n', "t.csv:1: .* is it JSON Lines. then name it .jsonl"),
        ("t.jsonl", b"\xff\xfea", "t.jsonl:1: .*iconv -f utf-16"),
        ("t.jsonl", '{"anchor": "a", "positive": null}\n', "t.jsonl:1: positive is missing"),
        ("t.jsonl", '{"anchor": "a", "positive": "b"}\n\n{"anchor": " ", "positive": "b"}\n', "t.jsonl:3: anchor is ' '"),
        ("t.jsonl", '{"anchor": "a", "positive": "b", "negative": ["c", 3]}\n', "t.jsonl:1: negative is 3"),
        ("t.jsonl", '{"anchor": "a", "positive": "b", "negative": " "}\n', "t.jsonl:1: negative is ' '"),
        ("t.jsonl", '{"premise": "a", "hypothesis": "b", "label": 3}\n', "t.jsonl:1: label is 3, but must be entailment"),
        ("t.jsonl", '{"premise": "a", "hypothesis": "b", "label": 0.0}\n', "t.jsonl:1: label is 0.0, but must be"),
        ("t.jsonl", '{"premise": "a", "hypothesis": "b", "label": true}\n', "t.jsonl:1: label is True, but must be"),
        ("t.jsonl", '{"premise": "a", "hypothesis": "b", "label": "yes"}\n', "t.jsonl:1: label is 'yes', but must be"),
        ("t.jsonl", '{"premise": "a", "hypothesis": "b", "label": 1}\n', "no pair: none of its 1 rows is an entailment"),
        ("t.jsonl", b'{"anchor": "caf\xe9", "positive": "b"}\n', r"t.jsonl:1: byte 16 of the line \(0xe9\) is not UTF-8"),
        ("t.csv", "premise\thypothesis\tlabel\n", "t.csv:1: a header of one column.*it is tab-separated"),
        ("t.csv", "premise,hypothesis,label\na,b,0\nc,d\n", "t.csv:3: 2 fields where 3"),
        ("t.csv", "premise,hypothesis,label\na,b,c,0\n", "t.csv:2: 4 fields where 3"),
        ("t.csv", 'premise,hypothesis,label\na,"b,0\nc,d,1\ne,f",0\n', "t.csv:2: the quoted field .* runs on to line 4"),
        ("t.csv", 'premise,hypothesis,label\na,"b,0\n"c",d,1\n', "t.csv:2: not valid CSV: ',' expected after"),
        ("t.csv", 'premise,hypothesis,label\na,"b,0\n', "t.csv:2: not valid CSV: unexpected end of data"),
        ("t.csv", "premise,premise,label\n", "t.csv:1: two columns of the header have the same name"),
        ("t.csv", "premise,hypothesis,label\n", "t.csv: there is no row in it"),
        ("t.parquet", "", "t.parquet: of no known format"),
    ],
)  # fmt: skip
def test_bad_training_data_is_named_by_file_and_line(name: str, text: str | bytes, message: str, tmp_path: Path):
    with pytest.raises(InputError, match=message) as error:
        load_pairs(write(tmp_path / name, text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", "g.csv:1: 2 fields where 3"),
        ("a,b,5.0\nc,d,5.5\n", "g.csv:2: score is '5.5', but must be a number from 0 to 5"),
        ("a,b,5.0\nc,d,-1\n", "g.csv:2: score is '-1'"),
        ("a,b,5.0\nc,d,nan\n", "g.csv:2: score is 'nan'"),
        ("a,b,high\n", "g.csv:1: score is 'high'"),
        ("a,,1\n", "g.csv:1: sentence2 is ''"),
        ("a,b,3\nc,d,3.0\n", "all 2 scores are 3"),
        ("", "there is no graded pair"),
    ],
)
def test_bad_graded_pairs_are_named_by_file_and_line(text: str, message: str, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        load_graded_pairs(write(tmp_path / "g.csv", text))


def test_sources_that_are_not_there(tmp_path: Path):
    with pytest.raises(InputError, match=r"no-such.jsonl: no such file"):
        load_pairs(Source("no-such.jsonl"))
    with pytest.raises(InputError, match="is a folder: name a file"):
        load_pairs(Source(str(tmp_path)))
    with pytest.raises(
        InputError,
        match=r"stanfordnlp/snli\[train\]: cannot be loaded from the Hugging Face Hub, and no such file is here .offline",
    ):
        load_pairs(Source("stanfordnlp/snli", split="train"))


def test_the_shipped_quickstart_data_is_what_its_readme_says():
    folder = Path(__import__("simcse_st.data").data.__file__).parent / "quickstart"
    pairs = load_pairs(Source(str(folder / "train.jsonl")))
    assert len(set(pairs.anchors)) == len(pairs) >= 400
    assert 0.65 <= pairs.facts["share_with_hard_negative"] <= 0.75
    assert sum(len(row) == 2 for row in pairs.negatives) >= 40
    graded = [load_graded_pairs(Source(str(folder / f"{split}.csv"))) for split in ("dev", "test")]
    assert [len(split) for split in graded] == [132, 132]
    assert all(min(split.scores) == 0 and max(split.scores) == 5 for split in graded)
    trained = {text.casefold() for text in pairs.texts}
    sentences = [text.casefold() for split in graded for text in (*split.sentences1, *split.sentences2)]
    assert not trained & set(sentences)
    assert len(set(sentences)) == len(sentences) == 4 * 132
