"""Strict modes for every test: eight fake CPU devices, no implicit promotion."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def strict_promotion() -> Iterator[None]:
    """The library must state every conversion; optax itself does not (see below)."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def optax_promotion() -> Iterator[None]:
    """For tests with optax optimizers inside, which promote int32 to float32."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
