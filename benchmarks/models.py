"""Gradient trees with the shapes of real models, shared by the benchmarks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# Logical axes of a tensor, by its name; a sharding says which mesh axis each gets.
AXES: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("q", "k", "v"), ("embed", "heads")),
    "o": ("heads", "embed"),
    **dict.fromkeys(("gate", "up"), ("embed", "mlp")),
    "down": ("mlp", "embed"),
    "router": ("embed", None),
    **dict.fromkeys(("norm", "norm1", "norm2"), (None,)),
    "embed": ("vocab", "embed"),
    "head": ("embed", "vocab"),
}


@dataclasses.dataclass(frozen=True)
class Llama:
    """Shapes of a Llama-style decoder."""

    layers: int
    width: int
    hidden: int
    vocab: int
    kv_width: int | None = None  # of keys and values; None: as wide as queries

    def layer(self) -> dict[str, Any]:
        """The tensors of one layer."""
        return (
            self._attention()
            | self._mlp()
            | {"norm1": (self.width,)}
            | {"norm2": (self.width,)}
        )

    def shapes(self, stacked: bool) -> dict[str, Any]:
        """The whole tree, layers listed or stacked on axis 0."""
        if stacked:
            layers = jax.tree.map(
                lambda shape: (self.layers, *shape), self.layer(), is_leaf=_is_tuple
            )
        else:
            layers = {str(i): self.layer() for i in range(self.layers)}
        ends = {"embed": (self.vocab, self.width), "head": (self.width, self.vocab)}
        return {"layers": layers, "norm": (self.width,), **ends}

    def axes(self, stacked: bool) -> dict[str, Any]:
        """Names of the axes of every tensor, in the tree of `shapes`."""

        def named(path: Any, shape: tuple[int, ...]) -> tuple[str | None, ...]:
            keys = [key.key for key in path]
            own = (("experts",) if "experts" in keys else ()) + AXES[keys[-1]]
            return (("layers",) if len(shape) > len(own) else ()) + own

        return jax.tree_util.tree_map_with_path(
            named, self.shapes(stacked), is_leaf=_is_tuple
        )

    def stacked_axes(self, stacked: bool) -> dict[str, Any]:
        """The axes that hold separate tensors, for ``adagc_jax.stacked``."""
        return {"^layers/": 0} if stacked else {}

    def _attention(self) -> dict[str, Any]:
        d, kv = self.width, self.kv_width or self.width
        return {"q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d)}

    def _mlp(self) -> dict[str, Any]:
        d, f = self.width, self.hidden
        return {"gate": (d, f), "up": (d, f), "down": (f, d)}


@dataclasses.dataclass(frozen=True)
class Mixtral(Llama):
    """A Llama whose layers hold a router and several stacked MLPs."""

    experts: int = 8

    def stacked_axes(self, stacked: bool) -> dict[str, Any]:
        """The axes that hold separate tensors: layers and experts."""
        if stacked:
            return {"/experts/": (0, 1), "^layers/": 0}
        return {"/experts/": 0}

    def _mlp(self) -> dict[str, Any]:
        experts = {name: (self.experts, *s) for name, s in super()._mlp().items()}
        return {"router": (self.width, self.experts), "experts": experts}


@dataclasses.dataclass(frozen=True)
class Dense:
    """Square matrices one after another: few, large and quickly compiled."""

    layers: int
    width: int

    def shapes(self, stacked: bool) -> dict[str, Any]:
        """The whole tree, layers listed or stacked on axis 0."""
        square = (self.width, self.width)
        if stacked:
            return {"layers": (self.layers, *square)}
        return {"layers": {str(i): square for i in range(self.layers)}}

    def axes(self, stacked: bool) -> dict[str, Any]:
        """Names of the axes of every tensor, in the tree of `shapes`."""
        own = (("layers",) if stacked else ()) + AXES["up"]
        return jax.tree.map(lambda _: own, self.shapes(stacked), is_leaf=_is_tuple)

    def stacked_axes(self, stacked: bool) -> dict[str, Any]:
        """The axes that hold separate tensors, for ``adagc_jax.stacked``."""
        return {"^layers": 0} if stacked else {}


Model = Llama | Dense

MODELS: dict[str, Model] = {
    "dense": Dense(layers=4, width=8192),
    "10M": Llama(layers=6, width=320, hidden=896, vocab=4096),
    "80M": Llama(layers=12, width=640, hidden=1792, vocab=16000),
    "300M": Llama(layers=24, width=1024, hidden=2560, vocab=16000),
    "1B, 4 layers": Llama(layers=4, width=2048, hidden=5504, vocab=4096),
    "1B": Llama(layers=16, width=2048, hidden=5504, vocab=32000),
    "Llama-2 7B, 0 layers": Llama(layers=0, width=4096, hidden=11008, vocab=32000),
    "Llama-2 7B, 2 layers": Llama(layers=2, width=4096, hidden=11008, vocab=32000),
    "Llama-2 7B": Llama(layers=32, width=4096, hidden=11008, vocab=32000),
    "Mixtral 8x7B": Mixtral(
        layers=32, width=4096, hidden=14336, vocab=32000, kv_width=1024
    ),
}


def gradients(model: Model, stacked: bool, dtype: Any, seed: int = 0) -> Any:
    """Random gradients with the model's shapes."""
    shapes, treedef = jax.tree.flatten(model.shapes(stacked), is_leaf=_is_tuple)
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    leaves = [
        0.01 * jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def parameter_count(tree: Any) -> int:
    """Number of elements of all leaves."""
    return sum(int(jnp.size(leaf)) for leaf in jax.tree.leaves(tree))


def _is_tuple(value: Any) -> bool:
    return isinstance(value, tuple)
