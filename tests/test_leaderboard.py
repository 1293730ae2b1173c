"""MTEB's tasks by MTEB's own code, its data from a local hub."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import spearmanr

from helpers import hub_environment
from hub import Hub
from simcse_st import InputError, build_model
from simcse_st.evaluation.evaluate import _find_mteb_tasks as find_tasks

PAIRS = [("a b", "a c", 5.0), ("c d", "x y z", 0.5), ("e f", "e", 3.0), ("g", "h i", 2.0)]
CARD = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: test\n    path: test.parquet\n---\n"
PROGRAM = """
import json, sys
from simcse_st import InputError, evaluate
graded = sys.argv[2]
record = evaluate([sys.argv[1]], tasks=["test"], test=graded, mteb=["STSBenchmark"])
try:
    evaluate([sys.argv[1]], tasks=["test"], test=graded, mteb=["STS12"])
except InputError as error:
    print(json.dumps([record.model_dump()["models"][0]["tasks"]["mteb"], str(error)]))
"""


def test_a_task_runs_on_the_revision_that_mteb_names(hub: Hub, tiny_base: Path, tmp_path: Path):
    mteb = pytest.importorskip("mteb", reason="the mteb extra is not installed")
    (revision,) = {task.metadata.dataset["revision"] for task in find_tasks(["STSBenchmark"])}
    first, second, gold = (list(column) for column in zip(*PAIRS, strict=True))
    file = io.BytesIO()
    pq.write_table(pa.table({"sentence1": first, "sentence2": second, "score": gold}), file)
    commit = hub.add_repo("dataset", "mteb/stsbenchmark-sts", {"README.md": CARD, "test.parquet": file.getvalue()})
    hub.repos["dataset", "mteb/stsbenchmark-sts"].tags[revision] = commit
    graded = tmp_path / "test.csv"
    graded.write_text("a,b,1\nc,d,2\ne,f g,3\n")
    command = [sys.executable, "-c", PROGRAM, f"{tiny_base}:mean", str(graded)]
    done = subprocess.run(
        command, env=hub_environment(hub, tmp_path / "home"), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found, missing = json.loads(done.stdout.splitlines()[-1])
    model = build_model(tiny_base, pooling="mean", device="cpu")
    cosines = (model.encode(first) * model.encode(second)).sum(axis=1)
    assert found["STSBenchmark"]["main_score"] == pytest.approx(100 * spearmanr(gold, cosines).statistic, abs=1e-6)
    assert found["STSBenchmark"]["metric"] == "cosine_spearman"
    assert found["STSBenchmark"]["dataset"] == "mteb/stsbenchmark-sts"
    assert found["STSBenchmark"]["parts"] == {"default_test": found["STSBenchmark"]["main_score"]}
    assert (found["STSBenchmark"]["revision"], found["STSBenchmark"]["version"]) == (revision, mteb.__version__)
    assert missing.startswith("--mteb STS12: ")
    assert "\n" not in missing


def test_unknown_tasks_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mteb", reason="the mteb extra is not installed")
    with pytest.raises(InputError, match="--mteb: no task 'STSBenchmrk'"):
        find_tasks(["STSBenchmrk"])
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(InputError, match=r"pip install 'simcse-st\[mteb\]'"):
        find_tasks(["STSBenchmark"])
