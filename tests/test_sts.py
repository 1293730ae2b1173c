"""Graded pairs in every layout that they are published in."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import jsonl
from simcse_st import InputError, Recipe, load_recipe, train
from simcse_st.data import load_graded_pairs
from simcse_st.references import GradedColumns, GradedFile

PAIRS = [('A, "b.', "C.", 5.0), ("D", '"E', 0.0), ("F", "G", 2.5)]


def graded(path: Path, text: str | None = None):
    if text is not None:
        path.write_text(text, encoding="utf-8")
    return load_graded_pairs(path)


def test_every_layout_gives_the_same_pairs(tmp_path: Path):
    csv_rows = '"A, ""b.",C.,5.0\nD,"""E",0\nF,G,2.5\n'
    tab_rows = 'A, "b.\tC.\t5.0\nD\t"E\t0\nF\tG\t2.5\n'
    official = (
        'main-captions\tMSRvid\t2012test\t0001\t5.000\tA, "b.\tC.\n'
        'main-news\theadlines\t2014\t0002\t0.0\tD\t"E\tsource of D\tsource of E\n'
        "main-forums\tx\t2015\t0003\t2.500\tF\tG\n"
    )
    glue = 'index\tsentence1\tsentence2\tscore\n0\tA, "b.\tC.\t5.0\n1\tD\t"E\t0\n2\tF\tG\t2.5\n'
    sick = 'pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n1\tA, "b.\tC.\t5.0\tNEUTRAL\n2\tD\t"E\t0\tNEUTRAL\n3\tF\tG\t2.5\tX\n'
    rows = [{"sentence1": s, "sentence2": t, "score": g} for s, t, g in PAIRS]
    pq.write_table(
        pa.Table.from_pylist([{"idx": 1, "sentence1": s, "sentence2": t, "label": g} for s, t, g in PAIRS]),
        tmp_path / "p.parquet",
    )
    found = [
        graded(tmp_path / "plain.csv", csv_rows), graded(tmp_path / "header.csv", "sentence1,sentence2,score\n" + csv_rows),
        graded(tmp_path / "plain.tsv", tab_rows), graded(tmp_path / "sts-dev.csv", official), graded(tmp_path / "dev.tsv", glue),
        graded(tmp_path / "SICK_test_annotated.txt", sick), graded(tmp_path / "p.parquet"),
        load_graded_pairs(jsonl(tmp_path / "l.jsonl", rows)),
    ]  # fmt: skip
    for pairs in found:
        assert list(zip(pairs.sentences1, pairs.sentences2, pairs.scores, strict=True)) == PAIRS
        assert (pairs.facts.scale, pairs.facts.pairs) == (5.0, 3)
    assert found[0].facts.columns == ["without a header: columns 1, 2 and 3"]
    assert found[3].facts.columns == ["without a header, as STS-B is published: columns 6, 7 and 5"]
    assert found[1].facts.columns == ["sentence1, sentence2, score"]


def test_the_scale_is_read_from_the_data_and_carried(tmp_path: Path):
    of_5 = graded(tmp_path / "five.csv", "a,b,4.0\nc,d,3.8\ne,f,0\n")
    of_1 = graded(tmp_path / "one.csv", "a,b,0.8\nc,d,0.76\ne,f,0\n")
    assert (of_5.facts.scale, of_1.facts.scale) == (5.0, 1.0)
    assert of_5.gold_of_5() == pytest.approx(of_1.gold_of_5())
    assert [gold >= 4 for gold in of_1.gold_of_5()] == [True, False, False]


def test_files_of_two_scales_are_not_one(tmp_path: Path):
    (tmp_path / "five.csv").write_text("a,b,4.0\nc,d,3.8\n")
    (tmp_path / "one.csv").write_text("a,b,0.8\nc,d,0.76\n")
    with pytest.raises(InputError, match="some of its files have scores up to 1, some up to 5"):
        load_graded_pairs(tmp_path / "*.csv")


def senteval(folder: Path, parts: dict[str, tuple[str, str]]) -> Path:
    folder.mkdir()
    for name, (texts, scores) in parts.items():
        (folder / f"STS.input.{name}.txt").write_text(texts)
        (folder / f"STS.gs.{name}.txt").write_text(scores)
    return folder


