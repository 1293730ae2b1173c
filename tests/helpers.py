"""What several tests need."""

from __future__ import annotations

import random
import string

from torch import Tensor, nn


def sentences(count: int, seed: int = 0) -> list[str]:
    """Distinct sentences of two to nine made-up words."""
    draw = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        words = ("".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 6))) for _ in range(draw.randint(2, 9)))
        made[" ".join(words)] = None
    return list(made)


def collect(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What the trainer makes of a collated batch: one feature dict for each prefix of ``*_input_ids``."""
    prefixes = [key.removesuffix("input_ids") for key in batch if key.endswith("_input_ids")]
    return [{k.removeprefix(prefix): v for k, v in batch.items() if k.startswith(prefix)} for prefix in prefixes]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
