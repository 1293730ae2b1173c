"""A run: its folder, its records, whether it is finished, and who is at work in it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from simcse_st.console import first_process, quiet_bars
from simcse_st.errors import InputError, RunError, one_line
from simcse_st.recipe import Recipe
from simcse_st.recipes import load_recipe
from simcse_st.records import (
    Environment,
    GradedFacts,
    HeldOutFacts,
    HistoryEntry,
    Manifest,
    Push,
    Pushes,
    Record,
    Results,
    Split,
)
from simcse_st.references import GIVEN, GradedFile, HeldOutReference, HeldOutSets, HoldOut, RetrievalRows

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer

RECIPE, HISTORY, CARD = "recipe.yaml", "history.jsonl", "README.md"
EVALUATION, TENSORBOARD, INDEX = "evaluation.json", "tensorboard", "index"
_LOCK, _HOLDER = ".lock", ".lock-holder"
# All that any command leaves in a folder of its own beside the recipe. The results go first: what is half removed must
# not look like a finished run.
_LEFT = (
    "results.json", "manifest.json", "environment.json", HISTORY, EVALUATION, "push.json",
    "dev.jsonl", "test.jsonl", "dev", "test", "train.jsonl", "figures", INDEX, TENSORBOARD, "model", "checkpoints",
)  # fmt: skip
_PACKAGES = (
    "simcse-st", "sentence-transformers", "transformers", "torch", "datasets", "huggingface_hub", "scipy", "numpy",
)  # fmt: skip

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class Run:
    """What a recipe came to: a folder and the records in it.

    Attributes:
        folder: ``runs/NAME``.

    Example:
        >>> run = Run(Path("runs/quickstart"))
        >>> run.results.test.spearman
        81.5
        >>> embeddings = run.load_model().encode(["A man is eating pasta."])
    """

    folder: Path

    @property
    def model_path(self) -> Path:
        """The folder of the kept model."""
        return self.folder / "model"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, while the run is under way."""
        return self.folder / "checkpoints"

    @property
    def history_path(self) -> Path:
        """The file that gets a line for every loss and every score."""
        return self.folder / HISTORY

    @property
    def is_begun(self) -> bool:
        """Whether a run stands in the folder, finished or not."""
        return (self.folder / RECIPE).is_file()

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end. The card is written last."""
        return self.is_measured and (self.model_path / CARD).is_file()

    @property
    def is_measured(self) -> bool:
        """Whether all that a card is made of is there."""
        return self.is_begun and self.has(Results) and self.model_path.is_dir()

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe with every key."""
        return load_recipe(self.folder / RECIPE)

    @cached_property
    def manifest(self) -> Manifest:
        """The data."""
        return self.read(Manifest)

    @cached_property
    def environment(self) -> Environment:
        """What the run was made on."""
        return self.read(Environment)

    @cached_property
    def results(self) -> Results:
        """The scores."""
        return self.read(Results)

    def held_out(self, split: Split) -> HeldOutReference:
        """Where dev or test is: where the recipe says, or kept here if only this run has it."""
        return _place(getattr(self.recipe.data, split), self.manifest.held_out(split), self.kept(split))

    def kept(self, split: Split) -> Path:
        """The file of a dev or test set that only this run has."""
        return self.folder / f"{split}.jsonl"

    def history(self) -> list[HistoryEntry]:
        """Every loss and every score, in their order."""
        try:
            lines = self.history_path.read_text("utf-8").splitlines()
            return [HistoryEntry.model_validate_json(line) for line in lines]
        except (OSError, ValueError) as error:
            raise InputError(f"{self.history_path}: cannot be read as a history: {one_line(error)}") from None

    def pushes(self) -> list[Push]:
        """What was published of the run: the last push first, and of each repository and branch the last."""
        if not self.has(Pushes):
            return []
        try:
            last = self.read(Pushes)
        except InputError as error:
            raise InputError(f"{error}; delete it: the next push writes it anew") from None
        return [last, *last.earlier]

    def has(self, kind: type[Record]) -> bool:
        """Whether there is a record of this kind."""
        return (self.folder / kind.FILE).is_file()

    def read(self, kind: type[AnyRecord]) -> AnyRecord:
        """Reads a record of the folder."""
        return read_record(self.folder / kind.FILE, kind)

    def write(self, record: Record) -> None:
        """Writes a record into the folder, all of it or nothing."""
        write_text(self.folder / record.FILE, record.to_json())

    def begin(self, recipe: Recipe) -> None:
        """Empties the folder of what an earlier command left there, and puts the recipe into it."""
        for old in map(self.folder.joinpath, _LEFT):  # nothing else: a user's own files may stand beside them
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:
                old.unlink(missing_ok=True)
        write_text(self.folder / RECIPE, recipe.to_yaml())

    def check_model_files(self) -> dict[str, Path]:
        """Makes sure that ``model/`` holds the very files that were measured; returns them by name.

        The card is not among them: it may be written again.
        """
        wanted, folder = self.results.files, self.model_path
        found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
        if other := sorted(found.keys() - wanted.keys() - {CARD}):
            raise InputError(f"{folder}: {', '.join(other)}: not of the model that was measured: move it elsewhere")
        if missing := sorted(wanted.keys() - found.keys()):
            raise InputError(f"{folder}: {', '.join(missing)}: not there any more: train it again with --overwrite")
        for name, sha256 in wanted.items():
            if (now := file_sha256(found[name])) != sha256:
                raise InputError(f"{folder / name} has changed since it was measured (SHA-256 {now})")
        return {name: found[name] for name in wanted}

    def load_model(self, device: str | None = None) -> SentenceTransformer:
        """Loads the kept model, by stock Sentence Transformers."""
        quiet_bars()
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(self.model_path), device=device, local_files_only=True)


