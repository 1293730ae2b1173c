"""What several tests need."""

from __future__ import annotations

import random
import string


def sentences(count: int, seed: int = 0) -> list[str]:
    """Distinct sentences of two to nine made-up words."""
    draw = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        words = ("".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 6))) for _ in range(draw.randint(2, 9)))
        made[" ".join(words)] = None
    return list(made)
