"""A run's scores on the tasks of the MTEB leaderboard -> ``.eval_results/``, from which the Hub and mteb read them."""

from __future__ import annotations

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from simcse_st.evaluation.records import Evaluation, MTEBScore
from simcse_st.run import Run

FOLDER = ".eval_results"
_MTEB = "https://github.com/embeddings-benchmark/mteb/"


def leaderboard_files(run: Run) -> dict[str, bytes]:
    """The files of a run's scores on MTEB's tasks, one a task, as mteb itself writes them.

    Args:
        run: The run; without an evaluation of its model by ``--mteb`` there are none.

    Returns:
        What each holds, by its path in the repository.
    """
    models = run.read(Evaluation).models if run.has(Evaluation) else []
    own = [model.tasks.mteb or {} for model in models if model.model_sha256 == run.results.model_sha256]
    return {
        f"{FOLDER}/{task}.yaml": yaml.safe_dump(_entries(task, score), sort_keys=False, allow_unicode=True).encode()
        for scores in own[:1]
        for task, score in scores.items()
        if score.dataset
    }


def _entries(task: str, score: MTEBScore) -> list[dict[str, object]]:
    """A task's score in each of its parts, ``SUBSET_SPLIT``, and over all of them."""
    values = {**{f"{task}_{part}": value for part, value in score.parts.items()}, task: score.main_score}
    note = f"Obtained using MTEB v{score.version}"
    return eval_result_entries_to_yaml(
        [
            EvalResultEntry(
                dataset_id=str(score.dataset),
                task_id=name,
                value=round(value, 5),
                dataset_revision=score.revision,
                source_url=_MTEB,
                source_name=note,
                notes=note,
            )
            for name, value in values.items()
        ]
    )
