"""All that is checked before the first byte is sent: the run, its card, the place and the rights to it, the model."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import get_session, hf_raise_for_status
from pydantic import BaseModel, Field

from simcse_st.data.held_out import HeldOut, load_held_out
from simcse_st.data.sources import resolve
from simcse_st.errors import InputError, RunError
from simcse_st.evaluation.records import Evaluation
from simcse_st.identity import weights_sha256
from simcse_st.publishing.hub import HARMLESS, LocalFile, local_file, remote_files
from simcse_st.publishing.verify import TOLERANCE, load_as_anyone, read_proof
from simcse_st.records import SPLITS, Record
from simcse_st.references import files_of
from simcse_st.run import CARD, Run

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

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


def check_folder(run: Run, texts: Mapping[str, bytes]) -> dict[str, LocalFile]:
    """The files that are published: the model's, as its run left them, and what is written for the repository."""
    if not run.recipe.card.license:
        raise InputError(
            f"card.license is not set, and a model without a licence may be used by nobody: choose one, e.g. "
            f"simcse-st card {run.folder} --set card.license=apache-2.0"
        )
    paths = run.check_model_files()
    for name, path in paths.items():
        if name.endswith(".json"):
            _check_private(run, str(path), path.read_text("utf-8"))
    for name, text in texts.items():
        _check_private(run, "the card" if name == CARD else name, text.decode())
    contents: dict[str, Path | bytes] = {**paths, **texts}
    return {name: local_file(content) for name, content in contents.items()}


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
    files = [Path(resolve(name)).expanduser() for reference in names for name in files_of(reference)]
    base = Path(resolve(recipe.model.base)).expanduser()
    return [*([base] if base.is_absolute() else []), *(file.parent for file in files if file.is_absolute())]


def check_metadata(api: HfApi, card: str) -> None:
    """Has the hub look at the card's metadata."""
    # Not by ModelCard.validate: before huggingface_hub 2.2 it asks huggingface.co, whatever HF_ENDPOINT says.
    body = {"repoType": "model", "content": card}
    answer = get_session().post(f"{api.endpoint}/api/validate-yaml", json=body, headers={"Accept": "text/plain"})
    if answer.status_code == 400:
        raise InputError(f"the hub does not accept the card's metadata: {' '.join(answer.text.split())}")
    hf_raise_for_status(answer)


def find_target(api: HfApi, repo_id: str, branch: str, private: bool, create_pr: bool) -> Target:
    """Finds the repository, and whether this token may change it."""
    if not get_token():
        raise InputError("no token: log in with `hf auth login`, or set HF_TOKEN to one with write permission")
    account = _Account.model_validate(api.whoami())
    if account.auth.token.role == "read":
        raise RunError(f"{repo_id}: the token of {account.name} can only read: use one with write permission")
    try:
        info = api.model_info(repo_id)
    except RepositoryNotFoundError:
        _check_may_create(account, repo_id)
        return Target(repo_id, branch, private, exists=False)
    if private and not info.private:
        raise InputError(f"--private: {repo_id} is public: make it private in its settings, or leave the option out")
    api.auth_check(repo_id, write=not create_pr)
    target = Target(repo_id, branch, bool(info.private))
    look(api, target)
    return target


def look(api: HfApi, target: Target) -> None:
    """Finds out what the branch is at."""
    refs = api.list_repo_refs(target.repo_id, include_pull_requests=target.branch.startswith("refs/"))
    heads = {ref.name: ref.target_commit for ref in refs.branches}
    heads |= {ref.ref: ref.target_commit for ref in refs.pull_requests or ()}
    target.has_branch = target.branch in heads
    if not target.has_branch and target.branch.startswith("refs/"):
        raise InputError(f"--revision {target.branch}: {target.repo_id} has no such pull request")
    target.head = heads.get(target.branch) or str(api.model_info(target.repo_id).sha)
    target.files = remote_files(api, target.repo_id, target.head)


class _AccessToken(BaseModel):
    role: str | None = None


class _Auth(BaseModel):
    token: _AccessToken = Field(default=_AccessToken(), alias="accessToken")


class _Organisation(BaseModel):
    name: str
    role: str | None = Field(default=None, alias="roleInOrg")


class _Account(BaseModel):
    """What the hub says of the one whose token it is."""

    name: str
    auth: _Auth = _Auth()
    orgs: list[_Organisation] = []


def _check_may_create(account: _Account, repo_id: str) -> None:
    """Whether an account may make a repository there; of a fine-grained token, only the hub knows."""
    owners = [account.name, *(org.name for org in account.orgs if org.role != "read")]
    if repo_id.partition("/")[0] not in owners:
        raise RunError(
            f"{repo_id}: there is no such repository that {account.name} may see, and to make one takes an owner of "
            f"{', '.join(owners)}"
        )


def check_others(api: HfApi, target: Target, files: Mapping[str, LocalFile]) -> list[str]:
    """The other files of the repository: harmless ones, and those of an earlier model, which go."""
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
        path = api.hf_hub_download(target.repo_id, CARD, revision=target.head, cache_dir=empty)
        try:
            proof = read_proof(ModelCard(Path(path).read_text("utf-8")).data)
        except (ValueError, TypeError, yaml.YAMLError):
            return set()
    return set(proof["files"]) if proof else set()


def load_pairs(run: Run) -> dict[str, HeldOut]:
    """The run's dev and test, which must be those that it was measured on."""
    pairs: dict[str, HeldOut] = {}
    for split in SPLITS:
        pairs[split] = load_held_out(run.held_out(split), split, run.recipe.data)
        if pairs[split].facts.pairs_sha256 != run.manifest.held_out(split).pairs_sha256:
            raise InputError(
                f"data.{split}: these {pairs[split].facts.size} are not those that the run was measured on"
            )
    return pairs


def check_model(run: Run, pairs: Mapping[str, HeldOut]) -> None:
    """Loads the model as its verification will, and measures it again.

    Raises:
        RunError: It is not the model of the records.
    """
    from simcse_st.evaluation.evaluators import score_model

    model, problem = load_as_anyone(run.model_path)
    if model is None:
        raise RunError(f"{run.model_path}: {problem}")
    recorded: dict[str, Record] = {split: run.results.split(split) for split in SPLITS}
    if run.has(Evaluation):
        models = run.read(Evaluation).models
        own = next((one.tasks for one in models if one.model_sha256 == run.results.model_sha256), None)
        known = {name: own.task(name) for name in ("geometry", "retrieval")} if own else {}
        recorded |= {name: result for name, result in known.items() if result}
    metrics: dict[str, str] = {split: run.results.split(split).metric for split in SPLITS}
    found, _ = score_model(list(recorded), pairs, model, metrics, run.recipe.loss.matryoshka or ())
    wrong = []
    for task, record in recorded.items():
        new = found.task(task)
        for key, old in record:
            now = getattr(new, key, None)
            if isinstance(now, float) and isinstance(old, float) and not abs(now - old) <= TOLERANCE:
                wrong.append(f"{task} {key} is {now:.4f}, recorded {old:.4f}")
    if weights_sha256(model) != run.results.weights_sha256:
        wrong.insert(0, "its weights are others")
    if wrong:
        raise RunError(f"{run.model_path} is not the model that its records are about: {wrong[0]}: not published")
    assert found.test
    logger.info("model    loads, and scores as recorded: test %.4f", found.test.value)