def test_a_senteval_year_is_its_parts_together_without_pairs_that_have_no_gold(tmp_path: Path):
    folder = senteval(tmp_path / "STS", {"news": ("a\tb\nc\td\n", "1.0\n\n"), "forum": ('e\t"f\ng\th\n', "0\n0.5\n")})
    (folder / "STS.gs.ALL.txt").write_text("1\n")
    year = load_graded_pairs(folder)
    assert list(zip(year.sentences1, year.sentences2, year.scores, strict=True)) == [
        ("e", '"f', 0),
        ("g", "h", 0.5),
        ("a", "b", 1),
    ]
    assert year.facts.subsets == {"forum": 2, "news": 1}
    assert (year.facts.pairs_without_score, year.facts.scale) == (1, 5.0)
    assert len(year.facts.sources) == 4


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "is a folder without SentEval's STS.input"),
        ({"n": ("a\tb\nc\td\n", "1\n")}, "STS.input.n.txt has 2 lines, but STS.gs.n.txt has 1"),
        ({"n": ("a\tb\nc d\n", "1\n2\n")}, "STS.input.n.txt:2: 1 fields where 2 sentences belong"),
        ({"n": ("a\tb\nc\td\n", "1\n6\n")}, "STS.input.n.txt:2: score is '6', but must be a number from 0 to 5"),
    ],
)
def test_bad_senteval_folders(parts: dict, message: str, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        load_graded_pairs(senteval(tmp_path / "STS", parts))


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("year", "count", "parts", "without"),
    [(12, 3108, 5, 0), (13, 1500, 3, 0), (14, 3750, 6, 0), (15, 3000, 5, 5500), (16, 1186, 5, 7997)],
)
def test_the_paper_s_years(year: int, count: int, parts: int, without: int, shared_data: Path):
    pairs = load_graded_pairs(shared_data / "senteval-sts" / f"STS{year}-en-test")
    assert (len(pairs), len(pairs.facts.subsets), pairs.facts.pairs_without_score) == (count, parts, without)


