"""The folder that a command leaves its records in."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from simcse_st.errors import InputError

MARK = "recipe.yaml"
EVALUATION = "evaluation.json"
# All that any command leaves in a folder of its own beside that. The results go first: what is half removed must not
# look like a finished run.
_RECORDS = (
    "results.json", "manifest.json", "environment.json", "history.jsonl", EVALUATION, "push.json",
    "train.jsonl", "figures", "model", "checkpoints",
)  # fmt: skip


def check_folder(folder: Path, overwrite: bool, *, resumable: bool = False) -> None:
    """Makes sure that the folder can be made, and that nothing in it is lost unasked.

    Args:
        folder: The folder.
        overwrite: Whether what a command left there may be replaced.
        resumable: Whether what is there could also be gone on with.

    Raises:
        InputError: It holds something, or cannot be written. Nothing has been changed.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--output: {folder} is a file, but must name a folder")
        begun = f"{MARK}.part"  # all that is there if a command was killed as it began
        if folder.is_dir() and any(path.name != begun for path in folder.iterdir()):
            if not overwrite:
                on = "go on with --resume, " if resumable else ""
                raise InputError(
                    f"{folder} exists already: choose another --output, {on}or replace it with --overwrite"
                )
            if not (folder / MARK).is_file():
                raise InputError(f"{folder} is no run folder (it has no {MARK}): choose another --output")
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
        for path in missing:
            path.rmdir()
    except OSError as error:
        raise InputError(f"--output: cannot write to {str(folder)[:200]!r}: {error.strerror}") from None


SEEDS = ("seeds.json", "seed-")  # the record of a group of runs, and how the names of the others in it begin
ABLATION = ("ablation.json", "full", "without-")


def check_group(folder: Path, record: str, *prefixes: str) -> None:
    """Makes sure that runs are not put among the files of something else.

    Args:
        folder: The folder of a group of runs.
        record: The name of the group's record.
        *prefixes: How the names of all else in it begin.

    Raises:
        InputError: It holds something else, or is a file.
    """
    if folder.is_dir() and not (folder / record).is_file():
        other = [path.name for path in folder.iterdir() if not path.name.startswith(prefixes)]
        if other:
            raise InputError(f"{folder} holds other things ({other[0]!r}): choose another --output")
    elif folder.exists() and not folder.is_dir():
        raise InputError(f"--output: {folder} is a file, but must name a folder")


def check_record(path: Path) -> None:
    """Makes sure that a record may stand there.

    Raises:
        InputError: A file is where its folder must be, or a folder where it must be.
    """
    if (path.parent.exists() and not path.parent.is_dir()) or path.is_dir():
        raise InputError(f"--output: {path.parent} must be a folder, and {path.name} in it a file")


def check_writable(folder: Path) -> None:
    """Writes into a folder, and leaves nothing there.

    Raises:
        OSError: It cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"?")


def make_folder(folder: Path, recipe: str) -> None:
    """Makes the folder without what an earlier command left there, and puts the recipe into it.

    Args:
        folder: The folder.
        recipe: The recipe as YAML.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in map(folder.joinpath, _RECORDS):  # nothing else: a user's own files may stand beside them
        if not old.exists() and not old.is_symlink():
            continue
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()
    write_text(folder / MARK, recipe)


def write_json(path: Path, value: Any) -> None:
    """Writes a record, all of it or nothing."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file, all of it or nothing, also if the machine goes down."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    flush(unfinished)
    unfinished.replace(path)


def flush(path: Path) -> None:
    """Has the system write a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
