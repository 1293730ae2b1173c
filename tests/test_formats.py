"""One content in every form gives one result; what is not of its form is named by file and line."""

from __future__ import annotations

import csv
import gzip
import json
import random
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import jsonl, loaded, nli
from simcse_st import InputError
from simcse_st.references import HubDataset

TEXTS = [
    "plain",
    'He said "hi".',
    '"All of it."',
    "comma, and; more",
    "it's",
    "naïve 東京",
    'a "" b',
    "trailing\\",
    " spaced ",
]
ROWS = nli(
    *[(text, f"e {text}", 0) for text in TEXTS], *[(text, f"n {text}", 1) for text in TEXTS[::2]],
    *[(text, f"c {text}", 2) for text in TEXTS[1::2]], ("plain", "no consensus", -1),
)  # fmt: skip
WORDS = {0: "entailment", 1: "neutral", 2: "contradiction", -1: "-"}


def table(path: Path, rows: list[dict], delimiter: str, quoting: int = csv.QUOTE_MINIMAL, end: str = "\n") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), delimiter=delimiter, quoting=quoting, lineterminator=end)
        writer.writeheader()
        writer.writerows(rows)
    return path


def raw_tsv(path: Path, rows: list[dict]) -> Path:
    lines = ["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def in_every_form(folder: Path, rows: list[dict]) -> list[Path]:
    """The same rows as files of all kinds, with word labels, other names, shuffled and further columns."""
    words = [{**row, "label": WORDS[row["label"]]} for row in rows]
    renamed = [
        {"gold_label": r["label"], "sentence2": r["hypothesis"], "pairID": i, "sentence1": r["premise"]}
        for i, r in enumerate(words)
    ]
    shuffled = []
    for row in rows:
        cells = [*row.items(), ("id", 1), ("source", 'x"y')]
        random.Random(4).shuffle(cells)
        shuffled.append(dict(cells))
    paths = [folder / "lines.jsonl", folder / "renamed.json", folder / "shuffled.jsonl"]
    for path, content in zip(paths, (words, renamed, shuffled), strict=True):
        jsonl(path, content)
    paths += [
        table(folder / "rows.csv", rows, ","), table(folder / "all.csv", renamed, ",", csv.QUOTE_ALL),
        table(folder / "crlf.csv", shuffled, ",", end="\r\n"),
        table(folder / "rows.tsv", words, "\t"), table(folder / "all.tsv", rows, "\t", csv.QUOTE_ALL),
        table(folder / "shuffled.tsv", shuffled, "\t", csv.QUOTE_NONNUMERIC), raw_tsv(folder / "raw.tsv", rows),
    ]  # fmt: skip
    bom = folder / "bom.csv"
    bom.write_bytes(b"\xef\xbb\xbf" + (folder / "rows.csv").read_bytes())
    parquet = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(shuffled), parquet, row_group_size=7)
    zipped = []
    for path in paths:
        zipped.append(path.with_name(f"z-{path.name}.gz"))
        zipped[-1].write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    return [*paths, bom, parquet, *zipped]


def quotes_of(path: Path) -> Literal["csv", "text"]:
    return "text" if "raw" in path.name else "csv"


def test_the_same_rows_in_every_form_give_the_same_bytes(tmp_path: Path):
    expected = [(text, f"e {text}", [f"c {text}"] if i % 2 else []) for i, text in enumerate(TEXTS)]
    prepared = {}
    for path in in_every_form(tmp_path, ROWS):
        pairs = loaded(path, quotes=quotes_of(path))
        assert list(pairs.rows()) == expected, path.name
        prepared[path.name] = pairs.facts.prepared_sha256
    assert len(set(prepared.values())) == 1
    assert len(prepared) == 22


