"""Checkpoints that a run goes on from as if nothing had happened, whatever stopped it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from sentence_transformers.util.distributed import get_world_size
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from simcse_st.batch import BatchFacts
from simcse_st.callbacks import STSCallback
from simcse_st.folder import write_json

logger = logging.getLogger(__name__)

_COMPLETE = "simcse_st.json"  # written last: a checkpoint without it was cut short


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from.

    Attributes:
        folder: The trainer's checkpoint.
        step: The step after which it was written.
        total_steps: The steps of the whole run.
        best: :meth:`~simcse_st.callbacks.STSCallback.state` at that step.
        seen: What the loss had seen.
        train_seconds: Seconds of training until then.
    """

    folder: Path
    step: int
    total_steps: int
    best: dict[str, Any]
    seen: dict[str, Any]
    train_seconds: float


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that was written to its end.

    Args:
        folder: The trainer's ``output_dir``.
    """
    found = []
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{_COMPLETE}"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Checkpoint(path.parent, **json.loads(path.read_text("utf-8"))))
    return max(found, key=lambda checkpoint: checkpoint.step, default=None)


class CheckpointCallback(TrainerCallback):
    """Has the trainer write a checkpoint every so many steps and at the end, and keeps the newest.

    A checkpoint counts once all of it is on the disk; only then does the one before it go, with the weights that were
    the best until then. So there are never more than two checkpoints and two of the best weights, and at any moment
    one of each that is whole.

    Put it behind the callbacks that add to a checkpoint.

    Args:
        steps: Steps between two checkpoints.
        best: Keeps the best weights, made with ``resumable=True``.
        seen: What the loss sees.
        resumed: What the run goes on from.

    Attributes:
        stop: Set it to have the run stop after the current step, with a checkpoint.
    """

    def __init__(self, steps: int, best: STSCallback, seen: BatchFacts, resumed: Checkpoint | None = None) -> None:
        self.steps = steps
        self.best = best
        self.seen = seen
        self.resumed = resumed
        self.stop = False
        self._before = resumed.train_seconds if resumed else 0.0
        self._begin = time.perf_counter()
        self._elsewhere = best.seconds  # of the time since then: scoring, and writing checkpoints
        self._asked = (0.0, 0.0)

    def train_seconds(self) -> float:
        """Seconds of training so far, without scoring and without writing checkpoints."""
        return self._before + time.perf_counter() - self._begin - (self.best.seconds - self._elsewhere)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Asks for a checkpoint when one is due, or when the run is to stop."""
        stop = self.stop
        if get_world_size() > 1:  # a signal does not reach all processes within the same step
            flag = torch.tensor([int(stop)], device=args.device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            stop = bool(flag.item())
        self.stop = stop
        if stop:
            control.should_training_stop = True
        control.should_save = stop or state.global_step % self.steps == 0 or state.global_step >= state.max_steps
        self._asked = (time.perf_counter(), self.best.seconds)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Makes sure that all of the checkpoint is on the disk, marks it complete, and drops what it supersedes."""
        if get_world_size() > 1:
            torch.distributed.barrier()  # each process has written its own random state
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            for whole in (folder, *([] if self.best.best_step is None else [self.best.kept])):
                for path in (*whole.rglob("*"), whole):
                    _flush(path)
            record = {
                "step": state.global_step,
                "total_steps": state.max_steps,
                "best": self.best.state(),
                "seen": asdict(self.seen),
                "train_seconds": self.train_seconds(),
            }
            write_json(folder / _COMPLETE, record)
            for path in (folder / _COMPLETE, folder, folder.parent):
                _flush(path)
            for other in folder.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)
            self.best.drop_superseded()
        begin, scoring = self._asked
        self._elsewhere -= time.perf_counter() - begin - (self.best.seconds - scoring)


def _flush(path: Path) -> None:
    """Has the system write a file or folder to the disk, so that it is there after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def finish_the_step(saver: CheckpointCallback) -> Iterator[None]:
    """Makes the first Ctrl-C or SIGTERM end the run after the current step, with a checkpoint; the second ends it at once.

    Raises:
        KeyboardInterrupt: On the second, where it comes.
    """  # noqa: E501

    def ask(number: int, frame: FrameType | None) -> None:
        if saver.stop:
            raise KeyboardInterrupt
        saver.stop = True
        logger.warning("stopping after this step (again: at once, from the last checkpoint)")

    before = {}
    with contextlib.suppress(ValueError):  # not in the main thread, which alone gets signals
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
