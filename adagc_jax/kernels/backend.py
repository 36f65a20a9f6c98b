"""Which backend was asked for, and what was said about it.

argument ``backend`` of the clippers -> Backend -> routes
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Sharding

from adagc_jax.checks import check_choice
from adagc_jax.groups import is_sharding
from adagc_jax.leaves import path_name

BACKENDS = ("auto", "xla", "pallas", "pallas_tpu", "pallas_gpu")


@dataclasses.dataclass(frozen=True)
class Backend:
    """What reads gradients for their norms, with what it must know of them.

    A kernel serves arrays of one device, or shards of which it is known where they lie.
    Types say it on meshes with explicit axes and inside ``jax.shard_map``. With
    automatic axes nothing does under ``jit``: say it here, or the sums are XLA's. Where
    several devices are to be seen and nothing is said, an array may lie on all of them;
    a ``SingleDeviceSharding`` says that it does not. No array is gathered silently: a
    program that turns out to be for several devices when it is lowered, such as one
    compiled ahead of time for a pod by a process that sees one device, is refused then.

    Args:
      name: ``"auto"`` (XLA, as long as no kernel has been measured to win), ``"xla"``,
        ``"pallas_tpu"`` (Mosaic), ``"pallas_gpu"`` (Triton), or ``"pallas"``, the one
        of the platform.
      shardings: Tree of the parameters' ``jax.sharding.NamedSharding``, or a prefix
        tree, such as one sharding for all. Gradients must be sharded so: others are
        moved.
      interpret: Passed to ``pallas_call``: True runs a kernel on any platform, slowly,
        to test it.

    Raises:
      ValueError: for a name that there is not, or something other than shardings.

    Example:
      >>> import adagc_jax, jax
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("fsdp",))
      >>> backend = adagc_jax.kernels.Backend(
      ...     "pallas_tpu", shardings={"w": NamedSharding(mesh, P("fsdp"))}
      ... )
      >>> clip = adagc_jax.adagc(backend=backend)
    """

    name: str = "auto"
    shardings: Any = None
    interpret: Any = False

    def __post_init__(self) -> None:
        """Checks the name, and keeps shardings by path, so that they can be hashed."""
        check_choice("backend", self.name, BACKENDS)
        flat = jax.tree_util.tree_flatten_with_path(
            self.shardings, is_leaf=is_sharding
        )[0]
        for key_path, value in flat:
            if not is_sharding(value):
                raise ValueError(
                    "Backend(shardings=...) must be a tree of "
                    f"jax.sharding.NamedSharding, got {value!r} at "
                    f"{path_name(key_path)!r}: jax.tree.map(lambda p: p.sharding, "
                    "params) makes one."
                )
        by_path = tuple((path_name(key), value) for key, value in flat)
        object.__setattr__(self, "shardings", by_path)

    @property
    def by_xla(self) -> bool:
        """Whether there is no kernel to look for."""
        return self.name in ("auto", "xla")

    def sharding_of(self, path: str) -> Sharding | None:
        """What was said of a leaf; by its path, so that masked trees fit as well."""
        inside = [
            (prefix, sharding)
            for prefix, sharding in self.shardings
            if prefix in ("", path) or path.startswith(f"{prefix}/")
        ]
        return max(inside, key=lambda pair: len(pair[0]))[1] if inside else None


def as_backend(backend: "str | Backend") -> Backend:
    """The argument ``backend``, checked.

    Raises:
      ValueError: for what is neither the name of a backend nor a `Backend`.
    """
    return backend if isinstance(backend, Backend) else Backend(backend)
