"""The object store: where the bytes of LFS objects go to and come from, on an origin of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from .downloads import content
from .messages import HubError, Reply, Request
from .store import Hub
from .uploads import SIGNATURE


def answer(hub: Hub, request: Request) -> Reply:
    """What the store says to a request; as S3 does, it takes a signed address or a token, not both."""
    if request.headers.get("Authorization"):
        raise HubError(400, "InvalidArgument: Only one auth mechanism allowed")
    name, _, value = SIGNATURE.partition("=")
    if request.query.get(name) != value:
        raise HubError(403, "AccessDenied")
    kind, *names = request.path.strip("/").split("/")
    method = "GET" if request.method == "HEAD" else request.method
    endpoint = ENDPOINTS.get((method, kind, len(names)))
    if endpoint is None:
        raise HubError(404, "NoSuchKey")
    return endpoint(hub, request, *names)


def put(hub: Hub, request: Request, oid: str) -> Reply:
    hub.put_object(oid, request.body)
    return Reply(headers={"ETag": md5_etag(request.body)})


def put_part(hub: Hub, request: Request, oid: str, number: str) -> Reply:
    hub.part_path(oid, int(number)).write_bytes(request.body)
    return Reply(headers={"ETag": md5_etag(request.body)})


def complete(hub: Hub, request: Request, oid: str) -> Reply:
    """Join the parts of an object."""
    wanted = request.json()
    parts = [hub.part_path(oid, part["partNumber"]) for part in wanted["parts"]]
    hub.put_object(wanted["oid"], b"".join(part.read_bytes() for part in parts))
    for part in parts:
        part.unlink()
    return Reply({})


def get(hub: Hub, request: Request, oid: str) -> Reply:
    data = hub.read_object(oid)
    if data is None:
        raise HubError(404, "NoSuchKey")
    return content(request, data, md5_etag(oid.encode()))


def md5_etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


# By method, kind and the number of names after it.
ENDPOINTS: dict[tuple[str, str, int], Callable[..., Reply]] = {
    ("PUT", "lfs", 1): put,
    ("GET", "lfs", 1): get,
    ("PUT", "part", 2): put_part,
    ("POST", "complete", 1): complete,
}
