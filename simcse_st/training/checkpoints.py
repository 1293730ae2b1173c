"""Checkpoints that a run goes on from as if nothing had happened, whatever stopped it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from sentence_transformers.util.distributed import get_rank, get_world_size
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from simcse_st.errors import InputError, RunError, one_line
from simcse_st.records import Environment, Manifest, Record
from simcse_st.run import Run, flush, read_record, write_text
from simcse_st.training.batch import BatchCounter
from simcse_st.training.callbacks import STSCallback

logger = logging.getLogger(__name__)


class BestState(Record):
    """What :class:`~simcse_st.training.callbacks.STSCallback` goes on from."""

    base_metrics: dict[str, float]
    best_step: int | None = None
    best_metrics: dict[str, float]
    best_sha256: str
    history_bytes: int


class CheckpointRecord(Record):
    """What a checkpoint holds beside the trainer's own files, written last: one without it was cut short."""

    FILE: ClassVar = "simcse_st.json"

    step: int
    """The step after which it was written."""
    total_steps: int
    best: BestState
    seen: dict[str, int]
    """What the loss had seen."""
    train_seconds: float
    files: dict[str, int]
    """The sizes in bytes of its files and of the best weights', by their paths in the folder of the checkpoints."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from: the trainer's checkpoint, and its record."""

    folder: Path
    record: CheckpointRecord

    def damage(self) -> str:
        """What of it is not there as it was written; "" if all is."""
        for name, size in self.record.files.items():
            path, (place, *inside) = self.folder.parent / name, Path(name).parts
            if not (self.folder.parent / place).exists() and self.record.step >= self.record.total_steps:
                path = self.folder.parent.parent.joinpath("model", *inside)  # which the best weights become at the end
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size} bytes, not {size}"
        return ""


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that was written to its end.

    Args:
        folder: The trainer's ``output_dir``.

    Raises:
        InputError: Its record cannot be read. An older one would not do instead: its best weights may be gone.
    """
    complete = {step: path for step, path in _checkpoints(folder).items() if (path / CheckpointRecord.FILE).is_file()}
    if not complete:
        return None
    newest = complete[max(complete)]
    try:
        return Checkpoint(newest, read_record(newest / CheckpointRecord.FILE, CheckpointRecord))
    except InputError as error:
        raise InputError(f"--resume: {error}: begin the run again with --overwrite") from None


def _checkpoints(folder: Path) -> dict[int, Path]:
    """The trainer's checkpoints by their steps; not a copy that somebody has put beside them."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    steps = {path: path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*")}
    return {int(step): path for path, step in steps.items() if step.isdecimal()}


