"""Peak memory and time of preparing 20,000 and 2,000,000 labelled rows, each in a process of its own.

Run it as ``python tests/benchmarks/prepare_scale.py [ROWS]``; needs 1 GB of temporary disk for two million rows.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL, LARGE = 20_000, 2_000_000


def write_rows(path: Path, rows: int) -> None:
    """Three rows for each premise, one of each label, of as many words as SNLI has."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(20_000)]
    with path.open("w") as file:
        for number in range(rows):
            if number % 3 == 0:
                premise = f"{' '.join(draw.choices(words, k=12))} {number}"
            label = ("neutral", "entailment", "contradiction")[number % 3]
            hypothesis = " ".join(draw.choices(words, k=8))
            file.write(json.dumps({"premise": premise, "hypothesis": hypothesis, "label": label}) + "\n")


def prepare(path: str, kind: str) -> None:
    """Prepares and prints rows, seconds and the peak memory of this process in MiB."""
    from simcse_st.data import load_training_data
    from simcse_st.recipe import DataSection

    begin = time.perf_counter()
    data = load_training_data(DataSection(train=path, kind=kind))
    print(len(data), time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main(large: int) -> None:
    """Measures both sizes for both kinds of data."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("pairs", "sentences"):
            measured = {}
            for rows in (SMALL, large):
                path = Path(folder) / f"{rows}.jsonl"
                if not path.exists():
                    write_rows(path, rows)
                command = [sys.executable, __file__, str(path), kind]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                count, seconds, peak = map(float, done.stdout.split())
                measured[rows] = (seconds, peak)
                print(f"{kind}: {rows:,} rows -> {count:,.0f}, {seconds:.1f} s, peak {peak:.0f} MiB")
            time_ratio = measured[large][0] / measured[SMALL][0] / (large / SMALL)
            growth = measured[large][1] - measured[SMALL][1]
            print(f"{kind}: {growth:+.0f} MiB, {time_ratio:.2f} times the time a row")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        prepare(*sys.argv[1:])
    else:
        main(int(sys.argv[1]) if len(sys.argv) == 2 else LARGE)
