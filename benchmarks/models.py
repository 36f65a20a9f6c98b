"""Gradient trees with the shapes of real models, shared by the benchmarks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Llama:
    """Shapes of a Llama-style decoder."""

    layers: int
    width: int
    hidden: int
    vocab: int

    def layer(self) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer."""
        d, f = self.width, self.hidden
        square = dict.fromkeys(("q", "k", "v", "o"), (d, d))
        mlp = {"gate": (d, f), "up": (d, f), "down": (f, d)}
        return square | mlp | {"norm1": (d,), "norm2": (d,)}

    def shapes(self, stacked: bool) -> dict[str, Any]:
        """The whole tree, layers listed or stacked on axis 0."""
        if stacked:
            layers: Any = {k: (self.layers, *s) for k, s in self.layer().items()}
        else:
            layers = {str(i): self.layer() for i in range(self.layers)}
        ends = {"embed": (self.vocab, self.width), "head": (self.width, self.vocab)}
        return {"layers": layers, "norm": (self.width,), **ends}


MODELS = {
    "10M": Llama(layers=6, width=320, hidden=896, vocab=4096),
    "80M": Llama(layers=12, width=640, hidden=1792, vocab=16000),
    "300M": Llama(layers=24, width=1024, hidden=2560, vocab=16000),
}


def gradients(model: Llama, stacked: bool, dtype: Any, seed: int = 0) -> Any:
    """Random gradients with the model's shapes."""
    shapes, treedef = jax.tree.flatten(
        model.shapes(stacked), is_leaf=lambda x: isinstance(x, tuple)
    )
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    leaves = [
        0.01 * jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def parameter_count(tree: Any) -> int:
    """Number of elements of all leaves."""
    return sum(int(jnp.size(leaf)) for leaf in jax.tree.leaves(tree))
