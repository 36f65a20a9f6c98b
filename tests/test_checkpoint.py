"""Saving and restoring: with and without a target, on the same mesh and on others."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import multiprocess_worker as worker
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from optimizers import OPTIMIZERS, PARAMS, initial, numbered
from streams import assert_same

import adagc_jax as aj
from adagc_jax import restore_state

# Optimizers of optax mix int32 counts and float32 moments.
pytestmark = pytest.mark.usefixtures("optax_promotion")


def by_flax(states: Any, folder: Path) -> Any:
    (folder / "states").write_bytes(flax.serialization.to_bytes(states))
    return flax.serialization.msgpack_restore((folder / "states").read_bytes())


def by_orbax(states: Any, folder: Path) -> Any:
    with ocp.CheckpointManager(folder / "states") as manager:
        manager.save(0, args=ocp.args.StandardSave(states))
        manager.wait_until_finished()
        return manager.restore(0, args=ocp.args.StandardRestore())


class TestWithoutATarget:
    @pytest.mark.parametrize("through", [by_flax, by_orbax])
    def test_types_and_names_come_back(self, through: Any, tmp_path: Path) -> None:
        states = {name: numbered(initial(name)) for name in OPTIMIZERS}
        raw = through(states, tmp_path)
        for name, optimizer in OPTIMIZERS.items():
            restored = restore_state(raw[name], optimizer, PARAMS)
            assert_same(restored, states[name])
            assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(restored))
            if name != "global norm":
                got, want = (
                    aj.clip_metrics(state, level="all")
                    for state in (restored, states[name])
                )
                assert got == want

    def test_boxes_tuples_and_lists_of_parameters(self, tmp_path: Path) -> None:
        kernel = nn.Partitioned(jnp.ones((2, 3)), names=("a", None))
        params = {"x": [kernel, (jnp.ones(2),)], "7": jnp.ones(1)}
        optimizer = OPTIMIZERS["adagc"]
        state = numbered(optimizer.init(params))
        for through in (by_flax, by_orbax):
            folder = tmp_path / through.__name__
            folder.mkdir()
            raw = through({"opt": state}, folder)
            restored = restore_state(raw["opt"], optimizer, params)
            assert_same(restored, state)

    def test_abstract_parameters_and_a_state_with_types(self) -> None:
        state = numbered(initial("stacked"))
        abstract = jax.eval_shape(lambda: PARAMS)
        restored = restore_state(state, OPTIMIZERS["stacked"], abstract)
        assert_same(restored, state)
        assert restored[0].clip_step is state[0].clip_step

    def test_python_numbers_that_are_scalars_exactly(self) -> None:
        state = numbered(initial("wrapped"), 7)
        raw: Any = jax.tree.map(lambda x: x if x.ndim else x.item(), state)
        restored = restore_state(raw, OPTIMIZERS["wrapped"], PARAMS)
        assert_same(restored, state)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(restored))

    @pytest.mark.parametrize(
        ("value", "wanted"),
        [
            (2**31, "int32"),
            (1.0, "int32"),
            (True, "int32"),
            (0.1, "float32"),
            (2**24 + 1, "float32"),
            (10.0**39, "float32"),
            (False, "float32"),
            (1, "bool"),
        ],
    )
    def test_python_numbers_that_are_not(self, value: Any, wanted: str) -> None:
        optimizer = optax.GradientTransformation(lambda p: p, lambda u, s, p: (u, s))
        form = jax.ShapeDtypeStruct((), wanted)
        with pytest.raises(ValueError, match=r"^raw has Python numbers") as caught:
            restore_state({"n": value}, optimizer, {"n": form})
        assert f": n is {value}, no {wanted}. " in str(caught.value)

    @pytest.mark.parametrize("value", [np.inf, np.nan, 0.5, 3])
    def test_numbers_of_floats(self, value: float) -> None:
        optimizer = optax.GradientTransformation(lambda p: p, lambda u, s, p: (u, s))
        form = jax.ShapeDtypeStruct((), jnp.float32)
        restored = restore_state({"n": value}, optimizer, {"n": form})
        np.testing.assert_array_equal(restored["n"], np.float32(value))

    def test_states_and_optimizers_are_not_mixed_up(self) -> None:
        optimizer, state = OPTIMIZERS["adagc"], initial("adagc")
        with pytest.raises(ValueError, match=r"^raw is None"):
            restore_state(None, optimizer, PARAMS)
        with pytest.raises(ValueError, match=r"^raw is an optimizer"):
            restore_state(optimizer, optimizer, PARAMS)
        with pytest.raises(ValueError, match=r"^optimizer must have an init"):
            restore_state(state, state, PARAMS)

    @pytest.mark.parametrize(
        ("optimizer", "params", "words"),
        [
            (
                "stacked",
                PARAMS,
                ["lacks 0/stages/0/seen/0", "has besides 0/metrics/active, "],
            ),
            (
                "global norm",
                PARAMS,
                ["lacks nothing", "0/clip_step", "more", "transfer_state"],
            ),
            (
                "adagc",
                PARAMS | {"head": jnp.ones((2, 4))},
                ["1/0/mu/head is float32[2, 3], not float32[2, 4]", "1/0/nu/head"],
            ),
            (
                "adagc",
                jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS),
                ["1/0/mu/embed is float32[4, 2], not bfloat16[4, 2]"],
            ),
        ],
    )
    def test_what_does_not_fit_is_named(
        self, optimizer: str, params: Any, words: list[str]
    ) -> None:
        raw = flax.serialization.to_state_dict(initial("adagc"))
        with pytest.raises(ValueError, match=r"^raw does not fit") as caught:
            restore_state(raw, OPTIMIZERS[optimizer], params)
        for word in words:
            assert word in str(caught.value)


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    """Parameters are split along the first axis only."""
    count = int(np.prod(sizes))
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices, has {jax.device_count()}")
    names, kinds = ("fsdp", "copies")[: len(sizes)], (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[:count]
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, worker.Results]:
    """A run on four devices with checkpoints in warm-up and after it."""
    folder = str(tmp_path_factory.mktemp("saved"))
    mesh = mesh_of(4)
    with jax.numpy_dtype_promotion("standard"), jax.set_mesh(mesh):
        return folder, dict(worker.save(mesh, folder))


class TestOnMeshes:
    @pytest.mark.parametrize("sizes", [(4,), (2,), (1,), (4, 2)], ids=str)
    def test_goes_on_from_the_checkpoint(
        self, sizes: tuple[int, ...], saved: tuple[str, worker.Results]
    ) -> None:
        folder, want = saved
        mesh = mesh_of(*sizes)
        with jax.set_mesh(mesh):
            results = dict(worker.resume(mesh, folder))
        gammas = [name for name in results if name.endswith("gamma[0]")]
        assert len(gammas) == sum(worker.STEPS - step for step in worker.SAVED)
        for name, got in results.items():
            uninterrupted = want[name.split("/", 1)[1]]
            error = np.max(np.abs(got - uninterrupted))
            same_mesh = sizes == (4,)
            assert error <= (0 if same_mesh else 1e-6 * np.max(np.abs(got))), name

    def test_restores_without_a_target(self, saved: tuple[str, worker.Results]) -> None:
        folder, want = saved
        step = worker.SAVED[0]
        with worker.checkpoints(folder) as manager:
            params, raw = manager.restore(step, args=ocp.args.StandardRestore())
        assert type(raw) is list
        state = restore_state(raw, worker.clip_and_adam(), params)
        for name, got in worker.named_views(f"{step - 1}/", (params, state)):
            np.testing.assert_array_equal(got, want[name], name)


def test_an_update_with_a_raw_state_says_what_to_do() -> None:
    optimizer = OPTIMIZERS["adagc"]
    raw = flax.serialization.to_state_dict(initial("adagc"))
    with pytest.raises(ValueError, match=r"ClipState, got a dict.*restore_state\("):
        optimizer.update(PARAMS, tuple(raw.values()), PARAMS)
