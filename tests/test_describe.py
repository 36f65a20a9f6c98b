"""The table of groups, and the warning for trees that look stacked."""

import linecache
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec as P

import adagc_jax as aj
from adagc_jax import StackedTreeWarning, describe, stacked
from adagc_jax.stack_warning import looks_stacked, warn_if_stacked

SHAPES = {
    "layers": {"b": (8, 4), "w": (8, 4, 16)},
    "moe": {"experts": (4, 3, 8, 6)},
    "out": (8, 2),
}
SPEC = stacked({"^layers/": 1, "experts": (0, 1)})


def abstract(shapes: Any) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


class TestDescribe:
    def test_rows_and_total_are_those_of_the_state(self) -> None:
        params = abstract(SHAPES)
        table = describe(SPEC, params)
        assert [row.groups for row in table.rows] == [4, 4, 12, 1]
        assert table.rows[1] == ("layers/w", (8, 4, 16), (1,), (), "", 4)
        assert table.total == 21
        state = jax.eval_shape(aj.adagc(groups=SPEC).init, params)
        assert sum(x.size for x in state.stages[0].seen) == table.total

    def test_units_are_marked(self) -> None:
        groups = aj.units({"out": "tensor"}, stacked={"^layers/": 1, "experts": (0, 1)})
        assert str(describe(groups, abstract(SHAPES))).splitlines() == [
            "leaf         shape         kept axes       groups",
            "layers/b     (8, 4)        1               4",
            "layers/w     (8, 4, 16)    1, 2 (unit)     64",
            "moe/experts  (4, 3, 8, 6)  0, 1, 3 (unit)  72",
            "out          (8, 2)        -               1",
            "groups: 141, of 4 leaves",
        ]

    def test_leaves_left_out(self) -> None:
        params = abstract(SHAPES) | {"step": jnp.arange(3), "none": None}
        table = describe(SPEC, params, exclude=["/b$"])
        assert {row.path: row.groups for row in table.rows} == {
            "layers/b": 0,
            "layers/w": 4,
            "moe/experts": 12,
            "out": 1,
            "step": 0,
        }
        assert str(table).endswith("groups: 17, of 3 leaves, 2 left out")
        mask = {"layers": {"b": False, "w": True}, "moe": True, "out": True}
        mask |= {"step": True, "none": True}
        assert describe(SPEC, params, mask=mask) == table

    def test_the_whole_tree_is_one_group(self) -> None:
        table = describe(aj.whole_tree(), abstract(SHAPES), exclude=["out"])
        assert table.total == 1
        lines = str(table).splitlines()
        assert lines[1] == "layers/b     (8, 4)        -          shared"
        assert lines[-2:] == [
            "out          (8, 2)        -          -",
            "groups: 1, of 3 leaves, 1 left out",
        ]
        assert describe(aj.whole_tree(), {}).total == 0

    def test_boxes_are_looked_into(self) -> None:
        shape = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        boxed = {"w": nn.Partitioned(shape, names=("embed", "layers"))}
        assert describe(stacked(1), boxed) == describe(stacked(1), {"w": shape})

    def test_shards_count_with_the_layers(self) -> None:
        mesh = jax.make_mesh((4, 2), ("x", "y"))
        sharding = NamedSharding(mesh, P(None, "x", "y"))
        groups = aj.per_shard({"w": sharding, "b": NamedSharding(mesh, P())}, {"w": 0})
        shapes = {"w": (3, 8, 6), "b": (5,)}
        table = describe(groups, abstract(shapes))
        assert [row.groups for row in table.rows] == [1, 3 * 4 * 2]
        assert table.rows[1].stacked == (0,)
        assert table.rows[1].shards == "1 x 4 x 2 blocks"
        assert "0, shards 1 x 4 x 2 blocks  24" in str(table)

    def test_specs_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(ValueError, match="'blocks/' matches no leaf"):
            describe(stacked({"blocks/": 0}), abstract(SHAPES))
        with pytest.raises(ValueError, match="exclude: the pattern 'head'"):
            describe(SPEC, abstract(SHAPES), exclude=["head"])
        axes: Any = {"layers/": 0}
        with pytest.raises(ValueError, match=r"^groups must be .*stacked\(\{'layers/'"):
            describe(axes, abstract(SHAPES))


def message(shapes: Any) -> str | None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        shapes, is_leaf=lambda shape: isinstance(shape, tuple)
    )
    paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves]
    return looks_stacked(paths, [shape for _, shape in leaves])


