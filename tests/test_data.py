"""What is made of good data: pairs by the published rule and its options, columns by their names, samples, counts."""

from __future__ import annotations

import gc
import hashlib
import json
import pickle
import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import jsonl, nli
from simcse_st import InputError
from simcse_st.data import NLIRule, Reading, Source, load_graded_pairs, load_pairs, load_sentences, truncation
from simcse_st.data.spool import Digests

ROWS = nli(
    ("P", "c-other-case", 2), ("p", "e1", "entailment"), ("p", "n", 1), ("q", "e2", 0), ("p", "dropped", -1),
    ("p", "dropped too", "-"), ("p", "c1", "contradiction"), ("p", "e3", 0), ("p", "c2", 2), ("p", "no label", None),
    ("p", "c1", "CONTRADICTION"),
)  # fmt: skip


def test_first_contradiction_of_the_same_premise_is_the_hard_negative(tmp_path: Path):
    pairs = load_pairs(jsonl(tmp_path / "nli.jsonl", ROWS))
    assert list(pairs) == [("p", "e1", ["c1"]), ("q", "e2", []), ("p", "e3", ["c1"])]
    facts = pairs.facts
    assert (facts["rows_read"], facts["rows_usable"], facts["dropped"]["no_consensus"]) == (11, 8, 3)
    assert facts["labels"] == {"entailment": 3, "neutral": 1, "contradiction": 4}
    assert (facts["pairs"], facts["pairs_with_hard_negative"], facts["hard_negatives"]) == (3, 2, 2)
    assert facts["hard_negatives_per_row"] == {"0": 1, "1": 2}
    assert facts["share_with_hard_negative"] == pytest.approx(2 / 3)
    assert (facts["unique_anchors"], facts["unique_sentences"]) == (2, 6)
    assert pairs.dataset().column_names == ["anchor", "positive", "negative"]
    assert pairs.dataset()[1] == {"anchor": "q", "positive": "e2", "negative": []}
    assert list(pairs.texts()) == ["p", "e1", "c1", "q", "e2", "p", "e3", "c1"]


def test_other_rules_for_labelled_rows(tmp_path: Path):
    source = jsonl(tmp_path / "nli.jsonl", ROWS)
    every = load_pairs(source, rule=NLIRule(hard_negatives="all"))
    assert [row[2] for row in every] == [["c1", "c2"], [], ["c1", "c2"]]
    once = load_pairs(source, rule=NLIRule(pairs="one_per_premise"))
    assert list(once) == [("p", "e1", ["c1"]), ("q", "e2", [])]
    assert list(load_pairs(source, hard_negatives=False)) == [("p", "e1", []), ("q", "e2", []), ("p", "e3", [])]
    assert "hard negatives are left out" in load_pairs(source, hard_negatives=False).facts["rule"]
    with pytest.raises(InputError, match=r"data\.nli: .*holds pairs as they are, and no labels"):
        load_pairs(jsonl(tmp_path / "p.jsonl", [{"anchor": "a", "positive": "b"}]), rule=NLIRule(hard_negatives="all"))


def test_random_contradictions_are_drawn_by_the_seed(tmp_path: Path):
    rows = nli(*[(f"p{i}", "e", 0) for i in range(200)], *[(f"p{i}", f"c{k}", 2) for k in range(4) for i in range(200)])
    source = jsonl(tmp_path / "nli.jsonl", rows)
    first, again, other = (
        [row[2] for row in load_pairs(source, rule=NLIRule(hard_negatives="random", seed=seed))] for seed in (1, 1, 2)
    )
    assert first == again != other
    counts = [sum(row == [f"c{k}"] for row in first) for k in range(4)]
    assert sum(counts) == 200
    assert min(counts) > 25  # 50 are expected of each; fewer than 25 come once in a million seeds
    # The very draws, so that another platform or release that draws others is noticed.
    assert [row[0] for row in first[:8]] == EXPECTED_DRAWS


EXPECTED_DRAWS = ["c1", "c0", "c2", "c0", "c3", "c3", "c3", "c3"]

