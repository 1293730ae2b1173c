"""What the hub holds: repositories with their commits in memory, the bytes of files on disk."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .accounts import Access, Account
from .commits import File, Repo, git_sha1, lfs_file
from .faults import Fault
from .messages import HubError
from .xet import XetStore

REPO_TYPES = ("model", "dataset", "space")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".onnx", ".gguf", ".model", ".ot", ".tflite", ".pb")
DATA = (".parquet", ".arrow", ".npy", ".npz", ".pkl", ".joblib", ".msgpack", ".mlmodel", ".wasm", ".png", ".jpg")
ARCHIVES = (".gz", ".xz", ".bz2", ".zst", ".zip", ".tar", ".7z", ".rar")
LFS_SUFFIXES = WEIGHTS + DATA + ARCHIVES
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()
SAMPLE_SIZE = 512  # bytes of a file by which to tell whether it is text, as git does


class Hub:
    """The repositories, the stored bytes, the faults to come and the log of all requests.

    ``log`` holds a dict for each request in the order of arrival: server ("hub" or "cdn"), method, path (with the query),
    status ("reset" if the connection was), user, and what the headers said: auth, length, range, ua.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        lfs_threshold: int = 5 * 2**20,
        page_size: int = 1000,
        resolve_cache: bool = False,
        multipart_over: int | None = None,
        chunk_size: int = 5 * 2**20,
        xet: bool = False,
    ) -> None:
        self.root = Path(root).resolve()
        for folder in ("lfs", "blobs", "parts"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        self.lfs_threshold = lfs_threshold
        self.page_size = page_size
        self.resolve_cache = resolve_cache
        self.multipart_over = multipart_over
        self.chunk_size = chunk_size
        self.xet = XetStore(self.root / "cas") if xet else None
        self.repos: dict[tuple[str, str], Repo] = {}
        self.faults: list[Fault] = []
        self.log: list[dict[str, Any]] = []
        self.lock = threading.RLock()
        self.url = self.cdn = ""  # set when it is served

    def fault(self, action: str, **details: Any) -> Fault:
        """Let something go wrong: see ``faults.Fault``."""
        fault = Fault(action, **details)
        with self.lock:
            self.faults.append(fault)
        return fault

    def add_repo(
        self,
        type_: str,
        id_: str,
        files: Mapping[str, bytes],
        *,
        private: bool = False,
        gated: bool = False,
        user: str = "alice",
    ) -> str:
        """Commit files to ``main``, and give the commit's hash.

        A repository that is not there is made first: private, gated and user are of its making, and later calls leave
        them alone. The user may read it, even where the namespace is nobody's ("stanfordnlp/snli") or there is none
        ("bert-base-uncased").
        """
        with self.lock:
            repo = self.repos.get((type_, id_)) or self.create_repo(type_, id_, user, private=private, gated=gated)
            added = {path: self.put(path, data) for path, data in files.items()}
            return repo.commit("main", {**repo.at("main").tree, **added}, "Add files")

    def create_repo(self, type_: str, id_: str, user: str, *, private: bool = False, gated: bool = False) -> Repo:
        """A repository with a first commit, as every new one has."""
        if type_ not in REPO_TYPES:
            raise ValueError(f"{type_!r} is none of {', '.join(REPO_TYPES)}")
        repo = Repo(type_, id_, user, private, gated)
        repo.commit("main", {".gitattributes": self.put_blob(GITATTRIBUTES)}, "initial commit")
        self.repos[type_, id_] = repo
        return repo

    def find_repo(self, type_: str, id_: str, account: Account | None, access: Access) -> Repo:
        """The repository, if this account (None: nobody) may do this with it."""
        repo = self.repos.get((type_, id_))
        may_read = repo is not None and account is not None and (account.user == repo.user or account.belongs_to(id_))
        if repo is None or (repo.private and not may_read):
            # As hf.co does. A client knows it by the code alone: it takes a bare 401 for this only over https.
            raise HubError(404 if account else 401, "Repository not found", "RepoNotFound")
        if access is Access.READ and repo.gated and not may_read:
            raise gated_repo(repo, account)
        if access is Access.WRITE:
            if account is None:
                raise HubError(401, "Invalid username or password.")
            if account.role == "read":
                raise HubError(403, "Forbidden: you must use a write token to upload to a repository.")
            if not account.may_write(id_):
                raise HubError(403, "Authorization error.")
        return repo

    def wants_lfs(self, path: str, size: int, sample: bytes) -> bool:
        """Whether such a file is stored as an LFS object rather than in the commit."""
        return path.lower().endswith(LFS_SUFFIXES) or size > self.lfs_threshold or b"\0" in sample

    def put(self, path: str, data: bytes) -> File:
        """Store a file in the way that its name and content call for."""
        if not data or not self.wants_lfs(path, len(data), data[:SAMPLE_SIZE]):
            return self.put_blob(data)
        oid = hashlib.sha256(data).hexdigest()
        self.put_object(oid, data)
        return lfs_file(oid, len(data))

    def put_blob(self, data: bytes) -> File:
        file = File(git_sha1(data), len(data))
        self._write(self.blob_path(file), data)
        return file

    def put_object(self, oid: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != oid:
            raise HubError(400, "BadDigest")
        self._write(self.object_path(oid), data)

    def blob_path(self, file: File) -> Path:
        return self.root / "blobs" / file.oid

    def object_path(self, oid: str) -> Path:
        """Where an LFS object is, or would be."""
        if not re.fullmatch(r"[0-9a-f]{64}", oid):
            raise HubError(422, "bad oid")
        return self.root / "lfs" / oid

    def part_path(self, oid: str, number: int) -> Path:
        """Where a part of an LFS object is until all are there."""
        return self.root / "parts" / f"{oid}.{number}"

    def find_object(self, oid: str) -> File | None:
        """The LFS object as a file of a commit, if its bytes are here."""
        if self.xet and (stored := self.xet.find(oid)):
            return replace(lfs_file(oid, stored.size), xet=stored.hash)
        path = self.object_path(oid)
        return lfs_file(oid, path.stat().st_size) if path.exists() else None

    def read_object(self, oid: str) -> bytes | None:
        """The bytes of an LFS object; from Xet they are put together once, and kept."""
        path = self.object_path(oid)
        if not path.exists():
            stored = self.xet.find(oid) if self.xet else None
            if not self.xet or not stored:
                return None
            self.put_object(oid, self.xet.read(stored))
        return path.read_bytes()

    def _write(self, path: Path, data: bytes) -> None:
        """Write at once, so that no reader sees half of it."""
        draft = path.with_name(f"{path.name}.{threading.get_ident()}")
        draft.write_bytes(data)
        draft.replace(path)


def gated_repo(repo: Repo, account: Account | None) -> HubError:
    if account is None:
        how = "You must have access to it and be authenticated to access it. Please log in."
        return HubError(401, f"Access to {repo.type} {repo.id} is restricted. {how}", "GatedRepo")
    how = f"you are not in the authorized list. Visit https://huggingface.co/{repo.web_path} to ask for access."
    return HubError(403, f"Access to {repo.type} {repo.id} is restricted and {how}", "GatedRepo")