D, F, L, E = 16, 24, 4, 3
LAYER = {
    "attn": {"q": (D, 2, 8), "k": (D, 2, 8), "v": (D, 2, 8), "o": (2, 8, D)},
    "mlp": {"up": (D, F), "down": (F, D)},
    "norm": (D,),
}
NO_NORM = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D)}
EXPERTS = {"up": (D, F), "down": (F, D)}


def along(shapes: Any, axis: int, size: int) -> Any:
    """A layer's shapes with a stack of ``size`` on ``axis``."""
    return jax.tree.map(
        lambda shape: (*shape[:axis], size, *shape[axis:]),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


STACKS = {
    "axis 0": ({"layers": along(LAYER, 0, L)}, "{'^layers/': 0}"),
    "axis 1": ({"decoder": {"layers": along(LAYER, 1, L)}}, "{'^decoder/layers/': 1}"),
    "one width": ({"blocks": along(NO_NORM, 0, L)}, "{'^blocks/': 0}"),
    "one width on axis 1": ({"blocks": along(NO_NORM, 1, L)}, "{'^blocks/': 1}"),
    "one expert in a stack": (
        {"layers": along(LAYER | {"experts": {"up": (D, F), "gate": (D, F)}}, 0, L)},
        "{'^layers/': 0}",
    ),
    "two stacks": (
        {"enc_layers": along(LAYER, 0, 2), "dec_layers": along(LAYER, 0, 3)},
        "{'^enc_layers/': 0, '^dec_layers/': 0}",
    ),
    "Linen's name": ({"ScanLayer_0": along(LAYER, 0, L)}, "{'^ScanLayer_0/': 0}"),
    "experts": ({"moe": {"experts": along(EXPERTS, 0, E)}}, "{'^moe/experts/': 0}"),
    "experts of layers in a list": (
        {"layers": [LAYER | {"experts": along(EXPERTS, 0, E)}] * 6},
        r"{'^layers/\\d+/experts/': 0}",
    ),
    "experts in a stack": (
        {"layers": along(LAYER | {"experts": along(EXPERTS, 0, E)}, 0, L)},
        "{'^layers/experts/': (0, 1), '^layers/': 0}",
    ),
    "experts in a stack on axis 1": (
        {"layers": along(LAYER | {"experts": along(EXPERTS, 0, E)}, 1, L)},
        "{'^layers/experts/': (0, 1), '^layers/': 1}",
    ),
    "haiku's name": (
        {"net/__layer_stack_no_per_layer/mlp": along(LAYER, 0, L)},
        "{'^net/__layer_stack_no_per_layer/': 0}",
    ),
    "single names": (
        {name: along(LAYER, 0, L) for name in ("block", "h", "layer", "layer_stack")},
        "{'^layer_stack/': 0, '^layer/': 0, '^h/': 0, '^block/': 0}",
    ),
    "as many heads as layers": (
        {"layers": along(LAYER | {"q": (D, L, 8), "v": (D, L, 8)}, 0, L)},
        "{'^layers/': 0}",
    ),
    "scalars of layers": (
        {"layers": along(LAYER | {"gate": ()}, 0, L)},
        "{'^layers/': 0}",
    ),
    "three layers": ({"layers": along(LAYER, 0, 3)}, "{'^layers/': 0}"),
    "a mixture on axis 1": (
        {
            "layers": along(LAYER, 1, L)
            | {"MoeBlock_0": {"wi": (E, L, D, F), "wo": (E, L, F, D)}}
        },
        "{'^layers/': 1}",
    ),
    "beside other leaves": (
        {"layers": along(LAYER, 0, L), "embed": (64, D), "norm": (D,)},
        "{'^layers/': 0}",
    ),
}
NOT_STACKS = {
    "a list": {"layers": [LAYER, LAYER]},
    "numbered names": {f"layers_{i}": LAYER for i in range(L)},
    "one layer": {"layers": LAYER},
    "one layer of squares": {"layers": NO_NORM | {"norm": (D,)}},
    "one layer of cubes": {"layers": along(NO_NORM, 0, D) | {"norm": (D,)}},
    "squares alone": {"layers": NO_NORM},
    "a list of squares": {"blocks": [NO_NORM] * L},
    "a list inside": {"blocks": {"a": [NO_NORM] * L, "b": [along(NO_NORM, 0, D)]}},
    "few leaves": {"layers": {"w": (L, D, D), "b": (L, D), "c": (L, D)}},
    "no name of a stack": {"model": along(LAYER, 0, L)},
    "kernels": {"blocks": dict.fromkeys("abcd", (3, 3, D, D))},
    "kernels of one axis": {"blocks": {f"conv{i}": (3, D, D) for i in "abcd"}},
    "one of each": {"layers": along(LAYER, 0, 1)},
    "kernels without a name": {"blocks": {f"c{i}": (3, D, F) for i in range(4)}},
    "kernels of unequal sides": {
        "blocks": {"a": (3, 5, 1, D), "b": (3, 5, D, D), "c": (3, 5, 1, D)}
        | {"d": (3, 5, D, D)}
    },
    "a stack of one": {"layers": along(NO_NORM | {"norm": (D,)}, 0, 1)},
    "a stack of one on axis 1": {"layers": along(NO_NORM | {"norm": (D,)}, 1, 1)},
    "attention by names": {
        "layers": dict.fromkeys(
            ("first", "second"), LAYER["attn"] | {"o": (D, D), "norm": (D, 1)}
        )
    },
    "shared layers": {
        "layers": dict.fromkeys("qkv", (D, 2, 8)) | {"in": (D, F), "out": (D, F)}
    },
    "a matrix as wide as the stack": {
        "layers": dict.fromkeys("qkv", (D, 2, F)) | {"o": (D, D), "in": (D, F)}
    },
    "scalars of layers on axis 1": {
        "layers": along(NO_NORM | {"norm": (D,)}, 1, L) | {"gate": (L,)}
    },
    "vectors as wide": {
        "layers": dict.fromkeys("qk", (D, 2, F))
        | {"v": (D, 2, 8), "in": (D, F), "up": (D, F), "norm": (D,)}
    },
    "different sizes": {"layers": along(LAYER, 0, L) | {"z": (L + 1, D)}},
    "one expert": {"experts": EXPERTS},
    "nothing": {},
}


class TestLooksStacked:
    @pytest.mark.parametrize("name", STACKS)
    def test_it_says_what_to_write(self, name: str) -> None:
        shapes, spec = STACKS[name]
        said = message(shapes)
        assert said is not None
        assert f"groups=adagc_jax.stacked({spec})" in said
        assert "groups=adagc_jax.per_tensor()" in said

    @pytest.mark.parametrize("name", STACKS)
    def test_what_it_says_to_write_silences_it_and_fits(self, name: str) -> None:
        shapes, _ = STACKS[name]
        said = message(shapes)
        assert said is not None
        code = said.partition("groups=adagc_jax.")[2].partition(", or say")[0]
        groups = eval(code, {"stacked": stacked})
        kept = [row for row in describe(groups, abstract(shapes)).rows if row.stacked]
        assert kept
        assert all(
            np.prod([row.shape[axis] for axis in row.stacked]) in (2, E, L, E * L)
            for row in kept
        )

    @pytest.mark.parametrize("name", NOT_STACKS)
    def test_it_is_silent(self, name: str) -> None:
        assert message(NOT_STACKS[name]) is None

    def test_it_names_leaves_and_sizes(self) -> None:
        said = message({"layers": along(LAYER, 1, L)})
        assert said is not None
        assert "7 leaves below 'layers/' have the size 4 on axis 1" in said
        assert "layers/attn/k (16, 4, 2, 8)" in said

    def test_it_speaks_of_experts_that_have_no_path_of_their_own(self) -> None:
        said = message(STACKS["a mixture on axis 1"][0])
        assert said is not None
        assert "Axis 0 of layers/MoeBlock_0/wi and layers/MoeBlock_0/wo may" in said
        for name in ("axis 1", "experts in a stack on axis 1"):
            said = message(STACKS[name][0])
            assert said is not None
            assert "may be that of experts" not in said
        said = message({"moe_layers": along(LAYER, 1, L)})
        assert said is not None
        assert "may be that of experts" not in said

    def test_it_warns_once_per_tree(self) -> None:
        tree = (["layers/a", "layers/b", "layers/c", "layers/d"], [(4, 7, 9)] * 4)
        with pytest.warns(StackedTreeWarning, match=r"stacked\(\{'\^layers/': 0\}\)"):
            warn_if_stacked(*tree)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_if_stacked(*tree)
        with pytest.warns(StackedTreeWarning) as caught:
            warn_if_stacked(tree[0], [(6, 7, 9)] * 4)
        assert caught[0].filename == __file__

    def test_it_shows_the_line_of_whoever_calls_init(self) -> None:
        shapes = {"layers": dict.fromkeys("abcd", (4, 7, 11))}
        optimizer = optax.chain(optax.chain(aj.adagc()), optax.scale(1.0))
        with pytest.warns(StackedTreeWarning) as caught:
            jax.eval_shape(optimizer.init, abstract(shapes))
        assert caught[0].filename == __file__
        assert "jax.eval_shape(optimizer.init" in linecache.getline(
            __file__, caught[0].lineno
        )
