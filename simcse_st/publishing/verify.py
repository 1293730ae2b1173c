"""A published model -> the proof that it is the one that was measured, or what is wrong with it."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub  # which imports its parts as they are used
import yaml

from simcse_st.card import PROOF, SET, SIZE
from simcse_st.console import quiet_bars
from simcse_st.data.held_out import HeldOut, check_held_out, load_held_out, parts_of
from simcse_st.data.sources import PACKAGE_SCHEME
from simcse_st.encoders import check_encoder, takes
from simcse_st.errors import InputError, listed, one_line
from simcse_st.evaluation.tables import metric_name
from simcse_st.identity import describe_model, weights_sha256
from simcse_st.publishing.hub import (
    HARMLESS,
    TIMEOUT,
    check_repo_id,
    connect,
    in_one_line,
    is_passing,
    local_file,
    remote_files,
)
from simcse_st.recipes import read_reference
from simcse_st.records import Push, Pushes
from simcse_st.references import HeldOutReference, HeldOutSets, HubDataset, is_public
from simcse_st.run import CARD, Run, open_run

if TYPE_CHECKING:
    from huggingface_hub import EvalResult
    from huggingface_hub.hf_api import RepoFile
    from sentence_transformers import SentenceTransformer

logger = logging.getLogger(__name__)

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
        files: The SHA-256 of its files, by their paths.
        tests: Its scores on test; the one that counts comes first.
    """

    stack: str
    weights_sha256: str
    files: dict[str, str]
    tests: list[StatedScore]


@dataclass(frozen=True)
class StatedScore:
    """A score that a card states.

    Attributes:
        entry: All that the card says of it, with what the pairs are.
        score: Its value, x100.
        metric: Its name.
        of_set: The name of its set, where test has several.
        size: To which embeddings are cut for it.
    """

    entry: EvalResult
    score: float
    metric: str
    of_set: str = ""
    size: int | None = None

    @property
    def name(self) -> str:
        """Its name in a run's records."""
        return "/".join(str(part) for part in (self.of_set, self.size, self.metric) if part)


def verify(
    repo_id: str,
    *,
    revision: str | None = None,
    run: str | Path | None = None,
    test: HeldOutReference | None = None,
    timeout: float = TIMEOUT,
) -> Iterator[Check]:
    """Fetches a published model anew and compares it with the hub's checksums, with its card and with the run.

    It is loaded from the files that were fetched, into a folder that nothing was in, by Sentence Transformers alone.

    Args:
        repo_id: ``OWNER/NAME``.
        revision: A commit, branch or tag; by default ``main``, or where it was pushed to, if that is elsewhere alone.
        run: The run folder that it was pushed from; by default those in ``runs`` whose ``push.json`` names it.
        test: The set of the card's test score; by default the one that the run or the card names.
        timeout: Seconds to wait for the hub.

    Yields:
        What was found, one after the other. Where one fails that others build on, it is the last.
    """
    check_repo_id(repo_id)
    api = connect(timeout)
    pushes = _pushes_to(repo_id, open_run(run) if run is not None else None)
    if test is not None:
        test = read_reference(test)
        check_held_out(test, "test")
    return _verify(repo_id, api, revision, pushes, test)


def _verify(
    repo_id: str,
    api: huggingface_hub.HfApi,
    revision: str | None,
    pushes: list[tuple[Run, Push]],
    test: HeldOutReference | None,
) -> Iterator[Check]:
    pairs = (
        load_held_out(test, "test") if test is not None else None
    )  # what cannot be read is known before all is fetched
    here = [(run, push) for run, push in pushes if push.revision == (revision or "main")]
    if not here and not revision:
        here = pushes[:1]
    if here and not revision:
        revision = here[0][1].revision
    with in_one_line(f"{repo_id} cannot be found"):
        commit = str(api.model_info(repo_id, revision=revision).sha)
    run, pushed = next(((run, push) for run, push in pushes if push.commit == commit), (None, None))
    if here and not pushed:
        of_run, push = here[0]
        told = f"{commit}, but pushed was {push.commit}, from {of_run.folder}: has someone pushed since?"
        yield Check("commit", False, told)
        return
    told = f"pushed from {run.folder}" if run else f"no {Pushes.FILE} of it is here (--run names a run folder)"
    yield Check("commit", True, f"{commit}, {told}")
    with tempfile.TemporaryDirectory(prefix="simcse-st-") as empty:
        os.environ["HF_XET_CACHE"] = f"{empty}/xet"  # read by hf_xet at its first download
        with in_one_line(f"{repo_id} cannot be fetched"):
            remote = remote_files(api, repo_id, commit)
            copy = _fetch(repo_id, commit, f"{empty}/hub")
        stated = _read_card(copy / CARD)
        yield (files := _check_files(copy, remote, stated, pushed))
        if files.passed:
            yield from _check_model(copy, stated, run, pushed, pairs)


