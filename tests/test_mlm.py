"""The masked-language-model term."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertForMaskedLM

from helpers import collect, sentences
from simcse_st import SimCSECollator, SimCSELoss, build_model


def features_of(model: SentenceTransformer) -> list[dict[str, torch.Tensor]]:
    rows = [{"anchor": a, "positive": b} for a, b in zip(sentences(8), sentences(8, seed=1), strict=True)]
    return collect(SimCSECollator(model.preprocess)(rows))


@pytest.fixture(scope="module")
def tiny_lm(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny encoder's folder with a masked-language-model head."""
    folder = tmp_path_factory.mktemp("tiny-lm")
    build_model(tiny_base).tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    BertForMaskedLM(BertConfig.from_pretrained(tiny_base)).save_pretrained(folder)
    return folder


def test_the_term_is_added_with_its_weight(tiny_lm: Path):
    model = build_model(tiny_lm, device="cpu").eval()
    features = features_of(model)
    plain = SimCSELoss(model)([dict(features[0])]).item()
    loss = SimCSELoss(model, mlm_weight=0.5, mlm_probability=0.3).eval()
    torch.manual_seed(0)
    value = loss([dict(features[0])])

    # By hand: the checkpoint's own language model on the same masked tokens.
    torch.manual_seed(0)
    masked, labels = loss.mlm._mask(features[0]["input_ids"].clone())
    whole = BertForMaskedLM.from_pretrained(tiny_lm).eval()
    logits = whole(masked, attention_mask=features[0]["attention_mask"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert value.item() == pytest.approx(plain + 0.5 * expected.item(), abs=1e-5)
    share = (labels != -100).sum() / features[0]["attention_mask"].sum()
    assert 0.15 < share < 0.45
    assert not (labels == model.tokenizer.cls_token_id).any()

    with torch.no_grad():  # an evaluation has no such term: its masks would be drawn anew each time
        assert loss([dict(features[0])]).item() == pytest.approx(plain, abs=1e-6)

    value.backward()
    assert {"mlm.lm.cls.predictions.bias", "mlm.lm.cls.predictions.transform.dense.weight"} <= set(
        loss.own_parameters()
    )
    assert not any("decoder.weight" in name or "bert" in name for name in loss.own_parameters())
    assert all(parameter.grad.abs().sum() > 0 for parameter in loss.own_parameters().values())


def test_a_checkpoint_without_a_head_is_reported(tiny_base: Path, tiny_lm: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="simcse_st"):
        SimCSELoss(build_model(tiny_lm, device="cpu"), mlm_weight=0.1)
        assert "starts from random weights" not in caplog.text
        SimCSELoss(build_model(tiny_base, device="cpu"), mlm_weight=0.1)
        assert "has no masked-language-model head: it starts from random weights" in caplog.text


def test_it_does_not_go_with_gradient_caching(tiny_model: SentenceTransformer):
    with pytest.raises(ValueError, match="mlm_weight does not go with gradient caching"):
        SimCSELoss(tiny_model, mlm_weight=0.1, mini_batch_size=4)
    with pytest.raises(ValueError, match="mlm_weight should be greater than or equal to 0"):
        SimCSELoss(tiny_model, mlm_weight=-0.1)
    with pytest.raises(ValueError, match="mlm_probability should be less than 1"):
        SimCSELoss(tiny_model, mlm_weight=0.1, mlm_probability=1.0)
