"""Any models side by side: plain recomputation, each sentence once."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from simcse_st import InputError, Recipe, Run, build_model, evaluate, train
from simcse_st.evaluation.evaluate import _task_names as task_names
from simcse_st.evaluation.evaluators import with_average
from simcse_st.evaluation.records import TASKS, Evaluation, Tasks
from simcse_st.evaluation.tables import evaluation_tables


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "tiny"


@pytest.fixture
def tiny_run(run: Path, tiny_recipe: Recipe) -> Path:
    """A finished run, made once."""
    if not run.exists():
        train(tiny_recipe, run)
    return run


def read_csv(path: Path) -> list[tuple[str, str, float]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [(first, second, float(score)) for first, second, score in csv.reader(file)]


def written(folder: Path) -> Evaluation:
    return Evaluation.model_validate_json((folder / "evaluation.json").read_text())


def measured(tasks: Tasks) -> set[str]:
    """The names of the tasks that have a result."""
    return set(tasks.model_dump(by_alias=True, exclude_none=True))


def test_a_run_is_measured_on_its_own_data_and_its_test_score_is_that_of_the_record(
    tiny_run: Path, tiny_data: Path, tmp_path: Path
):
    record = evaluate([str(tiny_run)], output=tmp_path)
    assert written(tmp_path) == record
    results = Run(tiny_run).results
    (model,) = record.models
    tasks = model.tasks
    assert tasks.test.spearman == pytest.approx(results.test.spearman, abs=1e-9)
    assert tasks.dev.spearman == pytest.approx(results.dev.spearman, abs=1e-9)
    assert tasks.geometry.alignment == pytest.approx(results.dev.alignment, rel=1e-6)
    assert tasks.geometry.uniformity == pytest.approx(results.dev.uniformity, rel=1e-6)
    # Without the test sentences between them, in the very batches of the run.
    alone = evaluate([str(tiny_run)], tasks=["geometry"]).models[0].tasks.geometry
    assert alone.alignment == pytest.approx(results.dev.alignment, rel=1e-9)
    assert alone.uniformity == pytest.approx(results.dev.uniformity, rel=1e-9)
    assert model.modules == ["Transformer", "Pooling(cls)", "Normalize"]

    # All of it again from the model alone.
    pairs = read_csv(tiny_data / "dev.csv")
    stock = SentenceTransformer(str(tiny_run / "model"), device="cpu")
    texts = list(dict.fromkeys(text for first, second, _ in pairs for text in (first, second)))
    vectors = dict(zip(texts, stock.encode(texts).astype(np.float64), strict=True))
    cosines = [float(vectors[first] @ vectors[second]) for first, second, _ in pairs]
    assert tasks.dev.spearman == pytest.approx(100 * spearmanr([p[2] for p in pairs], cosines).statistic, abs=1e-4)
    alike = [(first, second) for first, second, gold in pairs if gold >= 4]
    assert tasks.geometry.pairs == tasks.retrieval.n == len(alike) == 16
    assert tasks.geometry.sentences == tasks.retrieval.sentences == len(texts)
    ranks = []
    for first, second in alike:
        of_answer = vectors[first] @ vectors[second]
        ranks.append(
            1 + sum(vectors[first] @ vectors[text] >= of_answer for text in texts if text not in (first, second))
        )
    assert tasks.retrieval.mrr == pytest.approx(np.mean([1 / rank for rank in ranks]))
    worst = max((cosine, pair) for cosine, pair in zip(cosines, pairs, strict=True) if pair[2] <= 1)
    assert tasks.mistakes.overrated[0].sentence1 == worst[1][0]
    assert tasks.mistakes.overrated[0].cosine == pytest.approx(worst[0], abs=1e-5)
    assert sum(band.n for band in tasks.gold_scores) == 50


def test_changed_weights_or_another_pooling_are_scored_anew(tiny_run: Path, tmp_path: Path):
    changed = tmp_path / "changed"
    shutil.copytree(tiny_run, changed)
    weights = changed / "model" / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "word_embeddings" in name)
    save_file({**tensors, name: tensors[name] + torch.randn_like(tensors[name])}, weights, metadata={"format": "pt"})
    repooled = tmp_path / "repooled"
    shutil.copytree(tiny_run, repooled)
    pooling = repooled / "model" / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text().replace('"cls"', '"mean"'))
    record = evaluate(
        [str(tiny_run), f"{tiny_run}/model:mean", str(changed), str(repooled)], tasks=["test"], output=tmp_path
    )
    scores = [model.tasks.test.spearman for model in record.models]
    assert scores[0] == pytest.approx(Run(tiny_run).results.test.spearman, abs=1e-9)
    assert scores[1] == pytest.approx(scores[3])
    assert len({round(score, 6) for score in scores}) == 3
    # A second time it is the same.
    again = evaluate([str(changed), f"{tiny_run}/model:mean"], tasks=["test"], output=tmp_path)
    assert [model.tasks.test.spearman for model in again.models] == pytest.approx([scores[2], scores[1]], abs=1e-9)


def test_models_that_were_measured_by_different_tasks_stand_in_one_table(
    tiny_run: Path, tiny_base: Path, tiny_data: Path, tmp_path: Path
):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)  # whose evaluation.json has all tasks on dev
    record = evaluate([run, f"{tiny_base}:mean"], tasks="dev,test", output=run)
    assert record.models[0].tasks.gold_scores is not None
    assert record.models[1].tasks.gold_scores is None
    (table,) = evaluation_tables(record)
    assert [row[0] for row in table.rows] == [model.name for model in record.models]


def test_tasks_may_be_run_one_after_the_other(tiny_run: Path, tiny_data: Path, tmp_path: Path):
    evaluate([str(tiny_run)], tasks=["geometry"], output=tmp_path)
    record = evaluate([str(tiny_run)], tasks=["retrieval", "test"], output=tmp_path)
    assert {"geometry", "retrieval", "test"} <= measured(record.models[0].tasks)
    assert record.data.keys() == {"dev", "test"}
    # On other data it is another record.
    other = evaluate([str(tiny_run)], tasks=["dev"], dev=str(tiny_data / "test.csv"), output=tmp_path)
    assert measured(other.models[0].tasks) == {"dev"}
    (tmp_path / "evaluation.json").write_text('{"models": [{}]}')
    with pytest.raises(InputError, match="evaluation.json: not a record of this command: protocol: "):
        evaluate([str(tiny_run)], tasks=["dev"], output=tmp_path)


def test_another_tokenizer_or_configuration_is_another_model(tiny_run: Path, tmp_path: Path):
    shas = {evaluate([tiny_run], tasks="test").models[0].model_sha256}
    for name, old, new in (
        ("config.json", '"num_attention_heads": 2', '"num_attention_heads": 4'),
        ("config.json", '"hidden_act": "gelu"', '"hidden_act": "relu"'),
        ("tokenizer.json", '"a": 5', '"a": 6'),
    ):
        folder = tmp_path / f"{len(shas)}"
        shutil.copytree(tiny_run, folder)
        text = (folder / "model" / name).read_text()
        assert old in text
        text = text.replace('"b": 6', '"b": 5') if name == "tokenizer.json" else text
        (folder / "model" / name).write_text(text.replace(old, new))
        (model,) = evaluate([folder], tasks="test", output=tmp_path / "out").models
        shas.add(model.model_sha256)
    assert len(shas) == 4


def test_runs_on_different_data_are_not_measured_on_the_first_one_s(tiny_run: Path, tiny_data: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(tiny_run, other)
    recipe = (other / "recipe.yaml").read_text()
    (other / "recipe.yaml").write_text(recipe.replace(str(tiny_data / "dev.csv"), str(tiny_data / "test.csv")))
    with pytest.raises(InputError, match="is measured on .*dev.csv, .*other on .*test.csv: say by --dev which of them"):
        evaluate([tiny_run, other])
    # A run's model by itself is measured on the run's data, too.
    record = evaluate([f"{tiny_run}:mean", f"{tiny_run}/model"], tasks="dev")
    assert record.data["dev"].sources[0].file == "dev.csv"


def test_what_is_scored_before_a_model_fails_is_kept(tiny_run: Path, tiny_base: Path, tmp_path: Path):
    broken = build_model(tiny_base, device="cpu")
    with torch.no_grad():
        broken[0].auto_model.embeddings.word_embeddings.weight[5] = float("nan")
    broken.save_pretrained(str(tmp_path / "nan"), create_model_card=False)
    with pytest.raises(InputError, match="nan: the model's embedding of '.*' is not finite"):
        evaluate([f"{tiny_run}:mean", tmp_path / "nan"], tasks="dev", output=tmp_path / "out")
    assert [model.name.rpartition("/")[2] for model in written(tmp_path / "out").models] == ["tiny:mean"]


def test_precision_is_that_of_the_model(tiny_base: Path, tiny_data: Path, tmp_path: Path):
    build_model(tiny_base, device="cpu").to(torch.bfloat16).save_pretrained(
        str(tmp_path / "bf16"), create_model_card=False
    )
    record = evaluate(tmp_path / "bf16", tasks="dev", dev=str(tiny_data / "dev.csv"))
    assert record.models[0].precision == record.environment.precision == "bfloat16"


def test_each_sentence_is_encoded_once_for_all_tasks(tiny_base: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch):
    encoded: list[str] = []
    forward = SentenceTransformer.forward

    def counted(self: SentenceTransformer, features: dict, **options: object) -> object:
        encoded.extend(self.tokenizer.batch_decode(features["input_ids"], skip_special_tokens=True))
        return forward(self, features, **options)

    monkeypatch.setattr(SentenceTransformer, "forward", counted)
    dev, test = (str(tiny_data / f"{split}.csv") for split in ("dev", "test"))
    evaluate([f"{tiny_base}:mean"], dev=dev, test=test)
    texts = {text for split in ("dev", "test") for pair in read_csv(tiny_data / f"{split}.csv") for text in pair[:2]}
    encoded = encoded[2:]  # those by which a model is tried out
    assert len(encoded) == len(set(encoded)) == len(texts)


def test_models_of_different_sizes_stand_side_by_side(tiny_base: Path, tiny_run: Path, minilm: Path, tiny_data: Path):
    models = [str(tiny_run), f"{tiny_base}:mean", f"{minilm}:cls"]
    record = evaluate(models, dev=str(tiny_data / "dev.csv"), test=str(tiny_data / "test.csv"))
    assert [model.dimension for model in record.models] == [32, 32, 384]
    assert [model.modules[1] for model in record.models] == ["Pooling(cls)", "Pooling(mean)", "Pooling(cls)"]
    tables = evaluation_tables(record)
    assert [len(table.rows) for table in tables] == [3, 3]
    lines = tables[0].markdown().splitlines()
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|") == 9
    assert f"{record.models[2].tasks.dev.spearman:.2f}" in lines[6]


def test_years_of_sts_from_senteval_folders(tiny_base: Path, tmp_path: Path):
    texts = ["a b c", "b c d", "x y", "z", "p q r s", "a", "b", "c", "d", "e f", "g h i", "j"]
    parts = {"one": ([5, 1, 3, 2, 0], 0), "two": ([0.5, 4, 2.5, 1, 3.5, 0], 6)}
    for year in range(12, 17):
        folder = tmp_path / f"STS{year}-en-test"
        folder.mkdir()
        for name, (gold, begin) in parts.items():
            rows = [f"{texts[(begin + i) % 12]}\t{texts[(begin + i * 5 + 1) % 12]}" for i in range(len(gold))]
            (folder / f"STS.input.{name}.txt").write_text("\n".join(rows) + "\n")
            (folder / f"STS.gs.{name}.txt").write_text("\n".join(map(str, gold)) + "\n")
    (tmp_path / "SICK").mkdir()
    rows = ["pair_ID\tsentence_A\tsentence_B\trelatedness_score", "1\ta b\tc\t1.5", "2\tb\tz\t4.5", "3\tx\ty\t3"]
    (tmp_path / "SICK" / "SICK_test_annotated.txt").write_text("\n".join(rows) + "\n")
    test = tmp_path / "test.csv"
    test.write_text("a b,c,1\nb,z,2\nx,y x,3\n")
    record = evaluate([f"{tiny_base}:mean"], tasks=["sts"], test=str(test), senteval=tmp_path)
    tasks = record.models[0].tasks

    stock = build_model(tiny_base, pooling="mean", device="cpu")
    golds, cosines = [], []
    for gold, begin in parts.values():
        for i, score in enumerate(gold):
            first, second = stock.encode([texts[(begin + i) % 12], texts[(begin + i * 5 + 1) % 12]])
            golds.append(score)
            cosines.append(float(first @ second))
    assert tasks.sts14.all == pytest.approx(100 * spearmanr(golds, cosines).statistic, abs=1e-9)
    split = [100 * spearmanr(golds[a:b], cosines[a:b]).statistic for a, b in ((0, 5), (5, 11))]
    assert tasks.sts14.mean == pytest.approx(sum(split) / 2, abs=1e-9)
    assert tasks.sts14.wmean == pytest.approx((5 * split[0] + 6 * split[1]) / 11, abs=1e-9)
    (table,) = evaluation_tables(record)
    assert "'all'" in table.title
    # This test is not STS-B's, so there is no average of the paper's seven sets.
    assert table.columns[1:] == [f"STS{y}\nn 11" for y in range(12, 17)] + ["test\nn 3", "SICK-R\nn 3"]
    assert table.rows[0][3] == f"{tasks.sts14.all:.2f}"
    assert tasks.average is None
    stsb = tasks.model_copy(update={"test": tasks.test.model_copy(update={"n": 1379, "mean_gold": 2.608})})
    scores = [*(tasks.task(f"sts{year}").all for year in range(12, 17)), tasks.test.spearman, tasks.sick_r.spearman]
    assert with_average(stsb).average.all == pytest.approx(sum(scores) / 7, abs=1e-9)

    # The same pairs in other subsets are another year.
    folder = tmp_path / "STS12-en-test"
    before = record.data["sts12"].pairs_sha256
    for kind in ("input", "gs"):
        (folder / f"STS.{kind}.two.txt").rename(folder / f"STS.{kind}.zwei.txt")
    again = evaluate([f"{tiny_base}:mean"], tasks=["sts12"], senteval=tmp_path)
    assert again.data["sts12"].pairs_sha256 != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["dev", "retreival"]}, "--tasks: no task 'retreival': did you mean 'retrieval'"),
        ({"tasks": []}, "--tasks: none is given; known: 'all', "),
        ({"models": []}, "no model to evaluate"),
        ({"models": ["./nowhere"]}, "there is no folder './nowhere'"),
        ({"models": ["nobody/nothing"]}, "'nobody/nothing' cannot be loaded from the Hugging Face Hub"),
        ({"models": ["BASE"]}, "/BASE is a bare encoder: say how .*, e.g. as .*/BASE:mean"),
        ({"models": ["UNFINISHED"]}, "UNFINISHED is a run folder without a model: that run did not end"),
        ({"models": ["NAN"]}, "the model's embedding of '.*' is not finite"),
        ({"tasks": ["sts12"], "senteval": "/nowhere"}, "--senteval: /nowhere has no STS12-en-test, nor has downstream"),
        ({"tasks": ["sick-r"]}, "sick-r: give SentEval's folder by --senteval"),
        ({"models": ["EMPTY"]}, "EMPTY holds no model: it has neither modules.json nor config.json"),
        ({"models": ["NOTOKENIZER"]}, "NOTOKENIZER.* has no tokenizer"),
        ({"models": ["NOWEIGHTS"]}, "NOWEIGHTS"),
        ({"models": ["COLLAPSED"]}, "COLLAPSED: dev: the model gives all pairs the same similarity"),
        ({"dev": "SAME"}, "retrieval needs dev pairs with gold >= 4 of 5 whose sentences differ"),
        ({"models": [""]}, "'' is no model"),
        ({"dev": "CONSTANT"}, "all 2 scores are 3"),
        ({"dev": "LOW"}, "geometry and retrieval need dev pairs with gold >= 4 of 5: there is none"),
    ],
)
def test_what_cannot_be_measured(options: dict, message: str, tiny_base: Path, tiny_data: Path, tmp_path: Path):
    (tmp_path / "CONSTANT").with_suffix(".csv").write_text("a,b,3\nc,d,3\n")
    (tmp_path / "LOW").with_suffix(".csv").write_text("a,b,3\nc,d,2\n")
    shutil.copytree(tiny_base, tmp_path / "BASE")
    (tmp_path / "UNFINISHED").mkdir()
    (tmp_path / "UNFINISHED" / "recipe.yaml").write_text("model: {base: x}\ndata: {train: x.jsonl}\n")
    broken = build_model(tiny_base, device="cpu")
    with torch.no_grad():
        broken[0].auto_model.embeddings.word_embeddings.weight[5] = float("nan")
    broken.save_pretrained(str(tmp_path / "NAN"), create_model_card=False)
    (tmp_path / "SAME").with_suffix(".csv").write_text("a,a,5\nc,d,2\n")
    (tmp_path / "EMPTY").mkdir()
    whole = build_model(tiny_base, device="cpu")
    for name in ("NOTOKENIZER", "NOWEIGHTS"):
        whole.save_pretrained(str(tmp_path / name), create_model_card=False)
    for path in (tmp_path / "NOTOKENIZER").glob("*token*"):
        path.unlink()
    tensors = load_file(tmp_path / "NOWEIGHTS" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layer.1" not in name}
    save_file(kept, tmp_path / "NOWEIGHTS" / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        whole[0].auto_model.encoder.layer[1].output.LayerNorm.weight.zero_()
    whole.save_pretrained(str(tmp_path / "COLLAPSED"), create_model_card=False)
    models = [str(tmp_path / name) if name.isupper() else name for name in options.get("models", [f"{tiny_base}:cls"])]
    dev = str(tmp_path / options["dev"]) + ".csv" if "dev" in options else str(tiny_data / "dev.csv")
    rest = {key: value for key, value in options.items() if key not in ("models", "dev")}
    with pytest.raises(InputError, match=message):
        evaluate(models, dev=dev, test=str(tiny_data / "test.csv"), output=tmp_path / "out", **rest)
    assert not (tmp_path / "out").exists()


def test_groups_of_tasks():
    assert task_names(["sts"]) == ["test", "sts12", "sts13", "sts14", "sts15", "sts16", "sick-r"]
    assert task_names(["retrieval", "dev", "retrieval"]) == ["dev", "retrieval"]
    assert task_names(["all"]) == list(TASKS)


@pytest.mark.real_data
@pytest.mark.slow
def test_minilm_has_the_scores_that_the_public_leaderboard_gives_it(minilm: Path, shared_data: Path):
    stsb = shared_data / "stsb"
    sources = {split: str(stsb / f"{split}.csv") for split in ("dev", "test")}
    record = evaluate(
        [str(minilm)], tasks=["default", "sts12", "sts13", "sts14", "sts15", "sts16"],
        senteval=shared_data / "senteval-sts", **sources,
    )  # fmt: skip
    tasks = record.models[0].tasks
    assert [tasks.task(f"sts{y}").all for y in range(12, 17)] == pytest.approx(
        [72.37, 80.60, 75.59, 85.39, 78.99], abs=0.01
    )
    assert [tasks.task(f"sts{y}").n for y in range(12, 17)] == [3108, 1500, 3750, 3000, 1186]
    assert (tasks.dev.spearman, tasks.test.spearman) == pytest.approx((86.72, 82.03), abs=0.01)
    assert (tasks.geometry.pairs, tasks.geometry.sentences, tasks.retrieval.n) == (264, 2910, 264)
    print(tasks.geometry, tasks.retrieval)
