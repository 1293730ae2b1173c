"""Two processes with half of the rows each are one process with all of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import jsonl, sentences
from simcse_st import SimCSELoss, load_recipe, train

TESTS = Path(__file__).parent


def torchrun(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_two_processes_give_the_loss_and_gradients_of_one(tiny_base: Path, tmp_path: Path):
    script = TESTS / "two_processes.py"
    output = tmp_path / "steps.json"
    done = torchrun(str(script), str(tiny_base), str(output), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    two = json.loads(output.read_text())

    sys.argv, argv = ["two_processes.py", str(tiny_base), ""], sys.argv
    spec = importlib.util.spec_from_file_location("two_processes", script)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = argv

    for (_, without), steps in zip(module.SPLITS, two, strict=True):
        losses = set()
        for options, (value, found, seen) in zip(module.OPTIONS, steps, strict=True):
            expected, expected_gradients, expected_facts = module.step(module.rows(without), **options)
            assert value == pytest.approx(expected, abs=1e-9), options
            assert seen == expected_facts
            assert found.keys() == expected_gradients.keys()
            for name, gradient in expected_gradients.items():
                torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(gradient), rtol=1e-6, atol=1e-9)
            losses.add(round(expected, 6))
        # The options matter, but for those about hard negatives where there is none; caching changes nothing.
        assert len(losses) == (3 if len(without) == 12 else 4)


def test_without_a_process_group_gathering_is_the_plain_loss(tiny_model):
    generator = torch.Generator().manual_seed(0)
    anchors, positives = (torch.randn(5, 8, generator=generator) for _ in range(2))
    plain, gathered = (SimCSELoss(tiny_model, gather_across_devices=gather) for gather in (False, True))
    assert torch.equal(
        plain.compute_loss_from_embeddings(anchors, positives),
        gathered.compute_loss_from_embeddings(anchors, positives),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["model.head=none"], ["model.head=train-only", "loss.mini_batch_size=3"], ["training.batches=by_source"]],
    ids=["plain", "head and caching", "by source"],
)
def test_torchrun_trains_the_same_recipe(options: list[str], tiny_base: Path, tmp_path: Path):
    texts = sentences(160)
    rows = [
        {"anchor": texts[i], "positive": texts[i + 40], "negative": texts[i + 80 : i + 80 + i % 3]} for i in range(40)
    ]
    files = [jsonl(tmp_path / "first.jsonl", rows[:16]), jsonl(tmp_path / "second.jsonl", rows[16:])]
    for split in ("dev", "test"):
        (tmp_path / f"{split}.csv").write_text("\n".join(f"{texts[i]},{texts[i + 1]},{i % 6}" for i in range(50)))
    keys = {
        "name": "tiny", "model.base": tiny_base, "model.sha256": "null", "model.dropout": "0.0",
        "data.train": f"[{', '.join(files)}]", "data.dev": tmp_path / "dev.csv", "data.test": tmp_path / "test.csv",
        "training.batch_size": 8, "training.epochs": 2, "training.eval_steps": 5, "training.learning_rate": "1e-3",
    }  # fmt: skip
    recipe = load_recipe("quickstart", [*(f"{key}={value}" for key, value in keys.items()), *options])
    (tmp_path / "tiny.yaml").write_text(recipe.to_yaml())
    one = train(recipe, tmp_path / "one")
    done = torchrun("-m", "simcse_st", "train", "tiny.yaml", "--output", "two", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    folders = [tmp_path / "one", tmp_path / "two"]
    assert {p.name for p in folders[0].iterdir()} == {p.name for p in folders[1].iterdir()}
    lines = [[json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()] for folder in folders]
    assert [entry.keys() for entry in lines[0]] == [entry.keys() for entry in lines[1]]
    for first, second in zip(*lines, strict=True):
        assert first["step"] == second["step"]
        assert first.get("loss") == pytest.approx(second.get("loss"), abs=1e-4)
    weights = [load_file(folder / "model" / "model.safetensors") for folder in folders]
    # A key's bias shifts all scores of a query alike, so that its gradient is zero but for rounding, and Adam makes
    # steps of full size out of rounding errors.
    for name, tensor in ((name, tensor) for name, tensor in weights[0].items() if not name.endswith("key.bias")):
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-4)
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    assert two["total_steps"] == one.results.total_steps == 10
    assert two["dev"]["spearman"] == pytest.approx(one.results.dev.spearman, abs=0.1)
    assert done.stdout.count("before") == 1  # one table


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_refused(tiny_base: Path, tmp_path: Path):
    arguments = ["-m", "simcse_st", "train", "--set", "training.batch_size=7", "--output", "two"]
    done = torchrun(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert "training.batch_size is 7, but must be a multiple of the 2 processes" in done.stderr
    assert not (tmp_path / "two").exists()