def _place(reference: HeldOutReference, facts: HeldOutFacts, kept: Path) -> Any:  # a HeldOutReference
    """Where a held-out set is: where the recipe says, or kept beside it, several in a folder."""
    if isinstance(reference, HeldOutSets):
        folder = kept.with_suffix("")
        each = {name: _place(one, facts.parts[name], folder / f"{name}.jsonl") for name, one in reference.sets.items()}
        return HeldOutSets(sets=each)
    if not is_kept(reference):
        return reference
    if isinstance(facts, GradedFacts):
        return GradedFile(file=str(kept), scale=[facts.lowest, facts.scale])
    return RetrievalRows(retrieval=str(kept))


def is_kept(reference: HeldOutReference) -> bool:
    """Whether a run keeps the set: it was held out of the training data, or a program gave it."""
    given = reference.retrieval if isinstance(reference, RetrievalRows) else reference
    return isinstance(reference, HoldOut) or str(given) == GIVEN


def open_run(folder: str | Path, *, for_card: bool = False) -> Run:
    """The finished run of a folder.

    Args:
        folder: The folder.
        for_card: Whether its card is going to be written, and so may be missing.
    """
    folder = Path(os.path.abspath(folder)) if Path(folder).name in ("", "..") else Path(folder)
    run = Run(folder)
    if not run.is_begun:
        raise InputError(f"{folder} is no run folder: it has no {RECIPE}")
    if not (run.is_measured if for_card else run.is_finished):
        raise InputError(f"{folder} is of a run that did not end: go on with it by simcse-st train ... --resume")
    return run


def run_of(folder: Path) -> Run | None:
    """The finished run that a folder is of: its own, or as the ``model`` folder of one."""
    for candidate in (folder, folder.parent):
        if (run := Run(candidate)).is_finished and folder in (run.folder, run.model_path):
            return run
    return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps all other processes out of a folder; makes it, and removes it again if nothing was put into it.

    The system lets go of the lock when a process dies. Of several processes that train together the first holds it.

    Raises:
        InputError: Another process is at work there, or the folder cannot be written.
    """
    if not first_process():
        yield
        return
    from filelock import FileLock, Timeout

    holder = folder / _HOLDER
    lock = FileLock(str(folder / _LOCK), timeout=0)
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--output: {folder} is a file, but must name a folder")
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    except Timeout:
        with contextlib.suppress(OSError):
            other = holder.read_text("utf-8")
            raise InputError(f"{folder} is in use by {other}: wait until it ends, or name another folder") from None
        raise InputError(f"{folder} is in use by another process: name another folder") from None
    except OSError as error:
        raise InputError(f"--output: cannot write to {str(folder)[:200]!r}: {error.strerror}") from None
    try:
        yield
    finally:
        for path in (holder, folder / _LOCK):
            path.unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def check_free(folder: Path, overwrite: bool, *, resumable: bool = False, records: Sequence[str] = (RECIPE,)) -> None:
    """Makes sure that nothing in a folder is lost unasked.

    Args:
        folder: The folder.
        overwrite: Whether what a command left there may be replaced, or gone on with.
        resumable: Whether ``--resume`` is a way to go on.
        records: By what a folder of the command is known.
    """
    # All that is there of a command that was killed as it began.
    begun = {_LOCK, _HOLDER, f"{RECIPE}.part"}
    if not folder.is_dir() or all(path.name in begun for path in folder.iterdir()):
        return
    if not overwrite:
        on = "go on with --resume, " if resumable else ""
        raise InputError(f"{folder} exists already: choose another --output, {on}or replace it with --overwrite")
    if not any((folder / record).exists() for record in records):
        raise InputError(f"{folder} is no folder of this command (it has no {records[0]}): choose another --output")


def check_group(folder: Path, record: str, *prefixes: str) -> None:
    """Makes sure that runs are not put among the files of something else.

    Args:
        folder: The folder of a group of runs.
        record: The name of the group's record.
        *prefixes: How the names of all else in it begin.
    """
    if folder.is_dir() and not (folder / record).is_file():
        other = [path.name for path in folder.iterdir() if not path.name.startswith((_LOCK, *prefixes))]
        if other:
            raise InputError(f"{folder} holds other things ({other[0]!r}): choose another --output")


def read_record(path: Path, kind: type[AnyRecord]) -> AnyRecord:
    """Reads a JSON record."""
    try:
        return kind.model_validate_json(path.read_text("utf-8"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        what = f"{place}: {first['msg']}" if place else first["msg"]
        raise InputError(f"{path}: not a record of this command: {what}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a record: {one_line(error)}") from None


def write_text(path: Path, text: str) -> None:
    """Writes a file, all of it or nothing, also if the machine goes down.

    Raises:
        RunError: It cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        flush(unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error


def flush(path: Path) -> None:
    """Has the system write a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def package_versions() -> dict[str, str]:
    """The versions of the packages that a result depends on."""
    return {name: metadata.version(name) for name in _PACKAGES}


def describe_environment(device: torch.device, precision: str, devices: int = 1) -> Environment:
    """Versions, device and precision.

    Args:
        device: Where the model is.
        precision: What it computes in.
        devices: The number of processes.
    """
    import torch  # which takes seconds, and the versions do not need it

    return Environment(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages=package_versions(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        devices=devices,
        threads=torch.get_num_threads(),
        precision=precision,
    )
