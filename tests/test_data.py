"""What is made of good data: pairs by the published rule and its options, columns by their names, samples, counts."""

from __future__ import annotations

import gc
import hashlib
import pickle
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import jsonl, loaded, nli
from simcse_st import InputError, Recipe
from simcse_st.data import load_graded_pairs
from simcse_st.data.files import count_distinct, digest_of
from simcse_st.references import Columns, NLISection, Sample
from simcse_st.training.prepare import facts_of_texts

ROWS = nli(
    ("P", "c-other-case", 2), ("p", "e1", "entailment"), ("p", "n", 1), ("q", "e2", 0), ("p", "dropped", -1),
    ("p", "dropped too", "-"), ("p", "c1", "contradiction"), ("p", "e3", 0), ("p", "c2", 2), ("p", "no label", None),
    ("p", "c1", "CONTRADICTION"),
)  # fmt: skip


def test_first_contradiction_of_the_same_premise_is_the_hard_negative(tmp_path: Path):
    pairs = loaded(jsonl(tmp_path / "nli.jsonl", ROWS))
    assert list(pairs.rows()) == [("p", "e1", ["c1"]), ("q", "e2", []), ("p", "e3", ["c1"])]
    facts = pairs.facts
    assert (facts.rows_read, facts.rows_usable, facts.dropped["no_consensus"]) == (11, 8, 3)
    assert facts.labels == {"entailment": 3, "neutral": 1, "contradiction": 4}
    assert (facts.pairs, facts.pairs_with_hard_negative, facts.hard_negatives) == (3, 2, 2)
    assert facts.hard_negatives_per_row == {"0": 1, "1": 2}
    assert facts.share_with_hard_negative == pytest.approx(2 / 3)
    assert (facts.unique_anchors, facts.unique_sentences) == (2, 6)
    assert pairs.dataset.column_names == ["anchor", "positive", "negative"]
    assert pairs.dataset[1] == {"anchor": "q", "positive": "e2", "negative": []}
    assert list(pairs.texts()) == ["p", "e1", "c1", "q", "e2", "p", "e3", "c1"]


def test_other_rules_for_labelled_rows(tmp_path: Path):
    source = jsonl(tmp_path / "nli.jsonl", ROWS)
    every = loaded(source, nli=NLISection(hard_negatives="all"))
    assert [row[2] for row in every.rows()] == [["c1", "c2"], [], ["c1", "c2"]]
    assert list(loaded(source, hard_negatives=False).rows()) == [("p", "e1", []), ("q", "e2", []), ("p", "e3", [])]
    assert "hard negatives are left out" in loaded(source, hard_negatives=False).facts.rule
    with pytest.raises(InputError, match=r"data\.nli: .*holds pairs as they are, and no labels"):
        loaded(jsonl(tmp_path / "p.jsonl", [{"anchor": "a", "positive": "b"}]), nli=NLISection(hard_negatives="all"))


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
            loaded(source)
        return
    pairs = loaded(source)
    assert list(pairs.rows()) == expected
    # What is written reads back as the same, byte by byte.
    pairs.write(folder / "prepared.jsonl")
    again = loaded(folder / "prepared.jsonl")
    assert list(again.rows()) == expected
    again.write(folder / "again.jsonl")
    assert (folder / "again.jsonl").read_bytes() == (folder / "prepared.jsonl").read_bytes()
    digest = hashlib.sha256((folder / "prepared.jsonl").read_bytes()).hexdigest()
    assert again.facts.prepared_sha256 == pairs.facts.prepared_sha256 == digest


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
            loaded(source, kind="sentences")
        return
    sentences = loaded(source, kind="sentences")
    assert [text for (text,) in sentences.rows()] == expected
    sentences.write(folder / "prepared.jsonl")
    assert list(loaded(folder / "prepared.jsonl", kind="sentences").rows()) == list(sentences.rows())


def test_triplets_are_taken_as_they_are(tmp_path: Path):
    rows = [
        {"anchor": "a", "positive": "b", "negative": ["c", None, ""], "id": 7},
        {"anchor": "d", "positive": "e"},
        {"anchor": "f", "positive": "g", "negative_1": "i", "negative": "h"},
    ]
    pairs = loaded(jsonl(tmp_path / "triplets.jsonl", rows))
    assert [row[2] for row in pairs.rows()] == [["c"], [], ["h", "i"]]
    assert pairs.facts.columns_left_out == ["id"]
    assert pairs.facts.columns["negative"] == ["negative", "negative_1"]


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
    pairs = loaded(jsonl(tmp_path / "rows.jsonl", [dict(shuffled)]))
    assert list(pairs.rows()) == [("a", "p", [f"n{i}" for i in range(len(negatives))])]
    assert sorted(pairs.facts.columns_left_out) == ["id", "score"]