def checkpoint_to_resume(run: Run, manifest: Manifest, environment: Environment) -> Checkpoint | None:
    """The checkpoint that a run goes on from; None if it has none.

    Args:
        run: The run.
        manifest: What the data are now.
        environment: What the run would go on with.

    Raises:
        InputError: It is damaged, the data have changed since, or other processes would share the batches.
    """
    folder = run.folder
    checkpoint = latest_checkpoint(run.checkpoints)
    if checkpoint is None:
        logger.info("resume   no checkpoint in %s: the run begins", folder)
        return None
    history, record = run.history_path, checkpoint.record
    damage = checkpoint.damage()
    if not damage and (history.stat().st_size if history.is_file() else 0) < record.best.history_bytes:
        damage = f"{history} is shorter than it was"
    if damage:
        raise InputError(f"--resume: {damage}, so that {folder} cannot go on: begin it again with --overwrite")
    try:
        before, begun = run.read(Manifest), run.read(Environment)
    except InputError as error:
        raise InputError(f"--resume: {error}: begin the run again with --overwrite") from None
    for part, key in (("train", "prepared_sha256"), ("dev", "pairs_sha256"), ("test", "pairs_sha256")):
        was, now = (getattr(getattr(one, part), key) for one in (before, manifest))
        if was != now:
            raise InputError(f"--resume: data.{part} has changed since {folder} was begun: {key} was {was}")
    for key, kind in (("devices", "process(es)"), ("precision", "precision")):
        if (was := getattr(begun, key)) != (now := getattr(environment, key)):
            raise InputError(f"--resume: {folder} was begun with {was} {kind}, not {now}")
    if other := [key for key, value in environment if getattr(begun, key) != value]:
        logger.warning("resume   %s was begun with other %s: the result may differ", folder, ", ".join(other))
    logger.info("resume   from step %d of %d", record.step, record.total_steps)
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

    def __init__(self, steps: int, best: STSCallback, seen: BatchCounter, resumed: Checkpoint | None = None) -> None:
        self.steps = steps
        self.best = best
        self.seen = seen
        self.resumed = resumed
        self.stop = False
        self._before = resumed.record.train_seconds if resumed else 0.0
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
            files = []
            for whole in (folder, *([] if self.best.best_step is None else [self.best.kept])):
                for path in (*whole.rglob("*"), whole):
                    flush(path)
                    if path.is_file() and path != folder / CheckpointRecord.FILE:
                        files.append(path)
            record = CheckpointRecord(
                step=state.global_step,
                total_steps=state.max_steps,
                best=BestState(**self.best.state()),
                seen=asdict(self.seen),
                train_seconds=self.train_seconds(),
                files={path.relative_to(folder.parent).as_posix(): path.stat().st_size for path in files},
            )
            if self.best.history:
                flush(self.best.history)
            write_text(folder / CheckpointRecord.FILE, record.to_json())  # from here on it counts
            for path in (folder / CheckpointRecord.FILE, folder, folder.parent, folder.parent.parent):
                flush(path)
            for other in _checkpoints(folder.parent).values():
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)
            self.best.drop_superseded()
        begin, scoring = self._asked
        self._elsewhere -= time.perf_counter() - begin - (self.best.seconds - scoring)


@contextlib.contextmanager
def stoppable(saver: CheckpointCallback, folder: Path) -> Iterator[None]:
    """Training that can be interrupted: says from where it goes on then, and if it fails for want of space.

    The first Ctrl-C or SIGTERM ends it after the current step, with a checkpoint; the second ends it at once.

    Args:
        saver: Writes the checkpoints.
        folder: The run folder.

    Raises:
        RunError: The disk is full or cannot be written.
        KeyboardInterrupt: The run was stopped.
    """
    try:
        with disk_errors(folder / "checkpoints"), _finish_the_step(saver):
            yield
        if saver.stop:
            raise KeyboardInterrupt
    except (KeyboardInterrupt, RunError) as error:
        stopped = isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, _OF_WRITING)
        if stopped and get_rank() == 0:  # which drops superseded checkpoints, while the others would look at them
            last = latest_checkpoint(folder / "checkpoints")
            where = "the beginning: there is no checkpoint yet"
            if last:
                where = f"step {last.record.step} of {last.record.total_steps}"
            logger.warning("%s keeps what was recorded; resumed, it goes on from %s", folder, where)
        raise


_OF_WRITING = (OSError, RuntimeError, SafetensorError)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Says in one line that a disk is full or cannot be written.

    Args:
        folder: What is written.

    Raises:
        RunError: The disk is full, or cannot be written.
    """
    try:
        yield
    except _OF_WRITING as error:
        if isinstance(error, RunError) or not _is_about_the_disk(error):
            raise
        place = getattr(error, "filename", None) or folder
        reason = getattr(error, "strerror", None) or one_line(error)
        how = "used" if getattr(error, "errno", None) in (errno.EACCES, errno.EIO) else "written"
        raise RunError(f"{place}: cannot be {how}: {reason}") from error


@contextlib.contextmanager
def _finish_the_step(saver: CheckpointCallback) -> Iterator[None]:
    """Hands the first signal to the saver."""
    own = os.getpid()

    def ask(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # a process that loads data; it ends with this one
            return
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


def _is_about_the_disk(error: Exception) -> bool:
    """Whether a file could not be written; torch and safetensors say so in words alone."""
    words = (
        "No space left",
        "File too large",
        "Disk quota",
        "Read-only file system",
        "PytorchStreamWriter",
        "inline_container",  # torch's, of a file that ends too early
        "I/O error",
    )
    number = getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES) or any(
        word in str(error) for word in words
    )
