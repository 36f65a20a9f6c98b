"""Whether a model fits into the devices at all, before anything is allocated."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from _cli import BadOption
from _config import Config
from _job import count_parameters

# Of four bytes each: the start that all clippers share, parameters, gradients, moments.
_COPIES = {"adamw": 5, "muon": 4, "lion": 4}


def check_memory(config: Config, devices: Sequence[Any]) -> None:
    """Raises BadOption if not even the parameters and what goes with them fit."""
    parameters = count_parameters(config)
    needed, there = 4 * _COPIES[config.optimizer] * parameters, available(devices)
    if needed > there:
        raise BadOption(
            f"--size {config.size}: {parameters:,} parameters, gradients and moments "
            f"need {needed / 1e9:.1f} GB at least, {len(devices)} of "
            f"{devices[0].platform} have {there / 1e9:.1f} GB: choose a smaller "
            "size or a larger --mesh (--describe counts and trains nothing)"
        )


def available(devices: Sequence[Any]) -> float:
    """Bytes that the devices have together; infinite if they do not say."""
    if devices[0].platform == "cpu":
        meminfo = Path("/proc/meminfo")
        lines = meminfo.read_text().splitlines() if meminfo.exists() else []
        free = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
        # Fake devices share what this machine has.
        return 1024.0 * int(free[0]) if free else math.inf
    own = [device for device in devices if device.process_index == jax.process_index()]
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in own]
    known = [limit for limit in limits if limit]
    if not known:
        return math.inf
    return min(known) * len(devices)
