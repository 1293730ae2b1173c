"""Calls to the Hugging Face Hub that end, are tried again where that is safe, and fail in one line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub  # which imports its parts as they are used
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session, validate_repo_id
from pydantic import ValidationError

from simcse_st.errors import InputError, RunError

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

logger = logging.getLogger(__name__)

TIMEOUT = 60.0  # seconds without a byte
RETRIES = 4  # after 1, 2, 4, 8 seconds
_LONGEST_WAIT = 60.0  # seconds that the hub may ask for
_PASSING = (408, 425, 429, 500, 502, 503, 504)

# What a repository may hold beside a model: it changes nothing about how the model loads.
HARMLESS = re.compile(
    r"\.gitattributes|\.gitignore|(.*/)?(LICEN[CS]E|NOTICE)[^/]*|\.eval_results/[^/]+|.+\.(md|png|jpe?g|svg|gif|cff)",
    re.IGNORECASE,
)


def connect(timeout: float = TIMEOUT) -> HfApi:
    """The hub's client, with a bound on its waiting: by itself it would wait for ever.

    Args:
        timeout: Seconds that it may wait for a connection or a byte.

    Raises:
        InputError: The hub is switched off, or the time is none.
    """
    if huggingface_hub.is_offline_mode():
        raise InputError("offline: HF_HUB_OFFLINE is set, and this command needs the hub")
    if not timeout > 0:
        raise InputError(f"--timeout {timeout:g}: give seconds, more than 0")

    session = get_session()
    client = _PATIENT.get(type(session)) or type("PatientClient", (_Patient, type(session)), {})
    _PATIENT[client] = client
    hooks = session.event_hooks
    huggingface_hub.set_client_factory(lambda: client(event_hooks=hooks, follow_redirects=True, timeout=timeout))
    return huggingface_hub.HfApi()


_PATIENT: dict[type, type] = {}
# The calls that the hub's client does not try again by itself, and that do no more when made twice.
_REPEATABLE = re.compile(
    r"/api/(whoami-v2|validate-yaml|repos/create|models/[^/]+/[^/]+(/(revision|refs|auth-check|branch|discussions)\b.*)?)"
)


class _Patient:
    """Of the hub's HTTP client: bounds each wait, and repeats calls while the hub or the network fails in passing."""

    timeout: Any

    def send(self, request: Any, **options: Any) -> Any:
        """Sends a request."""
        # Here and not as the client's own time-out: the hub's calls overrule that by theirs, or by none.
        request.extensions["timeout"] = self.timeout.as_dict()
        send = super().send  # type: ignore[misc]
        if not _REPEATABLE.fullmatch(request.url.path):
            return send(request, **options)
        for number in range(RETRIES):
            wait = 2.0**number
            try:
                response = send(request, **options)
            except (HTTPError, ConnectionError, TimeoutError) as error:
                logger.info("the hub: %s; trying again", _short(error))
            else:
                asked = _retry_after(response)
                if response.status_code not in _PASSING or (asked or 0) > _LONGEST_WAIT:
                    return response
                logger.info("the hub: %s; trying again", response.status_code)
                wait = wait if asked is None else asked + 1
            time.sleep(wait)
        return send(request, **options)


def check_repo_id(repo_id: str) -> None:
    """Makes sure that it is ``OWNER/NAME``.

    Raises:
        InputError: It is not.
    """
    with contextlib.suppress(HFValidationError):
        validate_repo_id(repo_id)
        if repo_id.count("/") == 1:
            return
    raise InputError(f"{repo_id!r} is no repository: write OWNER/NAME, of letters, digits, '-', '_' and '.'")


def check_names(repo_id: str, revision: str | None, create_pr: bool) -> None:
    """Makes sure that these name a place.

    Raises:
        InputError: They do not.
    """
    check_repo_id(repo_id)
    if create_pr and revision:
        raise InputError("--create-pr opens a pull request against main: leave --revision out")
    if revision is not None and (
        not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", revision)
        or ".." in revision
        or revision.endswith((".", ".lock"))
        or re.fullmatch("[0-9a-f]{40}", revision)
    ):
        raise InputError(f"--revision {revision!r}: name a branch")


def pause(error: Exception, wait: float) -> float:
    """Seconds until the next try: what the hub asks for, or the given.

    Raises:
        Exception: The error, if the hub asks for more than a minute.
    """
    asked = retry_after(error)
    if asked is not None and asked > _LONGEST_WAIT:
        raise error
    logger.info("the hub: %s; trying again", _short(innermost(error)))
    return wait if asked is None else asked + 1


def retry_after(error: BaseException) -> float | None:
    """Seconds that an answer asks to wait for, if it does."""
    response = getattr(innermost(error), "response", None)
    return None if response is None else _retry_after(response)


def _retry_after(response: Any) -> float | None:
    asked = response.headers.get("Retry-After", "")
    return float(asked) if re.fullmatch(r"\d+", asked) else None


def status_of(error: BaseException) -> int | None:
    """The status of the answer that an error is about."""
    return getattr(getattr(innermost(error), "response", None), "status_code", None)


def is_passing(error: BaseException) -> bool:
    """Whether the same call may do in a moment: the network broke, or the hub is busy or down."""
    status = status_of(error)
    if status is not None:
        return status in _PASSING
    # Without an answer: what httpx raises of a connection, what hf_xet does, what is made of an answer that is no JSON.
    return isinstance(innermost(error), (HTTPError, ConnectionError, TimeoutError, json.JSONDecodeError))


