"""A process that publishes and verifies as it is told."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers import hub_environment
from hub import Hub, serve

HAS_XET = importlib.util.find_spec("hf_xet") is not None

ALL = ["commit", "files", "card", "stack", "weights", "score"]  # what is verified

PROGRAM = """
import json, os, sys
from simcse_st import InputError, RunError
from simcse_st.publishing.push import push
from simcse_st.publishing.verify import verify

for line in sys.stdin:
    task = json.loads(line)
    os.environ["HF_TOKEN"] = task.pop("token")
    checks = []
    try:
        if "run_folder" in task:
            pushed = push(task.pop("run_folder"), verify=False, **task)
            answer = {**pushed.record.model_dump(), "changed": pushed.changed, "deleted": pushed.deleted}
        else:
            for check in verify(**task):
                checks.append([check.name, check.passed, check.finding])
            answer = checks
    except (InputError, RunError) as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


class Publisher:
    """A fresh process with the real client, whose Hub is a local server.

    It takes one task after the other: a process for each would take minutes to import the libraries.
    """

    def __init__(self, hub: Hub, process: subprocess.Popen[str]) -> None:
        self.hub, self.process = hub, process

    def __call__(self, repo_id: str, token: str = "hf_alice", timeout: float = 20, **task: Any) -> Any:
        """Pushes a ``run_folder``, or without one verifies; gives the record, the checks, or the error in words."""
        assert self.process.stdin
        assert self.process.stdout
        task = {"repo_id": repo_id, "token": token, "timeout": timeout, **task}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def forget(self) -> None:
        """Leaves the hub as new."""
        self.hub.repos.clear()
        self.hub.faults.clear()
        self.hub.log.clear()
        for file in (self.hub.root / "lfs").iterdir():
            file.unlink()


def names(checks: Any) -> list[str]:
    """The names of the checks, with a sign before those that failed."""
    assert isinstance(checks, list), checks
    return [name if passed else f"-{name}" for name, passed, _ in checks]


def start(folder: Path, *, xet: bool) -> Iterator[Publisher]:
    """Starts hub and process, which has no folder ``runs``."""
    with serve(xet=xet) as hub:
        environment = hub_environment(hub, folder / "home")
        if xet:
            del environment["HF_HUB_DISABLE_XET"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        command = [sys.executable, "-c", PROGRAM]
        with subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes) as process:
            yield Publisher(hub, process)
            assert process.stdin
            process.stdin.close()  # which ends it
