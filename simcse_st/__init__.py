"""SimCSE sentence embeddings with hard negatives, as a Sentence Transformers plugin.

The public names are imported when they are first used: ``import simcse_st`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simcse_st.card import write_card
    from simcse_st.errors import InputError, RunError
    from simcse_st.evaluation.evaluate import evaluate
    from simcse_st.evaluation.search import search
    from simcse_st.mining.mine import mine
    from simcse_st.models import build_model
    from simcse_st.publishing.push import push
    from simcse_st.publishing.verify import verify
    from simcse_st.recipe import Recipe
    from simcse_st.recipes import load_recipe
    from simcse_st.run import Run
    from simcse_st.training.callbacks import LossCallback, STSCallback
    from simcse_st.training.collator import SimCSECollator
    from simcse_st.training.experiments import ablate, train_seeds
    from simcse_st.training.loss import SimCSELoss
    from simcse_st.training.prepare import prepare
    from simcse_st.training.session import SimCSETrainer
    from simcse_st.training.train import train

_HOME = {
    "InputError": "errors",
    "LossCallback": "training.callbacks",
    "Recipe": "recipe",
    "RunError": "errors",
    "STSCallback": "training.callbacks",
    "SimCSECollator": "training.collator",
    "SimCSELoss": "training.loss",
    "SimCSETrainer": "training.session",
    "Run": "run",
    "ablate": "training.experiments",
    "build_model": "models",
    "evaluate": "evaluation.evaluate",
    "load_recipe": "recipes",
    "mine": "mining.mine",
    "prepare": "training.prepare",
    "push": "publishing.push",
    "search": "evaluation.search",
    "train": "training.train",
    "train_seeds": "training.experiments",
    "verify": "publishing.verify",
    "write_card": "card",
}

__all__ = [
    "InputError",
    "LossCallback",
    "Recipe",
    "Run",
    "RunError",
    "STSCallback",
    "SimCSECollator",
    "SimCSELoss",
    "SimCSETrainer",
    "ablate",
    "build_model",
    "evaluate",
    "load_recipe",
    "mine",
    "prepare",
    "push",
    "search",
    "train",
    "train_seeds",
    "verify",
    "write_card",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("simcse-st")
    if name not in _HOME:
        raise AttributeError(f"module 'simcse_st' has no attribute {name!r}")
    return getattr(import_module(f"simcse_st.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__, "__version__"]