labelled = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "a ", "é", "e\u0301", "\x00"]),
        st.text(min_size=1).filter(lambda text: text.strip() and not any("\ud800" <= c <= "\udfff" for c in text)),
        st.sampled_from([0, 1, 2, -1]),
    ).filter(lambda row: row[0].strip() != ""),
    min_size=1,
)


@given(rows=labelled)
def test_the_rule_holds_for_any_rows(rows: list[tuple[str, str, int]], tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("nli")
    source = jsonl(folder / "rows.jsonl", nli(*rows))
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
    assert list(pairs) == expected
    # What is written reads back as the same, byte by byte.
    pairs.write(folder / "prepared.jsonl")
    again = load_pairs(Source(str(folder / "prepared.jsonl")))
    assert list(again) == expected
    again.write(folder / "again.jsonl")
    assert (folder / "again.jsonl").read_bytes() == (folder / "prepared.jsonl").read_bytes()
    digest = hashlib.sha256((folder / "prepared.jsonl").read_bytes()).hexdigest()
    assert again.facts["prepared_sha256"] == pairs.facts["prepared_sha256"] == digest


@given(rows=labelled)
def test_sentences_are_all_distinct_texts_for_any_rows(
    rows: list[tuple[str, str, int]], tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("nli")
    expected = list(
        dict.fromkeys(text for premise, hypothesis, label in rows if label >= 0 for text in (premise, hypothesis))
    )
    source = jsonl(folder / "rows.jsonl", nli(*rows))
    if not expected:
        with pytest.raises(InputError, match="holds a sentence|no row"):
            load_sentences(source)
        return
    sentences = load_sentences(source)
    assert [text for (text,) in sentences] == expected
    sentences.write(folder / "prepared.jsonl")
    assert list(load_sentences(Source(str(folder / "prepared.jsonl")))) == list(sentences)


def test_triplets_are_taken_as_they_are(tmp_path: Path):
    rows = [
        {"anchor": "a", "positive": "b", "negative": ["c", None, ""], "id": 7},
        {"anchor": "d", "positive": "e"},
        {"anchor": "f", "positive": "g", "negative_1": "i", "negative": "h"},
    ]
    pairs = load_pairs(jsonl(tmp_path / "triplets.jsonl", rows))
    assert [row[2] for row in pairs] == [["c"], [], ["h", "i"]]
    assert pairs.facts["columns_left_out"] == ["id"]
    assert pairs.facts["columns"]["negative"] == ["negative", "negative_1"]


@pytest.mark.parametrize(
    ("names", "negatives"),
    [
        (("anchor", "positive"), ("negative", "negative_1", "negative_2")),
        (("anchor", "positive"), ("negative_1", "negative_2", "negative_10")),
        (("sent0", "sent1"), ("hard_neg",)),
        (("query", "document"), ("hard_negative_1", "hard_negative_2")),
        (("query", "positive"), ("negatives",)),
        (("question", "answer"), ("neg",)),
        (("query", "passage"), ()),
    ],
)
def test_public_names_are_known_in_any_order(names: tuple[str, str], negatives: tuple[str, ...], tmp_path: Path):
    row = {names[0]: "a", names[1]: "p", **{name: f"n{i}" for i, name in enumerate(negatives)}, "id": "7", "score": 0.5}
    shuffled = list(row.items())
    random.Random(1).shuffle(shuffled)
    pairs = load_pairs(jsonl(tmp_path / "rows.jsonl", [dict(shuffled)]))
    assert list(pairs) == [("a", "p", [f"n{i}" for i in range(len(negatives))])]
    assert sorted(pairs.facts["columns_left_out"]) == ["id", "score"]


def test_columns_of_other_names_are_told(tmp_path: Path):
    rows = [{"title": "t", "body": "b", "neg_b": "nb", "wrong": "w"}, {"title": "t2", "body": "b2", "wrong": ""}]
    source = jsonl(tmp_path / "rows.jsonl", rows)
    reading = Reading(columns={"anchor": "title", "positive": "body", "negative": ["wrong", "neg_b"]})
    assert list(load_pairs(source, reading)) == [("t", "b", ["w", "nb"]), ("t2", "b2", [])]
    assert [text for (text,) in load_sentences(source, Reading(columns={"text": "body"}))] == ["b", "b2"]
    labelled = jsonl(tmp_path / "n.jsonl", [{"s1": "p", "sentence2": "h", "y": 0}])
    assert list(load_pairs(labelled, Reading(columns={"premise": "s1", "label": "y"}))) == [("p", "h", [])]
    # What a user names takes the place of what a name would tell.
    both = jsonl(tmp_path / "both.jsonl", [{"query": "q", "question": "q2", "answer": "a"}])
    assert list(load_pairs(both, Reading(columns={"anchor": "question", "positive": "answer"}))) == [("q2", "a", [])]


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"a": "x", "positive": "y"}, {"anchor": "b"}, "data.columns.anchor: no column 'b' in .*rows.jsonl:1; found the columns 'a', 'positive'"),
        ({"a": "x", "b": "y"}, {"anchor": "a"}, "rows.jsonl:1: no column for the positive: found the columns 'a', 'b'; name it by data.columns.positive"),
        ({"a": "x", "b": "y"}, {"anchor": "a", "positive": "a"}, "one column in two roles: a, a"),
        ({"a": "x", "b": "y"}, {"anchr": "a"}, "data.columns: no role 'anchr': did you mean 'anchor'"),
        ({"a": "x", "b": "y"}, {"anchor": "a", "label": "b"}, "anchor, label are not the roles of one kind of data"),
        ({"a": "x", "b": "y"}, {"anchor": "a", "positive": "b", "negative": "c"}, "no column 'c' in any row of .*rows.jsonl"),
        ({"query": "x", "question": "z", "answer": "y"}, {}, "query and question might both be the anchor: choose by data.columns.anchor"),
        ({"anchor": "x", "positive": "y", "label": 0}, {}, "a label beside anchor and positive: if it tells the positive pairs, keep those only"),
        ({"sentence1": "x", "sentence2": "y", "label": 0}, {}, "found the columns 'sentence1', 'sentence2', 'label', but need premise"),
        ({"anchor": "x", "positive": "y"}, {"anchor": 1, "positive": 2}, "data.columns by numbers is for CSV and TSV"),
    ],
)  # fmt: skip
def test_columns_that_are_not_clear_are_an_error(row: dict, columns: dict, message: str, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        load_pairs(jsonl(tmp_path / "rows.jsonl", [row]), Reading(columns=columns))


def test_files_without_a_header_are_read_by_numbers(tmp_path: Path):
    reading = Reading(columns={"anchor": 2, "positive": 1, "negative": [4]})
    (tmp_path / "t.csv").write_text('"b, b",a,7,c\ne,d,8,\n')
    (tmp_path / "t.tsv").write_text("b, b\ta\t7\tc\ne\td\t8\t\n")
    for name in ("t.csv", "t.tsv"):
        pairs = load_pairs(Source(str(tmp_path / name)), reading)
        assert list(pairs) == [("a", "b, b", ["c"]), ("d", "e", [])]
        assert pairs.facts["columns_left_out"] == ["3"]
    (tmp_path / "t.csv").write_text("positive,anchor,id,negative\nb,a,7,c\n")
    with pytest.raises(InputError, match="t.csv:1: this is a header: give data.columns by its names, not by numbers"):
        load_pairs(Source(str(tmp_path / "t.csv")), reading)
    (tmp_path / "t.csv").write_text("title,body,id,negative\nb,a,7,c\n")
    with pytest.raises(InputError, match="t.csv:1: this is a header"):
        load_pairs(Source(str(tmp_path / "t.csv")), reading)
    (tmp_path / "t.csv").write_text("a, x\tb\tc,3,4\n")
    with pytest.raises(InputError, match="t.csv:1: a tab in the first row: is it tab-separated"):
        load_pairs(Source(str(tmp_path / "t.csv")), reading)


def test_several_files_are_one_source_in_the_order_of_their_names(tmp_path: Path):
    jsonl(tmp_path / "b.jsonl", nli(("p", "c1", 2), ("q", "e2", 0)))
    jsonl(tmp_path / "a.jsonl", nli(("p", "e1", 0)))
    (tmp_path / "c.csv").write_text("label,hypothesis,premise\n2,c2,p\n2,c3,q\n")
    expected = [("p", "e1", ["c1"]), ("q", "e2", ["c3"])]
    by_pattern = load_pairs(Source(str(tmp_path / "*.*")))
    by_list = load_pairs(Source((str(tmp_path / "[ab].jsonl"), str(tmp_path / "c.csv"))))
    assert list(by_pattern) == list(by_list) == expected
    assert [source["file"] for source in by_list.facts["sources"]] == ["a.jsonl", "b.jsonl", "c.csv"]
    for source in by_list.facts["sources"]:
        assert source["sha256"] == hashlib.sha256((tmp_path / source["file"]).read_bytes()).hexdigest()
    jsonl(tmp_path / "d.jsonl", [{"anchor": "a", "positive": "b"}])
    with pytest.raises(InputError, match="d.jsonl:1: pairs, where labelled rows came before"):
        load_pairs(Source(str(tmp_path / "*.*")))


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path):
    jsonl(tmp_path / "a.jsonl", [{"anchor": "a", "positive": "b"}])
    with pytest.raises(InputError, match="a.jsonl is named twice: its rows would count twice"):
        load_pairs(Source([tmp_path / "a.jsonl", tmp_path / "*.jsonl"]))


