"""Memory of a training process over 300 steps, after a warm-up.

    python tests/benchmarks/memory_growth.py [BASE]

Trains in a fresh process, and prints the least and the most memory that it holds in every 25 steps, and how both have
grown from the 25 steps before step 50 to the last. A step holds some fifth more than what is left after it, so that a
single look would tell when it was taken.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, WARM_UP, WINDOW = 300, 50, 25


def resident(pid: int, key: str = "VmRSS") -> float:
    """Megabytes that a process holds, or with ``"VmHWM"`` the most that it held since the last call of ``forget``."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) / 1024


def forget(pid: int) -> None:
    """Lets the most that a process held begin at what it holds."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


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
            for step in range(WARM_UP - WINDOW, STEPS + 1, WINDOW):
                least = math.inf
                while process.poll() is None and not (history.exists() and f'"step": {step},' in history.read_text()):
                    time.sleep(0.02)
                    least = min(least, resident(process.pid))
                if process.poll() is not None:
                    sys.exit(f"training ended before step {step}")
                if step >= WARM_UP:
                    found.append((least, resident(process.pid, "VmHWM")))
                    print(f"to step {step:3}: {found[-1][0]:6.0f} to {found[-1][1]:6.0f} MB", flush=True)
                forget(process.pid)
        for name, first, last in zip(("least", "most"), found[0], found[-1], strict=True):
            print(f"{name}, from step {WARM_UP} to {STEPS}: {last / first - 1:+.1%}")


if __name__ == "__main__":
    main()
