"""Requests and replies, free of sockets."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from .accounts import Account
from .faults import Fault


@dataclass
class Request:
    """A request whose body has been read."""

    method: str
    path: str  # still percent-encoded: an encoded slash is part of a revision or a file name, not a separator
    query: dict[str, str]
    headers: Message
    body: bytes
    account: Account | None = None
    fault: Fault | None = None

    def json(self) -> Any:
        return json.loads(self.body or b"{}")

    def flag(self, name: str) -> bool:
        """Whether a parameter of the query is true."""
        return is_true(self.query.get(name))


@dataclass
class Reply:
    """A reply; a body that is not bytes is sent as JSON."""

    body: Any = b""
    status: int = 200
    headers: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> tuple[bytes, dict[str, str]]:
        """The body and all the headers that depend on it."""
        body, headers = self.body, {name: str(value) for name, value in self.headers.items()}
        given = {name.lower() for name in headers}
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers = {"Content-Type": "application/json; charset=utf-8", **headers}
        if "content-length" not in given:
            headers["Content-Length"] = str(len(body))
        return body, headers


class HubError(Exception):
    """A refusal. The clients choose their exception class by ``code``, not by the body."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        headers: dict[str, str] | None = None,
        body: Any = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.headers, self.body = headers or {}, body

    def reply(self) -> Reply:
        code = {"X-Error-Code": self.code} if self.code else {}
        body = {"error": self.message} if self.body is None else self.body
        return Reply(body, self.status, {"X-Error-Message": self.message, **code, **self.headers})


def is_true(value: object) -> bool:
    """Whether a parameter of a query, a form or JSON is true."""
    return str(value).lower() in ("1", "true")