def test_columns_of_other_names_are_told(tmp_path: Path):
    rows = [{"title": "t", "body": "b", "neg_b": "nb", "wrong": "w"}, {"title": "t2", "body": "b2", "wrong": ""}]
    source = jsonl(tmp_path / "rows.jsonl", rows)
    columns = Columns(anchor="title", positive="body", negative=["wrong", "neg_b"])
    assert list(loaded(source, columns=columns).rows()) == [("t", "b", ["w", "nb"]), ("t2", "b2", [])]
    assert list(loaded(source, kind="sentences", columns=Columns(text="body")).texts()) == ["b", "b2"]
    labelled = jsonl(tmp_path / "n.jsonl", [{"s1": "p", "sentence2": "h", "y": 0}])
    assert list(loaded(labelled, columns=Columns(premise="s1", label="y")).rows()) == [("p", "h", [])]
    # What a user names takes the place of what a name would tell.
    both = jsonl(tmp_path / "both.jsonl", [{"query": "q", "question": "q2", "answer": "a"}])
    assert list(loaded(both, columns=Columns(anchor="question", positive="answer")).rows()) == [("q2", "a", [])]


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"a": "x", "positive": "y"}, {"anchor": "b"}, "data.columns.anchor: no column 'b' in .*rows.jsonl:1; found the columns 'a', 'positive'"),
        ({"a": "x", "b": "y"}, {"anchor": "a"}, "rows.jsonl:1: no column for the positive: found the columns 'a', 'b'; name it by data.columns.positive"),
        ({"a": "x", "b": "y"}, {"anchor": "a", "positive": "a"}, "one column in two roles: a, a"),
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
        loaded(jsonl(tmp_path / "rows.jsonl", [row]), columns=Columns(**columns))


def test_files_without_a_header_are_read_by_numbers(tmp_path: Path):
    columns = Columns(anchor=2, positive=1, negative=[4])
    (tmp_path / "t.csv").write_text('"b, b",a,7,c\ne,d,8,\n')
    (tmp_path / "t.tsv").write_text("b, b\ta\t7\tc\ne\td\t8\t\n")
    for name in ("t.csv", "t.tsv"):
        pairs = loaded(tmp_path / name, columns=columns)
        assert list(pairs.rows()) == [("a", "b, b", ["c"]), ("d", "e", [])]
        assert pairs.facts.columns_left_out == ["3"]
    (tmp_path / "t.csv").write_text("positive,anchor,id,negative\nb,a,7,c\n")
    with pytest.raises(InputError, match="t.csv:1: this is a header: give data.columns by its names, not by numbers"):
        loaded(tmp_path / "t.csv", columns=columns)
    (tmp_path / "t.csv").write_text("title,body,id,negative\nb,a,7,c\n")
    with pytest.raises(InputError, match="t.csv:1: this is a header"):
        loaded(tmp_path / "t.csv", columns=columns)
    (tmp_path / "t.csv").write_text("a, x\tb\tc,3,4\n")
    with pytest.raises(InputError, match="t.csv:1: a tab in the first row: is it tab-separated"):
        loaded(tmp_path / "t.csv", columns=columns)


