"""Memory of a training process over 300 steps, after a warm-up.

    python tests/benchmarks/memory_growth.py [BASE]

Trains in a fresh process, and prints the memory that it holds every 50 steps and the growth from step 50 to the last.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, WARM_UP = 300, 50


def resident(pid: int) -> float:
    """Megabytes that a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def rows(count: int) -> str:
    """Rows with 0 to 2 hard negatives, of 3 to 25 words."""
    draw, words = random.Random(0), Path(__file__).read_text().split()
    lines = []
    for _ in range(count):
        texts = [" ".join(draw.choices(words, k=draw.randint(3, 25))) for _ in range(2 + draw.randint(0, 2))]
        lines.append(json.dumps({"anchor": texts[0], "positive": texts[1], "negative": texts[2:]}))
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.jsonl").write_text(rows(1600))
        keys = ["data.train=train.jsonl", "training.batch_size=16", f"training.max_steps={STEPS + 1}"]
        keys += ["training.eval_steps=100"]
        keys += [f"model.base={sys.argv[1]}", "model.sha256=null"] if len(sys.argv) > 1 else []
        command = [sys.executable, "-m", "simcse_st", "train", *(part for key in keys for part in ("--set", key))]
        history, found = folder / "runs/quickstart/history.jsonl", []
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
            for step in range(WARM_UP, STEPS + 1, WARM_UP):
                while process.poll() is None and not (history.exists() and f'"step": {step},' in history.read_text()):
                    time.sleep(0.02)
                found.append(resident(process.pid))
                print(f"step {step:3}: {found[-1]:6.0f} MB", flush=True)
        print(f"from step {WARM_UP} to {STEPS}: {found[-1] / found[0] - 1:+.1%}")


if __name__ == "__main__":
    main()
