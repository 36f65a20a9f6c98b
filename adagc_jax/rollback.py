"""Rollback: goes back to a good moment of a training run, and around what broke it.

Plain Python for training loops, outside of jit. The guard refuses single steps; this
is for what got through: keep a snapshot now and then, and when the loss has left its
track, restore it and go on with other batches.
"""

import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adagc_jax.checks import check_choice, check_count

PLACES = ("device", "host")


class Snapshot(NamedTuple):
    """A moment of a training run.

    Attributes:
      step: The step that was about to be made.
      tree: Copies of everything in it. On the host, arrays that this process can see
        as a whole are NumPy arrays; those it cannot are in pinned host memory.
    """

    step: int
    tree: Any


class Restored(NamedTuple):
    """Where to go on after a rollback.

    Attributes:
      tree: The snapshot as arrays with the original shardings; own buffers, so that
        they may be donated.
      step: The step of the snapshot.
      skip: Batches to skip for a data pipeline that is rewound to the snapshot: those
        up to the spike, and as many more as were asked for.
      skip_ahead: Batches to skip for one that cannot be rewound.
    """

    tree: Any
    step: int
    skip: int
    skip_ahead: int


class Rollback:
    r"""Keeps the last good snapshot, restores it, and says which batches to skip.

    With the snapshot at step :math:`s`, the spike at step :math:`t` and :math:`k`
    batches to skip beyond it, training goes on from the state at :math:`s` with batch
    number

    .. math:: s + \underbrace{(t - s + 1) + k}_{\texttt{skip}}

    Args:
      every: Steps between snapshots, at least 1.
      skip: :math:`k`, batches to skip after the one that spiked.
      place: ``"device"``: a copy beside the original, fast, as large as the tree;
        ``"host"``: in the memory of the host, which waits for the step to be finished.
      settle: Steps that must follow a snapshot without a spike before it counts as
        good: a run is often damaged some steps before it shows. Until then the one
        before it is kept as well (two copies), and no further one is taken.
      max_rollbacks: Rollbacks to one and the same snapshot before `restore` raises.

    Raises:
      ValueError: for an argument outside its range.

    Example:
      >>> import jax.numpy as jnp
      >>> rollback = Rollback(every=2, skip=3)
      >>> weights = jnp.zeros(())
      >>> for step in range(5):
      ...     _ = rollback.keep(step, weights)
      ...     weights = weights + 1.0
      >>> back = rollback.restore(step)
      >>> print(back.tree, back.step, back.skip, back.skip_ahead)
      4.0 4 4 3

    Reference:
      PaLM, https://arxiv.org/abs/2204.02311, section 5.1: restart some 100 steps before
      the spike, skip some 200 to 500 batches.

    Differs from a checkpoint: in memory, so it costs a copy and not a file; it is gone
    with the process. To have it survive, save `snapshot` with any checkpointer and hand
    it to `load`.
    """

    def __init__(
        self,
        every: int = 100,
        skip: int = 0,
        *,
        place: str = "device",
        settle: int = 0,
        max_rollbacks: int = 3,
    ):
        self.every = check_count("every", every, low=1)
        self.skip = check_count("skip", skip)
        self.place = check_choice("place", place, PLACES)
        self.settle = check_count("settle", settle)
        self.max_rollbacks = check_count("max_rollbacks", max_rollbacks, low=1)
        self.rollbacks = 0
        self._good: Snapshot | None = None
        self._unsettled: Snapshot | None = None
        self._origins: list[_Origin] = []

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot that `restore` goes back to, None before the first."""
        return self._good

    def keep(self, step: int, tree: Any) -> bool:
        """Takes a snapshot if one is due; call it before every good step.

        Args:
          step: Number of the step that is about to be made.
          tree: All that the run consists of, any pytree: parameters, optimizer state,
            position in the data. Arrays are copied, and so may be donated afterwards.

        Returns:
          Whether a snapshot was taken.
        """
        waiting = self._unsettled
        if waiting is not None and step >= waiting.step + self.settle:
            self._accept(waiting)
        is_last = self._good is not None and step == self._good.step
        if step % self.every or self._unsettled is not None or is_last:
            return False
        self._origins = [_Origin.of(x) for x in jax.tree.leaves(tree)]
        taken = Snapshot(step, jax.tree.map(self._copy, tree))
        # Nothing to go back to is worse than a snapshot of unknown quality.
        if self.settle == 0 or self._good is None:
            self._accept(taken)
        else:
            self._unsettled = taken
        return True

    def restore(self, step: int) -> Restored:
        """Goes back, from a step that turned out to be bad.

        Args:
          step: Number of the step that spiked; it has been made with batch ``step``
            (counted without earlier skips).

        Returns:
          A `Restored`. The snapshot stays and can be restored again.

        Raises:
          RuntimeError: if there is no snapshot, or `max_rollbacks` to this one have
            not helped.
        """
        if self._good is None:
            raise RuntimeError(
                "There is no snapshot to go back to: call keep(step, tree) before the "
                "first step."
            )
        if self.rollbacks >= self.max_rollbacks:
            raise RuntimeError(
                f"{self.rollbacks} rollbacks to step {self._good.step} have not helped "
                f"(max_rollbacks={self.max_rollbacks}); the last spike was at step "
                f"{step}. Lower the learning rate, or go back further."
            )
        self.rollbacks += 1
        self._unsettled = None
        leaves, treedef = jax.tree.flatten(self._good.tree)
        fresh = [o.put_back(x) for o, x in zip(self._origins, leaves, strict=True)]
        made = max(step - self._good.step + 1, 0)
        return Restored(
            treedef.unflatten(fresh), self._good.step, made + self.skip, self.skip
        )

    def load(self, snapshot: Snapshot, like: Any) -> None:
        """Takes over a snapshot that was saved, such as by orbax, and restored.

        Args:
          snapshot: What `snapshot` was, or any step and tree.
          like: A tree of the same structure whose arrays have the wanted shardings.

        Raises:
          ValueError: if the two trees differ in structure.
        """
        step, tree = snapshot
        if jax.tree.structure(tree) != jax.tree.structure(like):
            raise ValueError(
                "like must have the structure of the snapshot, "
                f"{jax.tree.structure(tree)}, got {jax.tree.structure(like)}."
            )
        self._origins = [_Origin.of(x) for x in jax.tree.leaves(like)]
        self._unsettled = None
        self._accept(Snapshot(int(step), jax.tree.map(self._copy, tree)))

    def _accept(self, snapshot: Snapshot) -> None:
        self._good, self._unsettled, self.rollbacks = snapshot, None, 0

    def _copy(self, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return copy.deepcopy(leaf)
        # NumPy knows neither random keys nor weak types, and without the latter the
        # step would be compiled once more after a rollback.
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        is_plain = not (is_key or leaf.weak_type)
        if self.place == "device" or not is_plain:
            return _duplicate(leaf, _Origin.of(leaf).sharding)
        if leaf.is_fully_addressable:
            return np.array(leaf)
        return _duplicate(leaf, leaf.sharding.with_memory_kind("pinned_host"))


class _Origin(NamedTuple):
    """Where a leaf lived; ``sharding`` is None where JAX was free to choose."""

    is_array: bool
    sharding: Any

    @classmethod
    def of(cls, leaf: Any) -> "_Origin":
        is_array = isinstance(leaf, jax.Array)
        return cls(is_array, leaf.sharding if is_array and leaf.committed else None)

    def put_back(self, leaf: Any) -> Any:
        if not self.is_array:
            return copy.deepcopy(leaf)
        return _duplicate(leaf, self.sharding)


def _duplicate(leaf: Any, sharding: Any) -> jax.Array:
    # An alias would be deleted, or written over, when either of the two is donated.
    return jax.device_put(leaf, sharding, may_alias=False)
