"""Bases of every architecture and as their authors saved them: trained, resumed, published; or refused in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, StaticEmbedding, Transformer
from transformers import AutoModel, AutoTokenizer

from architectures import ARCHITECTURES, make_base
from helpers import stop_at
from publisher import ALL, Publisher, names
from simcse_st import InputError, Recipe, build_model, evaluate, load_recipe, train
from simcse_st.data import load_graded_pairs
from simcse_st.encoders import make_ready
from simcse_st.evaluation.embedding import embed
from simcse_st.run import file_sha256


def with_base(recipe: Recipe, folder: Path, **keys: object) -> Recipe:
    return recipe.changed(
        **{"model__base": str(folder), "model__pooling": None, **{f"model__{k}": v for k, v in keys.items()}}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(
    name: str, tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publisher: Publisher
):
    base = make_base(name, tmp_path / "base")
    recipe = with_base(tiny_recipe, base, pooling=ARCHITECTURES[name][1]).changed(
        card__license="mit", training__epochs=4
    )
    run = train(recipe, tmp_path / "run")
    losses = [entry.loss for entry in run.history() if entry.loss is not None]
    assert sum(losses[-5:]) < sum(losses[:5])

    with monkeypatch.context() as patch:
        stop_at(8, patch)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "stopped")
    resumed = train(recipe, tmp_path / "stopped", resume=True)
    assert resumed.results.weights_sha256 == run.results.weights_sha256
    assert resumed.history() == run.history()
    assert run.results.untrained is None  # each is trained as it is saved, or has never been read before

    stock = SentenceTransformer(str(run.model_path), device="cpu", local_files_only=True)
    limit = stock.max_seq_length
    long = stock.preprocess(["a " * min(limit, 1000)])["input_ids"]
    assert long.shape[1] == limit or limit > 10**9
    assert torch.isfinite(stock.encode("a " * 1000, convert_to_tensor=True)).all()

    assert publisher("alice/m", run_folder=str(run.folder))["changed"]
    assert names(publisher("alice/m", run=str(run.folder))) == ALL


def test_what_cannot_be_trained_is_one_line(tiny_recipe: Recipe, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_recipe.model.base)
    static = SentenceTransformer(modules=[StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=8)], device="cpu")
    static.save(str(tmp_path / "static"))
    gpt2, t5, qwen = (make_base(name, tmp_path / name) for name in ("gpt2", "t5", "qwen embedding"))
    bert = make_base("bert", tmp_path / "bert")
    wrong = {
        "begins with StaticEmbedding, but only a Transformer can be trained": (tmp_path / "static", {}),
        "bare encoder that begins no text with a .CLS.: .* model.pooling, e.g. mean": (gpt2, {}),
        "a bare encoder that begins no text": (t5, {}),
        "one vector to sentences that begin alike: the first token of a causal model": (qwen, {"pooling": "cls"}),
        "model.max_length is 65, but .* takes fewer tokens": (bert, {"max_length": 65}),
        "model.prompt: no prompt 'quest': did you mean 'query'": (bert, {"prompt": "quest"}),
        "it is a run's: its model is .*run/model": (tmp_path / "run", {}),
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(tiny_recipe.to_yaml())
    for message, (folder, keys) in wrong.items():
        with pytest.raises(InputError, match=message) as error:
            train(with_base(tiny_recipe, folder, **keys), tmp_path / "out")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()


def test_a_base_that_cuts_its_vectors_is_refused(tiny_base: Path, tmp_path: Path):
    model = build_model(tiny_base, device="cpu")
    model.truncate_dim = 8
    model.save(str(tmp_path / "cut"))
    with pytest.raises(InputError, match="cuts its vectors to 8 numbers, which is not supported"):
        build_model(tmp_path / "cut", device="cpu")


def test_a_tokenizer_that_cannot_pad_is_refused(tiny_base: Path):
    model = build_model(tiny_base, device="cpu")
    model.tokenizer.pad_token = model.tokenizer.eos_token = None
    with pytest.raises(InputError, match="has no padding token, nor one that ends a text"):
        make_ready(model)


@pytest.mark.slow
def test_a_model_that_cannot_take_what_it_admits_is_not_published(
    tiny_recipe: Recipe, tmp_path: Path, publisher: Publisher
):
    base = make_base("roberta, padding 3", tmp_path / "base")
    run = train(with_base(tiny_recipe, base).changed(card__license="mit"), tmp_path / "run")
    path = run.model_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"model_max_length": 62', '"model_max_length": 64'))
    results = run.results.model_copy(update={"files": {**run.results.files, path.name: file_sha256(path)}})
    run.write(results)
    said = publisher("alice/m", run_folder=str(run.folder))
    assert "it cannot encode a text of the 64 tokens that it admits" in said
    assert not publisher.hub.repos


@pytest.mark.parametrize(("name", "limit"), [("roberta", 64), ("roberta, padding 3", 62), ("bert", 64)])
def test_the_length_is_the_true_one(name: str, limit: int, tmp_path: Path):
    base = make_base(name, tmp_path / "base")
    assert build_model(base, device="cpu").max_seq_length == limit
    assert build_model(base, device="cpu", max_length=40).max_seq_length == 40
    with pytest.raises(InputError, match=f"model.max_length is {limit + 1}"):
        build_model(base, device="cpu", max_length=limit + 1)


def test_a_saved_length_may_be_raised_to_what_the_encoder_has(tmp_path: Path):
    model = build_model(make_base("bert", tmp_path / "base"), device="cpu", max_length=20)
    model.save(str(tmp_path / "short"))
    assert build_model(tmp_path / "short", device="cpu").max_seq_length == 20
    assert build_model(tmp_path / "short", device="cpu", max_length=64).max_seq_length == 64


@pytest.mark.parametrize("pooling", ["max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"])
def test_poolings_of_sentence_transformers_by_hand(pooling: str, tiny_base: Path):
    encoder, tokenizer = AutoModel.from_pretrained(tiny_base).eval(), AutoTokenizer.from_pretrained(tiny_base)
    model = build_model(tiny_base, pooling=pooling, device="cpu")
    for text in ("abc", "the cat sat"):
        with torch.inference_mode():
            tokens = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        weights = torch.arange(1, len(tokens) + 1)[:, None]
        vector = {
            "max": tokens.amax(0),
            "lasttoken": tokens[-1],
            "weightedmean": (tokens * weights).sum(0) / weights.sum(),
            "mean_sqrt_len_tokens": tokens.sum(0) / math.sqrt(len(tokens)),
        }[pooling]
        found = model.encode(text, convert_to_tensor=True)
        torch.testing.assert_close(found, F.normalize(vector, dim=0), atol=1e-6, rtol=0)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return make_base("dense and prompts", tmp_path / "dense")


def test_a_base_goes_on_as_it_is_saved(dense: Path):
    texts = ["a man is eating", "two dogs run in the park"]
    saved = SentenceTransformer(str(dense), device="cpu")
    model = build_model(dense, device="cpu")
    assert [type(module) for module in model] == [Transformer, Pooling, Dense, Normalize]
    assert (model.prompts["query"], model.default_prompt_name) == ("find: ", "query")
    expected = F.normalize(saved.encode(texts, convert_to_tensor=True), dim=1)
    torch.testing.assert_close(model.encode(texts, convert_to_tensor=True), expected, atol=1e-6, rtol=0)
    again = build_model(dense, device="cpu", head="keep")
    assert [type(module) for module in again] == [Transformer, Pooling, Dense, Dense, Normalize]


def test_what_is_changed_of_a_base_is_said_and_scored(
    dense: Path, tiny_recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    as_saved = train(with_base(tiny_recipe, dense), tmp_path / "as-saved")
    assert as_saved.results.untrained is None
    assert [line for line in as_saved.manifest.base_changes if "saved as" in line] == []
    keys = {"pooling": "cls", "prompt": "", "max_length": 50}
    run = train(with_base(tiny_recipe, dense, **keys), tmp_path / "changed")
    lines = [
        "modules: Transformer -> Pooling(cls), saved as Transformer -> Pooling(mean) -> Dense",
        "max_length: 50, saved as 64",
        "prompt: None, saved as 'find: '",
    ]
    assert run.manifest.base_changes[-3:] == lines
    card = (run.model_path / "README.md").read_text()
    for line in lines:
        assert f"base     {line}" in caplog.text
        assert line.partition(":")[0] in card
    dev, test = (str(getattr(tiny_recipe.data, split)) for split in ("dev", "test"))
    measured = evaluate([dense, f"{dense}:cls"], dev=dev, test=test, tasks="dev,test").models
    assert run.results.base["dev"] == pytest.approx(measured[0].tasks.dev.spearman, abs=1e-4)
    assert run.results.base == as_saved.results.base
    assert run.results.untrained
    assert abs(run.results.untrained["dev"] - run.results.base["dev"]) > 0.1
    first, second = card.partition("| the base as saved | ")[2].splitlines()[:2]
    assert first.startswith(f"{run.results.base['dev']:.2f} | {run.results.base['test']:.2f}")
    assert second.startswith("| Transformer -> Pooling(cls) -> Normalize, untrained | ")
    assert f"{run.results.untrained['test']:.2f}" in second


def test_prompts_are_used_by_training_dev_test_and_the_saved_model(
    tiny_base: Path, tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[str] = []
    preprocess = Transformer.preprocess

    def spied(self: Transformer, texts: list[str], prompt: str | None = None, **options: object) -> object:
        if self.model.training and texts != ["find: "]:  # whose length may be asked for
            seen.extend([prompt or ""] * len(texts))
        return preprocess(self, texts, prompt=prompt, **options)

    monkeypatch.setattr(Transformer, "preprocess", spied)
    run = train(with_base(tiny_recipe, tiny_base, prompts={"find": "find: "}, prompt="find"), tmp_path / "run")
    assert set(seen) == {"find: "}
    stock = SentenceTransformer(str(run.model_path), device="cpu")
    assert stock.default_prompt_name == "find"
    texts = ["a man is eating", "two dogs run in the park"]
    assert embed(stock, texts).numpy() == pytest.approx(stock.encode(texts), abs=1e-6)
    assert embed(stock, texts).numpy() == pytest.approx(
        stock.encode(["find: " + text for text in texts], prompt=""), abs=1e-6
    )
    assert embed(stock, texts).numpy() != pytest.approx(stock.encode(texts, prompt=""), abs=1e-3)
    for split, scores in (("dev", run.results.dev), ("test", run.results.test)):
        pairs = load_graded_pairs(str(getattr(tiny_recipe.data, split)))
        gold, pearson = torch.tensor(pairs.scores, dtype=torch.float64), {}
        for prompt in (None, ""):
            first, second = (stock.encode(side, prompt=prompt) for side in (pairs.sentences1, pairs.sentences2))
            cosines = torch.tensor((first * second).sum(axis=1), dtype=torch.float64)
            pearson[prompt] = 100 * float(torch.corrcoef(torch.stack([cosines, gold]))[0, 1])
        assert scores.pearson == pytest.approx(pearson[None], abs=1e-3)
        assert abs(scores.pearson - pearson[""]) > 0.1


def test_a_base_of_the_hub_may_have_its_encoder_in_a_folder(tiny_base: Path, tmp_path: Path):
    build_model(tiny_base, device="cpu", pooling="mean").save(str(tmp_path / "old"))
    modules = json.loads((tmp_path / "old" / "modules.json").read_text())
    (tmp_path / "old" / "0_Transformer").mkdir()
    for file in [
        path
        for path in (tmp_path / "old").iterdir()
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json")
    ]:
        file.rename(tmp_path / "old" / "0_Transformer" / file.name)
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "old" / "modules.json").write_text(json.dumps(modules))
    expected = build_model(tiny_base, device="cpu", pooling="mean").encode("a cat")
    assert build_model(tmp_path / "old", device="cpu").encode("a cat") == pytest.approx(expected, abs=1e-6)


def test_shipped_recipes_name_their_pooling():
    assert {
        name: load_recipe(name).model.pooling for name in ("quickstart", "snli-sup", "nli-sup", "wiki-unsup")
    } == dict.fromkeys(("quickstart", "snli-sup", "nli-sup", "wiki-unsup"), "cls")
