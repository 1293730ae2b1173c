"""One rank's part of a step, for test_distributed.py: ``torchrun two_processes.py BASE OUTPUT``."""

import json
import sys

import torch
import torch.distributed as dist

from helpers import collect, gradients, sentences
from simcse_st import SimCSECollator, SimCSELoss, build_model

base, output = sys.argv[1:]
OPTIONS = [
    {},
    {"hard_negative_weight": 2.0, "share_hard_negatives": False},
    {"mask_false_negatives": True},
    {"mini_batch_size": 3, "mask_false_negatives": True},
    {"train_only_head": True},
]


# How many of the rows the first process has, and which rows have no hard negative.
SPLITS = [(6, range(6, 12)), (6, range(6)), (7, range(3, 5)), (4, range(12))]


def rows(without: range) -> list[dict]:
    """Twelve rows with 0 to 3 hard negatives, but for those without; texts recur in the two halves."""
    t = sentences(40)
    made = [{"anchor": t[i], "positive": t[i + 12], "negative": t[24 + i : 24 + i + i % 4]} for i in range(12)]
    for i in without:
        made[i]["negative"] = []
    made[8]["anchor"], made[9]["positive"] = made[1]["anchor"], made[2]["positive"]
    return made


def step(part: list[dict], **options: object) -> tuple[float, dict[str, list], dict]:
    model = build_model(base, device="cpu").double().eval()
    torch.manual_seed(0)  # for the head
    loss = SimCSELoss(model, gather_across_devices=True, **options).double()
    value = loss(collect(SimCSECollator(model.preprocess)(part)))
    value.backward()
    found = gradients(loss)
    if dist.is_initialized():  # what data-parallel training does
        value = value.detach()
        for tensor in (value, *found.values()):
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()
    flat = {name: gradient.flatten().tolist() for name, gradient in found.items()}
    return value.item(), flat, loss.seen.facts().model_dump()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    steps = []
    for first, without in SPLITS:
        part = slice(0, first) if rank == 0 else slice(first, 12)
        steps.append([step(rows(without)[part], **options) for options in OPTIONS])
    if rank == 0:
        with open(output, "w") as file:
            json.dump(steps, file)
    dist.destroy_process_group()
