"""Which device and how many threads the arithmetic and the models use."""

from __future__ import annotations

import os
from pathlib import Path

from mergelab.errors import MachineError

SMALL_MODEL_PARAMETERS = 50_000_000
"""Models below this size run on one CPU thread: measured 10 times slower on two threads of a busy machine."""


def choose_device(name: str = "auto") -> str:
    """Return the torch device string for ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.

    ``auto`` takes CUDA where there is a GPU, else the CPU.

    Raises:
        MachineError: The device was asked for by name and torch cannot use it, or the name is unknown; or ``auto``
            finds a GPU that torch cannot use, where the CPU would silently take days.
    """
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        if gpus := visible_gpus():
            raise MachineError(
                f"--device auto: this machine has {len(gpus)} NVIDIA GPUs, and torch {torch.__version__} (CUDA "
                f"{torch.version.cuda or 'none'}) cannot use them. Install a build of torch that fits the driver, or "
                "say --device cpu."
            )
        return "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise MachineError(f"--device {name}: not a device. Use auto, cpu, cuda, cuda:N or mps.") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise MachineError(
                f"--device {name}: torch {torch.__version__} sees {count} CUDA devices. "
                "Use --device cpu, or install a CUDA build of torch."
            )
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise MachineError("--device mps: torch cannot use it on this machine. Use --device cpu.")
    elif device.type not in ("cpu", "mps"):
        raise MachineError(f"--device {name}: not supported. Use auto, cpu, cuda, cuda:N or mps.")
    return name


def visible_gpus(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the NVIDIA GPUs that the driver shows, asked without torch; none if CUDA_VISIBLE_DEVICES hides all."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return []
    return sorted(path.name for path in drivers.iterdir()) if drivers.is_dir() else []


def limit_threads(num_parameters: int, device: str) -> None:
    """Keep torch to one CPU thread for a model of this size on the CPU, if it is small; else leave torch's choice."""
    import torch

    if device == "cpu" and num_parameters < SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)
