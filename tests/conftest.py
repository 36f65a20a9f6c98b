"""Strict modes for every test: eight fake CPU devices, no implicit promotion.

Programs are compiled quickly. To compile them as users do, at twice the time:
``XLA_FLAGS=--xla_backend_optimization_level=3 python -m pytest``.
"""

import os

from compiling import xla_flags

os.environ["XLA_FLAGS"] = xla_flags(os.environ.get("XLA_FLAGS", ""))
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
