"""Norms and fused clipping as kernels: Pallas for TPU and GPU, XLA everywhere.

    api (what they compute) -> dispatch (by which backend) -> xla, the reference
                                                           -> pallas_tpu
                                                           -> triton_gpu
    Backend -> routes (which leaf of a tree goes where) -> multi -> multi_tpu
                                                                 -> multi_gpu
    adamw -> adamw_update (one update of a tree) -> adamw_leaf -> adamw_tpu

`tiling` and `launches` cut arrays up for them, `placement` and `one_device` know where
arrays live, and `transformable` gives kernels the derivatives and the batching of the
reference.

The clippers come here for their sums of squares. Pallas itself is loaded when one of
its kernels is first asked for.
"""

from adagc_jax.kernels.adamw import (
    FusedOptimizer as FusedOptimizer,
    adagc_adamw as adagc_adamw,
)
from adagc_jax.kernels.api import (
    fused_clip as fused_clip,
    norm as norm,
    sum_squares as sum_squares,
    sums_of_squares as sums_of_squares,
)
from adagc_jax.kernels.backend import Backend as Backend
from adagc_jax.kernels.dispatch import why_not as why_not
