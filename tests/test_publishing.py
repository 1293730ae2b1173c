"""Publishing from the command line, in fresh processes: what is printed, what is sent, what nobody gets to see."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import hub_environment
from hub import Hub
from simcse_st import InputError, Recipe, cli, push, train, verify

CHECKS = ["commit", "files", "card", "stack", "weights", "score"]


def simcse_st(
    *arguments: object, hub: Hub, cwd: Path, token: str = "hf_alice", **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simcse_st", *map(str, arguments)]
    settings = {**hub_environment(hub, cwd / "home", token), **environment}
    return subprocess.run(command, cwd=cwd, env=settings, capture_output=True, text=True, timeout=300, check=False)


def test_push_ends_with_the_proof(hub: Hub, run: Path, tmp_path: Path):
    listed = simcse_st("push", run, "alice/m", "--dry-run", hub=hub, cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    for path in (run / "model").rglob("*"):
        assert path.is_dir() or path.relative_to(run / "model").as_posix() in listed.stdout
    assert not hub.repos

    pushed = simcse_st("push", run, "alice/m", hub=hub, cwd=tmp_path)
    assert pushed.returncode == 0, pushed.stderr
    assert re.findall(r"^ok +(\w+)", pushed.stdout, re.MULTILINE) == CHECKS
    commit = json.loads((run / "push.json").read_text())["commit"]
    assert commit == hub.repos["model", "alice/m"].refs["main"]
    assert f"{hub.url}/alice/m/commit/{commit}" in pushed.stderr
    assert 'SentenceTransformer("alice/m")' in (run / "model" / "README.md").read_text()
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "tiny")  # where push.json is found by itself
    verified = simcse_st("verify", "alice/m", hub=hub, cwd=tmp_path, token="")
    assert (verified.returncode, verified.stdout) == (0, pushed.stdout.replace(str(run), "runs/tiny"))
    assert not (tmp_path / "home" / "hub" / "models--alice--m").exists()  # nothing of it stays


@pytest.mark.slow
def test_a_published_copy_that_is_not_proven_fails_the_push(hub: Hub, run: Path, tmp_path: Path):
    hub.fault("corrupt", path="/lfs/", method="GET")
    pushed = simcse_st("push", run, "alice/m", hub=hub, cwd=tmp_path)
    assert pushed.returncode == 1
    assert re.search(
        r"^FAIL  files .*model.safetensors is not what the hub's checksum says", pushed.stdout, re.MULTILINE
    )
    commit = json.loads((run / "push.json").read_text())["commit"]
    assert pushed.stderr.splitlines()[-1] == (
        f"simcse-st: alice/m: commit {commit} is published, but not proven to be the model: see above, and verify it again by "
        f"simcse-st verify alice/m --revision main --run {run}"
    )
    again = simcse_st("push", run, "alice/m", hub=hub, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "nothing has changed" in again.stderr
    assert hub.repos["model", "alice/m"].refs["main"] == commit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "repo_id", "fault", "code", "says"),
    [
        ("hf_nobody_secret", "alice/m", None, 1, "the hub does not know the token (401"),
        ("hf_bob", "alice/m", None, 1, "to make one takes an owner of bob"),
        ("hf_alice_read", "alice/m", None, 1, "can only read"),
        ("hf_alice", "alice/m", {"action": "status", "path": "/preupload/", "status": 403, "times": 99, "error": "hf_alice"}, 1, "no right to that (403: (token))"),
        ("hf_alice", "alice/m", {"action": "status", "path": "/commit/", "status": 500, "times": 99, "error": "hf_alice"}, 1, "the hub does not work"),
        ("", "alice/m", None, 2, "no token"),
    ],
    ids=["401", "403", "read", "preupload", "500", "none"],
)  # fmt: skip
def test_no_token_is_ever_shown(
    token: str, repo_id: str, fault: dict | None, code: int, says: str, hub: Hub, run: Path, tmp_path: Path
):
    if fault:
        hub.fault(**fault)
    done = simcse_st("--debug", "push", run, repo_id, hub=hub, cwd=tmp_path, token=token)
    assert done.returncode == code, done.stderr
    assert "Traceback" in done.stderr
    assert says in done.stderr.splitlines()[-1]
    kept = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    for secret in filter(None, [token]):
        assert secret not in done.stdout + done.stderr
        assert not any(secret.encode() in data for data in kept)


def test_a_fault_of_the_program_does_not_show_the_token_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def fail(*_: object) -> None:
        raise KeyError("Bearer hf_secret")

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("simcse_st.card.write_card", fail)
    monkeypatch.setattr(sys, "argv", ["simcse-st", "card", "runs/x"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    error = capsys.readouterr().err
    assert end.value.code == 1
    assert "KeyError: 'Bearer (token)'" in error
    assert "hf_secret" not in error


@pytest.mark.slow
def test_nothing_of_this_machine_is_published(hub: Hub, tiny_recipe: Recipe, tmp_path: Path):
    """Neither where things are, nor what a local base is called."""
    base = tmp_path / "home-of-secrets" / "secret-base"
    shutil.copytree(tiny_recipe.model.base, base)
    model = tiny_recipe.model.model_copy(update={"base": str(base)})
    card = tiny_recipe.card.model_copy(update={"license": "mit", "samples": True, "examples": True})
    run = train(tiny_recipe.model_copy(update={"model": model, "card": card}), tmp_path / "secret-runs" / "a").folder
    shutil.rmtree(base)
    hub.log.clear()
    pushed = simcse_st("push", run, "alice/m", hub=hub, cwd=tmp_path)
    assert pushed.returncode == 0, pushed.stderr
    tree = hub.repos["model", "alice/m"].at("main").tree
    sent = {
        path: hub.read_object(file.lfs) if file.lfs else hub.blob_path(file).read_bytes() for path, file in tree.items()
    }
    for name in ("secret", str(tmp_path), os.fspath(Path.home()) + "/", "/tmp/"):
        assert not [path for path, data in sent.items() if name.encode() in data]
        assert not [request["path"] for request in hub.log if name in request["path"]]
    assert name.encode() not in json.dumps(hub.repos["model", "alice/m"].at("main").title).encode()
    assert sorted(set(sent) - {".gitattributes"}) == sorted(
        path.relative_to(run / "model").as_posix() for path in (run / "model").rglob("*") if path.is_file()
    )


def test_offline_is_said(run: Path):
    says = "offline: HF_HUB_OFFLINE is set, and this command needs the hub"
    with pytest.raises(InputError, match=says):
        push(run, "alice/m")
    with pytest.raises(InputError, match=says):
        next(verify("alice/m"))
