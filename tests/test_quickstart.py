"""The first thing that a newcomer runs, on a machine without a network; and the example script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers import hub_environment
from hub import serve
from publisher import HAS_XET

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
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "empty-cache")}


def test_the_block_blocks(tmp_path: Path):
    program = "import socket; socket.create_connection(('127.0.0.1', 1))"
    environment = without_network(tmp_path / "site")
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "network access" in done.stderr


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which the quickstart was run without a network, and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    command = [str(Path(sys.executable).parent / "simcse-st"), "train"]
    environment = without_network(folder / "site")
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_the_quickstart_improves_both_scores_without_a_network(quickstart: tuple[Path, str]):
    folder, stdout = quickstart
    results = json.loads((folder / "runs" / "quickstart" / "results.json").read_text())
    before, after = results["untrained"], {split: results[split]["spearman"] for split in ("dev", "test")}
    assert after["dev"] > before["dev"]
    assert after["test"] > before["test"]
    for score in (*results["base"].values(), *before.values(), *after.values()):  # all six in one table
        assert f"{score:.2f}" in stdout
    card = (folder / "runs" / "quickstart" / "model" / "README.md").read_text()
    assert f"| **this model** | **{after['dev']:.2f}** | **{after['test']:.2f}** |" in card
    assert str(folder) not in card
    # The rendered example is of this template: same sections, same tables.
    example = (EXAMPLES.parent / "model_card" / "example.md").read_text()
    parts = [[line for line in text.splitlines() if line.startswith(("#", "|---"))] for text in (card, example)]
    assert parts[0] == parts[1]
    print(
        f"\nquickstart: dev {before['dev']:.2f} -> {after['dev']:.2f}, test {before['test']:.2f} -> {after['test']:.2f}"
    )


LOAD = """
import sys
import numpy as np
from sentence_transformers import SentenceTransformer
texts = ["A man is eating pasta.", "Someone is having a meal.", "", "x " * 600]
np.save(sys.argv[2], SentenceTransformer(sys.argv[1], device="cpu").encode(texts))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lfs", "xet"])
def test_the_quickstart_published_is_the_quickstart(way: str, quickstart: tuple[Path, str], tmp_path: Path):
    """Trained, pushed, verified; then loaded by its name, from an empty cache, by Sentence Transformers alone."""
    if way == "xet" and not HAS_XET:
        pytest.skip("hf_xet is not installed")
    shutil.copytree(quickstart[0] / "runs", tmp_path / "runs")
    folder = tmp_path / "runs" / "quickstart"

    def process(*command: str, home: str = "home") -> str:
        settings = {
            **hub_environment(hub, tmp_path / home, "hf_alice"),
            "HF_HUB_DISABLE_XET": "1" if way == "lfs" else "0",
        }
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=settings,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with serve(xet=way == "xet") as hub:
        proof = process("-m", "simcse_st", "push", "runs/quickstart", "alice/simcse")
        assert proof.count("ok    ") == 6
        assert process("-m", "simcse_st", "verify", "alice/simcse", home="other") == proof
        process("-c", LOAD, "alice/simcse", str(tmp_path / "hub.npy"), home="empty")
        process("-c", LOAD, str(folder / "model"), str(tmp_path / "here.npy"))
        stored = hub.repos["model", "alice/simcse"].at("main").tree["model.safetensors"]
        assert (stored.xet is not None) == (way == "xet")
        assert hub.repos["model", "alice/simcse"].at("main").parent  # the first commit, and this one
        if way == "lfs":
            # For a stranger, too: the quickstart's test pairs come with the package.
            (folder / "push.json").rename(tmp_path / "push.json")
            assert process("-m", "simcse_st", "verify", "alice/simcse", home="third").count("ok    ") == 6
            # The card's usage runs as printed.
            card = (folder / "model" / "README.md").read_text()
            printed = process("-c", card.partition("```python\n")[2].partition("```")[0], home="empty")
            assert printed.startswith("tensor([[1.0000, ")
    published, here = np.load(tmp_path / "hub.npy"), np.load(tmp_path / "here.npy")
    assert published.shape == (4, 384)
    assert published.tobytes() == here.tobytes()


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
