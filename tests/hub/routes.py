"""The addresses of the hub, and what a request needs to be allowed for each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import unquote

from . import downloads, repos, uploads
from .accounts import TOKENS, Access
from .messages import HubError, Reply, Request
from .store import Hub

# The id of a repository without an owner is one name. A slash that is part of a revision comes encoded, so that it does
# not end the placeholder; only the path of a file may hold plain ones.
PLACEHOLDERS = {
    "{api}": "/api/{type}s/{id}",
    "{web}": "/(?:(?P<type_>dataset|space)s/)?{id}",
    "{type}": "(?P<type_>model|dataset|space)",
    "{id}": "(?P<id_>[^/]+(?:/[^/]+)?)",
    "{rev}": "(?P<revision>[^/]+)",
    "{sha}": "(?P<revision>[0-9a-f]{40})",
    "{path}": "(?P<path>.+)",
    "{number}": r"(?P<number>\d+)",
}


class Route(NamedTuple):
    """With an access, the endpoint is given the repository that the address names."""

    method: str
    address: re.Pattern[str]
    access: Access | None
    endpoint: Callable[..., Reply]


def route(method: str, template: str, access: Access | None, endpoint: Callable[..., Reply]) -> Route:
    for placeholder, pattern in PLACEHOLDERS.items():
        template = template.replace(placeholder, pattern)
    return Route(method, re.compile(template), access, endpoint)


# The first that fits is taken: {api} alone comes last, since "bert/refs" would do for the name of a repository.
ROUTES = [
    route("GET", "/api/whoami-v2", None, repos.whoami),
    route("POST", "/api/validate-yaml", None, repos.validate_yaml),
    route("POST", "/api/repos/create", None, repos.create),
    route("DELETE", "/api/repos/delete", None, repos.delete),
    route("GET", "/api/resolve-cache/{type}s/{id}/{sha}/{path}", Access.READ, downloads.resolve_cache),
    route("GET", "{api}/auth-check", Access.READ, repos.auth_check),
    route("GET", "{api}/auth-check/write", Access.WRITE, repos.auth_check),
    route("GET", "{api}/refs", Access.SEE, repos.refs),
    route("GET", "{api}/commits/{rev}", Access.SEE, repos.commits),
    route("GET", "{api}/tree/{rev}", Access.SEE, repos.tree),
    route("GET", "{api}/tree/{rev}/{path}", Access.SEE, repos.tree),
    route("POST", "{api}/paths-info/{rev}", Access.SEE, repos.paths_info),
    route("POST", "{api}/branch/{rev}", Access.WRITE, repos.create_branch),
    route("DELETE", "{api}/branch/{rev}", Access.WRITE, repos.delete_branch),
    route("POST", "{api}/tag/{rev}", Access.WRITE, repos.create_tag),
    route("DELETE", "{api}/tag/{rev}", Access.WRITE, repos.delete_tag),
    route("POST", "{api}/discussions", Access.WRITE, repos.open_pull_request),
    route("GET", "{api}/discussions/{number}", Access.SEE, repos.pull_request),
    route("POST", "{api}/preupload/{rev}", Access.WRITE, uploads.preupload),
    route("POST", "{api}/commit/{rev}", Access.WRITE, uploads.commit),
    route("GET", "{api}/xet-write-token/{rev}", Access.WRITE, uploads.xet_token),
    route("GET", "{api}/xet-read-token/{rev}", Access.READ, uploads.xet_token),
    route("GET", "{api}/revision/{rev}", Access.SEE, repos.info),
    route("GET", "{api}", Access.SEE, repos.info),
    route("POST", r"{web}\.git/info/lfs/objects/batch", None, uploads.lfs_batch),
    route("GET", "{web}/(?:resolve|raw)/{rev}/{path}", Access.READ, downloads.resolve),
]


def answer(hub: Hub, request: Request) -> Reply:
    """What the hub says to a request."""
    if header := request.headers.get("Authorization"):
        request.account = TOKENS.get(header.removeprefix("Bearer ").strip())
        if request.account is None:
            raise HubError(401, "Invalid credentials in Authorization header")
    method = "GET" if request.method == "HEAD" else request.method
    for candidate in ROUTES:
        match = candidate.address.fullmatch(request.path) if candidate.method == method else None
        if match:
            return call(candidate, hub, request, match)
    raise HubError(404, "Sorry, we can't find the page you are looking for.")


def call(chosen: Route, hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    names = {name: unquote(text) for name, text in match.groupdict().items() if text is not None}
    with hub.lock:
        if "id_" not in names:
            return chosen.endpoint(hub, request)
        type_, id_ = names.pop("type_", "model"), names.pop("id_")
        if chosen.access is None:
            return chosen.endpoint(hub, request, type_, id_)
        if request.flag("create_pr") or chosen.endpoint is repos.open_pull_request:
            # Whoever may read may ask for a change, but must be known.
            repo = hub.find_repo(type_, id_, request.account, Access.READ)
            if request.account is None or request.account.role == "read":
                raise HubError(403, "Forbidden: you must use a write token to open a pull request.")
            return chosen.endpoint(hub, request, repo, **names)
        return chosen.endpoint(hub, request, hub.find_repo(type_, id_, request.account, chosen.access), **names)