def test_words_that_stand_for_nothing_are_counted(tmp_path: Path):
    (tmp_path / "t.csv").write_text("anchor,positive,negative\na,b,None\nc,d,nan\ne,f,None\ng,h,\n")
    pairs = load_pairs(tmp_path / "t.csv")
    assert [row[2] for row in pairs] == [["None"], ["nan"], ["None"], []]
    assert pairs.facts["words_for_nothing"] == {"None": 2, "nan": 1}


def test_a_premise_with_thousands_of_rows_takes_no_time_for_each_pair_of_them(tmp_path: Path):
    rows = nli(*[("p", f"e{i}", 0) for i in range(20_000)], *[("p", f"c{i}", 2) for i in range(20_000)])
    source = jsonl(tmp_path / "nli.jsonl", rows)
    begin = time.perf_counter()
    pairs = load_pairs(source)
    assert {row[2][0] for row in pairs} == {"c0"}
    assert time.perf_counter() - begin < 10  # with all contradictions listed for each pair it is minutes


def test_rules_and_readings_that_do_not_exist():
    with pytest.raises(InputError, match="hard_negatives is 'lsat': did you mean 'last'|hard_negatives is 'lsat': "):
        NLIRule(hard_negatives="lsat")
    with pytest.raises(InputError, match="sample_rows must be at least 1, not -1"):
        Reading(sample_rows=-1)


