"""Two dropout views of a sentence, the train-only head, and what switches them off."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import nn

from helpers import collect, sentences
from simcse_st import InputError, Recipe, SimCSECollator, SimCSELoss, build_model, load_recipe, train
from simcse_st.data import TrainingData, load_training_data
from simcse_st.errors import RunError
from simcse_st.identity import dropout_probabilities
from simcse_st.recipe import DataSection
from simcse_st.training.callbacks import LossCallback


def two_views(model: SentenceTransformer, *, shared: bool) -> torch.Tensor:
    """Cosine of the two views of each of six sentences, as the loss gets them."""
    collator = SimCSECollator(model.preprocess, shared_dropout_mask=shared)
    features = collect(collator([{"sentence": text} for text in sentences(6)]))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Recording(SimCSELoss):
        def compute_loss_from_embeddings(self, anchors, positives, *rest):  # type: ignore[no-untyped-def, override]
            seen.append((anchors, positives))
            return super().compute_loss_from_embeddings(anchors, positives, *rest)

    Recording(model)(features)
    return torch.cosine_similarity(*seen[0])


def test_two_views_differ_by_dropout_and_one_shared_mask_makes_them_one(tiny_base: Path):
    model = build_model(tiny_base, device="cpu").train()
    torch.manual_seed(0)
    cosines = two_views(model, shared=False)
    assert (cosines < 0.9999).all()
    assert (cosines > 0.1).all()
    torch.testing.assert_close(two_views(model, shared=True), torch.ones(6))
    torch.testing.assert_close(two_views(model.eval(), shared=False), torch.ones(6))


def test_a_shared_mask_encodes_each_sentence_once(tiny_model: SentenceTransformer):
    rows = [{"sentence": text} for text in sentences(4)]
    both = SimCSECollator(tiny_model.preprocess)(rows)
    once = SimCSECollator(tiny_model.preprocess, shared_dropout_mask=True)(rows)
    assert (len(both["sentence_input_ids"]), len(once["sentence_input_ids"])) == (8, 4)
    loss = SimCSELoss(tiny_model)  # without dropout the two are the same
    assert loss(collect(once)).item() == pytest.approx(loss(collect(both)).item(), abs=1e-6)
    assert loss.seen.sentences == 8 + 4
    with pytest.raises(ValueError, match="is for rows of a single text column"):
        SimCSECollator(tiny_model.preprocess, shared_dropout_mask=True)([{"anchor": "a", "positive": "b"}])


def test_the_head_stands_between_pooling_and_normalisation(tiny_model: SentenceTransformer):
    texts = sentences(12)
    rows = [{"anchor": texts[i], "positive": texts[i + 4], "negative": texts[i + 8]} for i in range(4)]
    loss = SimCSELoss(tiny_model, train_only_head=True, chunk_size=5)
    value = loss(collect(SimCSECollator(tiny_model.preprocess)(rows)))

    # By hand: [CLS] as it leaves the encoder, not yet normalised, through the linear layer and tanh.
    outputs = [tiny_model[0](tiny_model.preprocess(texts[begin : begin + 4])) for begin in (0, 4, 8)]
    pooled = torch.cat([output["token_embeddings"][:, 0] for output in outputs])
    assert (pooled.norm(dim=1) - 1).abs().min() > 0.1
    assert loss.head is not None
    linear = loss.head[0]  # type: ignore[index]
    vectors = torch.tanh(pooled @ linear.weight.T + linear.bias)
    expected = SimCSELoss(tiny_model).compute_loss_from_embeddings(*vectors.split(4), torch.arange(4))
    assert value.item() == pytest.approx(expected.item(), abs=1e-5)

    # As in the paper's code: std 0.02 and no bias (torch's own would be 0.1 here).
    assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not linear.bias.any()

    value.backward()
    assert linear.weight.grad.abs().sum() > 0
    assert {name.split(".")[0] for name, _ in loss.named_parameters()} == {"model", "head"}


def test_the_head_refuses_what_would_pass_it_by(tiny_model: SentenceTransformer):
    features = collect(SimCSECollator(tiny_model.preprocess)([{"sentence": text} for text in sentences(4)]))
    loss = MatryoshkaLoss(tiny_model, SimCSELoss(tiny_model, train_only_head=True), matryoshka_dims=[32, 8])
    with pytest.raises(ValueError, match="does not work inside MatryoshkaLoss without gradient caching"):
        loss(features, None)


@pytest.fixture
def texts_file(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join([*sentences(40), "", *sentences(10)]) + "\n")
    return path


@pytest.fixture
def recipe(texts_file: Path, tiny_base: Path, tmp_path: Path) -> Recipe:
    texts = sentences(60, seed=1)
    for split in ("dev", "test"):
        rows = [f"{texts[i]},{texts[i + 1]},{i % 6}" for i in range(50)]
        (tmp_path / f"{split}.csv").write_text("\n".join(rows))
    keys = {
        "data.train": texts_file, "data.dev": tmp_path / "dev.csv", "data.test": tmp_path / "test.csv",
        "data.sample": "null", "model.base": tiny_base, "training.batch_size": 8, "training.eval_steps": 2,
    }  # fmt: skip
    return load_recipe("snli-unsup", [f"{key}={value}" for key, value in keys.items()])


def change(recipe: Recipe, section: str, **keys: object) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=keys)})


def load_sentences(path: Path) -> TrainingData:
    return load_training_data(DataSection(train=str(path), kind="sentences"))


def test_sentences_are_the_distinct_texts_in_their_order(tmp_path: Path):
    (tmp_path / "t.txt").write_text("b\na\n\nb\nb \n")
    plain = load_sentences(tmp_path / "t.txt")
    assert list(plain.texts()) == ["b", "a", "b "]
    facts = plain.facts
    assert (facts.rows_read, facts.texts, facts.blank_texts, facts.duplicate_texts) == (5, 4, 1, 1)

    rows = [("p", "x", 0), ("q", "never", -1), ("p", "y", 1), ("x", "p", 2)]
    lines = (json.dumps({"premise": p, "hypothesis": h, "label": label}) for p, h, label in rows)
    (tmp_path / "nli.jsonl").write_text("\n".join(lines))
    assert list(load_sentences(tmp_path / "nli.jsonl").texts()) == ["p", "x", "y"]

    (tmp_path / "pairs.jsonl").write_text('{"anchor": "a", "positive": "b", "negative": ["c", null]}\n')
    assert list(load_sentences(tmp_path / "pairs.jsonl").texts()) == ["a", "b", "c"]


def test_a_run_on_plain_text_saves_a_model_without_the_head(recipe: Recipe, tmp_path: Path):
    result = train(recipe, tmp_path / "run")
    assert result.results.total_steps == 5
    assert result.results.batches.sentences == 5 * 16
    modules = json.loads((tmp_path / "run" / "model" / "modules.json").read_text())
    assert [module["type"].split(".")[-1] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "40 sentences" in card


@pytest.mark.parametrize("caching", [None, 4])
def test_a_train_only_head_trains_in_half_precision(caching: int | None, recipe: Recipe, tmp_path: Path):
    half = change(change(recipe, "training", precision="bf16"), "loss", mini_batch_size=caching)
    result = train(half, tmp_path / "half")
    assert result.results.total_steps == 5
    full = train(change(recipe, "loss", mini_batch_size=caching), tmp_path / "full")
    first, expected = (
        json.loads((folder / "history.jsonl").read_text().splitlines()[1])["loss"]
        for folder in (tmp_path / "half", tmp_path / "full")
    )
    assert full.results.total_steps == 5
    assert first == pytest.approx(expected, rel=0.05)


def test_a_loss_with_a_head_can_be_copied_and_its_model_saved(tiny_model: SentenceTransformer, tmp_path: Path):
    features = collect(SimCSECollator(tiny_model.preprocess)([{"sentence": text} for text in sentences(4)]))
    loss = SimCSELoss(tiny_model, train_only_head=True)
    copied = copy.deepcopy(loss)
    with torch.no_grad():
        next(copied.model.parameters()).add_(1.0)
    assert copied([dict(features[0])]).item() != loss([dict(features[0])]).item()
    torch.save(tiny_model, tmp_path / "model.pt")
    assert "head.0.weight" in loss.state_dict()
    assert len(loss.state_dict()) == len(tiny_model.state_dict()) + 2


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("data", {"hard_negatives": False}),
        ("loss", {"hard_negative_weight": 2.0}),
        ("loss", {"share_hard_negatives": False}),
    ],
)
def test_keys_about_hard_negatives_are_refused(section: str, keys: dict, recipe: Recipe, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(change(recipe, section, **keys).to_yaml())
    with pytest.raises(InputError, match=f"{section}.{next(iter(keys))}: .*would do nothing"):
        load_recipe(tmp_path / "recipe.yaml")


def test_a_kept_head_is_a_stock_module_of_the_saved_model(recipe: Recipe, tmp_path: Path):
    result = train(change(recipe, "model", head="keep"), tmp_path / "run")
    assert [type(module).__name__ for module in result.load_model()] == ["Transformer", "Pooling", "Dense", "Normalize"]
    modules = json.loads((tmp_path / "run" / "model" / "modules.json").read_text())
    assert all(module["type"].startswith("sentence_transformers.") for module in modules)


def test_dropout_that_is_off_is_noticed_and_can_be_set(recipe: Recipe, tiny_base: Path, tmp_path: Path):
    message = r"dropout is off \(.*hidden_dropout_prob=0.*\), so there are no two views: set model.dropout=0.1"
    with pytest.raises(InputError, match=message):
        train(change(recipe, "model", dropout=0.0), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(change(recipe, "model", dropout=0.0, shared_dropout_mask=True), tmp_path / "run")

    # Named or written otherwise, as in other architectures' configurations.
    config = json.loads((tiny_base / "config.json").read_text())
    shutil.copytree(tiny_base, tmp_path / "int")
    off = {**config, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    (tmp_path / "int" / "config.json").write_text(json.dumps(off))
    assert set(dropout_probabilities(build_model(tmp_path / "int", dropout=0.3)).values()) == {0.3}

    model = build_model(tiny_base, dropout=0.25)
    assert set(dropout_probabilities(model).values()) == {0.25}
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.25}
    with pytest.raises(InputError, match="needs data.kind=sentences"):
        train(change(change(recipe, "model", shared_dropout_mask=True), "data", kind="pairs"), tmp_path / "other")


def test_the_head_is_checkpointed_and_resumed(tiny_base: Path, tmp_path: Path):
    def trainer(folder: Path, steps: int) -> tuple[SentenceTransformerTrainer, SimCSELoss]:
        model = build_model(tiny_base, device="cpu")
        torch.manual_seed(0)
        loss = SimCSELoss(model, train_only_head=True)
        assert loss.head is not None
        args = SentenceTransformerTrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=4, max_steps=6, save_steps=3, report_to="none",
            learning_rate=1e-3, save_strategy="steps", dataloader_pin_memory=False,
        )  # fmt: skip
        made = SentenceTransformerTrainer(
            model, args, Dataset.from_dict({"sentence": sentences(24)}), loss=loss,
            data_collator=SimCSECollator(model.preprocess), callbacks=[LossCallback(loss.own_parameters())],
        )  # fmt: skip
        return made, loss

    whole, expected = trainer(tmp_path / "whole", 6)
    whole.train()
    resumed, loss = trainer(tmp_path / "whole", 6)
    first = {name: value.clone() for name, value in loss.state_dict().items()}
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for name, value in expected.state_dict().items():
        assert torch.equal(loss.state_dict()[name], value), name
    assert not torch.equal(first["head.0.weight"], loss.state_dict()["head.0.weight"])

    # A checkpoint of another run stands where this one's should be.
    other, _ = trainer(tmp_path / "other", 6)
    other.args.seed = 7
    with torch.no_grad():
        other.loss.head[0].weight.add_(0.1)
    other.train()
    with pytest.raises(RunError, match="is not of the checkpoint that training resumes from"):
        trainer(tmp_path / "other", 6)[0].train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))

    (tmp_path / "whole" / "checkpoint-3" / LossCallback.FILE).unlink()
    with pytest.raises(RunError, match="cannot resume the parameters of the loss"):
        trainer(tmp_path / "whole", 6)[0].train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))


@pytest.mark.parametrize("pooling", ["cls", "mean", "first_last_avg"])
def test_poolings_by_hand(pooling: str, tiny_base: Path, tmp_path: Path):
    model = build_model(tiny_base, pooling=pooling, device="cpu").eval()
    model.save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    texts = sentences(3)
    features = model.preprocess(texts)
    with torch.no_grad():
        output = model[0].auto_model(features["input_ids"], features["attention_mask"], output_hidden_states=True)
    mask = features["attention_mask"].unsqueeze(-1)
    first, last = output.hidden_states[1], output.hidden_states[-1]
    vectors = {
        "cls": last[:, 0],
        "mean": (last * mask).sum(1) / mask.sum(1),
        "first_last_avg": ((first + last) / 2 * mask).sum(1) / mask.sum(1),
    }[pooling]
    expected = nn.functional.normalize(vectors, dim=1)
    for either in (model, SentenceTransformer(str(tmp_path / "saved"), device="cpu")):
        torch.testing.assert_close(either.encode(texts, convert_to_tensor=True), expected, atol=1e-6, rtol=1e-5)
