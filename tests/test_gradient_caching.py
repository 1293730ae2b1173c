"""Gradient caching gives the loss and gradients of the whole batch, whatever is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from helpers import collect, gradients, sentences
from simcse_st import SimCSECollator, SimCSELoss, build_model

TEXTS = sentences(60)
RAGGED = [
    {"anchor": TEXTS[i], "positive": TEXTS[i + 20], "negative": TEXTS[40 + i : 40 + i + i % 4]} for i in range(11)
]
SIZE = sum(2 + len(row["negative"]) for row in RAGGED)


def step(model: SentenceTransformer, rows: list[dict], **arguments: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """One step with dropout on; every call draws the same dropout masks and head."""
    torch.manual_seed(0)
    loss = SimCSELoss(model, **arguments).train().to(next(model.parameters()).dtype)
    value = loss(collect(SimCSECollator(model.preprocess)(rows)))
    loss.zero_grad()
    (value / 3).backward()  # as with gradient accumulation: the factor must reach every parameter
    return value.item(), gradients(loss)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("size", [1, 7, SIZE])
def test_loss_and_every_gradient_are_those_without_caching(size: int, head: bool, tiny_base: Path):
    model = build_model(tiny_base, device="cpu", dropout=0.2).double()  # the gradient of some biases is 0 but for noise
    options = {"train_only_head": head, "hard_negative_weight": 2.0}
    # Chunks of the same size draw the same dropout masks.
    expected, expected_gradients = step(model, RAGGED, chunk_size=size, **options)
    value, found = step(model, RAGGED, mini_batch_size=size, **options)
    assert value == pytest.approx(expected, rel=1e-5)
    assert found.keys() == expected_gradients.keys()
    assert any(name.startswith("head") for name in found) is head
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-12)


def test_a_token_budget_cuts_by_tokens(tiny_model: SentenceTransformer):
    features = collect(SimCSECollator(tiny_model.preprocess)(RAGGED))
    expected = SimCSELoss(tiny_model)([dict(features[0])])
    sizes: list[int] = []
    tiny_model.register_forward_pre_hook(lambda _, inputs: sizes.append(int(inputs[0]["attention_mask"].sum())))
    loss = SimCSELoss(tiny_model, mini_batch_num_tokens=64)
    value = loss(features)
    forwards = len(sizes)
    value.backward()
    assert loss.uses_gradient_cache
    assert len(sizes) == 2 * forwards  # once without gradients, and again in the backward pass
    assert value.item() == pytest.approx(expected.item(), abs=1e-6)
    assert max(sizes) <= 64
    assert len(sizes) > 3


def test_dropout_is_on_in_this_comparison(tiny_base: Path):
    model = build_model(tiny_base, device="cpu", dropout=0.2)
    assert step(model, RAGGED, chunk_size=7)[0] != pytest.approx(step(model, RAGGED, chunk_size=5)[0], rel=1e-5)


def test_masks_shared_views_and_columns_are_cached_too(tiny_base: Path):
    model = build_model(tiny_base, device="cpu").eval()
    rows = [dict(row) for row in RAGGED]
    rows[3]["anchor"] = rows[0]["anchor"]
    for options in ({"mask_false_negatives": True}, {"share_hard_negatives": False}):
        expected, expected_gradients = step_eval(model, SimCSECollator(model.preprocess)(rows), **options)
        value, found = step_eval(model, SimCSECollator(model.preprocess)(rows), mini_batch_size=4, **options)
        assert value == pytest.approx(expected, rel=1e-6)
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    columns = [{"anchor": TEXTS[i], "positive": TEXTS[i + 20], "negative": TEXTS[i + 40]} for i in range(9)]
    batch = SentenceTransformerDataCollator(model.preprocess)(columns)
    assert step_eval(model, batch, mini_batch_size=4)[0] == pytest.approx(step_eval(model, batch)[0], abs=1e-6)


def step_eval(model: SentenceTransformer, batch: dict, **arguments: Any) -> tuple[float, dict[str, torch.Tensor]]:
    loss = SimCSELoss(model, **arguments)
    value = loss(collect(batch))
    loss.zero_grad()
    value.backward()
    return value.item(), gradients(loss)


@pytest.mark.parametrize("arguments", [{}, {"mini_batch_size": 4}], ids=["plain", "cached"])
def test_matryoshka_trains(arguments: dict, tiny_base: Path):
    model = build_model(tiny_base, device="cpu").eval()
    loss = MatryoshkaLoss(model, SimCSELoss(model, **arguments), matryoshka_dims=[32, 16, 8])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batch = SimCSECollator(model.preprocess)(RAGGED)
    values = []
    for _ in range(8):
        optimizer.zero_grad()
        value = loss(collect(batch), None)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < 0.8 * values[0]


def test_gradient_checkpointing_changes_nothing(tiny_base: Path):
    model = build_model(tiny_base, device="cpu", dropout=0.2)
    expected, expected_gradients = step(model, RAGGED)
    calls: list[int] = []
    model[0].auto_model.encoder.layer[0].attention.register_forward_pre_hook(lambda *_: calls.append(1))
    step(model, RAGGED)
    once = len(calls)
    model[0].auto_model.gradient_checkpointing_enable()
    value, found = step(model, RAGGED)
    assert len(calls) - once == 2 * once  # the backward pass computes the layers again
    assert value == pytest.approx(expected, rel=1e-6)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["mini_batch_size", "mini_batch_num_tokens"])
def test_sizes_without_meaning_are_refused(name: str, tiny_model: SentenceTransformer):
    with pytest.raises(ValueError, match=f"{name} should be (greater than 0|a valid integer)"):
        SimCSELoss(tiny_model, **{name: 0})


def test_no_graph_of_the_loss_outlives_its_backward_pass(tiny_model: SentenceTransformer):
    reps = [[torch.randn(2, 8, requires_grad=True), torch.randn(1, 8, requires_grad=True)] for _ in range(2)]
    loss = SimCSELoss(tiny_model, mini_batch_size=2).calculate_loss(reps, with_backward=True)
    assert not loss.requires_grad
    assert all(chunk.grad is not None for chunks in reps for chunk in chunks)
