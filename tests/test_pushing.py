"""Publishing to a Hub that fails in every way it can: all of the new commit or nothing of it, and once."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from hub import Hub
from publisher import ALL, Publisher, names
from simcse_st import load_recipe


def commits(hub: Hub, repo_id: str = "alice/m", branch: str = "main") -> int:
    """The commits to a branch beside the first, which every repository has."""
    repo = hub.repos.get(("model", repo_id))
    count, sha = -1, repo.refs.get(branch) if repo else None
    while repo and sha:
        count, sha = count + 1, repo.commits[sha].parent
    return max(count, 0)


def published(hub: Hub, repo_id: str = "alice/m", branch: str = "main") -> dict[str, bytes]:
    """The files of a branch."""
    tree = hub.repos["model", repo_id].at(branch).tree
    return {
        path: (hub.read_object(file.lfs) if file.lfs else hub.blob_path(file).read_bytes()) or b""
        for path, file in tree.items()
    }


def is_the_model(hub: Hub, run: Path, repo_id: str = "alice/m", branch: str = "main") -> bool:
    files = published(hub, repo_id, branch)
    files.pop(".gitattributes")
    return files == {
        path.relative_to(run / "model").as_posix(): path.read_bytes()
        for path in (run / "model").rglob("*")
        if path.is_file()
    }


def fault(action: str, path: str, **details: Any) -> dict[str, Any]:
    return {"action": action, "path": path, **details}


FOREVER = {"times": 999}
# What goes wrong; whether the same call gets over it by itself, or what it says.
FAULTS = {
    "unknown token": ([fault("status", "/whoami", status=401, **FOREVER)], "the hub does not know the token (401: injected): log in"),
    "another server": ([fault("status", "/whoami", status=200, json={"hello": "world"}, **FOREVER)], " gave an answer that is none of the hub's"),
    "whoami 503 once": ([fault("status", "/whoami")], None),
    "model 503 once": ([fault("status", "/api/models/alice/m$")], None),
    "metadata 503 once": ([fault("status", "/validate-yaml")], None),
    "metadata 503 in HTML": ([fault("status", "/validate-yaml", json="<html>")], None),
    "metadata refused": (
        [fault("status", "/validate-yaml", status=400, json={"errors": [{"message": "bad licence"}]}, **FOREVER)],
        "InputError: the hub does not accept the card's metadata: .*bad licence",
    ),
    "create 503 once": ([fault("status", "/repos/create")], None),
    "create loses its answer": ([fault("reset_after", "/repos/create")], None),
    "create 409": ([fault("reset_after", "/repos/create"), fault("status", "/repos/create", status=409)], None),
    "create 403": ([fault("status", "/repos/create", status=403, **FOREVER)], "may not make repositories: make it on the hub"),
    "preupload 503 once": ([fault("status", "/preupload/")], None),
    "preupload 403": ([fault("status", "/preupload/", status=403, error="no", **FOREVER)], "nothing has been published: this token has no right to that"),
    "batch 503 once": ([fault("status", "/info/lfs")], None),
    "upload 503 once": ([fault("status", "/lfs/", method="PUT")], None),
    "upload reset once": ([fault("reset_body", "/lfs/", method="PUT", bytes=1000)], None),
    "commit 503 once": ([fault("status", "/commit/main")], None),
    "commit 409 once": ([fault("status", "/commit/main", status=409)], None),
    "commit 429": ([fault("status", "/commit/main", status=429, headers={"Retry-After": "1"})], None),
    "commit 429 for an hour": (
        [fault("status", "/commit/main", status=429, headers={"Retry-After": "3600"}, **FOREVER)],
        "nothing has been published: too many requests (429: injected): wait 3600 s, and run the same command again",
    ),
    "commit 403": ([fault("status", "/commit/main", status=403, error="no", **FOREVER)], "this token has no right to that (403: no)"),
    "commit 412": ([fault("status", "/commit/main", status=412, **FOREVER)], "someone has pushed in between (412: injected)"),
    "commit reset": ([fault("reset", "/commit/main")], None),
    "commit loses its answer": ([fault("reset_after", "/commit/main")], None),
    "commit 503 for ever": ([fault("status", "/commit/main", **FOREVER)], "the hub does not work at the moment (503: injected): run the same command again later"),
    "commit 501": ([fault("status", "/commit/main", status=501, error="no such storage", **FOREVER)], "nothing has been published: 501: no such storage"),
    "commit 400 with its reason deep": (
        [fault("status", "/commit/main", status=400, json={"detail": {"error": "the file is too large"}}, **FOREVER)],
        "nothing has been published: 400: the file is too large",
    ),
    "commit hangs": ([fault("hang", "/commit/main", seconds=2.5)], None),
    "whoami hangs": ([fault("hang", "/whoami", seconds=2.5, **FOREVER)], "no answer from http://127.0.0.1"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("faults", "says"), FAULTS.values(), ids=FAULTS)
def test_a_push_that_meets_a_fault(faults: list[dict], says: str | None, publisher: Publisher, run: Path):
    hangs = any(each["action"] == "hang" for each in faults)
    ordered = [publisher.hub.fault(**each) for each in faults]
    began, before = time.monotonic(), (run / "model" / "README.md").read_bytes()
    answer = publisher(run_folder=str(run), repo_id="alice/m", timeout=1 if hangs else 20)
    assert time.monotonic() - began < 60
    assert all(each.times == 0 for each in ordered if each.times < 900)  # it happened
    if says is None:
        assert isinstance(answer, dict), answer
    else:
        assert isinstance(answer, str), answer
        assert "\n" not in answer
        for part in says.split(".*"):
            assert part in answer
        assert commits(publisher.hub) == 0
        assert not (run / "push.json").exists()
        assert (run / "model" / "README.md").read_bytes() == before
    publisher.hub.faults.clear()
    time.sleep(2 if hangs else 0)  # what was late
    answer = publisher(run_folder=str(run), repo_id="alice/m")
    assert isinstance(answer, dict), answer
    assert answer["changed"] == [] or says is not None
    assert commits(publisher.hub) == 1
    assert is_the_model(publisher.hub, run)
    assert json.loads((run / "push.json").read_text())["commit"] == publisher.hub.repos["model", "alice/m"].refs["main"]


def test_someone_who_pushes_in_between_is_not_overwritten(publisher: Publisher, run: Path):
    assert publisher(run_folder=str(run), repo_id="alice/m")["commit"]
    (run / "push.json").unlink()
    change_card(run)
    publisher.hub.fault("hang", path="/preupload/", seconds=2)

    def other() -> None:
        while not any("/preupload/" in request["path"] for request in list(publisher.hub.log)):
            time.sleep(0.05)
        publisher.hub.add_repo("model", "alice/m", {"NOTICE": b"someone else's\n"})

    publisher.hub.log.clear()
    thread = threading.Thread(target=other)
    thread.start()
    answer = publisher(run_folder=str(run), repo_id="alice/m")
    thread.join()
    assert "nothing has been published: someone has pushed in between (commit " in answer
    assert commits(publisher.hub) == 2
    assert b"Changed." not in published(publisher.hub)["README.md"]
    assert publisher(run_folder=str(run), repo_id="alice/m")["changed"] == ["README.md"]
    assert commits(publisher.hub) == 3
    assert published(publisher.hub)["NOTICE"] == b"someone else's\n"


def test_an_answer_without_a_commit_of_its_own_is_no_publication(publisher: Publisher, run: Path):
    hub = publisher.hub
    first = publisher(run_folder=str(run), repo_id="alice/m")["commit"]
    change_card(run)
    answer = {"success": True, "commitOid": first, "commitUrl": f"{hub.url}/alice/m/commit/{first}", "hookOutput": ""}
    hub.fault("status", path="/commit/main", status=200, json=answer)
    said = publisher(run_folder=str(run), repo_id="alice/m")
    assert (
        said
        == "RunError: alice/m: nothing has been published: the hub says that all is well, but its commit is the old one"
    )
    assert commits(hub) == 1
    assert json.loads((run / "push.json").read_text())["commit"] == first


def change_card(run: Path) -> None:
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("notes: ''", "notes: Changed."))
    assert recipe != (run / "recipe.yaml").read_text()


def test_rights_are_known_before_anything_is_sent(publisher: Publisher, run: Path):
    hub, folder = publisher.hub, str(run)
    hub.add_repo("model", "bob/theirs", {"README.md": b"theirs\n"}, user="bob")
    hub.add_repo("model", "alice/mine", {"README.md": b"old\n"})
    hub.log.clear()
    cases = [
        ({"repo_id": "bob/theirs"}, "RunError: bob/theirs: nothing has been pushed: this token has no right to that (403"),
        ({"repo_id": "bob/new"}, "RunError: bob/new: there is no such repository that alice may see, and to make one takes an owner of alice, acme"),
        ({"repo_id": "alice/mine", "token": "hf_alice_read"}, "RunError: alice/mine: the token of alice can only read"),
        ({"repo_id": "alice/mine", "token": "hf_nobody"}, "RunError: alice/mine: nothing has been pushed: the hub does not know the token (401"),
        ({"repo_id": "alice/mine", "token": ""}, "InputError: no token: log in with `hf auth login`"),
        ({"repo_id": "alice/mine", "private": True}, "InputError: --private: alice/mine is public"),
        ({"repo_id": "mine"}, "InputError: 'mine' is no repository: write OWNER/NAME"),
        ({"repo_id": "alice/mine/x"}, "InputError: 'alice/mine/x' is no repository"),
        ({"repo_id": "alice/mi ne"}, "InputError: 'alice/mi ne' is no repository"),
        ({"repo_id": "alice/mine", "revision": "a b"}, "InputError: --revision 'a b': name a branch"),
        ({"repo_id": "alice/mine", "revision": "refs/pr/9"}, "InputError: --revision refs/pr/9: alice/mine has no such pull request"),
        ({"repo_id": "alice/mine", "revision": "x", "create_pr": True}, "InputError: --create-pr opens a pull request against main"),
        ({"repo_id": "alice/mine", "timeout": 0}, "InputError: --timeout 0: give seconds"),
    ]  # fmt: skip
    for task, says in cases:
        answer = publisher(run_folder=folder, **task)
        assert isinstance(answer, str), task
        assert answer.startswith(says), answer
    assert not [request for request in hub.log if request["method"] != "GET" and "validate-yaml" not in request["path"]]
    assert publisher(run_folder=folder, repo_id="acme/new")["repo"] == "acme/new"


def test_a_folder_that_is_not_the_measured_model_is_not_pushed(publisher: Publisher, run: Path, tmp_path: Path):
    model = run / "model"

    def refused(says: str, folder: Path = run) -> None:
        answer = publisher(run_folder=str(folder), repo_id="alice/m")
        assert isinstance(answer, str), says
        assert says in answer, answer
        assert "\n" not in answer

    (model / "optimizer.pt").touch()
    refused("InputError: ")
    refused("model: optimizer.pt: not of the model that was measured")
    (model / "optimizer.pt").rename(tmp_path / "optimizer.pt")
    (model / "modules.json").rename(tmp_path / "modules.json")
    refused("model: modules.json: not there any more")
    (tmp_path / "modules.json").rename(model / "modules.json")
    config = (model / "1_Pooling" / "config.json").read_text()
    (model / "1_Pooling" / "config.json").write_text(config.replace("cls", "mean"))
    refused("1_Pooling/config.json has changed since it was measured")
    (model / "1_Pooling" / "config.json").write_text(config)

    results = (run / "results.json").read_text()
    score = json.loads(results)["test"]["spearman"]
    (run / "results.json").write_text(results.replace(str(score), str(score + 0.001)))
    refused(f"test spearman is {score:.4f}, recorded {score + 0.001:.4f}: not published")
    weights = json.loads(results)["weights_sha256"]
    (run / "results.json").write_text(results.replace(weights, "0" * 64))
    refused("is not the model that its records are about: its weights are others: not published")
    for key in ("dev", "test"):
        wrong = json.loads(results)
        wrong[key]["pearson"] = float("nan")
        (run / "results.json").write_text(json.dumps(wrong))
        refused(f"{key} pearson is ")
    (run / "results.json").write_text(results)
    evaluation = (run / "evaluation.json").read_text()
    wrong = json.loads(evaluation)
    wrong["models"][0]["tasks"]["geometry"]["uniformity"] -= 0.001
    (run / "evaluation.json").write_text(json.dumps(wrong))
    refused("geometry uniformity is ")
    (run / "evaluation.json").write_text(evaluation)

    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("license: mit", "license: null"))
    refused(
        f"card.license is not set, and a model without a licence may be used by nobody: choose one, e.g. simcse-st card {run}"
    )
    data = Path(str(load_recipe(run / "recipe.yaml").data.train)).parent
    for place in (f"{run}/model.", f"`{run}`", f"file://{run.parent},", f"{data}.", f"{Path.home()}", "/usr/bin/env"):
        (run / "recipe.yaml").write_text(recipe.replace("notes: ''", f"notes: 'It lies in {place}'"))
        refused("the card names a place on this machine, /")
    (run / "recipe.yaml").write_text(recipe.replace("notes: ''", "notes: 'hf_alice'"))
    refused("the card holds the token of this machine")
    (run / "recipe.yaml").write_text(recipe)
    refused("nowhere is no run folder: it has no recipe.yaml", tmp_path / "nowhere")
    assert not publisher.hub.repos
    assert not (run / "push.json").exists()


def test_what_else_a_repository_holds(publisher: Publisher, run: Path):
    hub = publisher.hub
    hub.add_repo("model", "alice/m", {"LICENSE": b"MIT\n", "adapter_config.json": b"{}"})
    answer = publisher(run_folder=str(run), repo_id="alice/m")
    assert (
        answer
        == "InputError: alice/m holds files of something else: adapter_config.json: delete them, or choose another"
    )
    hub.repos.clear()
    hub.add_repo("model", "alice/m", {"LICENSE": b"MIT\n"})
    assert isinstance(publisher("alice/m", run_folder=str(run)), dict)
    assert published(hub)["LICENSE"] == b"MIT\n"
    # What an earlier model of this package brought and this one does not have goes, in the same commit.
    hub.add_repo("model", "alice/m", {"2_Dense/model.safetensors": b"old"})
    change_card(run)
    assert "holds files of something else: 2_Dense/model.safetensors" in publisher("alice/m", run_folder=str(run))
    card = published(hub)["README.md"].replace(b"  files:\n", b"  files:\n    2_Dense/model.safetensors: '0'\n")
    hub.add_repo("model", "alice/m", {"README.md": card})
    (run / "push.json").unlink()
    answer = publisher(run_folder=str(run), repo_id="alice/m")
    assert (answer["changed"], answer["deleted"]) == (["README.md"], ["2_Dense/model.safetensors"])
    assert "2_Dense/model.safetensors" not in published(hub)
    assert commits(hub) == 5


def test_scores_on_the_leaderboard_s_tasks_go_with_the_model(publisher: Publisher, run: Path):
    record = json.loads((run / "evaluation.json").read_text())
    record["models"][0]["tasks"]["mteb"] = {
        "STSBenchmark": {
            "main_score": 81.234567, "metric": "cosine_spearman", "dataset": "mteb/stsbenchmark-sts",
            "revision": "b0fddb56ed78048fa8b90373c8a3cfc37b684831", "version": "2.26.24",
            "parts": {"default_test": 81.234567},
        },
        "BIOSSES": {"main_score": 70.0, "metric": "cosine_spearman", "revision": "1", "version": "2.0"},  # of before
    }  # fmt: skip
    plain = (run / "evaluation.json").read_text()
    (run / "evaluation.json").write_text(json.dumps(record))
    answer = publisher("alice/m", run_folder=str(run))
    assert ".eval_results/STSBenchmark.yaml" in answer["changed"], answer
    entries = yaml.safe_load(published(publisher.hub)[".eval_results/STSBenchmark.yaml"])
    assert [entry["dataset"].pop("task_id") for entry in entries] == ["STSBenchmark_default_test", "STSBenchmark"]
    assert entries[0] == entries[1]
    note = "Obtained using MTEB v2.26.24"
    assert entries[0] == {
        "dataset": {"id": "mteb/stsbenchmark-sts", "revision": "b0fddb56ed78048fa8b90373c8a3cfc37b684831"},
        "value": 81.23457,
        "source": {"url": "https://github.com/embeddings-benchmark/mteb/", "name": note},
        "notes": note,
    }
    assert names(publisher("alice/m", run=str(run))) == ALL
    # What others have added there stays; what is ours and no longer measured goes.
    assert [path for path in published(publisher.hub) if path.startswith(".eval_results")] == [
        ".eval_results/STSBenchmark.yaml"
    ]
    publisher.hub.add_repo("model", "alice/m", {".eval_results/hle.yaml": b"[]"})
    (run / "evaluation.json").write_text(plain)
    answer = publisher("alice/m", run_folder=str(run))
    assert answer["deleted"] == [".eval_results/STSBenchmark.yaml"], answer
    assert published(publisher.hub)[".eval_results/hle.yaml"] == b"[]"
    assert names(publisher("alice/m", run=str(run))) == ALL


def test_a_damaged_record_is_named(publisher: Publisher, run: Path):
    assert isinstance(publisher("alice/m", run_folder=str(run)), dict)
    record = (run / "push.json").read_text()
    for damage in (
        "{",
        "{}",
        record.replace('"earlier"', '"later"'),
        record.replace('"repo": "alice/m"', '"repo": null'),
    ):
        (run / "push.json").write_text(damage)
        answer = publisher("alice/m", run_folder=str(run))
        assert answer.startswith(f"InputError: {run}/push.json: not a record of this command: "), answer
        assert answer.endswith("; delete it: the next push writes it anew")


def test_a_dry_run_changes_nothing(publisher: Publisher, run: Path):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    answer = publisher(run_folder=str(run), repo_id="alice/m", dry_run=True)
    assert answer["commit"] is None
    assert (
        sorted(answer["changed"])
        == sorted(answer["files"])
        == sorted(path.relative_to(run / "model").as_posix() for path in before if run / "model" in path.parents)
    )
    assert answer["files"]["model.safetensors"]["size"] == len(before[run / "model" / "model.safetensors"])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert not publisher.hub.repos
    assert {request["method"] for request in publisher.hub.log if "validate-yaml" not in request["path"]} == {"GET"}


def test_branches_private_repositories_and_pull_requests(publisher: Publisher, run: Path):
    hub, folder = publisher.hub, str(run)
    assert publisher(run_folder=folder, repo_id="alice/p", private=True)["private"]
    assert hub.repos["model", "alice/p"].private
    assert publisher(run_folder=folder, repo_id="alice/p")["private"]

    assert publisher(run_folder=folder, repo_id="alice/p", revision="next")["changed"] == []
    assert hub.repos["model", "alice/p"].refs["next"] == hub.repos["model", "alice/p"].refs["main"]
    hub.add_repo("model", "alice/b", {"README.md": b"old\n"})
    hub.repos["model", "alice/b"].tags["v1"] = hub.repos["model", "alice/b"].refs["main"]
    for branch in ("next", "v1"):  # a tag of that name is no branch
        answer = publisher(run_folder=folder, repo_id="alice/b", revision=branch)
        assert answer["revision"] == branch
        assert is_the_model(hub, run, "alice/b", branch)
    assert published(hub, "alice/b")["README.md"] == b"old\n"
    # Each place's last push is kept.
    record = json.loads((run / "push.json").read_text())
    places = [(push["repo"], push["revision"]) for push in [record, *record["earlier"]]]
    assert places == [("alice/b", "v1"), ("alice/b", "next"), ("alice/p", "next"), ("alice/p", "main")]


def test_pull_requests(publisher: Publisher, run: Path):
    hub, folder = publisher.hub, str(run)
    hub.add_repo("model", "bob/b", {"README.md": b"old\n"}, user="bob")

    def request() -> int:
        answer = publisher(run_folder=folder, repo_id="bob/b", create_pr=True)  # of alice, who may not write there
        assert isinstance(answer, dict), answer
        assert answer["url"].endswith(f"/bob/b/discussions/{answer['pull_request']}")
        assert answer["revision"] == f"refs/pr/{answer['pull_request']}"
        return answer["pull_request"]

    hub.fault("reset_after", path="/commit/main")
    assert request() == 1
    assert request() == 1  # the same is not asked for twice
    repo = hub.repos["model", "bob/b"]
    assert repo.pulls.keys() == {1}
    assert is_the_model(hub, run, "bob/b", "refs/pr/1")
    repo.closed.add(1)
    assert request() == 2
    assert published(hub, "bob/b")["README.md"] == b"old\n"
    assert names(publisher("bob/b", run=folder)) == ALL  # where it was pushed to


@pytest.mark.parametrize(
    ("action", "path", "details", "times", "fine"),
    [
        ("status", "/xet-write-token/", {"status": 503}, 1, None),
        ("reset_after", "/commit/main", {}, 1, True),
        ("status", "/commit/main", {"status": 503}, 1, True),
        ("status", "/commit/main", {"status": 403}, 999, False),
    ],
)
def test_xet(action: str, path: str, details: dict, times: int, fine: bool | None, xet_publisher: Publisher, run: Path):
    hub = xet_publisher.hub
    hub.fault(action, path=path, times=times, **details)
    answer = xet_publisher(run_folder=str(run), repo_id="alice/m")
    if fine is not None:  # whether hf_xet tries again is its own business
        assert isinstance(answer, dict) == fine, answer
    if isinstance(answer, str):
        assert commits(hub) == 0
        assert answer.startswith("RunError: alice/m: nothing has been published: ")
        assert "\n" not in answer
    hub.faults.clear()
    assert isinstance(xet_publisher(run_folder=str(run), repo_id="alice/m"), dict)
    assert commits(hub) == 1
    assert is_the_model(hub, run)
    assert hub.repos["model", "alice/m"].at("main").tree["model.safetensors"].xet
    checks = xet_publisher(repo_id="alice/m", run=str(run))
    assert [check[:2] for check in checks] == [
        [name, True] for name in ("commit", "files", "card", "stack", "weights", "score")
    ]