@pytest.mark.real_data
def test_snli_dev_in_every_form(shared_data: Path, tmp_path: Path):
    lines = (shared_data / "nli" / "snli_dev.jsonl").read_text("utf-8").splitlines()
    numbers = {name: number for number, name in WORDS.items()}
    rows = [{**row, "label": numbers[row["label"]]} for row in map(json.loads, lines)]
    prepared = set()
    for path in [shared_data / "nli" / "snli_dev.jsonl", *in_every_form(tmp_path, rows)]:
        facts = loaded(path, quotes=quotes_of(path)).facts
        assert (facts.rows_read, facts.rows_usable, facts.pairs) == (9842, 9842, 3329), path.name
        assert (facts.pairs_with_hard_negative, facts.unique_anchors) == (3172, 3074)
        prepared.add(facts.prepared_sha256)
    assert len(prepared) == 1


def test_class_labels_go_by_their_names_and_not_by_their_numbers(tmp_path: Path):
    from datasets import ClassLabel, Dataset, Features, Value

    text = Value("string")
    features = Features(
        {"premise": text, "hypothesis": text, "label": ClassLabel(names=["neutral", "contradiction", "entailment"])}
    )
    rows = {"premise": ["p", "p", "p"], "hypothesis": ["n", "c", "e"], "label": [0, 1, 2]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "t.parquet")
    assert list(loaded(tmp_path / "t.parquet").rows()) == [("p", "e", ["c"])]


def test_plain_text_is_read_as_it_is(tmp_path: Path):
    (tmp_path / "t.txt").write_bytes(b'a "quote\r\n\tb\n\n a "quote\na "quote')
    sentences = loaded(tmp_path / "t.txt", kind="sentences")
    assert [text for (text,) in sentences.rows()] == ['a "quote', "\tb", ' a "quote']
    assert (sentences.facts.texts, sentences.facts.blank_texts, sentences.facts.duplicate_texts) == (4, 1, 1)
    assert sentences.facts.sentences == 3