def _pushes_to(repo_id: str, run: Run | None) -> list[tuple[Run, Push]]:
    """The pushes to this repository that a run knows of, or all in ``runs``."""
    if run:
        found = [(run, push) for push in run.pushes() if push.repo == repo_id]
        if not found:
            raise InputError(f"{run.folder / Pushes.FILE} knows of no push to {repo_id!r}")
        return found
    found = []
    for path in sorted(path for depth in range(1, 4) for path in Path("runs").glob("*/" * depth + Pushes.FILE)):
        try:
            found += [(Run(path.parent), push) for push in Run(path.parent).pushes() if push.repo == repo_id]
        except InputError as error:
            logger.warning("verify   %s", error)
    return found


def read_proof(data: Any) -> dict[str, Any] | None:  # of YAML that anyone may have written
    """What a card's metadata say of the model beside its scores, if they are of this package.

    Args:
        data: The metadata.

    Returns:
        ``stack``, ``weights_sha256`` and ``files``, the SHA-256 of each by its path.
    """
    proof = data.get(PROOF)
    complete = isinstance(proof, dict) and {"stack", "weights_sha256", "files"} <= proof.keys()
    return proof if complete and isinstance(proof["files"], dict) else None


def _fetch(repo_id: str, commit: str, cache: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=commit, cache_dir=cache))
    except Exception as error:
        if not is_passing(error):
            raise
        # Once: most of it the hub's client has tried several times, but not a connection that broke within a file.
        return Path(huggingface_hub.snapshot_download(repo_id, revision=commit, cache_dir=cache))


def _check_files(copy: Path, remote: dict[str, RepoFile], stated: Stated | None, pushed: Push | None) -> Check:
    """Whether what was fetched is what the hub says it has, what the card says, and what was pushed."""
    local = {path.relative_to(copy).as_posix(): local_file(path) for path in sorted(copy.rglob("*")) if path.is_file()}
    wrong = [f"{name} did not come" for name in remote.keys() - local.keys()]
    for name, file in local.items():
        there = remote.get(name)
        if there is not None and there.size != file.size:
            wrong.append(f"{name} has {file.size:,} bytes here, {there.size:,} on the hub")
        elif not file.is_at(there):
            wrong.append(f"{name} is not what the hub's checksum says: damaged on its way, so verify again")
    by_push = {name: entry.sha256 for name, entry in pushed.files.items()} if pushed else None
    for source, said in ((Pushes.FILE, by_push), ("the card", stated.files if stated else None)):
        if said is not None:
            wrong += [f"{name} is missing, which {source} names" for name in said.keys() - local.keys()]
            changed = [name for name, file in local.items() if file.sha256 != said.get(name, file.sha256)]
            wrong += [f"{name} is not the one that {source} names" for name in changed]
            others = [name for name in local.keys() - said.keys() if name != CARD and not HARMLESS.fullmatch(name)]
            wrong += [f"{name} is none of those that {source} names" for name in others]
    size = sum(file.size for file in local.values()) / 1e6
    also = "".join(f", {source}'s" for source, known in (("the card", stated), (Pushes.FILE, pushed)) if known)
    right = f"{len(local)} files, {size:.1f} MB: sizes and checksums are the hub's{also}"
    return Check("files", not wrong, "; ".join(dict.fromkeys(sorted(wrong))) or right)


def _check_model(
    copy: Path, stated: Stated | None, run: Run | None, pushed: Push | None, pairs: HeldOut | None
) -> Iterator[Check]:
    """What the card says, what loads, and what it scores."""
    import torch

    if stated is None:
        yield Check("card", False, f"{CARD} states no test score, or no stack, weights_sha256 and files under {PROOF}")
        return
    test = stated.tests[0]
    finding = f"test {test.score:.4f} on {test.entry.dataset_name}"
    if pushed:
        said = (stated.stack, stated.weights_sha256)
        as_pushed = said == (pushed.stack, pushed.weights_sha256) and abs(test.score - pushed.scores["test"]) < 1e-9
        yield Check("card", as_pushed, f"{finding}, {'' if as_pushed else 'not '}as in {Pushes.FILE}")
    else:
        yield Check("card", True, finding)
    model, problem = load_as_anyone(copy)
    if model is None:
        yield Check("stack", False, problem)
        return
    stack = " -> ".join(describe_model(model).modules)
    vectors = model.encode(["A man is eating pasta.", "Someone is having a meal."], convert_to_tensor=True)
    unit = bool((torch.linalg.vector_norm(vectors.float(), dim=1) - 1).abs().max() < 1e-5)
    same = "as in the card" if stack == stated.stack else f"in the card {stated.stack}"
    yield Check("stack", stack == stated.stack and unit, f"{stack}, {same}; {'' if unit else 'not '}unit vectors")
    sha256 = weights_sha256(model)
    same = "as in the card" if sha256 == stated.weights_sha256 else f"in the card {stated.weights_sha256}"
    yield Check("weights", sha256 == stated.weights_sha256, f"SHA-256 {sha256}, {same}")
    yield _check_score(stated, model, run, pairs)


def _read_card(path: Path) -> Stated | None:
    """What a card's metadata say, if they say all of it."""
    try:
        data = huggingface_hub.ModelCard(path.read_text("utf-8")).data
        proof, tests = read_proof(data) or {}, list(map(_stated, filter(_is_test, data["eval_results"])))
        files = {str(name): str(sha256) for name, sha256 in proof["files"].items()}
        return Stated(str(proof["stack"]), str(proof["weights_sha256"]), files, tests) if tests else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration, yaml.YAMLError):
        return None


