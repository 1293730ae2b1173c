"""All that is checked before the first byte is sent: the run, its card, the place and the rights to it, the model."""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from sentence_transformers import SentenceTransformer

from simcse_st.card import CARD, read_proof
from simcse_st.data import GradedPairs, load_graded_pairs
from simcse_st.errors import InputError, RunError
from simcse_st.publishing.hub import HARMLESS, LocalFile, local_file, patiently, remote_files, status_of
from simcse_st.models import weights_sha256
from simcse_st.places import resolve
from simcse_st.data.preparing import source_of
from simcse_st.card_records import Run
from simcse_st.evaluation.scoring import score_model
from simcse_st.publishing.verify import TOLERANCE

logger = logging.getLogger(__name__)


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
            _check_private(run, str(run.model / name), found[name].read_text("utf-8"))
    _check_private(run, "the card", card)
    return {**files, CARD: local_file(card.encode())}


def _check_private(run: Run, where: str, text: str) -> None:
    """The token, and what this machine calls its folders, are nobody else's business."""
    if (token := get_token()) and token in text:
        raise InputError(f"{where} holds the token of this machine, and would publish it")
    own = [Path.home(), Path.cwd(), run.folder, *_folders(run)]
    named = [str(folder.resolve()) for folder in own if len(folder.resolve().parts) > 1]
    found = [path for path in named if re.search(rf"(?<!\w){re.escape(path)}(?![\w-])", text)]
    # And whatever else looks like a path of several folders and is one here.
    found += [path for path in re.findall(r"(?<!\w)/[\w.-]+(?:/[\w.-]+)+", text) if Path(path.rstrip(".")).exists()]
    if found:
        raise InputError(f"{where} names a place on this machine, {found[0]}, and would publish it")


def _folders(run: Run) -> list[Path]:
    """The folders that a recipe names: of a local base, and of its files."""
    recipe = run.recipe
    sources = [recipe.data.train, recipe.data.dev, recipe.data.test]
    names = [name for source in sources for name in (source if isinstance(source, list) else [source])]
    files = [Path(resolve(name)).expanduser() for name in names if isinstance(name, str)]
    base = Path(resolve(recipe.model.base)).expanduser()
    return [*([base] if base.is_absolute() else []), *(file.parent for file in files if file.is_absolute())]


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
    refs = patiently(api.list_repo_refs, target.repo_id, include_pull_requests=target.branch.startswith("refs/"))
    heads = {ref.name: ref.target_commit for ref in refs.branches}
    heads |= {ref.ref: ref.target_commit for ref in refs.pull_requests or ()}
    target.has_branch = target.branch in heads
    if not target.has_branch and target.branch.startswith("refs/"):
        raise InputError(f"--revision {target.branch}: {target.repo_id} has no such pull request")
    target.head = heads.get(target.branch) or str(patiently(api.model_info, target.repo_id).sha)
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


def check_others(api: HfApi, target: Target, files: Mapping[str, LocalFile]) -> list[str]:
    """The other files of the repository: harmless ones, and those of an earlier model, which go.

    Raises:
        InputError: It holds files that are neither.
    """
    others = sorted(target.files.keys() - files.keys())
    unknown = [name for name in others if not HARMLESS.fullmatch(name)]
    if unknown:
        ours = _files_by_its_card(api, target)
        foreign = [name for name in unknown if name not in ours]
        if foreign:
            raise InputError(
                f"{target.repo_id} holds files of something else: {', '.join(foreign)}: delete them, or choose another"
            )
    return others


def _files_by_its_card(api: HfApi, target: Target) -> set[str]:
    """The files that the repository's own card says it was published with."""
    if CARD not in target.files:
        return set()
    with tempfile.TemporaryDirectory(prefix="simcse-st-") as empty:
        path = patiently(api.hf_hub_download, target.repo_id, CARD, revision=target.head, cache_dir=empty)
        try:
            proof = read_proof(ModelCard(Path(path).read_text("utf-8")).data)
        except (ValueError, TypeError, yaml.YAMLError):
            return set()
    return set(proof["files"]) if proof else set()


def load_pairs(run: Run) -> dict[str, GradedPairs]:
    """The run's dev and test pairs.

    Raises:
        InputError: They are out of reach, or have changed since.
    """
    pairs = {}
    for split, default in (("dev", "validation"), ("test", "test")):
        pairs[split] = load_graded_pairs(source_of(getattr(run.recipe.data, split), default))
        if pairs[split].facts["pairs_sha256"] != run.manifest[split]["pairs_sha256"]:
            raise InputError(
                f"data.{split}: these {len(pairs[split]):,} pairs are not those that the run was measured on"
            )
    return pairs


def check_model(run: Run, pairs: Mapping[str, GradedPairs]) -> None:
    """Loads the model by Sentence Transformers alone, and measures it again.

    Raises:
        RunError: It is not the model of the records.
    """
    try:
        model = SentenceTransformer(str(run.model), local_files_only=True)
    except Exception as error:  # of many classes, all about what stands in the folder
        raise RunError(f"{run.model} does not load: {' '.join(str(error).split())}") from error
    recorded = {split: run.results[split] for split in pairs}
    if evaluation := run.evaluation:
        recorded = {**evaluation["models"][0]["tasks"], **recorded}
    tasks = [task for task in ("dev", "test", "geometry", "retrieval") if task in recorded]
    found, _ = score_model(tasks, pairs, model, {})
    wrong = []
    for task in tasks:
        for key in recorded[task].keys() & found[task].keys() - {"n", "pairs_sha256", "mean_gold"}:
            new, old = found[task][key], recorded[task][key]
            if isinstance(new, float) and not abs(new - old) <= TOLERANCE:
                wrong.append(f"{task} {key} is {new:.4f}, recorded {old:.4f}")
    if weights_sha256(model) != run.results["weights_sha256"]:
        wrong.insert(0, "its weights are others")
    if wrong:
        raise RunError(f"{run.model} is not the model that its records are about: {wrong[0]}: not published")
    logger.info("model    loads, and scores as recorded: test %.4f", found["test"]["spearman"])
