"""Checkpoints that a run goes on from as if nothing had happened, whatever stopped it."""

from __future__ import annotations

import contextlib
import errno
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
from safetensors import SafetensorError
from sentence_transformers.util.distributed import get_world_size
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from simcse_st.batch import BatchFacts
from simcse_st.callbacks import STSCallback
from simcse_st.environment import package_versions
from simcse_st.errors import InputError, RunError
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


def checkpoint_to_resume(folder: Path, manifest: dict[str, Any], processes: int) -> Checkpoint | None:
    """The checkpoint that a run goes on from; None if it has none.

    Args:
        folder: The run folder.
        manifest: What the data are now.
        processes: How many train together now.

    Raises:
        InputError: The data have changed since, or other processes would share the batches.
    """
    checkpoint = latest_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        logger.info("resume   no checkpoint in %s: the run begins", folder)
        return None
    before = json.loads((folder / "manifest.json").read_text("utf-8"))
    for part, key in (("train", "prepared_sha256"), ("dev", "pairs_sha256"), ("test", "pairs_sha256")):
        if before[part][key] != manifest[part][key]:
            raise InputError(
                f"--resume: data.{part} has changed since {folder} was begun: {key} was {before[part][key]}"
            )
    environment = json.loads((folder / "environment.json").read_text("utf-8"))
    if environment["devices"] != processes:
        raise InputError(f"--resume: {folder} was begun with {environment['devices']} processes, not {processes}")
    if environment["packages"] != package_versions():
        logger.warning("odd      %s was begun with other versions of the libraries: the result may differ", folder)
    logger.info("resume   from step %d of %d", checkpoint.step, checkpoint.total_steps)
    return checkpoint


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
        self._begin: float | None = None
        self._end: float | None = None
        self._elsewhere = 0.0  # of the time between the two: scoring, and writing checkpoints
        self._asked = (0.0, 0.0)

    def train_seconds(self) -> float:
        """Seconds of training so far, without scoring and without writing checkpoints."""
        if self._begin is None:
            return self._before
        return self._before + (self._end or time.perf_counter()) - self._begin - (self.best.seconds - self._elsewhere)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock."""
        self._begin, self._elsewhere = time.perf_counter(), self.best.seconds

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops it: loading the kept weights and scoring test are no training."""
        self._end = time.perf_counter()

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
def stoppable(saver: CheckpointCallback, checkpoints: Path) -> Iterator[None]:
    """Training that can be interrupted, or fail for want of space, and says how to go on then.

    The first Ctrl-C or SIGTERM ends it after the current step, with a checkpoint; the second ends it at once.

    Args:
        saver: Writes the checkpoints.
        checkpoints: The trainer's ``output_dir``.

    Raises:
        RunError: The disk is full or cannot be written.
        KeyboardInterrupt: The run was stopped.
    """
    try:
        with _finish_the_step(saver):
            yield
        if saver.stop:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        _say_how_to_resume(checkpoints)
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RunError) or not _is_about_the_disk(error):
            raise
        _say_how_to_resume(checkpoints)
        raise RunError(f"{checkpoints}: cannot be written: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def _finish_the_step(saver: CheckpointCallback) -> Iterator[None]:
    """Hands the first signal to the saver."""

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


def _say_how_to_resume(checkpoints: Path) -> None:
    last = latest_checkpoint(checkpoints)
    where = f"from step {last.step} of {last.total_steps}" if last else "from the beginning: there is no checkpoint yet"
    logger.warning("%s keeps what was recorded; the same command with --resume goes on %s", checkpoints.parent, where)


def _is_about_the_disk(error: Exception) -> bool:
    """Whether a file could not be written; torch and safetensors say so in words alone."""
    words = (
        "No space left",
        "File too large",
        "Disk quota",
        "Read-only file system",
        "PytorchStreamWriter",
        "I/O error",
    )
    number = getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES) or any(
        word in str(error) for word in words
    )
