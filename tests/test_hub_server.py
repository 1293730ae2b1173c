"""The stand-in for the Hub against the real clients, each in a fresh process: they read their settings on import."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import hub_environment
from hub import Hub, serve

Client = Callable[..., Any]
HAS_XET = importlib.util.find_spec("hf_xet") is not None

# Calls a function of the Hub's client; the answer is its result or the name and text of its exception.
ATTEMPT = """
def attempt(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


@pytest.fixture
def client(tmp_path: Path) -> Client:
    """Runs code in a fresh process with the hub as its endpoint and empty caches; gives what it puts in ``result``."""

    def run(hub: Hub, code: str, *arguments: object, token: str = "", **environment: str) -> Any:
        settings = {**hub_environment(hub, tmp_path / "home", token), **environment}
        script = f"import json, sys\n{ATTEMPT}\n{code}\nprint(json.dumps(result))"
        command = [sys.executable, "-c", script, *map(str, arguments)]
        process = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120)
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout.splitlines()[-1])

    return run


def parquet(*sentences: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"sentence": list(sentences)}), file)
    return file.getvalue()


UPLOAD = """
from huggingface_hub import HfApi, hf_hub_download
api, (folder,) = HfApi(), sys.argv[1:]
api.create_repo("alice/m", private=True)
commit = api.upload_folder(repo_id="alice/m", folder_path=folder, commit_message="Weights")
result = {path: hf_hub_download("alice/m", path, revision=commit.oid)
          for path in ("model.safetensors", "nested/config.json")}
result["files"] = api.list_repo_files("alice/m")
"""


@pytest.mark.parametrize(
    ("way", "uploaded_to"),
    [
        ("basic", "/lfs/"),
        ("multipart", "/part/"),
        pytest.param("xet", None, marks=pytest.mark.skipif(not HAS_XET, reason="hf_xet is not installed")),
    ],
)
def test_what_is_uploaded_is_downloaded(way: str, uploaded_to: str | None, client: Client, tmp_path: Path) -> None:
    contents = {"model.safetensors": os.urandom(300_000), "nested/config.json": b'{"a": 1}'}
    for path, data in contents.items():
        (tmp_path / "model" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / path).write_bytes(data)
    options = {"multipart": {"multipart_over": 100_000, "chunk_size": 128_000}, "xet": {"xet": True}}.get(way, {})
    environment = {"HF_HUB_DISABLE_XET": "0"} if way == "xet" else {}
    with serve(resolve_cache=True, **options) as hub:
        downloaded = client(hub, UPLOAD, tmp_path / "model", token="hf_alice", **environment)
        puts = [request["path"] for request in hub.log if request["method"] == "PUT"]
        assert downloaded.pop("files") == [".gitattributes", *contents]
        assert {path: Path(file).read_bytes() for path, file in downloaded.items()} == contents
        assert all(path.startswith(uploaded_to or "nowhere") for path in puts)
        assert len(puts) == {"basic": 1, "multipart": 3, "xet": 0}[way]
        if way == "xet":  # a client without Xet gets the same bytes from the object store
            plain = client(hub, UPLOAD.replace("api.create_repo", "# "), tmp_path / "model", token="hf_alice")
            assert Path(plain["model.safetensors"]).read_bytes() == contents["model.safetensors"]


def test_a_parquet_dataset_is_loaded(hub: Hub, client: Client) -> None:
    splits = {"train": parquet("one", "two"), "test": parquet("three")}
    files = {f"data/{split}-00000-of-00001.parquet": data for split, data in splits.items()}
    sha = hub.add_repo("dataset", "stanfordnlp/snli", files)
    assert hub.add_repo("dataset", "stanfordnlp/snli", {"README.md": b"# SNLI\n"}) != sha
    code = """
from datasets import load_dataset
result = {split: rows["sentence"][:] for split, rows in load_dataset("stanfordnlp/snli").items()}
"""
    assert client(hub, code) == {"train": ["one", "two"], "test": ["three"]}
    downloads = [request for request in hub.log if request["server"] == "cdn"]
    assert [(request["status"], request["auth"]) for request in downloads] == [(200, None)] * 2


