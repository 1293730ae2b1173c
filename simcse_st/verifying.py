"""A published model -> the proof that it is the one that was measured, or what is wrong with it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, snapshot_download
from sentence_transformers import SentenceTransformer

from simcse_st.card import CARD, PROOF
from simcse_st.data import GradedPairs, Source, load_graded_pairs
from simcse_st.errors import InputError
from simcse_st.evaluation import embed
from simcse_st.hub import TIMEOUT, check_repo_id, connect, in_one_line, is_passing, local_file, patiently, remote_files
from simcse_st.loading import describe_model
from simcse_st.modeling import check_encoder, weights_sha256
from simcse_st.preparing import source_of
from simcse_st.publishing import PUSHED, load_run, read_record
from simcse_st.recipe import PACKAGE_SCHEME, resolve
from simcse_st.scoring import score_model

TOLERANCE = 1e-4  # of Spearman x100


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool
    finding: str

    def __str__(self) -> str:
        """One line."""
        return f"{'ok' if self.passed else 'FAIL':<5} {self.name:<8} {self.finding}"


@dataclass(frozen=True)
class Stated:
    """What a card's metadata say of the model.

    Attributes:
        stack: Its modules.
        weights_sha256: The checksum of its weights.
        score: Spearman x100 on the test pairs.
        test: That score's entry, with what the pairs are.
    """

    stack: str
    weights_sha256: str
    score: float
    test: EvalResult


def verify(
    repo_id: str,
    *,
    revision: str | None = None,
    run: str | Path | None = None,
    test: Source | None = None,
    timeout: float = TIMEOUT,
) -> Iterator[Check]:
    """Fetches a published model anew and compares it with the hub's checksums, with its card and with the run.

    It is loaded from the files that were fetched, into a folder that nothing was in, by Sentence Transformers alone.

    Args:
        repo_id: ``OWNER/NAME``.
        revision: A commit, branch or tag; by default ``main``.
        run: The run folder that it was pushed from; by default the one in ``runs`` whose ``push.json`` names it.
        test: Graded pairs of the card's test score; by default those that the run or the card names.
        timeout: Seconds to wait for the hub.

    Yields:
        What was found, one after the other. Where one fails that others build on, it is the last.

    Raises:
        InputError: The name or the run cannot be used, or nothing says where the test pairs are.
        RunError: The hub does not give the model.
    """
    check_repo_id(repo_id)
    api = connect(timeout)
    pushed, folder = _pushed_from(repo_id, run)
    with in_one_line(f"{repo_id} cannot be found"):
        commit = str(patiently(api.model_info, repo_id, revision=revision).sha)
    wanted = pushed["commit"] if pushed and not revision else commit
    record = f", pushed from {folder}" if pushed else "; no push.json of it is here (--run names a run folder)"
    yield Check("commit", commit == wanted, commit + (record if commit == wanted else f", but pushed was {wanted}"))
    if commit != wanted:
        return
    pushed = pushed if pushed and pushed["commit"] == commit else None
    with tempfile.TemporaryDirectory(prefix="simcse-st-") as empty:
        os.environ["HF_XET_CACHE"] = f"{empty}/xet"  # read by hf_xet at its first download
        with in_one_line(f"{repo_id} cannot be fetched"):
            remote = remote_files(api, repo_id, commit)
            copy = _fetch(repo_id, commit, f"{empty}/hub")
            files = _check_files(copy, remote, pushed)
        yield files
        if not files.passed:
            return
        yield from _check_model(copy, pushed, folder, test)


def _pushed_from(repo_id: str, run: str | Path | None) -> tuple[dict[str, Any] | None, Path | None]:
    """The record of a push to this repository, and the run folder that it stands in."""
    folders = [Path(run)] if run else [path.parent for path in Path("runs").glob(f"*/{PUSHED}")]
    found = {}
    for folder in folders:
        record = read_record(folder / PUSHED)
        if record.get("repo") == repo_id and "commit" in record:
            found[folder] = record
        elif run:
            raise InputError(f"{folder / PUSHED} is about {record.get('repo')!r}, not about {repo_id!r}")
    if len(found) > 1:
        raise InputError(f"{repo_id} was pushed from {' and '.join(map(str, found))}: say which of them by --run")
    return next(((record, folder) for folder, record in found.items()), (None, None))


def _fetch(repo_id: str, commit: str, cache: str) -> Path:
    try:
        return Path(snapshot_download(repo_id, revision=commit, cache_dir=cache))
    except Exception as error:
        if not is_passing(error):
            raise
        # Once: most of it the hub's client has tried several times, but not a connection that broke within a file.
        return Path(snapshot_download(repo_id, revision=commit, cache_dir=cache))


def _check_files(copy: Path, remote: dict[str, Any], pushed: dict[str, Any] | None) -> Check:
    """Whether what was fetched is what the hub says it has, and what was pushed."""
    local = {path.relative_to(copy).as_posix(): local_file(path) for path in sorted(copy.rglob("*")) if path.is_file()}
    wrong = [f"{name} did not come" for name in remote.keys() - local.keys()]
    for name, file in local.items():
        there = remote.get(name)
        if there is not None and there.size != file.size:
            wrong.append(f"{name} has {file.size:,} bytes here, {there.size:,} on the hub")
        elif not file.is_at(there):
            wrong.append(f"{name} is not what the hub's checksum says: damaged on its way, so verify again")
    if pushed:
        recorded = {name: entry["sha256"] for name, entry in pushed["files"].items()}
        wrong += [f"{name} was pushed and is not there" for name in recorded.keys() - local.keys()]
        changed = [name for name, file in local.items() if file.sha256 != recorded.get(name, file.sha256)]
        wrong += [f"{name} is not the one that was pushed" for name in changed]
        wrong += [f"{name} was not pushed" for name in local.keys() - recorded.keys() - set(pushed["other_files"])]
    size = sum(file.size for file in local.values()) / 1e6
    also = f", and those of {PUSHED}" if pushed else ""
    right = f"{len(local)} files, {size:.1f} MB: sizes and checksums are the hub's{also}"
    return Check("files", not wrong, "; ".join(sorted(wrong)) or right)


def _check_model(copy: Path, pushed: dict[str, Any] | None, run: Path | None, test: Source | None) -> Iterator[Check]:
    """What the card says, what loads, and what it scores."""
    stated = _read_card(copy / CARD)
    if stated is None:
        yield Check("card", False, f"{CARD} states no test score, or no stack and weights_sha256 under {PROOF}")
        return
    said = {"stack": stated.stack, "weights_sha256": stated.weights_sha256, "score": stated.score}
    finding = f"test {stated.score:.4f} on {stated.test.dataset_name}"
    if pushed:
        as_pushed = said == {
            **{key: pushed[key] for key in ("stack", "weights_sha256")},
            "score": pushed["scores"]["test"],
        }
        yield Check("card", as_pushed, f"{finding}, {'' if as_pushed else 'not '}as in {PUSHED}")
    else:
        yield Check("card", True, finding)
    model, problem = _load(copy)
    if model is None:
        yield Check("stack", False, problem)
        return
    stack = " -> ".join(describe_model(model)["modules"])
    norms = torch.linalg.vector_norm(embed(model, ["A man is eating pasta.", "Someone is having a meal."]), dim=1)
    unit = bool((norms - 1).abs().max() < 1e-5)
    same = "as in the card" if stack == stated.stack else f"in the card {stated.stack}"
    yield Check("stack", stack == stated.stack and unit, f"{stack}, {same}; {'' if unit else 'not '}unit vectors")
    sha256 = weights_sha256(model)
    same = "as in the card" if sha256 == stated.weights_sha256 else f"in the card {stated.weights_sha256}"
    yield Check("weights", sha256 == stated.weights_sha256, f"SHA-256 {sha256}, {same}")
    yield _check_score(stated, model, run, test)


def _read_card(path: Path) -> Stated | None:
    """What a card's metadata say, if they say all of it."""
    try:
        data = ModelCard(path.read_text("utf-8")).data
        proof, test = data[PROOF], next(filter(_is_test, data["eval_results"]))
        return Stated(str(proof["stack"]), str(proof["weights_sha256"]), float(test.metric_value), test)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration, yaml.YAMLError):
        return None