def innermost(error: BaseException) -> BaseException:
    """Of an error and those that it came from, the one that says most: the hub's answer, or the broken connection."""
    chain, below = [error], error.__cause__ or error.__context__
    while below is not None:
        chain.append(below)
        below = below.__cause__ or below.__context__
    answered = [one for one in chain if getattr(one, "response", None) is not None]
    return next(iter([*answered, *(one for one in chain if isinstance(one, HTTPError)), error]))


@contextlib.contextmanager
def in_one_line(doing: str) -> Iterator[None]:
    """Makes one line of whatever the hub's client raises.

    Args:
        doing: What failed, as the beginning of that line.

    Raises:
        RunError: With what happened and what to do.
    """
    try:
        yield
    except (InputError, RunError):
        raise
    except Exception as error:
        by_the_hub = isinstance(error, (HTTPError, OSError, ValueError, RuntimeError)) or status_of(error) is not None
        if not (by_the_hub or _misread(error)):  # but a fault of this program
            raise
        raise RunError(f"{doing}: {_explain(innermost(error))}") from error


def _misread(error: BaseException) -> bool:
    """Whether the hub's client stumbled over an answer that is none of the hub's, such as a gateway's."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return isinstance(error, (json.JSONDecodeError, ValidationError)) or (
        isinstance(error, (LookupError, TypeError, AttributeError, AssertionError))
        and Path(huggingface_hub.__file__).parent in Path(frames[-1]).parents
    )


def _explain(error: BaseException) -> str:
    status, again = status_of(error), "run the same command again"
    if isinstance(error, GatedRepoError):
        return f"it is open on request only ({status}): ask for access on its page, and set the token of that account"
    if isinstance(error, RevisionNotFoundError):
        return "there is no such branch, tag or commit: see its page for those that exist"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no such repository, or this token may not see it ({status}): check the name and the token"
    if status == 401:
        return f"the hub does not know the token ({_said(error)}): log in with `hf auth login`, or set HF_TOKEN"
    if status == 403:
        return f"this token has no right to that ({_said(error)}): use one with write permission there"
    if status == 409:
        return f"another change of the repository is under way ({_said(error)}): {again}"
    if status == 412:
        return f"someone has pushed in between ({_said(error)}): look at it, and {again}"
    if status == 429:
        asked = retry_after(error)
        return f"too many requests ({_said(error)}): wait {f'{asked:.0f} s' if asked else 'some minutes'}, and {again}"
    if status in _PASSING:
        return f"the hub does not work at the moment ({_said(error)}): {again} later"
    if "timeout" in type(error).__name__.lower() or isinstance(error, TimeoutError):
        return f"no answer from {constants.ENDPOINT} in time ({_short(error)}): {again}, or with a longer --timeout"
    if isinstance(error, (HTTPError, ConnectionError)) and not isinstance(error, HfHubHTTPError):
        return f"the connection to {constants.ENDPOINT} failed ({_short(error)}): {again}"
    if _misread(error):
        return f"{constants.ENDPOINT} gave an answer that is none of the hub's ({_short(error)}): is this the hub?"
    if status == 404:
        path: Any = "what was asked for"
        with contextlib.suppress(RuntimeError, AttributeError):  # an answer may have lost its question
            path = error.request.url  # type: ignore[attr-defined]
        return f"{constants.ENDPOINT} does not find {path} ({_said(error)}): is this the hub? then {again}"
    return _short(error)


def _said(error: BaseException) -> str:
    """What the hub says of it, with the status."""
    said = getattr(error, "server_message", None)
    if not said:
        with contextlib.suppress(ValueError, AttributeError):
            said = _words(error.response.json())  # type: ignore[attr-defined]
    said = " ".join(str(said or "").split())
    return f"{status_of(error)}: {said}" if said else str(status_of(error))


def _words(answer: Any) -> str:
    """The reason within an answer, however deep: as in ``{"detail": {"error": "no space left"}}``."""
    if isinstance(answer, dict):
        answer = [answer[key] for key in ("error", "message", "errors", "detail") if key in answer]
    return "; ".join(filter(None, map(_words, answer))) if isinstance(answer, list) else str(answer or "")


def _short(error: BaseException) -> str:
    if status_of(error) is not None:
        return _said(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(frozen=True)
class LocalFile:
    """A file of this disk that is, or is to be, in a repository.

    Attributes:
        size: In bytes.
        sha256: The hub's name of it if it is a large file (LFS, Xet).
        git_sha1: The hub's name of it if it is not.
    """

    size: int
    sha256: str
    git_sha1: str

    def is_at(self, remote: RepoFile | None) -> bool:
        """Whether the file of a repository has these bytes, by the hub's own checksum."""
        if remote is None:
            return False
        return remote.lfs.sha256 == self.sha256 if remote.lfs else remote.blob_id == self.git_sha1


def local_file(content: Path | bytes) -> LocalFile:
    """Reads a file, or takes bytes for one."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    sha256, sha1 = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)  # git's name of a file
    for block in [content] if isinstance(content, bytes) else _blocks(content):
        sha256.update(block)
        sha1.update(block)
    return LocalFile(size, sha256.hexdigest(), sha1.hexdigest())


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block


def remote_files(api: HfApi, repo_id: str, commit: str) -> dict[str, RepoFile]:
    """The files of a commit, with sizes and the hub's checksums, by their paths."""
    from huggingface_hub.hf_api import RepoFile

    entries = api.list_repo_tree(repo_id, revision=commit, recursive=True)  # which tries again by itself
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
