"""Endpoints for accounts, for repositories and for what can be seen in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qsl, urlencode

from .accounts import ORGANISATIONS, Access
from .commits import Commit, File, Repo, unknown_revision
from .messages import HubError, Reply, Request, is_true
from .store import Hub


def whoami(hub: Hub, request: Request) -> Reply:
    if request.account is None:
        raise HubError(401, "Invalid username or password.")
    user, role = request.account
    organisations = [
        {"type": "org", "id": "1" * 24, "name": name, "fullname": name, "roleInOrg": "write"}
        for name in ORGANISATIONS.get(user, [])
    ]
    token = {"type": "access_token", "accessToken": {"displayName": "test", "role": role}}
    account = {"type": "user", "id": "0" * 24, "name": user, "fullname": user.title(), "isPro": False}
    return Reply({**account, "orgs": organisations, "auth": token})


def validate_yaml(hub: Hub, request: Request) -> Reply:
    """Every card will do."""
    return Reply({"errors": [], "warnings": []})


def create(hub: Hub, request: Request) -> Reply:
    if request.account is None:
        raise HubError(401, "Invalid username or password.")
    wanted = request.json()
    type_, namespace = wanted.get("type") or "model", wanted.get("organization") or request.account.user
    id_ = f"{namespace}/{wanted['name']}"
    if not request.account.may_write(id_):
        raise HubError(403, f'You don\'t have the rights to create a {type_} under the namespace "{namespace}"')
    there = hub.repos.get((type_, id_))
    private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
    repo = there or hub.create_repo(type_, id_, request.account.user, private=private)
    url = f"{hub.url}/{repo.web_path}"
    if there:
        message = f"You already created this {type_} repo: {id_}"
        # A client that does not mind takes the address from the error.
        raise HubError(409, message, body={"error": message, "url": url})
    return Reply({"url": url, "name": id_, "id": "2" * 24})


def delete(hub: Hub, request: Request) -> Reply:
    wanted = request.json()
    user = request.account.user if request.account else None
    id_ = f"{wanted.get('organization') or user}/{wanted['name']}"
    repo = hub.find_repo(wanted.get("type") or "model", id_, request.account, Access.WRITE)
    del hub.repos[repo.type, repo.id]
    return Reply({})


def auth_check(hub: Hub, request: Request, repo: Repo) -> Reply:
    """The check was made on the way here."""
    return Reply({})


def info(hub: Hub, request: Request, repo: Repo, revision: str = "main") -> Reply:
    commit = repo.at(revision)
    with_blobs = "blobs" in request.query
    described = {
        "_id": "0" * 24,
        "id": repo.id,
        "author": repo.id.rpartition("/")[0] or None,
        "sha": commit.id,
        "private": repo.private,
        "gated": "manual" if repo.gated else False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "siblings": [sibling(path, file, with_blobs) for path, file in sorted(commit.tree.items())],
        "createdAt": repo.created,
        "lastModified": commit.date,
        "usedStorage": 0,
    }
    of_models = {"modelId": repo.id, "spaces": []} if repo.type == "model" else {}
    return Reply({**described, **of_models})


def sibling(path: str, file: File, with_blobs: bool) -> dict[str, Any]:
    if not with_blobs:
        return {"rfilename": path}
    lfs = {"lfs": {"sha256": file.lfs, "size": file.size, "pointerSize": file.pointer_size}} if file.lfs else {}
    return {"rfilename": path, "blobId": file.oid, "size": file.size, **lfs}


def refs(hub: Hub, request: Request, repo: Repo) -> Reply:
    def listed(table: dict[str, str], prefix: str) -> list[dict[str, str]]:
        return [{"name": name, "ref": prefix + name, "targetCommit": sha} for name, sha in table.items()]

    pulls = {name: sha for name, sha in repo.refs.items() if name.startswith("refs/pr/")}
    branches = {name: sha for name, sha in repo.refs.items() if name not in pulls}
    body = {
        "branches": listed(branches, "refs/heads/"),
        "converts": [],
        "tags": listed(repo.tags, "refs/tags/"),
    }
    if request.flag("include_prs"):
        body["pullRequests"] = listed(pulls, "")
    return Reply(body)


def commits(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    history: list[dict[str, Any]] = []
    sha: str | None = repo.resolve(revision)
    while sha:
        commit = repo.commits[sha]
        about = {"id": sha, "title": commit.title, "message": commit.message, "date": commit.date}
        history.append({**about, "authors": [{"user": commit.user}]})
        sha = commit.parent
    return Reply(history, headers={"X-Total-Count": len(history)})


def tree(hub: Hub, request: Request, repo: Repo, revision: str, path: str = "") -> Reply:
    """The files and folders under a path, in pages."""
    commit, folder = repo.at(revision), path.strip("/")
    entries = dict(walk(commit, folder + "/" if folder else "", recursive=request.flag("recursive")))
    if folder and not entries:
        raise HubError(404, f'{folder} does not exist on "{revision}"', "EntryNotFound")
    ordered = [entries[name] for name in sorted(entries)]
    start, size = int(request.query.get("cursor", 0)), int(request.query.get("limit", hub.page_size))
    page = ordered[start : start + size]
    headers = {}
    if start + size < len(ordered):
        following = urlencode({**request.query, "cursor": start + size})
        headers["Link"] = f'<{hub.url}{request.path}?{following}>; rel="next"'
    return Reply(with_commit(page, commit) if request.flag("expand") else page, headers=headers)


def walk(commit: Commit, prefix: str, *, recursive: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Entries by path; a folder comes up once for each file in it."""
    for path, file in commit.tree.items():
        if path.startswith(prefix):
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                folder = prefix + "/".join(parts[:depth])
                yield folder, folder_entry(folder)
            if recursive or len(parts) == 1:
                yield path, file_entry(path, file)