def test_a_data_set_stays_usable_when_what_it_was_made_of_is_gone(tmp_path: Path):
    source = jsonl(tmp_path / "rows.jsonl", [{"anchor": "a", "positive": "b"}] * 20)
    dataset = load_pairs(source).dataset()
    gc.collect()
    again = pickle.loads(pickle.dumps(dataset))  # as worker processes get it
    assert again[19] == {"anchor": "a", "positive": "b", "negative": []}


def test_a_sample_is_fixed_by_its_seed_and_keeps_the_order(tmp_path: Path):
    pairs = [{"anchor": f"a{i}", "positive": f"b{i}"} for i in range(50)]
    source = jsonl(tmp_path / "pairs.jsonl", pairs)

    def anchors(seed: int) -> list[str]:
        return [row[0] for row in load_pairs(source, Reading(sample_rows=10, sample_seed=seed))]

    assert anchors(1) != anchors(2)
    # The very rows, so that another platform or release that draws others is noticed.
    assert anchors(1) == ["a4", "a7", "a8", "a16", "a24", "a28", "a30", "a31", "a36", "a41"]
    with pytest.raises(InputError, match="rows is 51, but .* has 50 usable rows"):
        load_pairs(source, Reading(sample_rows=51))


def test_a_sample_is_drawn_after_rows_without_consensus_are_dropped(tmp_path: Path):
    kept = [(f"p{i}", f"h{i}", i % 3) for i in range(30)]
    noise = [(f"x{i}", "h", -1) for i in range(30)]
    mixed = [row for both in zip(noise, kept, strict=True) for row in both]
    reading = Reading(sample_rows=20, sample_seed=3)
    clean = load_pairs(jsonl(tmp_path / "kept.jsonl", nli(*kept)), reading)
    drawn = load_pairs(jsonl(tmp_path / "mixed.jsonl", nli(*mixed)), reading)
    assert list(clean) == list(drawn)
    assert drawn.facts["sample"] == {"rows": 20, "seed": 3}
    assert sum(drawn.facts["labels"].values()) == 20


