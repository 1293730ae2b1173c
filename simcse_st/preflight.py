"""All that is checked before the first byte is sent: the run, its card, the place and the rights to it, the model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from sentence_transformers import SentenceTransformer

from simcse_st.card import CARD
from simcse_st.data import load_graded_pairs
from simcse_st.errors import InputError, RunError
from simcse_st.hub import LocalFile, check_repo_id, local_file, patiently, remote_files, status_of
from simcse_st.modeling import weights_sha256
from simcse_st.preparing import source_of
from simcse_st.publishing import Run
from simcse_st.recipe import resolve
from simcse_st.verifying import TOLERANCE, spearman

logger = logging.getLogger(__name__)

# What a repository may hold beside the model: it changes nothing about how the model loads.
HARMLESS = re.compile(
    r"\.gitattributes|\.gitignore|LICEN[CS]E[^/]*|NOTICE[^/]*|[^/]+\.(md|png|jpe?g|svg|gif|cff)", re.IGNORECASE
)


@dataclass
class Target:
    """The place on the hub, and what is there.

    Attributes:
        repo_id: ``OWNER/NAME``.
        branch: Where to commit.
        exists: Whether there is such a repository.
        private: Whether only its owners see it, or will.
        head: The commit that the branch is at; of a branch that is to be made, the one it starts from.
        has_branch: Whether there is such a branch.
        files: What is in that commit.
    """

    repo_id: str
    branch: str
    private: bool
    exists: bool = True
    head: str | None = None
    has_branch: bool = False
    files: dict[str, RepoFile] = field(default_factory=dict)


def check_names(repo_id: str, revision: str | None, create_pr: bool) -> None:
    """Makes sure that these name a place.

    Raises:
        InputError: They do not.
    """
    check_repo_id(repo_id)
    if create_pr and revision:
        raise InputError("--create-pr opens a pull request against main: leave --revision out")
    if revision is not None and (not re.fullmatch(r"\w[\w./-]*", revision) or re.fullmatch("[0-9a-f]{40}", revision)):
        raise InputError(f"--revision {revision!r}: name a branch")


def check_folder(run: Run, card: str) -> dict[str, LocalFile]:
    """The files that are published: the model's, as its run left them, and the card.

    Raises:
        InputError: The card lacks what a published one needs, the folder holds other files, or one has changed.
    """
    if not run.recipe.card.license:
        raise InputError(
            f"card.license is not set, and a model without a licence may be used by nobody: choose one, e.g. "
            f"simcse-st card {run.folder} --set card.license=apache-2.0"
        )
    wanted = run.results.get("files")
    if not isinstance(wanted, dict) or not wanted:
        raise InputError(f"{run.folder / 'results.json'} has no 'files', the checksums of the model: train it again")
    found = {path.relative_to(run.model).as_posix(): path for path in sorted(run.model.rglob("*")) if not path.is_dir()}
    other = sorted(found.keys() - wanted.keys() - {CARD})
    if other:
        raise InputError(f"{run.model}: {', '.join(other)}: not of the model that was measured: move it elsewhere")
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise InputError(f"{run.model}: {', '.join(missing)}: not there any more: train it again")
    files = {name: local_file(found[name]) for name in wanted}
    for name, file in files.items():
        if file.sha256 != wanted[name]:
            raise InputError(f"{run.model / name} has changed since it was measured (SHA-256 {file.sha256})")
        if name.endswith(".json"):
            _check_paths(run, str(run.model / name), found[name].read_text("utf-8"))
    _check_paths(run, "the card", card)
    return {**files, CARD: local_file(card.encode())}


def _check_paths(run: Run, where: str, text: str) -> None:
    """What this machine calls its folders is nobody else's business."""
    base = Path(resolve(run.recipe.model.base)).expanduser()
    for folder in (Path.home(), Path.cwd(), run.folder, *([base] if base.is_dir() else [])):
        path = str(folder.resolve())
        if len(folder.resolve().parts) > 1 and re.search(rf"(?<![\w/]){re.escape(path)}(?=[/\"'\s)]|$)", text):
            raise InputError(f"{where} names a folder of this machine, {path}, and would publish it")