def tsv(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_quotes_around_a_field_of_a_tsv_are_asked_about(tmp_path: Path):
    head = "anchor\tpositive"
    path = tmp_path / "t.tsv"
    tsv(path, head, 'a\tb "c"', '5" disk\tx')
    assert list(loaded(path).rows()) == [("a", 'b "c"', []), ('5" disk', "x", [])]
    for line in ('"A man, in a hat."\tb', 'c\t"say ""hi"""'):
        tsv(path, head, "a\tb", line)
        with pytest.raises(
            InputError, match="t.tsv:3: do the quotes around a field belong to its text.*Set data.quotes"
        ):
            loaded(path)
    # As spreadsheets write it: in quotes where there is a comma, a quote or a tab.
    tsv(path, head, '"A man, in a hat."\tb', 'c\t"say ""hi"""', '"with\ta tab"\tb')
    assert list(loaded(path, quotes="csv").rows()) == [
        ("A man, in a hat.", "b", []),
        ("c", 'say "hi"', []),
        ("with\ta tab", "b", []),
    ]
    tsv(path, head, '"A man, in a hat."\tb', 'c\tsay "hi"', '5" disk\t"No."')
    assert list(loaded(path, quotes="text").rows()) == [
        ('"A man, in a hat."', "b", []),
        ("c", 'say "hi"', []),
        ('5" disk', '"No."', []),
    ]


def test_columns_without_a_name_are_named_in_the_log_too(tmp_path: Path):
    (tmp_path / "t.csv").write_text(",anchor,positive\n0,a,b\n")
    assert loaded(tmp_path / "t.csv").facts.columns_left_out == [""]


def test_a_table_of_one_column_is_one_of_sentences(tmp_path: Path):
    (tmp_path / "t.csv").write_text('text\n"hello, there"\nbye\n')
    assert list(loaded(tmp_path / "t.csv", kind="sentences").texts()) == ["hello, there", "bye"]


def test_parquet_of_odd_types(tmp_path: Path):
    import datetime

    table = pa.table(
        {
            "when": pa.array([datetime.date(2020, 1, 1), None]),
            "premise": pa.array(["p", "q"]).dictionary_encode(),
            "hypothesis": pa.array(["h", "i"], pa.large_string()),
            "label": pa.array([0, None], pa.int8()),
            "raw": pa.array([b"x", b"y"]),
        }
    )
    for features in (b"no JSON", b'{"info": {"features": null}}', b'{"info": {"features": {"label": [1], "raw": {}}}}'):
        pq.write_table(table.replace_schema_metadata({b"huggingface": features}), tmp_path / "t.parquet")
        pairs = loaded(tmp_path / "t.parquet")
        assert list(pairs.rows()) == [("p", "h", [])]
        assert (pairs.facts.dropped["no_consensus"], pairs.facts.columns_left_out) == (1, ["when", "raw"])
    pq.write_table(table.rename_columns(["premise", "x", "hypothesis", "label", "raw"]), tmp_path / "t.parquet")
    with pytest.raises(
        InputError, match="t.parquet row 0: premise is DataType.date32.day.., but must be a sentence|date32"
    ):
        loaded(tmp_path / "t.parquet")
    twice = pa.Table.from_arrays(
        [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["anchor", "positive", "positive"]
    )
    pq.write_table(twice, tmp_path / "t.parquet")
    with pytest.raises(InputError, match="t.parquet: two columns have the same name: 'anchor', 'positive', 'positive'"):
        loaded(tmp_path / "t.parquet")


PAIR = '{"anchor": "a", "positive": "b"}\n'
HEADER = "premise,hypothesis,label\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", "", "t.jsonl: there is no row in it"),
        ("t.jsonl", HEADER + "a,b,0\n", r"t.jsonl:1: not a JSON object.*is it a CSV\? then name it .csv"),
        ("t.jsonl", '{"anchor": "a", "positive": "b"}\n{"anchor": \n', "t.jsonl:2: not a JSON object on one line"),
        ("t.json", '[\n{"anchor": "a", "positive": "b"}\n]\n', "t.json:1: not a JSON object .*each object must stand on a line"),
        ("t.jsonl", '["a", "b"]\n', "t.jsonl:1: a row must be a JSON object"),
        ("t.jsonl", '{"words": "a"}\n', "t.jsonl:1: found the columns 'words', but need premise, hypothesis and label"),
        ("t.jsonl", '{"text": "a"}\n', "single sentences make no pairs: set data.kind=sentences"),
        ("t.jsonl", '{"anchor": "a", "anchor": "b"}\n', "t.jsonl:1: not a JSON object on one line .a key stands twice"),
        ("t.jsonl", '{"anchor": "a", "positive": "\\ud800"}\n', "t.jsonl:1: positive is .*must be a sentence"),
        ("t.jsonl", '{"anchor": "a", "positive": ["b", 3]}\n', "t.jsonl:1: positive is 3, but must be a sentence"),
        ("t.jsonl", '{"anchor": ' + "1" * 5000 + "}\n", "t.jsonl:1: not a JSON object on one line .Exceeds the limit"),
        ("t.jsonl", "[" * 100_000 + "\n", "t.jsonl:1: not a JSON object on one line .*recursion"),
        ("t.csv", PAIR, "t.csv:1: .* is it JSON Lines. then name it .jsonl"),
        ("t.jsonl", b"\xff\xfea", "t.jsonl: is UTF-16 text; .*iconv -f utf-16"),
        ("t.jsonl", '{"anchor": "a", "positive": null}\n', "t.jsonl:1: positive is missing"),
        ("t.jsonl", PAIR + '\n{"anchor": " ", "positive": "b"}\n', "t.jsonl:3: anchor is ' '"),
        ("t.jsonl", '{"anchor": "a", "positive": "b", "negative": ["c", 3]}\n', "t.jsonl:1: negative is 3"),
        ("t.jsonl", '{"anchor": "a", "positive": "b", "negative": [["c"]]}\n', r"t.jsonl:1: negative is \['c'\], but must be a sentence"),
        ("t.jsonl", '{"anchor": "a", "positive": "b", "negative": {"c": 1}}\n', "t.jsonl:1: negative is .*, but must be a sentence"),
        ("t.jsonl", '{"anchor": "a", "positive": "b", "negative": " "}\n', "t.jsonl:1: negative is ' '"),
        ("t.jsonl", '{"premise": "a", "hypothesis": "b", "label": 3}\n', "t.jsonl:1: label is 3, but must be entailment"),
        ("t.jsonl", '{"premise": "a", "hypothesis": "b", "label": 0.0}\n', "t.jsonl:1: label is 0.0, .*; write whole numbers"),
        ("t.csv", HEADER + "a,b,0.0\n", "t.csv:2: label is '0.0', but must be .*; write whole numbers"),
        ("t.jsonl", '{"premise": "a", "hypothesis": "b", "label": true}\n', "t.jsonl:1: label is True, but must be"),
        ("t.jsonl", '{"premise": "a", "hypothesis": "b", "label": "yes"}\n', "t.jsonl:1: label is 'yes', but must be"),
        ("t.jsonl", '{"premise": "a", "hypothesis": "b", "label": 1}\n', "no pair: none of the rows that are left is an entailment .1 read"),
        ("t.jsonl", b'{"anchor": "caf\xe9", "positive": "b"}\n', r"t.jsonl:1: byte 16 of the line \(0xe9\) is not UTF-8"),
        ("t.csv", "premise\thypothesis\tlabel\n", "t.csv:1: a header of one column.*it is tab-separated: then name it .tsv"),
        ("t.csv", "premise;hypothesis;label\n", "t.csv:1: a header of one column.*separated by semicolons"),
        ("t.tsv", HEADER, "t.tsv:1: a header of one column.*; it is a CSV"),
        ("t.csv", HEADER + "a,b,0\nc,d\n", "t.csv:3: 2 fields where 3 .premise, hypothesis, label. belong"),
        ("t.csv", HEADER + "a,b,c,0\n", "t.csv:2: 4 fields where 3"),
        ("t.tsv", "premise\thypothesis\tlabel\na\tb\n", "t.tsv:2: 2 fields where 3"),
        ("t.csv", HEADER + 'a,"b,0\nc,d,1\ne,f",0\n', "t.csv:2: a quote opens and is not closed on this line"),
        ("t.csv", HEADER + 'a,"b,0\n"c",d,1\n', "t.csv:2: a quote opens and is not closed"),
        ("t.csv", HEADER + 'a,"b"c,0\n', "t.csv:2: not valid CSV: ',' expected after"),
        ("t.tsv", 'premise\thypothesis\tlabel\na\t"b ""c"""\t0\na\tb "c"\t0\n', "t.tsv:2: do the quotes around a field belong to its text"),
        ("t.csv", "premise,premise,label\n", "t.csv:1: two columns of the header have the same name"),
        ("t.csv", HEADER, "t.csv: there is no row in it .its first line is the header"),
        ("t.csv", "\n\n", "t.csv: there is no row in it"),
        ("t.jsonl.gz", gzip.compress(PAIR.encode() * 9, mtime=0)[:-9], "t.jsonl.gz: damaged gzip after line"),
        ("t.jsonl.gz", PAIR, "t.jsonl.gz: damaged gzip after line 0"),
        ("t.parquet", PAIR, "t.parquet: not a Parquet file that can be read"),
        ("t.parquet.gz", PAIR, "t.parquet.gz: of no known format"),
        ("t.zip", PAIR, "t.zip: of no known format: its name must end in .jsonl, .json, .csv, .tsv, .txt .also .gz. or .parquet"),
        ("t.txt", PAIR, "t.txt:1: a JSON object and no sentence: then name it .jsonl"),
        ("t.txt", HEADER + "a,b,0\n", "t.txt:1: the header of a table and no sentence: then name it .csv"),
        ("t.txt", "text\tid\na\t1\n", "t.txt:1: the header of a table and no sentence: then name it .tsv"),
        ("t.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "t.txt: is a Git LFS pointer and not the file"),
        ("t.txt", "one\rtwo\rthree\r", "t.txt:1: a carriage return within the line: are these old line ends"),
        ("t.csv", "anchor,positive\ra,b\r", "t.csv:1: a carriage return within the line"),
        ("t.txt", "a\0b\0", "t.txt:1: a NUL byte: this is binary, or UTF-16 text"),
        ("t.jsonl", gzip.compress(PAIR.encode(), mtime=0), "t.jsonl: is gzip-compressed; its name must end in .gz"),
        ("t.csv", b"PK\x03\x04abc", "t.csv: is a zip archive or an Excel workbook"),
        ("t.txt", "\ufeffa".encode("utf-32"), "t.txt: is UTF-32 text"),
        ("t.csv", "anchor|positive\n", "t.csv:1: a header of one column.*separated by bars"),
        ("t.jsonl", '[{"anchor": "a", "positive": "b"}]\n', "t.jsonl:1: a row must be a JSON object, .*; each object must stand on a line"),
        ("t.csv", "\nanchor, positive\na,b\n", "t.csv:2: found the columns 'anchor', ' positive', but need"),
        ("t.csv", "anchor,positive,gold_label\na,b,contradiction\n", "t.csv:1: a gold_label beside anchor and positive"),
        ("t.csv", "anchor,positive,Negative\na,b,c\n", "t.csv:1: is 'Negative' a hard negative. then name it negative, or set data.columns="),
        ("t.csv", "anchor,positive,negative\na,b,\"['x', 'y']\"\n", "t.csv:2: negative is .*, a list written as text: use JSON Lines"),
        ("t.csv", "anchor,positive\na," + "b" * 200_000 + "\n", "t.csv:2: not valid CSV: field larger than field limit .*JSON Lines has no such limit"),
        ("t.txt", "gold_label\tsentence1\tsentence2\n-\ta\tb\n", "t.txt:1: the header of a table and no sentence: then name it .tsv"),
    ],
)  # fmt: skip
def test_bad_training_data_is_named_by_file_and_line(name: str, text: str | bytes, message: str, tmp_path: Path):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message) as error:
        loaded(path)
    assert "\n" not in str(error.value)