def test_duplicates_and_long_rows_are_dropped_on_request_and_counted(tmp_path: Path):
    rows = [{"anchor": "a", "positive": "b", "negative": n} for n in ("c", "c", "d", "much too long", "c")]
    source = jsonl(tmp_path / "rows.jsonl", rows)
    kept = load_pairs(source, Reading(max_characters=6), drop_duplicates=True)
    assert [row[2] for row in kept] == [["c"], ["d"]]
    assert (kept.facts["dropped"]["too_long"], kept.facts["dropped"]["duplicate"]) == (1, 2)
    assert len(load_pairs(source)) == 5


def test_rows_that_cannot_be_used_are_counted_drops_if_that_is_wanted(tmp_path: Path):
    lines = [
        '{"anchor": "a", "positive": "b"}', "{broken", '{"anchor": " ", "positive": "b"}', '{"anchor": 3, "positive": "b"}',
        '{"positive": "b"}', '{"anchor": "c", "positive": "d", "negative": "e"}',
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    source = Source(str(tmp_path / "rows.jsonl"))
    pairs = load_pairs(source, Reading(strict=False))
    assert list(pairs) == [("a", "b", []), ("c", "d", ["e"])]
    assert pairs.facts["rows_read"] == 6
    assert pairs.facts["dropped"] == {"no_consensus": 0, "too_long": 0, "broken": 1, "blank": 2, "not_text": 1}
    assert [line.split("rows.jsonl:")[1][:2] for line in pairs.facts["unusable_rows"]] == ["2:", "3:", "4:"]
    with pytest.raises(InputError, match="rows.jsonl:2: not a JSON object"):
        load_pairs(source)


def test_truncation_counts_texts_and_tokens(tiny_model):
    # A letter is a token; [CLS] and [SEP] are two more.
    facts = truncation(tiny_model.tokenizer, ["abc", "abcdef", "abcdefgh"], max_length=6)
    assert facts == {"max_length": 6, "texts": 3, "texts_truncated": 2, "tokens": 23, "tokens_truncated": 6}


def test_firsts_are_found_among_digests():
    texts = [random.Random(0).choice("abcdefgh") * k for k in (1, 2, 3) for _ in range(40)]
    texts = random.Random(1).choices(["", "a", "aa", "b\x00", "b", "é"], k=500)
    expected = [text not in texts[:number] for number, text in enumerate(texts)]
    digests = Digests(texts)
    assert digests.first().tolist() == expected
    assert digests.distinct() == len(set(texts))
    # Several texts together are not their concatenation.
    joined = Digests()
    joined.add("ab", "c")
    joined.add("a", "bc")
    joined.add("abc")
    assert joined.distinct() == 3
    assert isinstance(joined.array(), np.ndarray)


def test_the_shipped_quickstart_data_is_what_its_readme_says():
    folder = Path(__import__("simcse_st.data").data.__file__).parent / "quickstart"
    pairs = load_pairs(Source(str(folder / "train.jsonl")))
    assert pairs.facts["unique_anchors"] == len(pairs) >= 400
    assert 0.65 <= pairs.facts["share_with_hard_negative"] <= 0.75
    assert pairs.facts["hard_negatives_per_row"]["2"] >= 40
    graded = [load_graded_pairs(Source(str(folder / f"{split}.csv"))) for split in ("dev", "test")]
    assert [len(split) for split in graded] == [132, 132]
    assert all(min(split.scores) == 0 and max(split.scores) == 5 for split in graded)
    trained = {text.casefold() for text in pairs.texts()}
    sentences = [text.casefold() for split in graded for text in (*split.sentences1, *split.sentences2)]
    assert not trained & set(sentences)
    assert len(set(sentences)) == len(sentences) == 4 * 132
    assert json.loads(next(pairs.lines())).keys() == {"anchor", "positive", "negative"}
