"""Data sets on the Hub, laid out as the real ones are, through the real clients, real HTTP and an empty cache."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from helpers import hub_environment, jsonl
from hub import Hub

TEXT = Value("string")
NLI_LABELS = ClassLabel(names=["entailment", "neutral", "contradiction"])
# Premises of three rows each, in the order neutral, entailment, contradiction, and one row without consensus.
NLI = [(f"p{i // 3}", f"h{i}", (1, 0, 2)[i % 3]) for i in range(60)]
CSV = b'sent0,sent1,hard_neg\na,"b, c",d\ne,None,n/a\nNA,h,\n1,2,3\n'
NLI.insert(7, ("p2", "no consensus", -1))


def parquet(columns: dict[str, list[Any]], features: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    Dataset.from_dict(columns, features=Features(features)).to_parquet(file)
    return file.getvalue()


def readme(configs: dict[str, dict[str, str]]) -> bytes:
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, path in splits.items():
            lines += [f"  - split: {split}", f"    path: {path}-*"]
    return "\n".join([*lines, "---", ""]).encode()


def add(hub: Hub, name: str, configs: dict[str, dict[str, str]], tables: dict[str, bytes], **access: bool) -> str:
    files = {f"{path}-00000-of-00001.parquet": data for path, data in tables.items()}
    return hub.add_repo("dataset", name, {"README.md": readme(configs), **files}, **access)


def nli_table(rows: list[tuple[str, str, int]], labels: ClassLabel = NLI_LABELS, **more: list[Any]) -> bytes:
    premises, hypotheses, numbers = (list(column) for column in zip(*rows, strict=True))
    columns = {**more, "premise": premises, "hypothesis": hypotheses, "label": numbers}
    features = {**dict.fromkeys(more, TEXT), "premise": TEXT, "hypothesis": TEXT, "label": labels}
    return parquet(columns, features)


@pytest.fixture
def commits(hub: Hub) -> dict[str, str]:
    """The data sets that the shipped recipes name, small; the commit of each."""
    stsb = parquet(
        {"sentence1": ["a b", "e f", "i"], "sentence2": ["c d", "g h", "k"], "score": [1.0, 0.2, 0.0]},
        {"sentence1": TEXT, "sentence2": TEXT, "score": Value("float64")},
    )
    triplets = {"anchor": ["a", "b"], "positive": ["c", "d"], "negative": ["e", "f"]}
    return {
        "stsb": add(
            hub, "sentence-transformers/stsb",
            {"default": {"train": "data/train", "validation": "data/validation", "test": "data/test"}},
            {f"data/{split}": stsb for split in ("train", "validation", "test")},
        ),
        "snli": add(
            hub, "stanfordnlp/snli",
            {"plain_text": {"test": "plain_text/test", "train": "plain_text/train"}},
            {"plain_text/train": nli_table(NLI), "plain_text/test": nli_table(NLI[:3])},
        ),
        "multi_nli": add(
            hub, "nyu-mll/multi_nli",
            {"default": {"train": "data/train", "validation_matched": "data/validation_matched"}},
            {
                "data/train": nli_table(NLI, pairID=[str(i) for i in range(61)], genre=["fiction"] * 61),
                "data/validation_matched": nli_table(NLI[:3]),
            },
        ),
        # Numbered otherwise than SNLI: by the names it is the same.
        "renumbered": add(
            hub, "acme/renumbered", {"default": {"train": "data/train"}},
            {
                "data/train": nli_table(
                    [(premise, hypothesis, label if label < 0 else 2 - label) for premise, hypothesis, label in NLI],
                    ClassLabel(names=["contradiction", "neutral", "entailment"]),
                ),
            },
        ),
        "all-nli": add(
            hub, "sentence-transformers/all-nli",
            {"pair-class": {"train": "pair-class/train"}, "triplet": {"train": "triplet/train"}},
            {"triplet/train": parquet(triplets, dict.fromkeys(triplets, TEXT)), "pair-class/train": nli_table(NLI)},
        ),
        "csv": hub.add_repo(
            "dataset", "acme/csv", {"train.csv": b"anchor,positive,negative\na,b,None\nc,d,\ne,f,NA\n"}
        ),
        "simcse": hub.add_repo(
            "dataset", "princeton-nlp/datasets-for-simcse",
            {"nli_for_simcse.csv": CSV, "wiki1m_for_simcse.txt": b"One sentence.\nAnother one .\n\nOne sentence.\n"},
        ),
    }  # fmt: skip


PROGRAM = """
import json, sys
from simcse_st import InputError, load_recipe, prepare

