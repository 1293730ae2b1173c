"""One rank's part of a step, for test_distributed.py: ``torchrun two_processes.py BASE OUTPUT``."""

import json
import sys

import torch.distributed as dist

from helpers import collect, gradients, sentences
from simcse_st import SimCSECollator, SimCSELoss, build_model

base, output = sys.argv[1:]
OPTIONS = [
    {},
    {"hard_negative_weight": 2.0, "share_hard_negatives": False},
    {"mask_false_negatives": True},
    {"mini_batch_size": 3, "mask_false_negatives": True},
]


def rows() -> list[dict]:
    """Twelve rows: the first half has 0 to 3 hard negatives, the second none, and texts recur across the halves."""
    t = sentences(40)
    made = [{"anchor": t[i], "positive": t[i + 12], "negative": t[24 + i : 24 + i + i % 4]} for i in range(6)]
    made += [{"anchor": t[i], "positive": t[i + 12], "negative": None} for i in range(6, 12)]
    made[8]["anchor"], made[9]["positive"] = made[1]["anchor"], made[2]["positive"]
    return made


def step(part: list[dict], **options: object) -> tuple[float, dict[str, list]]:
    model = build_model(base, device="cpu").eval()
    loss = SimCSELoss(model, gather_across_devices=True, **options)
    value = loss(collect(SimCSECollator(model.preprocess)(part)))
    value.backward()
    found = gradients(model)
    if dist.is_initialized():  # what data-parallel training does
        value = value.detach()
        for tensor in (value, *found.values()):
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()
    return value.item(), {name: gradient.flatten().tolist() for name, gradient in found.items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    steps = [step(rows()[6 * rank : 6 * rank + 6], **options) for options in OPTIONS]
    if rank == 0:
        with open(output, "w") as file:
            json.dump(steps, file)
    dist.destroy_process_group()
