"""What evaluation costs beyond encoding every distinct sentence once, alternated in one process.

Run it as ``python tests/benchmarks/evaluate_once.py MODEL DEV TEST``, e.g. with STS-B's dev.csv and test.csv; prints
the ratio of scores, geometry and retrieval together to encoding alone.
"""

import statistics
import sys
import time


def main(reference: str, dev: str, test: str) -> None:
    """Measures both ways three times in turn, after a round to warm up."""
    from simcse_st.data import load_graded_pairs
    from simcse_st.evaluation.evaluate import evaluate
    from simcse_st.models import load_model, locate_model

    graded = [load_graded_pairs(path) for path in (dev, test)]
    sentences = list(dict.fromkeys(text for pairs in graded for text in (*pairs.sentences1, *pairs.sentences2)))
    seconds: dict[str, list[float]] = {"encode": [], "evaluate": []}
    for round_ in range(4):
        begin = time.perf_counter()
        load_model(locate_model(reference)).encode(sentences, batch_size=64, show_progress_bar=False)
        middle = time.perf_counter()
        evaluate([reference], tasks=["dev", "test", "geometry", "retrieval"], dev=dev, test=test)
        end = time.perf_counter()
        if round_:
            seconds["encode"].append(middle - begin)
            seconds["evaluate"].append(end - middle)
    ratios = [one / other for one, other in zip(seconds["evaluate"], seconds["encode"], strict=True)]
    print(f"{len(sentences):,} sentences: {statistics.median(seconds['encode']):.1f} s to load and encode")
    print(f"evaluation: {statistics.median(ratios):.3f} times as long ({', '.join(f'{r:.3f}' for r in ratios)})")


if __name__ == "__main__":
    main(*sys.argv[1:])
