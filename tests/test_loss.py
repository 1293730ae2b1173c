"""The loss against sums written out by hand, against the stock loss, and what must not change it."""

from __future__ import annotations

import copy
import itertools
import math
import random

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import collect, gradients, sentences
from simcse_st import SimCSECollator, SimCSELoss
from simcse_st.training.batch import chunk_ranges, words_looked_up_once
from simcse_st.training.loss import CPU_PASS_COST

COUNTS = {
    "pairs only": [0, 0, 0, 0, 0],
    "one negative each": [1, 1, 1, 1, 1],
    "some without": [1, 0, 1, 0, 0],
    "zero to three": [3, 0, 2, 1, 0],
}


def by_hand(
    anchors: Tensor, positives: Tensor, negatives: list[list[Tensor]], temperature: float, alpha: float
) -> Tensor:
    """The formula, term by term: a row's own negatives count alpha times, all other columns once."""

    def term(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp((a @ b) / (a.norm() * b.norm()) / temperature)

    losses = []
    for i, anchor in enumerate(anchors):
        denominator = sum(term(anchor, positive) for positive in positives)
        for owner, row in enumerate(negatives):
            for negative in row:
                denominator = denominator + (alpha if owner == i else 1.0) * term(anchor, negative)
        losses.append(-torch.log(term(anchor, positives[i]) / denominator))
    return sum(losses) / len(losses)  # type: ignore[return-value]


def loss_and_gradients(loss: torch.nn.Module, features: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    loss.zero_grad()
    value = loss([dict(feature) for feature in features], None)
    value.backward()
    return value.item(), gradients(loss)


@pytest.mark.parametrize("alpha", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_value_and_gradients_are_those_of_the_formula(counts: list[int], alpha: float, tiny_model: SentenceTransformer):
    generator = torch.Generator().manual_seed(sum(counts))
    draw = lambda rows: torch.randn(rows, 7, dtype=torch.float64, generator=generator)  # noqa: E731
    anchors, positives, negatives = (draw(n).requires_grad_() for n in (5, 5, sum(counts)))
    owners = torch.tensor([row for row, count in enumerate(counts) for _ in range(count)], dtype=torch.long)
    leaves = [anchors, positives, negatives]

    loss = SimCSELoss(tiny_model, temperature=0.3, hard_negative_weight=alpha)
    ours = loss.compute_loss_from_embeddings(anchors, positives, negatives, owners)
    expected = by_hand(anchors, positives, [list(part) for part in negatives.split(counts)], 0.3, alpha)

    assert ours.item() == pytest.approx(expected.item(), abs=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(ours, leaves, allow_unused=True),
        torch.autograd.grad(expected, leaves, allow_unused=True),
        strict=True,
    ):
        if theirs is None:  # no hard negative at all: nothing to differentiate
            assert mine is None or not mine.numel()
        else:
            torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


def test_order_of_negatives_does_not_matter(tiny_model: SentenceTransformer):
    generator = torch.Generator().manual_seed(3)
    anchors, positives, negatives = (torch.randn(4, 5, generator=generator) for _ in range(3))
    owners = torch.tensor([0, 0, 2, 3])
    loss = SimCSELoss(tiny_model, hard_negative_weight=3.0)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(
        loss.compute_loss_from_embeddings(anchors, positives, negatives, owners),
        loss.compute_loss_from_embeddings(anchors, positives, negatives[order], owners[order]),
    )


def test_weight_two_is_the_own_negative_counted_twice(tiny_model: SentenceTransformer):
    generator = torch.Generator().manual_seed(4)
    anchor, positive, negative = torch.randn(3, 1, 6, dtype=torch.float64, generator=generator)
    twice = SimCSELoss(tiny_model).compute_loss_from_embeddings(
        anchor, positive, torch.cat([negative, negative]), torch.tensor([0, 0])
    )
    weighted = SimCSELoss(tiny_model, hard_negative_weight=2.0).compute_loss_from_embeddings(
        anchor, positive, negative, torch.tensor([0])
    )
    assert weighted.item() == pytest.approx(twice.item(), abs=1e-12)


def test_closed_forms(tiny_model: SentenceTransformer):
    loss = SimCSELoss(tiny_model, temperature=0.05)
    same = torch.ones(4, 8)
    owners = torch.tensor([0, 1])
    # All alike: every one of the 4 + 2 columns is as likely as the positive.
    assert loss.compute_loss_from_embeddings(same, same, same[:2], owners).item() == pytest.approx(
        math.log(6), abs=1e-6
    )
    # Orthogonal rows: the positive has logit 20, the five others 0.
    axes = torch.eye(8)
    value = loss.compute_loss_from_embeddings(axes[:4], axes[:4], axes[4:6], owners)
    assert value.item() == pytest.approx(math.log1p(5 * math.exp(-20)), abs=1e-7)


@pytest.mark.parametrize("columns", [2, 3, 5])
@pytest.mark.parametrize("collator", [SentenceTransformerDataCollator, SimCSECollator])
def test_rectangular_data_is_the_stock_loss(columns: int, collator: type, tiny_model: SentenceTransformer):
    texts = sentences(8 * columns)
    names = ["anchor", "positive", "negative", "negative_1", "negative_2"][:columns]
    rows = [dict(zip(names, texts[i::8], strict=True)) for i in range(8)]
    stock = collect(SentenceTransformerDataCollator(tiny_model.preprocess)(rows))
    # The trainer's prefixes make `negative_` swallow `negative_1_...` too; the flat batch has no such neighbours.
    ours = collect(collator(tiny_model.preprocess)(rows))

    expected, expected_gradients = loss_and_gradients(MultipleNegativesRankingLoss(tiny_model, scale=20.0), stock)
    value, found = loss_and_gradients(SimCSELoss(tiny_model, temperature=0.05), ours)

    assert value == pytest.approx(expected, abs=1e-6)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("missing", [None, "", [], [None, ""], "absent"])
def test_what_stands_for_a_missing_negative_changes_nothing(missing: object, tiny_model: SentenceTransformer):
    texts = sentences(10)
    rows = [{"anchor": texts[2 * i], "positive": texts[2 * i + 1], "negative": None} for i in range(4)]
    rows[1]["negative"] = texts[8]
    expected = SimCSECollator(tiny_model.preprocess)(rows)
    assert len(expected["sentence_input_ids"]) == 9

    for index in (0, 2, 3):
        rows[index]["negative"] = missing  # type: ignore[assignment]
        if missing == "absent":
            del rows[index]["negative"]
    batch = SimCSECollator(tiny_model.preprocess)(rows)

    loss = SimCSELoss(tiny_model)
    assert len(batch["sentence_input_ids"]) == 9
    assert loss(collect(batch)).item() == pytest.approx(loss(collect(expected)).item(), abs=1e-6)


def test_chunks_are_cut_where_they_cost_the_least():
    draw = random.Random(0)
    for _ in range(200):
        lengths = sorted(draw.choices(range(1, 9), k=draw.randint(1, 9)), reverse=True)
        pass_cost = draw.randint(0, 12)
        ranges = chunk_ranges(lengths, pass_cost)
        assert [place for begin, end in ranges for place in range(begin, end)] == list(range(len(lengths)))
        cost = sum(lengths[begin] * (end - begin) + pass_cost for begin, end in ranges)
        every = (  # all ways of cutting
            [0, *cuts, len(lengths)]
            for count in range(len(lengths))
            for cuts in itertools.combinations(range(1, len(lengths)), count)
        )
        assert cost == min(
            sum(lengths[begin] * (end - begin) + pass_cost for begin, end in itertools.pairwise(edges))
            for edges in every
        )


def test_on_a_cpu_chunks_go_by_length(tiny_model: SentenceTransformer):
    """Passes of 40 rows, three sentences each, against passes of 32."""
    texts = sentences(120)
    rows = [{"anchor": texts[i], "positive": texts[i + 40], "negative": texts[i + 80]} for i in range(40)]
    features = collect(SimCSECollator(tiny_model.preprocess)(rows))
    seen: list[tuple[int, int]] = []
    hook = tiny_model[0].register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0]["input_ids"].shape)))
    SimCSELoss(tiny_model)(features)
    fixed = SimCSELoss(tiny_model, chunk_size=32)
    own, seen = list(seen), []
    tiny_model[0].register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0]["input_ids"].shape)))
    hook.remove()
    fixed(features)
    assert [size for size, _ in seen] == [32, 32, 32, 24]
    assert sum(size for size, _ in own) == 120
    assert len({width for _, width in own}) == len(own) > 1  # cut between lengths
    costs = [sum(size * width + CPU_PASS_COST for size, width in passes) for passes in (own, seen)]
    assert costs[0] < costs[1]