outcomes = []
for number, (name, *overrides) in enumerate(json.loads(sys.argv[1])):
    try:
        folder = prepare(load_recipe(name, overrides), f"{sys.argv[2]}/{number}")
        manifest = json.loads((folder / "manifest.json").read_text())
        outcomes.append([(folder / "train.jsonl").read_text().splitlines(), manifest])
    except InputError as error:
        outcomes.append(str(error))
print(json.dumps(outcomes))
"""


def prepare_all(hub: Hub, home: Path, output: Path, recipes: list[list[str]], **environment: str) -> list[Any]:
    """Prepares recipes, one after another, in a fresh process; gives rows and manifest of each, or what was wrong."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(recipes), str(output)]
    settings = {**hub_environment(hub, home), **environment}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def expected_pairs(rows: list[tuple[str, str, int]]) -> list[str]:
    pairs = []
    for premise, hypothesis, label in rows:
        if label == 0:
            negatives = [h for p, h, other in rows if (p, other) == (premise, 2)][:1]
            pairs.append(json.dumps({"anchor": premise, "positive": hypothesis, "negative": negatives}))
    return pairs


def test_the_shipped_recipes_read_their_data_from_the_hub(
    hub: Hub, commits: dict[str, str], tiny_base: Path, tmp_path: Path
):
    base = f"model.base={tiny_base}"
    outcomes = prepare_all(
        hub, tmp_path / "home", tmp_path / "out",
        [
            ["snli-sup", base, "data.sample=null"],
            ["snli-sup", base, "data.sample.rows=40"],
            ["snli-unsup", base, "data.sample=null"],
            ["nli-sup", base],
            ["wiki-unsup", base],
            ["snli-sup", base, "data.sample=null", "data.train={dataset: nyu-mll/multi_nli, streaming: true}"],
            ["snli-sup", base, "data.sample=null", "data.train=acme/renumbered"],
            ["snli-sup", base, "data.sample=null", "data.train={dataset: sentence-transformers/all-nli, config: triplet}"],
            ["snli-sup", base, "data.sample=null", "data.train={dataset: sentence-transformers/all-nli, config: pair-class}"],
            ["snli-sup", base, "data.sample=null", "data.train=acme/csv"],
        ],
    )  # fmt: skip
    everything = expected_pairs(NLI)
    assert len(everything) == 20
    rows = [lines for lines, _ in outcomes]
    train = [manifest["train"] for _, manifest in outcomes]
    assert rows[0] == rows[5] == rows[6] == rows[8] == everything
    assert train[0]["sources"] == [
        {
            "dataset": "stanfordnlp/snli",
            "config": "plain_text",
            "split": "train",
            "revision": commits["snli"],
            "rows": 61,
        }
    ]
    assert (train[0]["rows_read"], train[0]["rows_usable"], train[0]["dropped"]["no_consensus"]) == (61, 60, 1)
    assert (train[1]["sample"], sum(train[1]["labels"].values())) == ({"rows": 40, "seed": 42}, 40)
    assert {json.loads(line)["positive"] for line in rows[1]} < {json.loads(line)["positive"] for line in everything}
    sentences = dict.fromkeys(
        text for premise, hypothesis, label in NLI if label >= 0 for text in (premise, hypothesis)
    )
    assert rows[2] == [json.dumps({"sentence": text}) for text in sentences]
    assert [json.loads(line) for line in rows[3]] == [
        {"anchor": "a", "positive": "b, c", "negative": ["d"]}, {"anchor": "e", "positive": "None", "negative": ["n/a"]},
        {"anchor": "NA", "positive": "h", "negative": []}, {"anchor": "1", "positive": "2", "negative": ["3"]},
    ]  # fmt: skip
    digest = hashlib.sha256(CSV).hexdigest()
    assert train[3]["sources"][0] == {
        "dataset": "princeton-nlp/datasets-for-simcse", "revision": commits["simcse"],
        "files": [{"file": "nli_for_simcse.csv", "sha256": digest}], "rows": 4,
    }  # fmt: skip
    assert [json.loads(line)["sentence"] for line in rows[4]] == ["One sentence.", "Another one ."]
    assert (train[4]["duplicate_texts"], train[4]["blank_texts"]) == (1, 1)
    # Of a data set of CSV files, "None" and "NA" are texts too.
    assert [json.loads(line)["negative"] for line in rows[9]] == [["None"], [], ["NA"]]
    assert train[5]["sources"][0]["revision"] == commits["multi_nli"]
    assert train[5]["columns_left_out"] == ["pairID", "genre"]
    assert [json.loads(line)["negative"] for line in rows[7]] == [["e"], ["f"]]
    dev = outcomes[0][1]["dev"]
    assert (dev["pairs"], dev["scale"], dev["sources"][0]["revision"]) == (3, 1.0, commits["stsb"])