def test_a_stray_quote_never_swallows_lines_even_if_rows_may_be_dropped(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text(HEADER + 'a,"b,0\nc,d,0\ne,f",0\n')
    with pytest.raises(InputError, match="t.csv:2: a quote opens and is not closed"):
        loaded(path, strict=False)
    path.write_text(HEADER + "a,b,0\nc,d\ne,f,g,0\nh,i,0\n")
    pairs = loaded(path, strict=False)
    assert [row[0] for row in pairs.rows()] == ["a", "h"]
    assert pairs.facts.dropped["broken"] == 2


def test_sources_that_are_not_there(tmp_path: Path):
    with pytest.raises(InputError, match=r"no-such.jsonl: no such file"):
        loaded("no-such.jsonl")
    with pytest.raises(InputError, match=r"nowhere/\*.csv: no file matches this pattern"):
        loaded("nowhere/*.csv")
    with pytest.raises(InputError, match="is a folder: name a file in it, or several .*; it holds none"):
        loaded(tmp_path)
    with pytest.raises(InputError, match="no such file: download it first"):
        loaded("https://example.org/pairs.jsonl")
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        loaded("x" * 5000 + ".jsonl")
    (tmp_path / "a.csv").touch()
    with pytest.raises(InputError, match="is a folder: .*; it holds 'a.csv'"):
        loaded(tmp_path)
    with pytest.raises(InputError, match="a.csv: there is no row in it"):
        loaded([jsonl(tmp_path / "b.jsonl", [{"anchor": "a", "positive": "b"}]), str(tmp_path / "a.csv")])
    with pytest.raises(
        InputError,
        match=r"stanfordnlp/snli\[train\]: cannot be read from the Hugging Face Hub: .*HF_HUB_OFFLINE is set. To work offline",
    ):
        loaded(HubDataset(dataset="stanfordnlp/snli", split="train"))
