"""What stands in every file of results: when, with which versions, on what."""

import datetime
import importlib.metadata
import os
import platform
from typing import Any

import jax


def made(*packages: str) -> dict[str, Any]:
    """The date and the versions of what was used; jax and optax if nothing is named."""
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in packages or ("jax", "optax")
        },
    }


def measured(*packages: str) -> dict[str, Any]:
    """The same, and the machine that the numbers were measured on."""
    device = jax.devices()[0]
    return made(*packages) | {
        "device": device.device_kind,
        "platform": device.platform,
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }


def in_words(stamp: dict[str, Any]) -> str:
    """``jax 0.10.2, optax 0.2.8, 2026-11-30``."""
    versions = [f"{name} {version}" for name, version in stamp["versions"].items()]
    return ", ".join([*versions, stamp["date"]])


def machine(stamp: dict[str, Any]) -> str:
    """``2 CPU cores (x86_64)``, or the name of the accelerator."""
    if stamp["device"] != "cpu":
        return stamp["device"]
    return f"{stamp['cores']} CPU cores ({stamp['processor']})"
