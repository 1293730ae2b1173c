"""The first thing that a newcomer runs, on a machine without a network; and the example script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# Found by Python at start-up. A connection to anything but a socket of this machine's own file system is an error,
# and so is the look-up of a name.
NO_NETWORK = """
import socket

def refuse(self, address, *rest):
    if self.family != socket.AF_UNIX:
        raise RuntimeError(f"network access: {address}")
    return original(self, address, *rest)

def refuse_name(*address, **options):
    raise RuntimeError(f"network access: {address}")

original = socket.socket.connect
socket.socket.connect = refuse
socket.socket.connect_ex = refuse
socket.getaddrinfo = refuse_name
"""


def without_network(folder: Path) -> dict[str, str]:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    return {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "empty-cache")}


def test_the_block_blocks(tmp_path: Path):
    program = "import socket; socket.create_connection(('127.0.0.1', 1))"
    environment = without_network(tmp_path / "site")
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "network access" in done.stderr


@pytest.mark.slow
def test_the_quickstart_improves_both_scores_without_a_network(tmp_path: Path):
    command = [str(Path(sys.executable).parent / "simcse-st"), "train"]
    environment = without_network(tmp_path / "site")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "runs" / "quickstart" / "results.json").read_text())
    before, after = results["base"], {split: results[split]["spearman"] for split in ("dev", "test")}
    assert after["dev"] > before["dev"]
    assert after["test"] > before["test"]
    for score in (*before.values(), *after.values()):  # all four in one table
        assert f"{score:.2f}" in done.stdout
    card = (tmp_path / "runs" / "quickstart" / "model" / "README.md").read_text()
    assert f"| **this model** | **{after['dev']:.2f}** | **{after['test']:.2f}** |" in card
    assert str(tmp_path) not in card
    # The rendered example is of this template: same sections, same tables.
    example = (EXAMPLES.parent / "model_card" / "example.md").read_text()
    parts = [[line for line in text.splitlines() if line.startswith(("#", "| |", "|---"))] for text in (card, example)]
    assert parts[0] == parts[1]
    print(
        f"\nquickstart: dev {before['dev']:.2f} -> {after['dev']:.2f}, test {before['test']:.2f} -> {after['test']:.2f}"
    )


@pytest.mark.slow
def test_the_example_script_runs(minilm: Path, tmp_path: Path):
    script = EXAMPLES / "train_with_trainer.py"
    assert len(script.read_text().splitlines()) < 60
    command = [sys.executable, str(script), str(minilm), str(tmp_path / "model")]
    environment = without_network(tmp_path / "site")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "model.safetensors").is_file()