@pytest.mark.parametrize("chunk_size", [1, 3, 7, None, 1000])
def test_chunks_do_not_change_loss_or_gradients(chunk_size: int | None, tiny_model: SentenceTransformer):
    texts = sentences(30)
    rows = [{"anchor": texts[i], "positive": texts[i + 10], "negative": [texts[i + 20]] * (i % 3)} for i in range(10)]
    features = collect(SimCSECollator(tiny_model.preprocess)(rows))
    expected, expected_gradients = loss_and_gradients(SimCSELoss(tiny_model, chunk_size=40), features)
    value, found = loss_and_gradients(SimCSELoss(tiny_model, chunk_size=chunk_size), features)
    assert value == pytest.approx(expected, abs=1e-6)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


class Lookups(TorchDispatchMode):
    """Counts the gradients of lookups in a table of so many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.count = rows, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten.embedding_dense_backward.default and args[2] == self.rows
        return func(*args, **(kwargs or {}))


class OtherEmbedding(nn.Embedding):
    """A kind of embedding that may do more than look up."""


@pytest.mark.parametrize("collator", [SentenceTransformerDataCollator, SimCSECollator])
def test_all_passes_share_one_gradient_of_the_vocabulary(collator: type, tiny_model: SentenceTransformer):
    texts = sentences(30)
    rows = [{"anchor": texts[i], "positive": texts[i + 10], "negative": texts[i + 20]} for i in range(10)]
    features = collect(collator(tiny_model.preprocess)(rows))
    model = copy.deepcopy(tiny_model).train()
    words = model[0].auto_model.get_input_embeddings()
    other = copy.deepcopy(model)
    plain = OtherEmbedding(*words.weight.shape, words.padding_idx)
    plain.load_state_dict(words.state_dict())
    other[0].auto_model.set_input_embeddings(plain)

    passes: list[object] = []
    model[0].register_forward_pre_hook(lambda *call: passes.append(call))
    found = []
    for each in (model, other):
        torch.manual_seed(1)
        with Lookups(len(words.weight)) as lookups:
            found.append((*loss_and_gradients(SimCSELoss(each, chunk_size=7), features), lookups.count))
    (value, ours, count), (expected, theirs, every) = found

    assert count == 1
    assert every == len(passes) > 2
    assert value == expected  # dropout draws and vectors are the same
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-6, rtol=1e-5)
    assert not words._forward_hooks


@pytest.mark.parametrize("change", ["frozen", "sparse", "max_norm", "scale_grad_by_freq"])
def test_other_lookups_are_left_alone(change: str, tiny_model: SentenceTransformer):
    model = copy.deepcopy(tiny_model)
    words = model[0].auto_model.get_input_embeddings()
    if change == "frozen":
        words.weight.requires_grad_(False)
    else:
        setattr(words, change, True)
    with words_looked_up_once(words, [{"input_ids": torch.tensor([[1, 2]])}]):
        assert not words._forward_hooks


def test_what_stands_for_padding_is_not_trained():
    words, plain = nn.Embedding(9, 4, padding_idx=0), nn.Embedding(9, 4, padding_idx=0)
    ids = torch.tensor([[1, 5, 5, 0]])
    with words_looked_up_once(words, [{"input_ids": ids}]):
        (words(ids).sum() + words(ids).sum()).backward()
    (plain(ids).sum() * 2).backward()
    torch.testing.assert_close(words.weight.grad, plain.weight.grad)


def test_words_that_are_not_in_the_batch_are_looked_up_too():
    words = nn.Embedding(9, 4)
    with words_looked_up_once(words, [{"input_ids": torch.tensor([[1, 5]])}]):
        assert words._forward_hooks
        for ids in ([[5, 1, 1]], [[0]], [[5, 8]], [[3, 1]]):
            torch.testing.assert_close(words(torch.tensor(ids)), words.weight[torch.tensor(ids)], rtol=0, atol=0)


def test_half_precision_is_computed_in_float32(tiny_model: SentenceTransformer):
    generator = torch.Generator().manual_seed(5)
    anchors, positives = (torch.randn(64, 16, generator=generator).bfloat16() for _ in range(2))
    loss = SimCSELoss(tiny_model, temperature=0.05)
    expected = loss.compute_loss_from_embeddings(anchors.float(), positives.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss.compute_loss_from_embeddings(anchors, positives)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), abs=1e-6)


def test_matryoshka_sums_the_loss_of_each_dimension(tiny_model: SentenceTransformer):
    texts = sentences(24)
    rows = [{"anchor": texts[i], "positive": texts[i + 8], "negative": texts[i + 16]} for i in range(8)]
    features = collect(SimCSECollator(tiny_model.preprocess)(rows))
    loss = SimCSELoss(tiny_model, chunk_size=5)
    value = MatryoshkaLoss(tiny_model, loss, matryoshka_dims=[32, 8])([dict(f) for f in features], None).item()

    vectors = torch.cat([tiny_model.encode(texts[begin : begin + 8], convert_to_tensor=True) for begin in (0, 8, 16)])
    expected = sum(
        loss.compute_loss_from_embeddings(*vectors[:, :dim].split(8), torch.arange(8)).item() for dim in (32, 8)
    )
    assert value == pytest.approx(expected, abs=1e-5)


def test_facts_count_what_was_seen(tiny_model: SentenceTransformer):
    loss = SimCSELoss(tiny_model)
    ids = torch.tensor([1, 1, 2, 3, 4, 5]), torch.tensor([10, 11, 12, 13, 14, 15])
    more = torch.randn(6, 3), torch.randn(6, 3), torch.randn(5, 3), torch.zeros(5).long()
    loss.compute_loss_from_embeddings(*more)
    loss.compute_loss_from_embeddings(*more, *ids)  # rows 0 and 1 have one anchor
    loss.compute_loss_from_embeddings(*more, *ids)
    loss.compute_loss_from_embeddings(torch.randn(4, 3), torch.randn(4, 3))
    with torch.no_grad():
        loss.compute_loss_from_embeddings(torch.randn(9, 3), torch.randn(9, 3))
    assert loss.seen.facts().model_dump() == {
        "batches": 4,
        "sentences": 8 + 3 * 17,
        "anchors": 22,
        "negatives": 4 * 3 + 18 * 10 - 2 * 2,
        "fewest_negatives": 3,
        "most_negatives": 10,
        "masked_cells": 4,
        "mean_negatives": (12 + 180 - 4) / 22,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0}, "temperature should be greater than or equal to 0.000001, not 0"),
        ({"temperature": math.nan}, "temperature should be .*, not nan"),
        ({"hard_negative_weight": -1.0}, "hard_negative_weight should be greater than 0, not -1.0"),
        ({"temperature": "0.05"}, "temperature should be a valid number, not '0.05'"),
        ({"temperature": True}, "temperature should be a valid number, not True"),
        ({"temperature": 1e-320}, "temperature should be greater than or equal to 0.000001, not 1e-320"),
        ({"chunk_size": 0}, "chunk_size should be greater than 0, not 0"),
        ({"mini_batch_size": 2.5}, "mini_batch_size should be a valid integer, not 2.5"),
        ({"mini_batch_size": True}, "mini_batch_size should be a valid integer, not True"),
        ({"mini_batch_size": 4, "chunk_size": 4}, "chunk_size does not go with gradient caching"),
    ],
)
def test_arguments_without_meaning_are_refused(arguments: dict, message: str, tiny_model: SentenceTransformer):
    with pytest.raises(ValueError, match=message):
        SimCSELoss(tiny_model, **arguments)


def test_data_parallel_and_static_embeddings_are_refused(tiny_model: SentenceTransformer):
    loss = SimCSELoss(tiny_model)
    loss.model = torch.nn.DataParallel(tiny_model)
    with pytest.raises(ValueError, match="start one process a GPU with torchrun"):
        loss(collect(SimCSECollator(tiny_model.preprocess)([{"anchor": "a", "positive": "b"}])))
    static = SentenceTransformer(modules=[StaticEmbedding(tiny_model.tokenizer.backend_tokenizer, embedding_dim=8)])
    with pytest.raises(ValueError, match="a model of static embeddings"):
        SimCSELoss(static)


def test_one_column_is_refused(tiny_model: SentenceTransformer):
    features = tiny_model.preprocess(["a single column", "of two rows"])
    with pytest.raises(ValueError, match="anchors and positives"):
        SimCSELoss(tiny_model)([features])


def test_shapes_that_do_not_fit_are_an_error(tiny_model: SentenceTransformer):
    loss = SimCSELoss(tiny_model)
    vectors = torch.randn(4, 8)
    with pytest.raises(ValueError, match="4 anchors need as many positives, not 3, and 0 hard negatives as many rows"):
        loss.compute_loss_from_embeddings(vectors, vectors[:3])
    with pytest.raises(ValueError, match="and 2 hard negatives as many rows, not 1"):
        loss.compute_loss_from_embeddings(vectors, vectors, vectors[:2], torch.tensor([0]))
