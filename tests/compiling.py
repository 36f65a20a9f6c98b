"""How tests compile: most of their time goes into compiling small programs."""

import importlib.metadata
import importlib.util
import os

OTHER_COMPILERS = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin")
AS_USERS = {"xla_backend_optimization_level": 3}
"""Options of a compilation whose numbers must be as exact as those of users."""


def as_users() -> bool:
    """Whether programs are compiled as users compile them."""
    return "--xla_backend_optimization_level=0" not in os.environ["XLA_FLAGS"]


def xla_flags(given: str) -> str:
    """Flags for XLA: the caller's, eight fake devices, and less optimised code."""
    flags = [given, "--xla_force_host_platform_device_count=8"]
    # Compilers for TPU and GPU read the same flags, and tests look at their programs.
    others = any(importlib.util.find_spec(name) for name in OTHER_COMPILERS)
    if others or "optimization_level" in given:
        return " ".join(flags)
    flags += ["--xla_backend_optimization_level=0"]
    flags += ["--xla_cpu_parallel_codegen_split_count=1"]
    major, minor = importlib.metadata.version("jaxlib").split(".")[:2]
    if (int(major), int(minor)) < (0, 11):  # Newer ones refuse this flag.
        flags += ["--xla_cpu_use_fusion_emitters=false"]
    return " ".join(flags)