def test_a_model_without_an_owner(hub: Hub, client: Client) -> None:
    sha = hub.add_repo("model", "bert-base-uncased", {"config.json": b"{}", "model.safetensors": b"\0" * 8})
    code = """
from huggingface_hub import HfApi, snapshot_download
from pathlib import Path
api = HfApi()
folder = Path(snapshot_download("bert-base-uncased"))
result = [folder.name, api.model_info("bert-base-uncased").id, sorted(p.name for p in folder.iterdir())]
result += [attempt(api.model_info, "nosuch"), attempt(api.hf_hub_download, "nosuch", "config.json")]
"""
    folder, id_, names, *errors = client(hub, code)
    assert (folder, id_, names) == (sha, "bert-base-uncased", [".gitattributes", "config.json", "model.safetensors"])
    assert [error.partition(":")[0] for error in errors] == ["RepositoryNotFoundError"] * 2


def test_a_gated_dataset(hub: Hub, client: Client) -> None:
    hub.add_repo("dataset", "acme/g", {"train.parquet": parquet("one")}, gated=True)
    load = "from datasets import load_dataset\nresult = attempt(load_dataset, 'acme/g')"
    assert client(hub, load) == (
        "DatasetNotFoundError: Dataset 'acme/g' is a gated dataset on the Hub. You must be authenticated to access it."
    )
    code = """
from huggingface_hub import HfApi
def look(token):
    api = HfApi(token=token)
    download = attempt(api.hf_hub_download, "acme/g", "train.parquet", repo_type="dataset")
    return [api.dataset_info("acme/g").gated, api.list_repo_files("acme/g", repo_type="dataset"), download,
            attempt(api.auth_check, "acme/g", repo_type="dataset")]
result = [look(token) for token in (False, "hf_bob", "hf_alice_read")]
"""
    nobody, bob, alice = client(hub, code)
    assert [seen[:2] for seen in (nobody, bob, alice)] == [["manual", [".gitattributes", "train.parquet"]]] * 3
    assert all(error.startswith("GatedRepoError: 401") for error in nobody[2:])
    assert all(error.startswith("GatedRepoError: 403") for error in bob[2:])
    assert Path(alice[2]).read_bytes() == parquet("one")
    assert alice[3] is None


def test_a_private_model_and_who_may_write(hub: Hub, client: Client) -> None:
    hub.add_repo("model", "alice/p", {"config.json": b"{}"}, private=True)
    code = """
from huggingface_hub import HfApi
def look(token):
    api = HfApi(token=token)
    return [attempt(lambda: api.model_info("alice/p").id), attempt(api.hf_hub_download, "alice/p", "config.json"),
            attempt(api.create_branch, "alice/p", branch="b"), attempt(lambda: api.create_repo("acme/new").repo_id)]
result = [look(token) for token in (False, "hf_bob", "hf_alice_read", "hf_alice")]
"""
    nobody, bob, reader, alice = client(hub, code)
    assert all(error.startswith("RepositoryNotFoundError: 401") for error in nobody[:3])
    assert "401 Unauthorized" in nobody[3]
    assert all(error.startswith("RepositoryNotFoundError: 404") for error in bob[:3])
    assert "403 Forbidden" in bob[3]
    assert reader[0] == "alice/p"
    assert Path(reader[1]).read_bytes() == b"{}"
    assert all("403 Forbidden" in error for error in reader[2:])
    assert [alice[0], *alice[2:]] == ["alice/p", None, "acme/new"]


def test_branches_tags_pull_requests_and_pages(client: Client) -> None:
    code = """
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
api = HfApi()
first = api.repo_info("alice/m").sha
api.create_branch("alice/m", branch="b")
api.create_tag("alice/m", tag="v1")
def commit(**options):
    changes = [CommitOperationAdd("new.txt", b"new"), CommitOperationDelete("folder/")]
    return api.create_commit("alice/m", changes, commit_message="Change", **options)
pull = commit(create_pr=True)
commit(revision="b", parent_commit=first)
refs = api.list_repo_refs("alice/m", include_pull_requests=True)
result = {
    "pull": [pull.pr_revision, pull.pr_num],
    "stale": attempt(commit, revision="b", parent_commit=first),
    "refs": [[ref.name for ref in kind] for kind in (refs.branches, refs.tags, refs.pull_requests)],
    "main": sorted(entry.path for entry in api.list_repo_tree("alice/m", recursive=True)),
    "top": sorted(entry.path for entry in api.list_repo_tree("alice/m")),
    "pr": api.list_repo_files("alice/m", revision="refs/pr/1"),
    "commits": [commit.title for commit in api.list_repo_commits("alice/m", revision="b")],
    "paths": [entry.path for entry in api.get_paths_info("alice/m", ["folder", "a.txt", "none"], expand=True)],
}
"""
    with serve(page_size=2) as hub:
        hub.add_repo("model", "alice/m", {f"{name}.txt": name.encode() for name in ("a", "folder/b", "folder/c")})
        result = client(hub, code, token="hf_alice")
        pages = [request for request in hub.log if "cursor=" in request["path"]]
    assert result.pop("stale").startswith("HfHubHTTPError: Client error '412")
    assert result == {
        "pull": ["refs/pr/1", 1],
        "refs": [["main", "b"], ["v1"], ["refs/pr/1"]],
        "main": [".gitattributes", "a.txt", "folder", "folder/b.txt", "folder/c.txt"],
        "top": [".gitattributes", "a.txt", "folder"],
        "pr": [".gitattributes", "a.txt", "new.txt"],
        "commits": ["Change", "Add files", "initial commit"],
        "paths": ["folder", "a.txt"],
    }
    assert len(pages) == 4  # two of the whole tree, one each of the top and of the pull request