def check_metadata(card: str) -> None:
    """Has the hub look at the card's metadata."""
    try:
        patiently(ModelCard(card).validate, repo_type="model")
    except ValueError as error:
        if status_of(error) not in (None, 400) or isinstance(error, json.JSONDecodeError):
            raise
        raise InputError(f"the hub does not accept the card's metadata: {' '.join(str(error).split())}") from error


def find_target(api: HfApi, repo_id: str, branch: str, private: bool, create_pr: bool) -> Target:
    """Finds the repository, and whether this token may change it.

    Raises:
        InputError: There is no token, or the repository is public and must be private.
        RunError: The token has no right to it.
    """
    if not get_token():
        raise InputError("no token: log in with `hf auth login`, or set HF_TOKEN to one with write permission")
    account = patiently(api.whoami)
    if _role(account) == "read":
        raise RunError(f"{repo_id}: the token of {account['name']} can only read: use one with write permission")
    try:
        info = patiently(api.model_info, repo_id)
    except RepositoryNotFoundError:
        _check_may_create(account, repo_id)
        return Target(repo_id, branch, private, exists=False)
    if private and not info.private:
        raise InputError(f"--private: {repo_id} is public: make it private in its settings, or leave the option out")
    patiently(api.auth_check, repo_id, write=not create_pr)
    target = Target(repo_id, branch, bool(info.private))
    look(api, target)
    return target


def look(api: HfApi, target: Target) -> None:
    """Finds out what the branch is at."""
    try:
        target.head = str(patiently(api.model_info, target.repo_id, revision=target.branch).sha)
        target.has_branch = True
    except RevisionNotFoundError:
        if target.branch.startswith("refs/"):
            raise InputError(f"--revision {target.branch}: {target.repo_id} has no such pull request") from None
        target.head = str(patiently(api.model_info, target.repo_id).sha)
    target.files = remote_files(api, target.repo_id, target.head)


def _role(account: Mapping[str, Any]) -> str | None:
    return ((account.get("auth") or {}).get("accessToken") or {}).get("role")


def _check_may_create(account: Mapping[str, Any], repo_id: str) -> None:
    """Whether an account may make a repository there; of a fine-grained token, only the hub knows."""
    writable = [org["name"] for org in account.get("orgs", ()) if org.get("roleInOrg") != "read"]
    owners = [account["name"], *writable]
    if repo_id.partition("/")[0] not in owners:
        raise RunError(
            f"{repo_id}: there is no such repository that {account['name']} may see, and to make one takes an owner of "
            f"{', '.join(owners)}"
        )


def check_others(run: Run, target: Target, files: Mapping[str, LocalFile]) -> list[str]:
    """The other files of the repository: harmless ones, and those of an earlier push, which go.

    Raises:
        InputError: It holds files that are neither.
    """
    others = sorted(target.files.keys() - files.keys())
    earlier = run.pushed() or {}
    ours = earlier.get("files", {}) if earlier.get("repo") == target.repo_id else {}
    foreign = [name for name in others if name not in ours and not HARMLESS.fullmatch(name)]
    if foreign:
        raise InputError(
            f"{target.repo_id} holds files of something else: {', '.join(foreign)}: delete them, or choose another"
        )
    return others


def check_model(run: Run) -> None:
    """Loads the model by Sentence Transformers alone, and scores it again.

    Raises:
        RunError: It is not the model of the record.
    """
    try:
        model = SentenceTransformer(str(run.model), local_files_only=True)
    except Exception as error:  # of many classes, all about what stands in the folder
        raise RunError(f"{run.model} does not load: {' '.join(str(error).split())}") from error
    pairs = load_graded_pairs(source_of(run.recipe.data.test, "test"))
    if pairs.facts["pairs_sha256"] != run.manifest["test"]["pairs_sha256"]:
        raise InputError(f"{pairs.facts['sources']}: the test pairs have changed since the run")
    score, recorded = spearman(model, pairs), run.results["test"]["spearman"]
    if weights_sha256(model) != run.results["weights_sha256"] or abs(score - recorded) > TOLERANCE:
        raise RunError(f"{run.model} scores {score:.4f} on test, but results.json says {recorded:.4f}: not published")
    logger.info("model    loads, and scores %.4f on test again", score)
