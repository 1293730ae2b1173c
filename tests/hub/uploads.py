"""Endpoints for changing what is in a repository: preupload, then LFS or Xet, then the commit."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

from .accounts import Access
from .commits import Repo, Tree, unknown_revision
from .messages import HubError, Reply, Request
from .store import Hub

# The object store knows an address that the hub has made by this, as S3 does by a signature, and asks for no token.
SIGNATURE = "sig=x"


def preupload(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    """How each file is to be uploaded, and what is in its place now."""
    commit, answers = repo.at(revision), []
    for file in request.json()["files"]:
        lfs = hub.wants_lfs(file["path"], file["size"], base64.b64decode(file["sample"]))
        answer = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
        if old := commit.tree.get(file["path"]):
            answer["oid"] = old.lfs or old.oid
        answers.append(answer)
    return Reply({"files": answers, "commitOid": commit.id})


def commit(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    """Carry out the operations of the body, one to a line, as one commit."""
    operations = [json.loads(line) for line in request.body.splitlines() if line.strip()]
    header = next(operation["value"] for operation in operations if operation["key"] == "header")
    create_pr = request.flag("create_pr")
    if not create_pr and revision not in repo.refs:
        raise unknown_revision(revision)
    parent = repo.at(revision)
    if header.get("parentCommit") not in (None, "", parent.id):
        raise HubError(412, "A commit has happened since. Please refresh and try again.")
    tree = dict(parent.tree)
    for operation in operations:
        if operation["key"] != "header":
            if operation["key"] not in OPERATIONS:
                raise HubError(400, f"unknown key {operation['key']}")
            OPERATIONS[operation["key"]](hub, tree, operation["value"])
    title, web = header.get("summary", ""), f"{hub.url}/{repo.web_path}"
    pull_request_url = None
    if create_pr:
        number = repo.open_pull(title, parent.id)
        revision, pull_request_url = f"refs/pr/{number}", f"{web}/discussions/{number}"
    user = request.account.user if request.account else None
    sha = repo.commit(revision, tree, title, header.get("description", ""), user)
    urls = {"pullRequestUrl": pull_request_url, "commitUrl": f"{web}/commit/{sha}"}
    return Reply({"success": True, "hookOutput": "", "commitOid": sha, **urls})


def add_file(hub: Hub, tree: Tree, file: dict[str, Any]) -> None:
    content = file["content"]
    data = base64.b64decode(content) if file.get("encoding") == "base64" else content.encode()
    tree[file["path"]] = hub.put_blob(data)


def add_object(hub: Hub, tree: Tree, file: dict[str, Any]) -> None:
    stored = hub.find_object(file["oid"])
    if stored is None:
        reason = f"an LFS pointer pointed to a file that does not exist: {file['path']}"
        raise HubError(400, f"Your push was rejected because {reason}")
    tree[file["path"]] = stored


def delete_file(hub: Hub, tree: Tree, file: dict[str, Any]) -> None:
    if tree.pop(file["path"].rstrip("/"), None) is None:
        raise nothing_to_delete(file["path"])


def delete_folder(hub: Hub, tree: Tree, folder: dict[str, Any]) -> None:
    gone = [path for path in tree if path.startswith(folder["path"].rstrip("/") + "/")]
    if not gone:
        raise nothing_to_delete(folder["path"])
    for path in gone:
        del tree[path]


def nothing_to_delete(path: str) -> HubError:
    return HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")


OPERATIONS = {"file": add_file, "lfsFile": add_object, "deletedFile": delete_file, "deletedFolder": delete_folder}


def lfs_batch(hub: Hub, request: Request, type_: str, id_: str) -> Reply:
    """Where to upload or download each LFS object."""
    batch = request.json()
    upload = batch["operation"] == "upload"
    # Objects are not to be seen without a commit, so that whoever may ask for a change may upload them.
    hub.find_repo(type_, id_, request.account, Access.READ)
    if upload and (request.account is None or request.account.role == "read"):
        raise HubError(403, "Forbidden: you must use a write token to upload.")
    action = upload_action if upload else download_action
    objects = [{**wanted, **action(hub, wanted, batch["transfers"])} for wanted in batch["objects"]]
    in_parts = any("chunk_size" in answer.get("actions", {}).get("upload", {}).get("header", {}) for answer in objects)
    transfer = "multipart" if in_parts else "basic"
    if hub.xet and upload and "xet" in batch["transfers"]:  # of clients before 2.0; later ones ask for it at once
        transfer = "xet"
    return Reply({"transfer": transfer, "objects": objects})


def download_action(hub: Hub, wanted: dict[str, Any], transfers: list[str]) -> dict[str, Any]:
    if not hub.object_path(wanted["oid"]).exists():
        return {"error": {"code": 404, "message": "Object does not exist"}}
    return {"actions": {"download": {"href": object_url(hub, "lfs", wanted["oid"])}}}


def upload_action(hub: Hub, wanted: dict[str, Any], transfers: list[str]) -> dict[str, Any]:
    oid, size = wanted["oid"], wanted["size"]
    path = hub.object_path(oid)
    if path.exists() and path.stat().st_size == size:
        return {}  # without an action the client skips the upload
    if hub.multipart_over is None or size <= hub.multipart_over or "multipart" not in transfers:
        return {"actions": {"upload": {"href": object_url(hub, "lfs", oid), "header": {}}}}
    count = -(-size // hub.chunk_size)
    header = {str(number): object_url(hub, "part", f"{oid}/{number}") for number in range(1, count + 1)}
    header["chunk_size"] = str(hub.chunk_size)
    return {"actions": {"upload": {"href": object_url(hub, "complete", oid), "header": header}}}


def object_url(hub: Hub, kind: str, name: str) -> str:
    return f"{hub.cdn}/{kind}/{name}?{SIGNATURE}"


def xet_token(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    """Where hf_xet stores and finds the data, in the body (for itself) and in headers (for huggingface_hub)."""
    if hub.xet is None:
        raise HubError(404, "Not found")
    token, expiration, url = "xet", int(time.time()) + 3600, hub.xet.url
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": expiration}
    return Reply({"accessToken": token, "exp": expiration, "casUrl": url}, headers=headers)
