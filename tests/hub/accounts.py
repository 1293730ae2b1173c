"""Who may do what."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Access(enum.Enum):
    """What a request wants with a repository."""

    SEE = "its metadata"
    READ = "the bytes of its files"
    WRITE = "to change it"


class Account(NamedTuple):
    """What a token stands for; with the role "read" it changes nothing."""

    user: str
    role: str

    def belongs_to(self, repo_id: str) -> bool:
        """Whether the repository is in the user's own namespace or in one of their organisations'."""
        namespace = repo_id.rpartition("/")[0]
        return namespace in (self.user, *ORGANISATIONS.get(self.user, []))

    def may_write(self, repo_id: str) -> bool:
        return self.role == "write" and self.belongs_to(repo_id)


TOKENS = {
    "hf_alice": Account("alice", "write"),
    "hf_alice_read": Account("alice", "read"),
    "hf_bob": Account("bob", "write"),
}
ORGANISATIONS = {"alice": ["acme"], "bob": []}
