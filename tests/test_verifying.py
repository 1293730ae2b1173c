"""Proving a published copy: what is damaged, exchanged or missing is found, and named."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from publisher import ALL, Publisher, names


@pytest.fixture
def published(publisher: Publisher, run: Path) -> Publisher:
    """A hub that holds alice/m, pushed from the run."""
    answer = publisher("alice/m", run_folder=str(run))
    assert isinstance(answer, dict), answer
    publisher.hub.log.clear()
    return publisher


def edit(publisher: Publisher, path: str, change: Any) -> str:
    """Changes a file of alice/m on the hub."""
    hub = publisher.hub
    file = hub.repos["model", "alice/m"].at("main").tree.get(path)
    data = (hub.read_object(file.lfs) if file.lfs else hub.blob_path(file).read_bytes()) if file else b""
    return hub.add_repo("model", "alice/m", {path: change(data)})


def replace(old: str, new: str) -> Any:
    def change(data: bytes) -> bytes:
        assert old.encode() in data
        return data.replace(old.encode(), new.encode())

    return change


def test_a_copy_that_is_the_model(published: Publisher, run: Path, tiny_data: Path, tmp_path: Path):
    commit = json.loads((run / "push.json").read_text())["commit"]
    score = json.loads((run / "results.json").read_text())["test"]["spearman"]
    checks = published("alice/m", run=str(run))
    assert names(checks) == ALL
    findings = {name: finding for name, _, finding in checks}
    assert findings["commit"] == f"{commit}, pushed from {run}"
    assert findings["files"].startswith("11 files, ")
    assert findings["files"].endswith(": sizes and checksums are the hub's, the card's, push.json's")
    assert findings["stack"] == "Transformer -> Pooling(cls) -> Normalize, as in the card; unit vectors"
    assert (
        findings["score"] == f"Spearman x100 {score:.4f} on 50 pairs of test, in the card {score:.4f}; 1 more as stated"
    )
    assert all(request["method"] in ("GET", "HEAD") for request in published.hub.log)
    # For anyone else, the card says all but where a user's own test pairs are.
    answer = published("alice/m", token="")
    assert answer == "InputError: the card's test score is on test.csv: say where that set is, by --test"
    checks = published("alice/m", token="", test=str(tiny_data / "test.csv"))
    assert names(checks) == ALL
    assert checks[0][2] == f"{commit}, no push.json of it is here (--run names a run folder)"
    assert names(published("alice/m", revision=commit[:12], test=str(tiny_data / "test.csv"))) == ALL
    # Other pairs are no proof, whatever the score: here the same ones the other way round.
    reverse = tmp_path / "reverse.csv"
    reverse.write_text("\n".join(reversed((tiny_data / "test.csv").read_text().splitlines())) + "\n")
    *_, (name, passed, finding) = published("alice/m", test=str(reverse))
    assert (name, passed) == ("score", False)
    assert finding.startswith("these 50 pairs (SHA-256 ")
    assert " are not the card's (" in finding


def test_names_that_are_none(published: Publisher, run: Path):
    assert published("nobody/m").startswith("RunError: nobody/m cannot be found: there is no such repository")
    assert published("alice/m", revision="v9").startswith("RunError: alice/m cannot be found: ")
    assert published("alice").startswith("InputError: 'alice' is no repository")
    assert published("alice/other", run=str(run)).endswith("push.json knows of no push to 'alice/other'")
    assert published("alice/m", run=str(run.parent)).endswith("is no run folder: it has no recipe.yaml")
    assert "/nowhere.csv" in published("alice/m", test="/nowhere.csv")
    published.hub.repos["model", "alice/m"].private = True
    assert published("alice/m", token="").startswith("RunError: alice/m cannot be found: there is no such repository")
    assert names(published("alice/m", run=str(run))) == ALL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ({"action": "corrupt", "path": "/lfs/"}, ["commit", "-files"]),
        ({"action": "corrupt", "path": "/resolve/.*1_Pooling", "method": "GET"}, ["commit", "-files"]),
        ({"action": "truncate", "path": "/lfs/", "bytes": 40_000, "fin": True}, ALL),
        ({"action": "truncate", "path": "/lfs/", "bytes": 40_000}, ALL),
        ({"action": "reset", "path": "/lfs/", "times": 99}, "RunError: alice/m cannot be fetched: the connection to "),
        ({"action": "status", "path": "modules.json", "status": 403, "times": 99}, "RunError: alice/m cannot be fetched: "),
        ({"action": "status", "path": "/revision/main", "status": 200, "json": "hello"}, "RunError: alice/m cannot be found: http://127.0.0.1"),
        ({"action": "status", "path": "/tree/", "status": 200, "json": [{"type": "file"}]}, "RunError: alice/m cannot be fetched: http://127.0.0.1"),
        ({"action": "status", "path": "modules.json", "method": "GET", "status": 503}, ALL),
        ({"action": "status", "path": "/tree/", "status": 503}, ALL),
        ({"action": "status", "path": "/revision/main"}, ALL),
        ({"action": "hang", "path": "/revision/main", "seconds": 2.5}, ALL),
        ({"action": "hang", "path": "/lfs/", "seconds": 3.5}, ALL),
    ],
    ids=["flipped", "flipped small", "cut", "cut and reset", "reset", "forbidden", "a word", "half a file", "gone", "tree", "once", "hangs", "weights hang"],
)  # fmt: skip
def test_a_copy_that_comes_badly(fault: dict, outcome: Any, published: Publisher, run: Path):
    hangs = fault["action"] == "hang"
    ordered = published.hub.fault(**fault)
    began = time.monotonic()
    answer = published("alice/m", run=str(run), timeout=1 if hangs else 20)
    assert time.monotonic() - began < 90
    assert ordered.times < fault.get("times", 1)
    if isinstance(outcome, str):
        assert isinstance(answer, str), answer
        assert answer.startswith(outcome)
        assert "\n" not in answer
    else:
        assert names(answer) == outcome
        if outcome[-1] == "-files":
            assert "is not what the hub's checksum says: damaged on its way, so verify again" in answer[-1][2]
    published.hub.faults.clear()
    assert names(published("alice/m", run=str(run))) == ALL


def other_pearson(card: bytes) -> bytes:
    """The card with another score than the one that counts."""
    before, metric, after = card.rpartition(b"type: pearson_cosine")
    assert metric
    return before + metric + after.replace(b"value: 0.", b"value: 0.9", 1)


@pytest.mark.parametrize(
    ("path", "change", "failed", "says"),
    [
        ("README.md", other_pearson, ["score"], "Pearson x100 "),
        ("1_Pooling/config.json", replace("cls", "mean"), ["files"], "1_Pooling/config.json is not the one that the card names"),
        ("evil.py", lambda _: b"import os", ["files"], "evil.py is none of those that the card names"),
        ("README.md", replace("metric", "metrik"), ["card"], "README.md states no test score"),
        ("README.md", lambda data: b"# A model\n", ["card"], "README.md states no test score"),
        ("README.md", lambda _: b"---\n- [\n---\n", ["card"], "README.md states no test score"),
        ("README.md", replace("weights_sha256: ", "weights_sha256: f00d"), ["weights"], ", in the card f00d"),
        ("README.md", replace("    config.json:", "    configs.json:"), ["files"], "configs.json is missing, which the card names"),
    ],
)  # fmt: skip
def test_a_copy_that_someone_changed(
    path: str, change: Any, failed: list[str], says: str, published: Publisher, run: Path, tiny_data: Path
):
    old = json.loads((run / "push.json").read_text())["commit"]
    new = edit(published, path, change)
    # Whoever pushed it knows by the commit; whoever asks for that commit, by the checksums.
    (check,) = published("alice/m", run=str(run))
    assert check == ["commit", False, f"{new}, but pushed was {old}, from {run}: has someone pushed since?"]
    assert names(published("alice/m", revision=old, run=str(run))) == ALL
    # Anyone else, by what the copy says of itself.
    checks = published("alice/m", test=str(tiny_data / "test.csv"))
    assert {name for name, passed, _ in checks if not passed} <= set(failed)
    assert not checks[[name for name, *_ in checks].index(failed[0])][1]
    assert any(says in finding for *_, finding in checks)


@pytest.mark.parametrize(
    ("path", "change", "stack", "failed", "says"),
    [
        ("1_Pooling/config.json", replace("cls", "mean"), None, ["stack", "score"], "Pooling(mean) -> Normalize, in the card Transformer -> Pooling(cls)"),
        ("1_Pooling/config.json", replace("cls", "mean"), "Transformer -> Pooling(mean) -> Normalize", ["score"], "in the card"),
        ("modules.json", lambda data: json.dumps(json.loads(data)[:2]).encode(), "Transformer -> Pooling(cls)", ["stack"], "as in the card; not unit vectors"),
        ("modules.json", replace("normalize.Normalize", "normalise.Normal"), None, ["stack"], "it does not load: "),
        ("modules.json", replace("sentence_transformers.base.modules.normalize", "evil"), None, ["stack"], "evil.Normalize is no module of Sentence Transformers"),
        ("modules.json", lambda _: b"[", None, ["stack"], "there is no modules.json that could be read"),
        ("model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1]), None, ["weights"], ", in the card "),
    ],
    ids=["pooling", "pooling and card", "no unit", "no class", "other class", "no modules", "weights"],
)  # fmt: skip
def test_a_copy_whose_card_goes_with_the_change(
    path: str,
    change: Any,
    stack: str | None,
    failed: list[str],
    says: str,
    published: Publisher,
    run: Path,
    tiny_data: Path,
):
    """Whoever changes a file may change its checksum in the card, too: then what loads and what it scores tell."""
    old = json.loads((run / "push.json").read_text())["files"][path]["sha256"]
    edit(published, path, change)
    hub = published.hub
    file = hub.repos["model", "alice/m"].at("main").tree[path]
    data = hub.read_object(file.lfs) if file.lfs else hub.blob_path(file).read_bytes()
    edit(published, "README.md", replace(old, hashlib.sha256(data or b"").hexdigest()))
    if stack:
        edit(published, "README.md", replace("stack: Transformer -> Pooling(cls) -> Normalize", f"stack: {stack}"))
    checks = published("alice/m", test=str(tiny_data / "test.csv"))
    found = [name for name, passed, _ in checks if not passed]
    assert found[0] == failed[0]
    assert set(found) <= {*failed, "score"}
    assert any(says in finding for *_, finding in checks)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda files: files["modules.json"].update(sha256="0"), "modules.json is not the one that push.json names"),
        (lambda files: files.update({"2_Dense/config.json": {"size": 1, "sha256": "0"}}), "2_Dense/config.json is missing, which push.json names"),
        (lambda files: files.pop("modules.json"), "modules.json is none of those that push.json names"),
    ],
    ids=["changed", "missing", "more"],
)  # fmt: skip
def test_files_that_are_not_those_of_the_push(change: Any, says: str, published: Publisher, run: Path):
    record = json.loads((run / "push.json").read_text())
    change(record["files"])
    (run / "push.json").write_text(json.dumps(record))
    checks = published("alice/m", run=str(run))
    assert names(checks) == ["commit", "-files"]
    assert says in checks[-1][2]


def test_where_it_was_pushed_to(published: Publisher, run: Path):
    """Without a revision: main, as it was pushed last; with one, that branch's last push."""
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("notes: ''", "notes: Changed."))
    answer = published("alice/m", run_folder=str(run), revision="dev")
    refs = published.hub.repos["model", "alice/m"].refs
    assert answer["commit"] == refs["dev"] != refs["main"]
    for revision in (None, "main", "dev", refs["dev"]):
        checks = published("alice/m", run=str(run), revision=revision)
        assert names(checks) == ALL
        assert checks[0][2] == f"{refs[revision or 'main'] if revision != refs['dev'] else revision}, pushed from {run}"
    edit(published, "README.md", replace("# tiny", "# Tiny"))
    assert names(published("alice/m", run=str(run))) == ["-commit"]
    assert names(published("alice/m", run=str(run), revision="main")) == ["-commit"]
    assert names(published("alice/m", run=str(run), revision="dev")) == ALL


def test_a_score_that_is_not_the_card_s(published: Publisher, run: Path, tiny_data: Path):
    score = json.loads((run / "results.json").read_text())["test"]["spearman"]
    edit(published, "README.md", replace(f"value: {score / 100}", f"value: {(score + 0.001) / 100}"))
    checks = published("alice/m", test=str(tiny_data / "test.csv"))
    assert names(checks) == [*ALL[:-1], "-score"]
    assert checks[-1][2] == f"Spearman x100 {score:.4f} on 50 pairs of test, in the card {score + 0.001:.4f}"