def load_as_anyone(copy: Path) -> tuple[SentenceTransformer | None, str]:
    """The model of a folder by Sentence Transformers alone, or what is wrong with it.

    Without ``modules.json``, another stack would be made up without an error.
    """
    try:
        classes = [str(module["type"]) for module in json.loads((copy / "modules.json").read_text("utf-8"))]
    except (OSError, ValueError, LookupError, TypeError):
        return None, "there is no modules.json that could be read, so nothing says how to read the encoder"
    foreign = [name for name in classes if not name.startswith("sentence_transformers.")]
    if foreign:
        return None, f"{foreign[0]} is no module of Sentence Transformers: it would need further code"
    quiet_bars()
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import get_device_name

    try:
        model = SentenceTransformer(str(copy), device="cpu", local_files_only=True)
        check_encoder(model, copy)
        if not takes(model, model.max_seq_length):
            return None, f"it cannot encode a text of the {model.max_seq_length} tokens that it admits"
        model.to(get_device_name())
    except Exception as error:  # of many classes, all about what stands in the folder
        return None, f"it does not load: {one_line(error)}"
    return model, ""


def _check_score(stated: Stated, model: SentenceTransformer, run: Run | None, pairs: HeldOut | None) -> Check:
    """Whether the model scores on test what the card says, by every metric, on every set and at every size."""
    first = stated.tests[0]
    sizes = {one.size for one in stated.tests if one.size}
    found: dict[str, float] = {}
    size_of: dict[str, str] = {}
    for one in stated.tests:
        if one.of_set in size_of:
            continue
        given = parts_of(pairs).get(one.of_set) if pairs else load_held_out(_place_of(one, run), "test")
        if given is None:
            sets = listed(dict.fromkeys(each.of_set for each in stated.tests if each.of_set)) or "one without a name"
            raise InputError(f"--test: the sets of the card's scores are {sets}: give these")
        sha256, wanted = given.facts.pairs_sha256, (one.entry.dataset_args or {}).get("pairs_sha256")
        if sha256 != wanted:
            return Check("score", False, f"these {given.facts.size} (SHA-256 {sha256}) are not the card's ({wanted})")
        size_of[one.of_set] = given.facts.size
        prefix = f"{one.of_set}/" if one.of_set else ""
        found |= {
            f"{prefix}{name}": value for name, value in metrics_on_test(model, given, filter(None, sizes)).items()
        }
    wrong = [one for one in stated.tests if not abs(found.get(one.name, math.nan) - one.score) <= TOLERANCE]
    shown, others = [*wrong, first][0], len(stated.tests) - 1
    finding = (
        f"{metric_name(shown.name)} x100 {found.get(shown.name, math.nan):.4f} on {size_of[shown.of_set]} of test, in "
        f"the card {shown.score:.4f}"
    )
    return Check("score", not wrong, finding if wrong or not others else f"{finding}; {others} more as stated")


def _is_test(result: EvalResult) -> bool:
    """Whether it is a score to take again."""
    return (result.dataset_args or {}).get("role") == "test"


def _stated(entry: EvalResult) -> StatedScore:
    # Cards of the first versions state it x100, and say so.
    score = float(entry.metric_value) * (1 if str(entry.metric_name).endswith("x100") else 100)
    size = dict(entry.metric_args or {}).get(SIZE)
    return StatedScore(
        entry,
        score,
        metric=entry.metric_type.removeprefix("cosine_").removesuffix("_cosine"),
        of_set=str(dict(entry.dataset_args or {}).get(SET, "")),
        size=int(size) if size is not None else None,
    )


def _place_of(score: StatedScore, run: Run | None) -> HeldOutReference:
    """Where the pairs of a score are: as the run's recipe says, or the card."""
    stated = score.entry
    told = stated.dataset_args or {}
    source = told.get("source", "")
    if str(source).startswith(PACKAGE_SCHEME):
        return str(source)
    if run:
        place = run.held_out("test")
        return place.sets[score.of_set] if isinstance(place, HeldOutSets) else place
    if isinstance(source, dict):
        place = read_reference(json.dumps(source))
        if is_public(place):  # a card does not choose files of this machine
            return place
    if "pairs" in told and "/" in stated.dataset_type:
        return HubDataset(
            dataset=stated.dataset_type,
            config=stated.dataset_config,
            split=stated.dataset_split,
            revision=stated.dataset_revision,
        )
    raise InputError(f"the card's test score is on {stated.dataset_name}: say where that set is, by --test")


def metrics_on_test(model: SentenceTransformer, held_out: HeldOut, sizes: Iterable[int] = ()) -> dict[str, float]:
    """The metrics of a model on a held-out set, x100, as a run's test scores are taken."""
    from simcse_st.evaluation.evaluators import score_model

    results, _ = score_model(["test"], {"test": held_out}, model, sizes=sizes)
    assert results.test
    return results.test.metrics
