"""Between the finest groups of a pass and those of a rule or the metrics."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from adagc_jax.layout import Layout, Parts, load
from adagc_jax.manual import pooled


@dataclasses.dataclass(frozen=True)
class Regroup:
    """Moves numbers between fine groups and the coarser ones that contain them."""

    fine: Layout
    coarse: Layout
    whole: bool = False

    def gather(self, parts: Parts, like: Any, reduce: Any = jnp.sum) -> Parts:
        """Reduces the numbers of the fine groups in each coarse one.

        Inside shard_map also over devices, until the result is split over them as the
        state field ``like`` is.
        """
        if self.whole:
            return (reduce(jnp.stack([pooled(reduce(part)) for part in parts]))[None],)
        if self.fine == self.coarse:
            return parts
        fine = zip(
            self.fine.unpack(parts),
            self.fine.axes,
            self.coarse.axes,
            self.coarse.varying(load(like)),
            strict=True,
        )
        return self.coarse.pack(
            [
                pooled(reduce(value, axis=_missing(have, want)), reduce, split)
                if have != want
                else value
                for value, have, want, split in fine
            ]
        )

    def spread(self, parts: Parts) -> Parts:
        """Gives every fine group the number of its coarse one."""
        if self.whole:
            (value,) = parts[0]
            return tuple(jnp.broadcast_to(value, s) for s in self.fine.part_shapes)
        if self.fine == self.coarse:
            return parts
        return self.fine.pack(
            [
                jnp.broadcast_to(jnp.expand_dims(value, _missing(have, want)), shape)
                for value, have, want, shape in zip(
                    self.coarse.unpack(parts),
                    self.fine.axes,
                    self.coarse.axes,
                    self.fine.shapes,
                    strict=True,
                )
            ]
        )


def _missing(fine: tuple[int, ...], coarse: tuple[int, ...]) -> tuple[int, ...]:
    """Positions in ``fine`` of the axes that ``coarse`` does not keep."""
    return tuple(place for place, axis in enumerate(fine) if axis not in coarse)