@pytest.mark.slow
def test_several_data_sets_are_read_as_one_file_of_all_their_rows(
    hub: Hub, commits: dict[str, str], tiny_base: Path, tmp_path: Path
):
    # Some premises are those of SNLI, with contradictions of their own.
    more = [(f"p{i // 2}", f"m{i}", (0, 2)[i % 2]) for i in range(30, 70)]
    add(hub, "acme/more", {"default": {"train": "data/train"}}, {"data/train": nli_table(more)})
    rows = [{"premise": p, "hypothesis": h, "label": label} for p, h, label in [*NLI, *more]]
    file = jsonl(tmp_path / "both.jsonl", rows)
    keys = ["snli-sup", f"model.base={tiny_base}", "data.sample=null"]
    sources = "[stanfordnlp/snli, {dataset: acme/more, split: train}]"
    several, together, allnli = prepare_all(
        hub, tmp_path / "home", tmp_path / "out",
        [[*keys, f"data.train={sources}"], [*keys, f"data.train={file}"], ["allnli", f"model.base={tiny_base}"]],
    )  # fmt: skip
    assert not isinstance(several, str), several
    assert several[0] == together[0] == expected_pairs([*NLI, *more])
    assert len(several[0]) == 40
    assert several[1]["train"]["prepared_sha256"] == together[1]["train"]["prepared_sha256"]
    assert several[1]["train"]["of_sources"] == [
        {"name": "stanfordnlp/snli[train]", "rows": 20}, {"name": "acme/more[train]", "rows": 20},
    ]  # fmt: skip
    assert [source["rows"] for source in several[1]["train"]["sources"]] == [61, 40]
    assert allnli[0] == expected_pairs(NLI) * 2
    assert [source["dataset"] for source in allnli[1]["train"]["sources"]] == ["stanfordnlp/snli", "nyu-mll/multi_nli"]


@pytest.mark.slow
def test_a_set_of_nano_beir_is_found_by_its_name(hub: Hub, commits: dict[str, str], tiny_base: Path, tmp_path: Path):
    parts = {
        "corpus": {"_id": ["d1", "d2", "d3"], "text": ["one", "two", "three"]},
        "queries": {"_id": ["q1", "q2"], "text": ["first", "second"]},
        "qrels": {"query-id": ["q1", "q1", "q2"], "corpus-id": ["d1", "d3", "d2"]},
    }
    add(
        hub, "sentence-transformers/NanoBEIR-en",
        {part: {"NanoMSMARCO": f"{part}/NanoMSMARCO", "NanoNQ": f"{part}/NanoNQ"} for part in parts},
        {
            f"{part}/{name}": parquet(columns, dict.fromkeys(columns, TEXT))
            for part, columns in parts.items() for name in ("NanoMSMARCO", "NanoNQ")
        },
    )  # fmt: skip
    keys = ["snli-sup", f"model.base={tiny_base}", "data.sample=null"]
    (_, manifest), missing = prepare_all(
        hub, tmp_path / "home", tmp_path / "out",
        [[*keys, "data.dev={nano_beir: NanoMSMARCO}"], [*keys, "data.dev={nano_beir: NanoMARCO}"]],
    )  # fmt: skip
    dev = manifest["dev"]
    assert (dev["queries"], dev["passages"], dev["relevant"]) == (2, 3, 3)
    assert [(one["dataset"], one["config"], one["split"]) for one in dev["sources"]] == [
        ("sentence-transformers/NanoBEIR-en", part, "NanoMSMARCO") for part in ("corpus", "queries", "qrels")
    ]
    assert missing.startswith("sentence-transformers/NanoBEIR-en[corpus, NanoMARCO]: ")
    assert "NanoMSMARCO" in missing


