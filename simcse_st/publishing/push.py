"""A finished run -> a model on the Hugging Face Hub, all of it or nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from simcse_st.card import compose_card
from simcse_st.console import Table
from simcse_st.errors import RunError
from simcse_st.publishing.hub import (
    HARMLESS,
    RETRIES,
    TIMEOUT,
    LocalFile,
    check_names,
    connect,
    in_one_line,
    is_passing,
    pause,
    remote_files,
    status_of,
)
from simcse_st.publishing.leaderboard import FOLDER, leaderboard_files
from simcse_st.publishing.preflight import (
    Target,
    check_folder,
    check_metadata,
    check_model,
    check_others,
    find_target,
    load_pairs,
    look,
)
from simcse_st.records import SPLITS, Push, PushedFile, Pushes
from simcse_st.run import CARD, Run, locked, open_run, write_text

logger = logging.getLogger(__name__)

Made = dict[str, str | int | None]  # the fields of a push that the hub's answer gives

_NEWEST = 20  # pull requests, of which one may be this push


@dataclass(frozen=True)
class Pushed:
    """What a push did, or in a dry run would do.

    Attributes:
        record: What ``push.json`` says; in a dry run without a commit.
        changed: The files that were sent.
        deleted: The files that were taken away.
    """

    record: Push
    changed: list[str]
    deleted: list[str]


def push(
    run: Run | str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
    verify: bool = True,
    timeout: float = TIMEOUT,
) -> Pushed:
    """Publishes the model of a finished run with its card, as one commit, and has the published copy verified.

    Everything is checked before the first byte is sent: the run and its card, the token and its rights, that the model
    loads by Sentence Transformers alone and scores what the record says. What was pushed goes to ``push.json``. The
    same call again sends what has changed, or finishes what was interrupted.

    Args:
        run: The run, or its folder.
        repo_id: ``OWNER/NAME``; made if it is not there.
        private: Make it so that only its owners see it.
        revision: The branch to commit to, by default ``main``; made if it is not there.
        create_pr: Open a pull request instead of committing to ``main``.
        dry_run: Check everything, and change nothing, here or there.
        verify: Whether to verify the published copy, in a process of its own.
        timeout: Seconds to wait for the hub.

    Raises:
        InputError: The run or a name cannot be used. Nothing has been changed.
        RunError: The hub refuses or fails; or the published copy is not the model.
    """
    check_names(repo_id, revision, create_pr)
    run = run if isinstance(run, Run) else open_run(run)
    api = connect(timeout)
    with locked(run.folder):
        pushed = _push(api, run, repo_id, private, revision or "main", create_pr, dry_run)
    if verify and not dry_run:
        _verify(run, pushed.record, timeout)
    return pushed


def _push(api: HfApi, run: Run, repo_id: str, private: bool, revision: str, create_pr: bool, dry_run: bool) -> Pushed:
    card = compose_card(run, repo_id)
    texts = {CARD: card.encode(), **leaderboard_files(run)}
    files = check_folder(run, texts)
    earlier = run.pushes()
    pairs = load_pairs(run)
    with in_one_line(f"{repo_id}: nothing has been pushed"):
        target = find_target(api, repo_id, revision, private, create_pr)
        check_metadata(api, card)
        others = check_others(api, target, files)
    check_model(run, pairs)
    changed = [name for name, file in files.items() if not file.is_at(target.files.get(name))]
    ours = {name for push in earlier if push.repo == repo_id for name in push.files if name.startswith(FOLDER)}
    stale = [name for name in others if name in ours or not HARMLESS.fullmatch(name)]
    record = _record(run, target, files)
    if dry_run:
        return Pushed(record, changed, stale)
    if changed or stale or not target.has_branch:
        content = {name: texts.get(name, run.model_path / name) for name in changed}
        made = _upload(api, run, target, files, content, stale, create_pr)
    else:
        logger.info("push     nothing has changed")
        made = _made(api, target, str(target.head), None)
    record = record.model_copy(update=made)
    kept = [push for push in earlier if (push.repo, push.revision) != (record.repo, record.revision)]
    try:
        write_text(run.model_path / CARD, card)  # which names the repository: not before it is there
        run.write(Pushes(**dict(record), earlier=[Push(**push.model_dump(exclude={"earlier"})) for push in kept]))
    except RunError as error:
        raise RunError(
            f"{repo_id}: commit {record.commit} is published, but {error}: make it writable, and push again"
        ) from error
    return Pushed(record, changed, stale)


def files_table(pushed: Pushed) -> Table:
    """What a push sends, file by file."""
    record = pushed.record
    rows = [
        [name, f"{file.size:,}", "send" if name in pushed.changed else "is there", file.sha256]
        for name, file in record.files.items()
    ]
    rows += [[name, "", "delete", ""] for name in pushed.deleted]
    total = sum(record.files[name].size for name in pushed.changed)
    title = f"{record.repo}, {record.revision}: {len(pushed.changed)} files, {total / 1e6:.1f} MB to send"
    return Table(title, ["", "bytes", "", "SHA-256"], rows)


def _record(run: Run, target: Target, files: Mapping[str, LocalFile]) -> Push:
    return Push(
        repo=target.repo_id,
        revision=target.branch,
        private=target.private,
        files={name: PushedFile(size=file.size, sha256=file.sha256) for name, file in sorted(files.items())},
        stack=run.results.stack,
        weights_sha256=run.results.weights_sha256,
        scores={split: run.results.split(split).value for split in SPLITS},
    )


def _upload(
    api: HfApi,
    run: Run,
    target: Target,
    files: Mapping[str, LocalFile],
    changed: Mapping[str, Path | bytes],
    stale: list[str],
    create_pr: bool,
) -> Made:
    """Sends what has changed, as one commit."""
    with in_one_line(f"{target.repo_id}: nothing has been published"):
        if not target.exists:
            _create(api, target)
            check_others(api, target, files)  # if someone else made it in between
        if not target.has_branch and not create_pr:
            api.create_branch(target.repo_id, branch=target.branch, revision=target.head, exist_ok=True)
        if not changed and not stale:
            return _made(api, target, str(target.head), None)
        additions = [CommitOperationAdd(name, content) for name, content in changed.items()]
        # The large files first: without a commit they are not to be seen, and what has come need not be sent again.
        api.preupload_lfs_files(
            target.repo_id, additions, revision=target.branch, create_pr=create_pr, free_memory=False
        )
        deletions = [CommitOperationDelete(name) for name in stale if name in target.files]
        if create_pr and (there := _find_commit(api, target, files, create_pr)):
            return there
    return _commit(api, target, files, [*additions, *deletions], _title(run), create_pr)


def _create(api: HfApi, target: Target) -> None:
    try:
        api.create_repo(target.repo_id, private=target.private)
    except Exception as error:
        if status_of(error) == 403:
            raise RunError(
                f"{target.repo_id}: this token may not make repositories: make it on the hub's site, and push again"
            ) from error
        if status_of(error) != 409:  # made in between, or by a call whose answer was lost
            raise
    look(api, target)


def _title(run: Run) -> str:
    dev, test = (run.results.split(split).value for split in SPLITS)
    return f"{run.recipe.name}: dev {dev:.2f}, test {test:.2f} (simcse-st {run.environment.packages['simcse-st']})"


def _commit(
    api: HfApi,
    target: Target,
    files: Mapping[str, LocalFile],
    operations: list[CommitOperationAdd | CommitOperationDelete],
    title: str,
    create_pr: bool,
) -> Made:
    """Makes the commit, once.

    A call that fails may have made it all the same, when only its answer was lost. So it names its parent, which keeps
    a second call from making another, and after each failure what is there is compared with what was to be there.
    """
    failed = f"{target.repo_id}: nothing has been published"
    for number in range(RETRIES + 1):
        try:
            made = api.create_commit(
                target.repo_id,
                operations,
                commit_message=title,
                revision=None if create_pr else target.branch,
                parent_commit=target.head,
                create_pr=create_pr,
            )
            if made.oid == target.head:
                raise RunError(f"{failed}: the hub says that all is well, but its commit is the old one")
            return _made(api, target, made.oid, made.pr_num)
        except RunError:
            raise
        except Exception as error:
            with in_one_line(f"{target.repo_id}: whether it is published could not be found out"):
                there = _find_commit(api, target, files, create_pr)
            if there is not None:
                return there
            with in_one_line(failed):
                if number == RETRIES or not (is_passing(error) or status_of(error) == 409):
                    raise
                time.sleep(pause(error, 2.0**number))
    raise AssertionError  # the last try returned or raised


def _find_commit(api: HfApi, target: Target, files: Mapping[str, LocalFile], create_pr: bool) -> Made | None:
    """The commit, if it was made.

    Raises:
        RunError: Someone else has made another in between.
    """
    if create_pr:
        refs = api.list_repo_refs(target.repo_id, include_pull_requests=True)
        numbers = {int(ref.name.rpartition("/")[2]): ref.target_commit for ref in refs.pull_requests or ()}
        for number in sorted(numbers, reverse=True)[:_NEWEST]:
            if _holds(api, target, numbers[number], files) and _is_open(api, target, number):
                return _made(api, target, numbers[number], number)
        return None
    head = str(api.model_info(target.repo_id, revision=target.branch).sha)
    if head == target.head:
        return None
    if _holds(api, target, head, files):
        return _made(api, target, head, None)
    raise RunError(
        f"{target.repo_id}: nothing has been published: someone has pushed in between (commit {head}): look at it, and "
        "run the same command again"
    )


def _is_open(api: HfApi, target: Target, pull_request: int) -> bool:
    return api.get_discussion_details(target.repo_id, pull_request).status in ("open", "draft")


def _holds(api: HfApi, target: Target, commit: str, files: Mapping[str, LocalFile]) -> bool:
    there = remote_files(api, target.repo_id, commit)
    return all(file.is_at(there.get(name)) for name, file in files.items())


def _made(api: HfApi, target: Target, commit: str, pull_request: int | None) -> Made:
    url = f"{api.endpoint}/{target.repo_id}"
    place = f"{url}/discussions/{pull_request}" if pull_request else f"{url}/commit/{commit}"
    logger.info("push     %s", place)
    of_request = {"revision": f"refs/pr/{pull_request}"} if pull_request else {}
    return {"commit": commit, "url": place, "pull_request": pull_request, **of_request}


def _verify(run: Run, record: Push, timeout: float) -> None:
    """Verifies the published copy as anyone would: in a process of its own, from nothing that is on this disk."""
    command = [
        *(sys.executable, "-m", "simcse_st", "verify", record.repo, "--revision", str(record.commit)),
        *("--run", str(run.folder), "--timeout", str(timeout)),
    ]
    if subprocess.run(command, check=False).returncode:
        raise RunError(
            f"{record.repo}: commit {record.commit} is published, but not proven to be the model: see above, and "
            f"verify it again by simcse-st verify {record.repo} --revision {record.revision} --run {run.folder}"
        )