def test_faults(hub: Hub, client: Client) -> None:
    """Those that the client overcomes, and those that it reports or does not see."""
    data = os.urandom(100_000)
    hub.add_repo("model", "alice/m", {"a.bin": data, "b.bin": data[:-1]})
    ordered = [
        hub.fault("status", method="PUT", path="/lfs/", status=503),
        hub.fault("reset_body", method="PUT", path="/lfs/", bytes=1000),
        hub.fault("truncate", method="GET", path="/lfs/", bytes=40_000, fin=True),
        hub.fault("corrupt", method="GET", path="/lfs/", skip=1),
        hub.fault("reset_after", path="/commit/main", skip=1),
        hub.fault("reset", path="/whoami"),
        hub.fault("hang", path="/revision/", seconds=0.2),
    ]
    code = """
from huggingface_hub import HfApi
api, (new,) = HfApi(), sys.argv[1:]
api.upload_file(path_or_fileobj=new, path_in_repo="c.bin", repo_id="alice/m")
result = [api.hf_hub_download("alice/m", name) for name in ("a.bin", "b.bin")]
result.append(attempt(api.upload_file, path_or_fileobj=b"text", path_in_repo="d.txt", repo_id="alice/m"))
result += [attempt(api.whoami), api.repo_info("alice/m", revision="main").sha]
"""
    (hub.root / "c.bin").write_bytes(data + data)
    fetched_again, corrupt, lost_answer, reset, sha = client(hub, code, hub.root / "c.bin", token="hf_alice")
    assert [fault.times for fault in ordered] == [0] * len(ordered)
    assert [request["status"] for request in hub.log if request["method"] == "PUT"] == [503, "reset", 200]
    assert Path(fetched_again).read_bytes() == data
    assert Path(corrupt).read_bytes()[:-1] == data[:-2]
    assert Path(corrupt).read_bytes() != data[:-1]
    for error in (lost_answer, reset):
        assert error.partition(":")[0] in ("ReadError", "RemoteProtocolError")
    tree = hub.repos["model", "alice/m"].commits[sha].tree
    assert {"c.bin", "d.txt"} <= set(tree)  # the commit was made, though its answer was lost


def test_the_object_store_takes_no_token(hub: Hub) -> None:
    hub.add_repo("model", "alice/m", {"a.bin": b"weights"})
    file = hub.repos["model", "alice/m"].at("main").tree["a.bin"]

    def get(query: str, headers: dict[str, str]) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(urllib.request.Request(f"{hub.cdn}/lfs/{file.lfs}{query}", headers=headers)).read()

    assert get("?sig=x", {}) == b"weights"
    assert get("?sig=x", {"Range": "bytes=2-4"}) == b"igh"
    with pytest.raises(urllib.error.HTTPError, match="400"):
        get("?sig=x", {"Authorization": "Bearer hf_alice"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        get("", {})
    assert [request["status"] for request in hub.log] == [200, 206, 400, 403]


def test_an_unknown_fault_is_refused(hub: Hub) -> None:
    with pytest.raises(ValueError, match="unknown action 'explode'; there are status, hang"):
        hub.fault("explode")


def test_it_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "hub", "--port", "0", "--resolve-cache"]
    with subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True) as program:
        try:
            url = program.stdout.readline().split()[1]
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            faults = json.dumps([{"action": "status", "path": "whoami", "status": 418}]).encode()
            opener.open(f"{url}/__faults", data=faults).close()
            with pytest.raises(urllib.error.HTTPError, match="418"):
                opener.open(f"{url}/api/whoami-v2")
            (request,) = json.load(opener.open(f"{url}/__log"))
            assert (request["server"], request["method"], request["status"]) == ("hub", "GET", 418)
        finally:
            program.terminate()