@pytest.mark.slow
def test_what_the_hub_does_not_have_or_does_not_give(
    hub: Hub, commits: dict[str, str], tiny_base: Path, tmp_path: Path
):
    snli = {"plain_text": {"train": "plain_text/train"}}
    add(hub, "acme/private", snli, {"plain_text/train": nli_table(NLI)}, private=True)
    add(hub, "acme/gated", snli, {"plain_text/train": nli_table(NLI)}, gated=True)
    keys = ["snli-sup", f"model.base={tiny_base}", "data.sample=null"]
    trains = [
        "{dataset: stanfordnlp/snli, split: trian}", "{dataset: stanfordnlp/snli, split: trian, streaming: true}",
        "{dataset: sentence-transformers/all-nli, config: triplets}", "{dataset: sentence-transformers/all-nli}",
        "{dataset: stanfordnlp/snli, revision: v9}", "acme/nothing", "acme/private", "acme/gated",
        "{dataset: stanfordnlp/snli, files: nothing-*.csv}",
    ]  # fmt: skip
    found = prepare_all(hub, tmp_path / "home", tmp_path / "out", [[*keys, f"data.train={train}"] for train in trains])
    for message, parts in zip(
        found,
        [
            ("stanfordnlp/snli[trian]: ", "trian", "['test', 'train']"),
            ("stanfordnlp/snli[trian]: ", "trian", "['test', 'train']"),
            ("sentence-transformers/all-nli[triplets, train]: ", "triplets", "['pair-class', 'triplet']"),
            ("sentence-transformers/all-nli[train]: ", "['pair-class', 'triplet']"),
            ("stanfordnlp/snli[train]: ", "v9"),
            (
                "acme/nothing[train]: ",
                "doesn't exist on the Hub or cannot be accessed",
                "set HF_TOKEN",
                "not here either",
            ),
            ("acme/private[train]: ", "doesn't exist on the Hub or cannot be accessed", "set HF_TOKEN"),
            ("acme/gated[train]: ", "gated", "set HF_TOKEN"),
            ("stanfordnlp/snli[train] (nothing-*.csv): ", "no file of this name or pattern"),
        ],
        strict=True,
    ):
        assert isinstance(message, str)
        assert message.startswith(parts[0])
        assert all(part in message for part in parts), message
        assert "\n" not in message
    assert not list((tmp_path / "out").glob("*/*"))
    # With a token of someone who may read them, both are read.
    owner = [[*keys, f"data.train={train}"] for train in ("acme/private", "acme/gated")]
    for lines, _ in prepare_all(hub, tmp_path / "home2", tmp_path / "own", owner, HF_TOKEN="hf_alice"):
        assert lines == expected_pairs(NLI)


@pytest.mark.slow
def test_a_hub_out_of_reach(hub: Hub, commits: dict[str, str], tiny_base: Path, tmp_path: Path):
    snli = ["snli-sup", f"model.base={tiny_base}", "data.sample=null"]
    offline = {"HF_HUB_OFFLINE": "1"}
    (missing,) = prepare_all(hub, tmp_path / "empty", tmp_path / "a", [snli], **offline)
    assert missing.startswith("sentence-transformers/stsb[validation]: cannot be read from the Hugging Face Hub: ")
    assert (
        "(HF_HUB_OFFLINE is set) To work offline, load it once online, and it stays in the cache; or give a file"
        in missing
    )

    # Once it is in the cache it is read from there, and the manifest names its commit.
    ((online, _),) = prepare_all(hub, tmp_path / "home", tmp_path / "b", [snli])
    hub.log.clear()
    of = "data.train={dataset: stanfordnlp/snli, split: train, revision: %s}"
    cached, pinned, other = prepare_all(
        hub,
        tmp_path / "home",
        tmp_path / "c",
        [snli, [*snli, of % commits["snli"]], [*snli, of % ("f" * 40)]],
        **offline,
    )
    assert hub.log == []
    assert cached[0] == pinned[0] == online
    assert cached[1]["train"]["sources"][0]["revision"] == commits["snli"]
    assert f"the copy in the cache is of commit {commits['snli']}, which may not be the revision ffff" in other


@pytest.mark.slow
def test_what_is_broken_in_a_hub_data_set_is_named(hub: Hub, commits: dict[str, str], tiny_base: Path, tmp_path: Path):
    hub.add_repo("dataset", "acme/broken", {"train.jsonl": b'{"anchor": "a", "positive": "b"}\n{"anchor": \n'})
    hub.add_repo("dataset", "acme/empty", {"README.md": b"nothing yet\n"})
    hub.add_repo("dataset", "acme/quoted", {"train.tsv": b'anchor\tpositive\n"a, b"\tc\n'})
    keys = ["snli-sup", f"model.base={tiny_base}", "data.sample=null"]
    named = "data.train={dataset: acme/broken, files: train.jsonl}"
    quoted = "data.train={dataset: acme/quoted, files: train.tsv}"
    found = prepare_all(
        hub, tmp_path / "home", tmp_path / "out",
        [
            [*keys, "data.train=acme/broken"], [*keys, named], [*keys, named, "data.strict=false"], [*keys, "data.train=acme/empty"],
            [*keys, quoted], [*keys, quoted, "data.quotes=csv"], [*keys, quoted, "data.quotes=text"],
        ],
    )  # fmt: skip
    assert found[0].startswith("acme/broken[train]: cannot be read from the Hugging Face Hub: ")
    assert "JSON" in found[0]
    assert found[1].startswith("acme/broken/train.jsonl:2: not a JSON object on one line")
    assert found[2][1]["train"]["dropped"]["broken"] == 1
    assert "acme/empty" in found[3]
    assert "network" not in found[3]
    assert found[4].startswith("acme/quoted/train.tsv:2: do the quotes around a field belong to its text?")
    assert [json.loads(lines[0])["anchor"] for lines, _ in found[5:]] == ["a, b", '"a, b"']
