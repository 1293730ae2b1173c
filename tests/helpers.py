"""What several tests need."""

from __future__ import annotations

import json
import os
import random
import signal
import string
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from hub import Hub
from simcse_st.data import TrainingData, load_training_data
from simcse_st.recipe import DataSection


def hub_environment(hub: Hub, home: Path, token: str = "") -> dict[str, str]:
    """The environment of a fresh process that takes this server for the Hub; its libraries read it on import."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": token,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }


def jsonl(path: Path, rows: list[dict]) -> str:
    """The path of a new file of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(train: str | Path | list[str], **keys: Any) -> TrainingData:
    """What is trained on by a recipe with these keys of ``data``."""
    train = str(train) if isinstance(train, Path) else train
    return load_training_data(DataSection(train=train, **keys))


def nli(*rows: tuple[str, str, object]) -> list[dict]:
    """Labelled rows: premise, hypothesis, label."""
    return [{"premise": p, "hypothesis": h, "label": label} for p, h, label in rows]


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


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGINT) -> None:
    """Sends a signal to this process when a step begins."""
    from simcse_st.training.checkpoints import CheckpointCallback

    def on_step_begin(self: CheckpointCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step - 1:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(CheckpointCallback, "on_step_begin", on_step_begin)
