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
from simcse_st.training.callbacks import BestState, STSCallback, any_process

logger = logging.getLogger(__name__)

_BEST = "best"  # the folder of the best weights in a checkpoint


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
    """The sizes in bytes of its files, by their paths in it."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from: the trainer's checkpoint with the weights that were the best by then, and its record."""

    folder: Path
    record: CheckpointRecord

    def damage(self) -> str:
        """What of it is not there as it was written; "" if all is."""
        for name, size in self.record.files.items():
            path = self.folder / name
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size} bytes, not {size}"
        return ""

    def restore(self, best: STSCallback) -> None:
        """Puts the best weights back where they are kept, and tells the callback."""
        best.restore(self.record.best)
        if get_rank() == 0:
            shutil.rmtree(best.best_model, ignore_errors=True)
            if (self.folder / _BEST).exists():
                _link(self.folder / _BEST, best.best_model)


def _link(source: Path, target: Path) -> None:
    """Copies a folder by giving each file a second name, which takes no time and no space."""

    def link(file: str, other: str) -> None:
        try:
            os.link(file, other)
        except OSError:  # where files have one name only, as on a mounted cloud drive
            shutil.copyfile(file, other)

    shutil.rmtree(target, ignore_errors=True)  # of a checkpoint that was cut short
    shutil.copytree(source, target, copy_function=link)


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

    A checkpoint holds the best weights so far, too, and counts once all of it is on the disk; only then does the one
    before it go. So there are never more than two, and at any moment one that is whole.

    Put it behind the callbacks that add to a checkpoint.

    Args:
        steps: Steps between two checkpoints.
        best: Keeps the best weights.
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
        self.train_seconds = resumed.record.train_seconds if resumed else 0.0
        self._mark, self._scored = 0.0, 0.0

    def _since_mark(self) -> float:
        """Seconds since this was last asked, without those in which dev was scored."""
        now, scored = time.perf_counter(), self.best.seconds
        seconds = now - self._mark - (scored - self._scored)
        self._mark, self._scored = now, scored
        return seconds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock."""
        self._since_mark()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Asks for a checkpoint when one is due, or when the run is to stop."""
        self.train_seconds += self._since_mark()
        self.stop = stop = any_process(self.stop, args)  # a signal does not reach all within the same step
        if stop:
            control.should_training_stop = True
        control.should_save = stop or state.global_step % self.steps == 0 or state.global_step >= state.max_steps

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Makes sure that all of the checkpoint is on the disk, marks it complete, and drops what it supersedes."""
        if get_world_size() > 1:
            torch.distributed.barrier()  # each process has written its own random state
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            if self.best.best_step is not None:
                _link(self.best.best_model, folder / _BEST)
            for path in (*folder.rglob("*"), folder):
                flush(path)
            files = [path for path in folder.rglob("*") if path.is_file()]
            record = CheckpointRecord(
                step=state.global_step,
                total_steps=state.max_steps,
                best=self.best.state(),
                seen=asdict(self.seen),
                train_seconds=self.train_seconds,
                files={path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
            )
            if self.best.history:
                flush(self.best.history)
            write_text(folder / CheckpointRecord.FILE, record.to_json())  # from here on it counts
            for path in (folder / CheckpointRecord.FILE, folder, folder.parent, folder.parent.parent):
                flush(path)
            for other in _checkpoints(folder.parent).values():
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)
        self._since_mark()  # writing a checkpoint is no training


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
