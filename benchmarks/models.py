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
    **dict.fromkeys(("norm", "norm1", "norm2", "q_norm", "k_norm"), (None,)),
    "embed": ("vocab", "embed"),
    "head": ("embed", "vocab"),
}


@dataclasses.dataclass(frozen=True)
class Llama:
    """Shapes of a Llama-style decoder.

    Attributes:
      layers: Number of layers.
      width: Of the residual stream and of queries.
      hidden: Width of an MLP.
      vocab: Number of tokens.
      kv_width: Width of keys and values; None for that of queries.
      head_norm: Width of the norms of queries and keys; None for no such norms.
      tied: Whether the output layer is the embedding.
    """

    layers: int
    width: int
    hidden: int
    vocab: int
    kv_width: int | None = None
    head_norm: int | None = None
    tied: bool = False

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
        ends = {"embed": (self.vocab, self.width)}
        if not self.tied:
            ends["head"] = (self.width, self.vocab)
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
        matrices: dict[str, Any] = {
            "q": (d, d),
            "k": (d, kv),
            "v": (d, kv),
            "o": (d, d),
        }
        if self.head_norm is None:
            return matrices
        return matrices | dict.fromkeys(("q_norm", "k_norm"), (self.head_norm,))

    def _mlp(self) -> dict[str, Any]:
        d, f = self.width, self.hidden
        return {"gate": (d, f), "up": (d, f), "down": (f, d)}


@dataclasses.dataclass(frozen=True)
class Mixtral(Llama):
    """A Llama whose layers hold a router and several stacked MLPs.

    Attributes:
      experts: Number of MLPs that the router chooses from.
      shared: Width of the MLP that every token goes through; 0 for none.
    """

    experts: int = 8
    shared: int = 0

    def stacked_axes(self, stacked: bool) -> dict[str, Any]:
        """The axes that hold separate tensors: layers and experts."""
        if stacked:
            return {"/experts/": (0, 1), "^layers/": 0}
        return {"/experts/": 0}

    def _mlp(self) -> dict[str, Any]:
        experts = {name: (self.experts, *s) for name, s in super()._mlp().items()}
        own = {"router": (self.width, self.experts), "experts": experts}
        if not self.shared:
            return own
        d, f = self.width, self.shared
        return {**own, "shared": {"gate": (d, f), "up": (d, f), "down": (f, d)}}


@dataclasses.dataclass(frozen=True)
class Dense:
    """Square matrices one after another: few, large and quickly compiled."""

    layers: int
    width: int

    def shapes(self, stacked: bool) -> dict[str, Any]:
        """The whole tree, layers listed or stacked on axis 0."""
        own = self.tensor()
        if stacked:
            return {"layers": {"all": (self.layers, *own)}}
        return {"layers": {str(i): own for i in range(self.layers)}}

    def tensor(self) -> tuple[int, ...]:
        """Shape of each."""
        return (self.width, self.width)

    def axes(self, stacked: bool) -> dict[str, Any]:
        """Names of the axes of every tensor, in the tree of `shapes`."""
        tensor = AXES["up"][-len(self.tensor()) :]
        own = (("layers",) if stacked else ()) + tensor
        return jax.tree.map(lambda _: own, self.shapes(stacked), is_leaf=_is_tuple)

    def stacked_axes(self, stacked: bool) -> dict[str, Any]:
        """The axes that hold separate tensors, for ``adagc_jax.stacked``."""
        return {"^layers/": 0} if stacked else {}


@dataclasses.dataclass(frozen=True)
class Vectors(Dense):
    """Vectors, for trees of very many small leaves."""

    def tensor(self) -> tuple[int, ...]:
        """Shape of each."""
        return (self.width,)


Model = Llama | Dense

MODELS: dict[str, Model] = {
    "dense": Dense(layers=4, width=8192),
    "2000 vectors": Vectors(layers=2000, width=8),
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
    "Llama-2 70B": Llama(
        layers=80, width=8192, hidden=28672, vocab=32000, kv_width=1024
    ),
    "Qwen3-1.7B": Llama(
        layers=28,
        width=2048,
        hidden=6144,
        vocab=151936,
        kv_width=1024,
        head_norm=128,
        tied=True,
    ),
    # The totals of ERNIE 10B-A1.4B; how its layers are cut is not published.
    "ERNIE-like 10B": Mixtral(
        layers=24,
        width=2048,
        hidden=1024,
        vocab=103424,
        kv_width=512,
        tied=True,
        experts=64,
        shared=2048,
    ),
    # DeepSeekMoE 16B, but for its first layer, which has no experts.
    "DeepSeekMoE 16B": Mixtral(
        layers=28,
        width=2048,
        hidden=1408,
        vocab=102400,
        experts=64,
        shared=2816,
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
