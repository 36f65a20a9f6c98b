"""Models and optimizers of the study: one of each, and what is varied."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax
from _model import Decoder
from flax import nnx

import adagc_jax


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model, an optimizer and the size of a batch.

    Attributes:
      name: In tables.
      peak_lr: Peak of the learning rate, so that clipping cannot win by standing in
        for another one. The phase "rates" compares it with half and twice of it.
      optimizer: "adamw", "lion" or "muon".
      b2: AdamW's decay of the second moment.
      eps: AdamW's term in the denominator.
      bfloat16: Whether the model computes in bfloat16, its gradients included.
      layers: Of the decoder; so are the following.
      width: Of the residual stream.
      hidden: Of the feed-forward block.
      experts: 0 for a dense model.
      qk_norm: Whether queries and keys are normalised.
      batch: Sequences per step.
      length: Bytes per sequence.
    """

    name: str
    peak_lr: float = 2e-2
    optimizer: str = "adamw"
    b2: float = 0.95
    eps: float = 1e-8
    bfloat16: bool = False
    layers: int = 2
    width: int = 32
    hidden: int = 88
    experts: int = 0
    qk_norm: bool = False
    batch: int = 8
    length: int = 48

    def model(self, seed: int) -> tuple[Any, Any]:
        """Structure, and parameters as a tree of arrays."""
        model = Decoder(
            layers=self.layers,
            width=self.width,
            heads=2,
            kv_heads=1,
            hidden=self.hidden,
            experts=self.experts,
            qk_norm=self.qk_norm,
            rngs=nnx.Rngs(seed),
        )
        structure, state = nnx.split(model)
        return structure, nnx.to_pure_dict(state)

    @property
    def groups(self) -> Any:
        """Every tensor by itself, and every expert."""
        if not self.experts:
            return adagc_jax.per_tensor()
        return adagc_jax.stacked({r"mlp/(gate|up|down)$": 0})

    def new_optimizer(self) -> optax.GradientTransformation:
        """With a learning rate of one: its updates are multiplied step by step."""
        if self.optimizer == "lion":
            return optax.lion(1.0, weight_decay=0.1)
        if self.optimizer == "muon":
            return optax.contrib.muon(1.0, weight_decay=0.1)
        return optax.adamw(1.0, b2=self.b2, eps=self.eps, weight_decay=0.1)

    def computed(self, params: Any) -> Any:
        """The parameters in the dtype that the model computes in."""
        return optax.tree.cast(params, jnp.bfloat16 if self.bfloat16 else jnp.float32)


MAIN = Setup("Llama, AdamW")
VARIANTS = (
    Setup("Llama, AdamW b2 .999", b2=0.999),
    Setup("Llama, AdamW eps 1e-15", eps=1e-15),
    Setup("Llama, Lion", optimizer="lion", peak_lr=4e-3),
    Setup("Llama, Muon", optimizer="muon", peak_lr=4e-2),
    Setup("Llama, bfloat16", bfloat16=True),
    Setup("Qwen3", qk_norm=True),
    Setup("Mixtral, 4 experts", experts=4),
    Setup("Llama, 4 layers of 64", layers=4, width=64, hidden=176, peak_lr=1e-2),
)
