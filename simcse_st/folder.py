"""The folder that a command leaves its records in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from simcse_st.errors import InputError

MARK = "recipe.yaml"
# All that any command leaves in a folder of its own.
_RECORDS = (
    MARK, "manifest.json", "environment.json", "history.jsonl", "results.json", "evaluation.json", "push.json",
    "train.jsonl", "figures", "model", "checkpoints",
)  # fmt: skip


def check_folder(folder: Path, overwrite: bool) -> None:
    """Makes sure that the folder can be made, and that nothing in it is lost unasked.

    Raises:
        InputError: It holds something, or cannot be written. Nothing has been changed.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--output: {folder} is a file, but must name a folder")
        if folder.is_dir() and any(folder.iterdir()):
            if not overwrite:
                ways = "choose another --output, go on with --resume, or replace it with --overwrite"
                raise InputError(f"{folder} exists already: {ways}")
            if not (folder / MARK).is_file():
                raise InputError(f"{folder} is no run folder (it has no {MARK}): --overwrite will not replace it")
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
        for path in missing:
            path.rmdir()
    except OSError as error:
        raise InputError(f"--output: cannot write to {str(folder)[:200]!r}: {error.strerror}") from None


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
    (folder / MARK).write_text(recipe, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes a record, all of it or nothing."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file, all of it or nothing."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