def test_several_files_are_one_source_in_the_order_of_their_names(tmp_path: Path):
    jsonl(tmp_path / "b.jsonl", nli(("p", "c1", 2), ("q", "e2", 0)))
    jsonl(tmp_path / "a.jsonl", nli(("p", "e1", 0)))
    (tmp_path / "c.csv").write_text("label,hypothesis,premise\n2,c2,p\n2,c3,q\n")
    expected = [("p", "e1", ["c1"]), ("q", "e2", ["c3"])]
    by_pattern = loaded(tmp_path / "*.*")
    by_list = loaded([str(tmp_path / "[ab].jsonl"), str(tmp_path / "c.csv")])
    assert list(by_pattern.rows()) == list(by_list.rows()) == expected
    assert [source.file for source in by_list.facts.sources] == ["a.jsonl", "b.jsonl", "c.csv"]
    for source in by_list.facts.sources:
        assert source.sha256 == hashlib.sha256((tmp_path / source.file).read_bytes()).hexdigest()
    jsonl(tmp_path / "d.jsonl", [{"anchor": "a", "positive": "b"}])
    with pytest.raises(InputError, match="d.jsonl:1: pairs, where labelled rows came before"):
        loaded(tmp_path / "*.*")


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path):
    jsonl(tmp_path / "a.jsonl", [{"anchor": "a", "positive": "b"}])
    with pytest.raises(InputError, match="a.jsonl is named twice: its rows would count twice"):
        loaded([str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl")])


def test_a_premise_with_thousands_of_rows_takes_no_time_for_each_pair_of_them(tmp_path: Path):
    rows = nli(*[("p", f"e{i}", 0) for i in range(20_000)], *[("p", f"c{i}", 2) for i in range(20_000)])
    source = jsonl(tmp_path / "nli.jsonl", rows)
    begin = time.perf_counter()
    pairs = loaded(source)
    assert {row[2][0] for row in pairs.rows()} == {"c0"}
    assert time.perf_counter() - begin < 10  # with all contradictions listed for each pair it is minutes


def test_a_data_set_stays_usable_when_what_it_was_made_of_is_gone(tmp_path: Path):
    source = jsonl(tmp_path / "rows.jsonl", [{"anchor": "a", "positive": "b"}] * 20)
    dataset = loaded(source).dataset
    gc.collect()
    again = pickle.loads(pickle.dumps(dataset))  # as worker processes get it
    assert again[19] == {"anchor": "a", "positive": "b", "negative": []}


def test_a_sample_is_fixed_by_its_seed_and_keeps_the_order(tmp_path: Path):
    pairs = [{"anchor": f"a{i}", "positive": f"b{i}"} for i in range(50)]
    source = jsonl(tmp_path / "pairs.jsonl", pairs)

    def anchors(seed: int) -> list[str]:
        return [row[0] for row in loaded(source, sample=Sample(rows=10, seed=seed)).rows()]

    assert anchors(1) != anchors(2)
    # The very rows, so that another platform or release that draws others is noticed.
    assert anchors(1) == ["a4", "a7", "a8", "a16", "a24", "a28", "a30", "a31", "a36", "a41"]
    with pytest.raises(InputError, match="rows is 51, but .* has 50 usable rows"):
        loaded(source, sample=Sample(rows=51))


def test_a_sample_is_drawn_after_rows_without_consensus_are_dropped(tmp_path: Path):
    kept = [(f"p{i}", f"h{i}", i % 3) for i in range(30)]
    noise = [(f"x{i}", "h", -1) for i in range(30)]
    mixed = [row for both in zip(noise, kept, strict=True) for row in both]
    sample = Sample(rows=20, seed=3)
    clean = loaded(jsonl(tmp_path / "kept.jsonl", nli(*kept)), sample=sample)
    drawn = loaded(jsonl(tmp_path / "mixed.jsonl", nli(*mixed)), sample=sample)
    assert list(clean.rows()) == list(drawn.rows())
    assert (drawn.facts.sample.rows, drawn.facts.sample.seed) == (20, 3)
    assert sum(drawn.facts.labels.values()) == 20


def test_duplicates_and_long_rows_are_dropped_on_request_and_counted(tmp_path: Path):
    rows = [{"anchor": "a", "positive": "b", "negative": n} for n in ("c", "c", "d", "much too long", "c")]
    source = jsonl(tmp_path / "rows.jsonl", rows)
    kept = loaded(source, max_characters=6, drop_duplicates=True)
    assert [row[2] for row in kept.rows()] == [["c"], ["d"]]
    assert (kept.facts.dropped["too_long"], kept.facts.dropped["duplicate"]) == (1, 2)
    assert len(loaded(source)) == 5


def test_rows_that_cannot_be_used_are_counted_drops_if_that_is_wanted(tmp_path: Path):
    lines = [
        '{"anchor": "a", "positive": "b"}', "{broken", '{"anchor": " ", "positive": "b"}', '{"anchor": 3, "positive": "b"}',
        '{"positive": "b"}', '{"anchor": "c", "positive": "d", "negative": "e"}',
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    source = tmp_path / "rows.jsonl"
    pairs = loaded(source, strict=False)
    assert list(pairs.rows()) == [("a", "b", []), ("c", "d", ["e"])]
    assert pairs.facts.rows_read == 6
    assert pairs.facts.dropped == {"no_consensus": 0, "too_long": 0, "broken": 1, "blank": 2, "not_text": 1}
    assert [line.split("rows.jsonl:")[1][:2] for line in pairs.facts.unusable_rows] == ["2:", "3:", "4:"]
    with pytest.raises(InputError, match="rows.jsonl:2: not a JSON object"):
        loaded(source)


def test_truncation_counts_texts_and_tokens(tiny_recipe: Recipe, tiny_model, tmp_path: Path):
    # A letter is a token; [CLS] and [SEP] are two more.
    row = {"anchor": "abc", "positive": "abcdef", "negative": "abcdefgh"}
    recipe = tiny_recipe.changed(training__max_length=6)
    facts = facts_of_texts(recipe, loaded(jsonl(tmp_path / "t.jsonl", [row])), {}, tiny_model.tokenizer).truncation
    counts = {"max_length": 6, "texts": 3, "texts_truncated": 2, "tokens": 23, "tokens_truncated": 6}
    assert facts
    assert facts.model_dump(exclude={"tokenizer"}) == {**counts, "unknown_tokens": 0, "texts_unknown": 0}
    source = loaded(str(tmp_path / "t.jsonl"))
    facts = facts_of_texts(recipe, source, {}, tiny_model.tokenizer, "xy ").truncation
    assert facts
    assert (facts.tokens, facts.texts_truncated, facts.tokens_truncated) == (29, 3, 11)


def test_different_texts_are_counted_by_their_digests():
    texts = random.Random(1).choices(["", "a", "aa", "b\x00", "b", "é"], k=500)
    assert count_distinct(bytearray(b"".join(map(digest_of, texts)))) == len(set(texts))
    # Several texts together are not their concatenation.
    assert len({digest_of("ab", "c"), digest_of("a", "bc"), digest_of("abc")}) == 3


def test_the_shipped_quickstart_data_is_what_its_readme_says():
    folder = Path(__import__("simcse_st.data").data.__file__).parent / "quickstart"
    pairs = loaded(folder / "train.jsonl")
    assert pairs.facts.unique_anchors == len(pairs) >= 400
    assert 0.65 <= pairs.facts.share_with_hard_negative <= 0.75
    assert pairs.facts.hard_negatives_per_row["2"] >= 40
    graded = [load_graded_pairs(folder / f"{split}.csv") for split in ("dev", "test")]
    assert [len(split) for split in graded] == [132, 132]
    assert all(min(split.scores) == 0 and max(split.scores) == 5 for split in graded)
    trained = {text.casefold() for text in pairs.texts()}
    sentences = [text.casefold() for split in graded for text in (*split.sentences1, *split.sentences2)]
    assert not trained & set(sentences)
    assert len(set(sentences)) == len(sentences) == 4 * 132
    assert pairs.dataset.column_names == ["anchor", "positive", "negative"]


def test_a_list_of_positives_is_a_row_for_each(tmp_path: Path):
    rows = [
        {"query": "how", "pos": ["p1", "p2"], "neg": ["n1"]},
        {"query": "who", "pos": ["p3"], "neg": []},
        {"query": "why", "pos": "p4", "neg": ["n2", "n3"]},
    ]
    source = jsonl(tmp_path / "lists.jsonl", rows)
    pairs = loaded(source)
    assert list(pairs.rows()) == [
        ("how", "p1", ["n1"]), ("how", "p2", ["n1"]), ("who", "p3", []), ("why", "p4", ["n2", "n3"]),
    ]  # fmt: skip
    assert (pairs.facts.rows_read, pairs.facts.rows_usable, pairs.facts.pairs) == (3, 3, 4)
    texts = [text for (text,) in loaded(source, kind="sentences").rows()]
    assert texts == ["how", "p1", "p2", "n1", "who", "p3", "why", "p4", "n2", "n3"]
    for row, says in (
        ({"query": "how", "pos": [], "neg": ["n"]}, "x.jsonl:1: pos is missing"),
        ({"query": ["how"], "pos": ["p"]}, "x.jsonl:1: query is .'how'., but must be a sentence"),
        ({"query": "how", "pos": ["p", 3]}, "x.jsonl:1: pos is 3, but must be a sentence"),
        ({"premise": ["a"], "hypothesis": "b", "label": 0}, "x.jsonl:1: premise is .'a'., but must be a sentence"),
    ):
        with pytest.raises(InputError, match=says):
            loaded(jsonl(tmp_path / "x.jsonl", [row]))
