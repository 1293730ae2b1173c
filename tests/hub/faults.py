"""Faults to order: what a network, a proxy or a broken server does to a request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

ACTIONS = {
    "status": "answer with `status` (and `headers`, and `error` or `json` as the body) instead of doing the work",
    "hang": "wait for `seconds` first",
    "reset": "reset the connection before reading the request's body",
    "reset_body": "reset the connection after reading `bytes` of the request's body",
    "reset_after": "do the work, then reset the connection instead of answering",
    "truncate": "send `bytes` of the reply's body, then reset the connection; with `fin` close it in good order",
    "corrupt": "flip a bit in the last byte of a file that is downloaded",
}


@dataclass
class Fault:
    """One of the actions, for `times` requests of this method (all by default) whose address the pattern is found in.

    The first `skip` such requests pass unharmed. A request that an earlier fault happens to does not count for a later
    one. `times` counts down, so it is 0 once all has happened.
    """

    action: str
    method: str | None = None
    path: str = ""
    times: int = 1
    skip: int = 0
    status: int = 503
    headers: dict[str, str] | None = None
    error: str = "injected"
    json: Any = None
    seconds: float = 5
    bytes: int = 65536
    fin: bool = False

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"unknown action {self.action!r}; there are {', '.join(ACTIONS)}")

    def strikes(self, method: str, target: str) -> bool:
        """Whether it happens to this request, which is then counted."""
        if self.times <= 0 or self.method not in (None, method) or not re.search(self.path, target):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True
