"""Norms and fused clipping as kernels: Pallas for TPU and GPU, XLA everywhere.

    api (what they compute) -> dispatch (by which backend) -> xla, the reference
                                                           -> pallas_tpu
                                                           -> triton_gpu

`tiling` cuts arrays up for them, `placement` knows where arrays live, and
`transformable` gives kernels the derivatives and the batching of the reference.

Nothing in the clippers depends on this package, and Pallas itself is loaded when one
of its kernels is first asked for.
"""

from adagc_jax.kernels.api import (
    fused_clip as fused_clip,
    norm as norm,
    sum_squares as sum_squares,
)
from adagc_jax.kernels.dispatch import why_not as why_not
