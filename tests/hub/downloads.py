"""Endpoints for the bytes of files."""

from __future__ import annotations

import re
from urllib.parse import quote

from .commits import Commit, File, Repo
from .messages import HubError, Reply, Request
from .store import Hub
from .uploads import object_url


def resolve(hub: Hub, request: Request, repo: Repo, revision: str, path: str) -> Reply:
    """A file, or where it is."""
    commit = repo.at(revision)
    file, headers = find(commit, path)
    if file.lfs or not hub.resolve_cache:
        return serve_file(hub, request, repo, commit, file, headers)
    linked = {"X-Linked-Size": file.size, "X-Linked-ETag": f'"{file.oid}"'}
    location = f"/api/resolve-cache/{repo.type}s/{repo.id}/{commit.id}/{quote(path, safe='')}?etag=%22{file.oid}%22"
    return Reply(status=307, headers={**headers, **linked, "Location": location})


def resolve_cache(hub: Hub, request: Request, repo: Repo, revision: str, path: str) -> Reply:
    """A file, at the address that hf.co redirects to for a small one."""
    commit = repo.at(revision)
    return serve_file(hub, request, repo, commit, *find(commit, path))


def find(commit: Commit, path: str) -> tuple[File, dict[str, str]]:
    """The file at a path, and the headers that go with it however it is sent."""
    headers = {"X-Repo-Commit": commit.id}
    file = commit.tree.get(path)
    if file is None:
        # The client notes in its cache that this commit has no such file.
        raise HubError(404, "Entry not found", "EntryNotFound", headers=headers, body=b"Entry not found")
    name = quote(path.rpartition("/")[2])
    return file, {**headers, "Content-Disposition": f"inline; filename*=UTF-8''{name}"}


def serve_file(hub: Hub, request: Request, repo: Repo, commit: Commit, file: File, headers: dict[str, str]) -> Reply:
    """The bytes themselves, or for an LFS object a redirect to the object store."""
    if not file.lfs:
        return content(request, hub.blob_path(file).read_bytes(), f'"{file.oid}"', headers)
    # The client takes what it needs to know from the redirect: the object store is asked for the bytes alone.
    linked = {"X-Linked-Size": file.size, "X-Linked-ETag": f'"{file.lfs}"', "ETag": f'"{file.oid}"'}
    xet = {}
    if file.xet:
        token_url = f"{hub.url}/api/{repo.type}s/{repo.id}/xet-read-token/{commit.id}"
        xet = {"X-Xet-Hash": file.xet, "Link": f'<{token_url}>; rel="xet-auth"'}
    return Reply(b"Found", 302, {**headers, **linked, **xet, "Location": object_url(hub, "lfs", file.lfs)})


def content(request: Request, data: bytes, etag: str, headers: dict[str, str] | None = None) -> Reply:
    """The bytes of a file, or the range of them that is asked for."""
    headers = {"Content-Type": "application/octet-stream", "ETag": etag, "Accept-Ranges": "bytes", **(headers or {})}
    if data and request.fault and request.fault.action == "corrupt":
        data = data[:-1] + bytes([data[-1] ^ 1])
    wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
    if wanted is None or wanted.group() == "bytes=-":
        return Reply(data, headers=headers)
    first, last = wanted.groups()
    start = int(first) if first else max(len(data) - int(last), 0)
    end = min(int(last) + 1, len(data)) if first and last else len(data)
    if start >= len(data):
        return Reply(status=416, headers={"Content-Range": f"bytes */{len(data)}"})
    return Reply(data[start:end], 206, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})