@pytest.mark.real_data
def test_stsb_in_three_columns_and_as_published(shared_data: Path, tmp_path: Path):
    plain = load_graded_pairs(shared_data / "stsb" / "dev.csv")
    rows = zip(plain.sentences1, plain.sentences2, plain.scores, strict=True)
    lines = [f"main-x\tf\t2012\t{i}\t{score!r}\t{first}\t{second}" for i, (first, second, score) in enumerate(rows)]
    official = graded(tmp_path / "sts-dev.csv", "\n".join(lines) + "\n")
    assert (official.sentences1, official.sentences2, official.scores) == (
        plain.sentences1,
        plain.sentences2,
        plain.scores,
    )
    assert sum(gold >= 4 for gold in plain.gold_of_5()) == 264
    assert len(plain) == 1500


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("g.csv", "a,b\n", "g.csv:1: found the columns 'a', 'b', but need sentence1, sentence2 and score"),
        ("g.csv", "a,b,5.0\nc,d,5.5\n", "g.csv:2: score is '5.5', but must be a number from 0 to 5"),
        ("g.csv", "a,b,5.0\nc,d,-1\n", "g.csv:2: score is -1, which is none, but must be from 0 to 5"),
        ("g.csv", "a,b,-1\nc,d,-1\n", "g.csv: all 2 scores are -1: it comes without gold scores, as GLUE's test sets do"),
        ("g.csv", "a,b,5.0\nc,d,nan\n", "g.csv:2: score is 'nan'"),
        ("g.csv", "a,b,5.0\nc,d,\n", "g.csv:2: score is ''"),
        ("g.csv", "a,b,high\n", "g.csv:1: found the columns 'a', 'b', 'high', but need sentence1"),
        ("g.csv", "a,b,high\nc,d,1\n", "g.csv:1: found the columns 'a', 'b', 'high', but need sentence1, sentence2 and score"),
        ("g.csv", "a,,1\n", "g.csv:1: sentence2 is ''"),
        ("g.csv", "a,b,3\nc,d,3.0\n", "all 2 scores are 3"),
        ("g.csv", "", "there is no graded pair"),
        ("g.csv", "sentence1\tsentence2\tscore\n", "g.csv:1: a header of one column.*it is tab-separated"),
        ("g.csv", "a\tb\tc\td\t1.0\te\tf\na\tb\tc\td\t1.0\te\n", "g.csv:2: 6 fields where 7 belong"),
        ("g.tsv", "sentence1\tsentence2\tscore\na\tb\t1\nc\td\n", "g.tsv:3: 2 fields where 3"),
        ("g.csv", "sentence1,sentence2,label\na,b,1\nc,d,0\n", "g.csv: its label holds whole numbers only: are these classes"),
        ("g.csv", "a,b,0_1\nc,d,1\n", "g.csv:1: found the columns 'a', 'b', '0_1'"),
        ("g.csv", "a,b," + "5" * 140_000 + "\n", "g.csv:1: not valid CSV: field larger than field limit"),
        ("g.txt", "sentence_A\tsentence_B\trelatedness_score\tSemEval_set\na\tb\t1\tTEST\nc\td\t2\tTRAIN\n", "holds several sets, 'TEST', 'TRAIN' in SemEval_set"),
        ("g.jsonl", '{"sentence1": "a", "sentence2": "b", "score": true}\n', "g.jsonl:1: score is True"),
        ("g.jsonl", '{"sentence1": "a", "sentence2": "b"}\n', "g.jsonl:1: found the columns 'sentence1', 'sentence2', but need"),
    ],
)  # fmt: skip
def test_bad_graded_pairs_are_named_by_file_and_line(name: str, text: str, message: str, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        graded(tmp_path / name, text)


def test_json_numbers_and_texts_are_scores(tmp_path: Path):
    rows = [{"sentence1": "a", "sentence2": "b", "score": "1.5"}, {"sentence1": "c", "sentence2": "d", "score": 4}]
    (tmp_path / "g.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert graded(tmp_path / "g.jsonl").scores == [1.5, 4.0]


def test_graded_pairs_under_other_names_and_scales(tmp_path: Path, tiny_recipe: Recipe):
    rows = [("a b", "a c", 100.0), ("d e", "f g", 0.0), ("h i", "h j", 80.0)]
    columns = GradedColumns(sentence1="text1", sentence2="text2", score="similarity")
    csv, lines = str(tmp_path / "x.csv"), str(tmp_path / "y.jsonl")
    Path(csv).write_text("text1,text2,similarity\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    jsonl(Path(lines), [{"sentence1": a, "sentence2": b, "score": c / 50 - 1} for a, b, c in rows])
    pairs = load_graded_pairs(GradedFile(file=csv, scale=[0.0, 100.0], columns=columns))
    assert (pairs.sentences1, pairs.scores) == (["a b", "d e", "h i"], [100.0, 0.0, 80.0])
    assert pairs.gold_of_5() == [5.0, 0.0, 4.0]
    assert pairs.paraphrases() == [True, False, True]
    assert (pairs.facts.lowest, pairs.facts.scale, pairs.facts.mean_gold) == (0.0, 100.0, 3.0)
    pairs = load_graded_pairs(GradedFile(file=lines, scale=[-1.0, 1.0]))
    assert pairs.gold_of_5() == [5.0, 0.0, 4.0]
    of_100 = "x.csv:2: score is '100.0', but must be a number from 0 to 5; of another scale say"
    for reference, says in (
        (csv, "x.csv:1: found the columns 'text1', .*name others as {file: ..., columns"),
        (lines, "y.jsonl:2: score is -1"),
        (GradedFile(file=csv, columns=columns), of_100),
        (GradedFile(file=lines, scale=[0.0, 0.5]), "y.jsonl:1: score is 1.0, but must be a number from 0 to 0.5"),
        (GradedFile(file=lines, columns=columns), "need text1, text2 and similarity"),
    ):
        with pytest.raises(InputError, match=says):
            load_graded_pairs(reference)
    names = "{sentence1: text1, sentence2: text2, score: similarity}"
    key = f"data.dev={{file: {csv}, columns: {names}, scale: [0, 100]}}"
    recipe = load_recipe("quickstart", [key])
    assert recipe.data.dev == GradedFile(file=csv, scale=[0.0, 100.0], columns=columns)
    with pytest.raises(InputError, match="scale is the lowest and the highest score"):
        load_recipe("quickstart", [key.replace("[0, 100]", "[5, 0]")])
    run = train(tiny_recipe.changed(data__dev=recipe.data.dev), tmp_path / "run")
    assert run.recipe == tiny_recipe.changed(data__dev=recipe.data.dev)
    card = (run.model_path / "README.md").read_text()
    assert str(tmp_path) not in card
    assert "data.dev={file: x.csv, columns: {sentence1: text1, sentence2: text2, score: similarity}, scale: [" in card


@pytest.mark.parametrize("header", ["sentence1;sentence2;score", '"sentence1";"sentence2";"score"'])
def test_a_spreadsheet_s_csv_has_a_clear_remedy(header: str, tmp_path: Path):
    line = header.replace("sentence1", "A man eats.").replace("sentence2", "He is eating.").replace("score", "4,5")
    (tmp_path / "x.csv").write_text(f"{header}\n{line}\n")
    with pytest.raises(InputError, match="x.csv:1: .*by semicolons, but must be by commas, and numbers have points"):
        load_graded_pairs(str(tmp_path / "x.csv"))
