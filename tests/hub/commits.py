"""A repository: branches and tags that point at commits, whose trees say what each file's bytes are called."""

from __future__ import annotations

import datetime
import hashlib
import re
import time
from dataclasses import dataclass, field

from .messages import HubError


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def git_sha1(data: bytes) -> str:
    """The name that git gives to these bytes as a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs_pointer(oid: str, size: int) -> bytes:
    """What git holds in the place of an LFS object."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()


def lfs_file(oid: str, size: int) -> File:
    return File(git_sha1(lfs_pointer(oid, size)), size, lfs=oid)


def unknown_revision(revision: str) -> HubError:
    return HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")


@dataclass(frozen=True)
class File:
    """A file of a commit."""

    oid: str  # git's SHA-1: of the content, or of the pointer if the content is an LFS object
    size: int
    lfs: str | None = None  # SHA-256 of the content
    xet: str | None = None

    @property
    def pointer_size(self) -> int:
        return len(lfs_pointer(self.lfs or "", self.size))


Tree = dict[str, File]


@dataclass(frozen=True)
class Commit:
    id: str
    parent: str | None
    tree: Tree
    title: str
    message: str
    date: str
    user: str


@dataclass
class Repo:
    type: str
    id: str
    user: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # branches, and refs/pr/N
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[int, str] = field(default_factory=dict)  # titles
    closed: set[int] = field(default_factory=set)  # those of them that are not open any more
    created: str = field(default_factory=now)

    @property
    def web_path(self) -> str:
        """Where its page is: models have no prefix."""
        return self.id if self.type == "model" else f"{self.type}s/{self.id}"

    def commit(self, branch: str, tree: Tree, title: str, message: str = "", user: str | None = None) -> str:
        parent = self.refs.get(branch)
        # The time is part of it, so that the same change made twice is two commits.
        content = repr((self.type, self.id, branch, parent, title, sorted(tree.items(), key=str), time.time_ns()))
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha] = Commit(sha, parent, tree, title, message, now(), user or self.user)
        self.refs[branch] = sha
        return sha

    def resolve(self, revision: str) -> str:
        """The commit of a branch, a tag or a pull request, or the one whose hash begins so."""
        name = revision.removeprefix("refs/heads/")
        for table, key in ((self.refs, revision), (self.tags, revision), (self.refs, name)):
            if key in table:
                return table[key]
        if re.fullmatch(r"[0-9a-f]{7,40}", revision):
            hits = [sha for sha in self.commits if sha.startswith(revision)]
            if len(hits) == 1:
                return hits[0]
        raise unknown_revision(revision)

    def at(self, revision: str) -> Commit:
        return self.commits[self.resolve(revision)]

    def open_pull(self, title: str, sha: str) -> int:
        """A new pull request whose branch starts at this commit."""
        number = len(self.pulls) + 1
        self.pulls[number] = title
        self.refs[f"refs/pr/{number}"] = sha
        return number