def paths_info(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    """The entries of some paths; those that are not there are left out."""
    commit = repo.at(revision)
    if "json" in request.headers.get("Content-Type", ""):
        wanted = request.json()
        paths, expand = wanted["paths"], wanted.get("expand")
    else:
        form = parse_qsl(request.body.decode())
        paths, expand = [value for name, value in form if name == "paths"], dict(form).get("expand")
    entries = []
    for path in dict.fromkeys(path.strip("/") for path in paths):
        if path in commit.tree:
            entries.append(file_entry(path, commit.tree[path]))
        elif any(name.startswith(path + "/") for name in commit.tree):
            entries.append(folder_entry(path))
    return Reply(with_commit(entries, commit) if is_true(expand) or request.flag("expand") else entries)


def file_entry(path: str, file: File) -> dict[str, Any]:
    lfs = {"lfs": {"oid": file.lfs, "size": file.size, "pointerSize": file.pointer_size}} if file.lfs else {}
    xet = {"xetHash": file.xet} if file.xet else {}
    return {"type": "file", "oid": file.oid, "size": file.size, "path": path, **lfs, **xet}


def folder_entry(path: str) -> dict[str, Any]:
    return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}


def with_commit(entries: list[dict[str, Any]], commit: Commit) -> list[dict[str, Any]]:
    last = {key: value for key, value in asdict(commit).items() if key in ("id", "title", "date")}
    return [{**entry, "lastCommit": last} for entry in entries]


def create_branch(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    return new_ref(repo.refs, revision, repo.resolve(request.json().get("startingPoint") or "main"))


def create_tag(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    return new_ref(repo.tags, request.json()["tag"], repo.resolve(revision))


def new_ref(table: dict[str, str], name: str, sha: str) -> Reply:
    if name in table:
        raise HubError(409, f"Reference already exists: {name}")
    table[name] = sha
    return Reply({})


def delete_branch(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    return remove_ref(repo.refs, revision)


def delete_tag(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    return remove_ref(repo.tags, revision)


def remove_ref(table: dict[str, str], name: str) -> Reply:
    if table.pop(name, None) is None:
        raise unknown_revision(name)
    return Reply({})


def open_pull_request(hub: Hub, request: Request, repo: Repo) -> Reply:
    """What ``upload_folder(create_pr=True)`` begins with when the data goes by Xet."""
    return Reply({"num": repo.open_pull(request.json()["title"], repo.resolve("main")), "pullRequest": True})


def pull_request(hub: Hub, request: Request, repo: Repo, number: str) -> Reply:
    if int(number) not in repo.pulls:
        raise HubError(404, "Discussion not found")
    return Reply(
        {
            "title": repo.pulls[int(number)],
            "num": int(number),
            "author": {"name": request.account.user if request.account else None},
            "createdAt": repo.created,
            "status": "closed" if int(number) in repo.closed else "draft",
            "repo": {"name": repo.id, "type": repo.type},
            "isPullRequest": True,
            "filesWithConflicts": [],
            "changes": {"base": "refs/heads/main"},
            "events": [],
            "diff": "",
        }
    )
