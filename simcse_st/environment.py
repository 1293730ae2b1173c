"""What a command runs on, for its records."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PACKAGES = (
    "simcse-st",
    "sentence-transformers",
    "transformers",
    "torch",
    "datasets",
    "huggingface_hub",
    "scipy",
    "numpy",
)


def package_versions() -> dict[str, str]:
    """The versions of the packages that a result depends on."""
    return {name: metadata.version(name) for name in _PACKAGES}


def describe_environment(device: torch.device, precision: str, devices: int = 1) -> dict[str, Any]:
    """Versions, device and precision.

    Args:
        device: Where the model is.
        precision: What it computes in.
        devices: The number of processes.
    """
    import torch  # which takes seconds, and the versions do not need it

    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": package_versions(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "devices": devices,
        "threads": torch.get_num_threads(),
        "precision": precision,
    }