def _load(copy: Path) -> tuple[SentenceTransformer | None, str]:
    """The model of the fetched files, or what is wrong with them.

    Without ``modules.json``, another stack would be made up without an error.
    """
    try:
        classes = [str(module["type"]) for module in json.loads((copy / "modules.json").read_text("utf-8"))]
    except (OSError, ValueError, LookupError, TypeError):
        return None, "there is no modules.json that could be read, so nothing says how to read the encoder"
    foreign = [name for name in classes if not name.startswith("sentence_transformers.")]
    if foreign:
        return None, f"{foreign[0]} is no module of Sentence Transformers: it would need further code"
    try:
        model = SentenceTransformer(str(copy), local_files_only=True)
        check_encoder(model, copy)
    except Exception as error:  # of many classes, all about what stands in the folder
        return None, f"it does not load: {' '.join(str(error).split())}"
    return model, ""


def _check_score(stated: Stated, model: SentenceTransformer, run: Path | None, test: Source | None) -> Check:
    pairs = load_graded_pairs(test or _source_of(stated.test, run))
    found, wanted = pairs.facts["pairs_sha256"], (stated.test.dataset_args or {}).get("pairs_sha256")
    if found != wanted:
        return Check(
            "score", False, f"these {len(pairs):,} pairs are not those of the card (SHA-256 {found}, not {wanted})"
        )
    score = spearman(model, pairs)
    finding = f"Spearman x100 {score:.4f} on {len(pairs):,} test pairs, in the card {stated.score:.4f}"
    return Check("score", abs(score - stated.score) <= TOLERANCE, finding)


def _is_test(result: EvalResult) -> bool:
    """Whether it is the score to take again."""
    return result.metric_type == "spearman_cosine" and (result.dataset_args or {}).get("role") == "test"


def _source_of(stated: EvalResult, run: Path | None) -> Source:
    """Where the test pairs are: as the run's recipe says, or the card."""
    packaged = (stated.dataset_args or {}).get("source", "")
    if str(packaged).startswith(PACKAGE_SCHEME):
        return Source(resolve(packaged))
    if run:
        return source_of(load_run(run).recipe.data.test, "test")
    if "/" in stated.dataset_type:
        return Source(stated.dataset_type, stated.dataset_config, stated.dataset_split, stated.dataset_revision)
    raise InputError(f"the card's test score is on {stated.dataset_name}: say where these pairs are, by --test")


def spearman(model: SentenceTransformer, pairs: GradedPairs) -> float:
    """Spearman x100 of a model on graded pairs, as a run's test score is taken."""
    results, _ = score_model(["test"], {"test": pairs}, model, {})
    return float(results["test"]["spearman"])
