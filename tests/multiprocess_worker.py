"""One of the processes that test_multiprocess.py starts, and what it trains.

Usage: multiprocess_worker.py PROCESS PROCESSES PORT OUT.npz WHAT...

WHAT is the name of an optimizer, resume:FOLDER or save:FOLDER.
"""

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import adagc_jax as aj

DEVICES = 4
STEPS = 6
MAX_NORM = 100.0
# Exit status where CPU processes cannot work together, and what jax then says.
NO_COLLECTIVES = 77
NO_COLLECTIVES_REASONS = ("aren't implemented on the CPU", "only implemented for")
NAN_STEP, EXPLOSION_STEP = 3, 4
SCENARIOS = ("clean", "nan", "explosion")
SAVED = (1, 4)  # steps before which there is a checkpoint: in warm-up and after it
SPECS = {
    "rows": P("fsdp"),
    "columns": P(None, "fsdp"),
    "experts": P("fsdp"),  # one per device, so each gamma has a process of its own
    "layers": P(None, "fsdp"),
    "bias": P(),
}
SHAPES = {
    "rows": (8, 4),
    "columns": (3, 8),
    "experts": (4, 6),
    "layers": (3, 8, 2),
    "bias": (5,),
}
# Where the faults are: in a shard of the last process, and in one of the first.
NAN_AT, EXPLOSION_AT = ("experts", (3, 2)), ("rows", (0, 1))

# Stands for elements that only other processes hold; no float32 is as large.
ELSEWHERE = -1e300

Results = dict[str, np.ndarray]


def clip_and_adam() -> optax.GradientTransformationExtraArgs:
    groups = aj.stacked({"experts": 0, "layers": 0})
    # The limit is between the norms of the first two steps, the warm-up.
    clip = aj.adagc(lambda_abs=14.0, warmup_steps=2, groups=groups)
    return optax.chain(clip, optax.adamw(1e-2))


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformationExtraArgs]] = {
    "chain": clip_and_adam,
    "guard": lambda: aj.guard(clip_and_adam(), max_norm=MAX_NORM),
}


def host_gradients(scenario: str, step: int) -> Results:
    rng = np.random.default_rng(step)
    # From step to step the norms rise and fall, so that AdaGC clips some of them.
    grads = {
        name: (rng.normal(size=shape) * rng.lognormal()).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    if scenario == "nan" and step == NAN_STEP:
        grads[NAN_AT[0]][NAN_AT[1]] = np.nan
    if scenario == "explosion" and step == EXPLOSION_STEP:
        grads[EXPLOSION_AT[0]][EXPLOSION_AT[1]] = 1e4
    return grads


def place(tree: Results, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    def sharded(name: str, value: np.ndarray) -> jax.Array:
        sharding = NamedSharding(mesh, SPECS[name])
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    return {name: sharded(name, value) for name, value in tree.items()}


def local_view(array: jax.Array) -> np.ndarray:
    """What this process holds of it, without asking any other process."""
    view = np.full(array.shape, ELSEWHERE)
    for shard in array.addressable_shards:
        data, before = np.asarray(shard.data, np.float64), view[shard.index]
        replica = np.where(before == ELSEWHERE, data, before)
        np.testing.assert_array_equal(replica, data)
        view[shard.index] = data
    return view


def named_views(prefix: str, tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield f"{prefix}{jax.tree_util.keystr(path)}", local_view(leaf)


def count_faults(grads: dict[str, jax.Array]) -> np.ndarray:
    """How many NaN and how many exploded elements this process can see."""
    shards = [
        np.asarray(shard.data)
        for name in (NAN_AT[0], EXPLOSION_AT[0])
        for shard in grads[name].addressable_shards
    ]
    nan = sum(np.isnan(shard).sum() for shard in shards)
    return np.asarray([nan, sum((shard > MAX_NORM).sum() for shard in shards)])


def metrics_of(state: Any) -> dict[str, jax.Array]:
    clip = aj.clip_metrics(state)
    return clip | (aj.guard_metrics(state) if isinstance(state, aj.GuardState) else {})


def shardings_of(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Moments lie with their parameters, numbers of experts with the experts."""
    specs = {SHAPES[name]: SPECS[name] for name in SHAPES}
    specs[SHAPES["experts"][:1]] = P("fsdp")
    return jax.tree.map(lambda x: NamedSharding(mesh, specs.get(x.shape, P())), tree)


def make_step(
    optimizer: optax.GradientTransformationExtraArgs, where: Any, state_where: Any
) -> Callable[..., Any]:
    # Left to XLA, the state would move in the first step, and compile another one.
    @functools.partial(jax.jit, out_shardings=(where, state_where, where, None))
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any, Any, Any]:
        loss = sum(jnp.sum(jnp.square(leaf)) for leaf in params.values())
        updates, state = optimizer.update(grads, state, params, loss=loss)
        params = optax.apply_updates(params, updates)
        return params, state, updates, metrics_of(state)

    return step


def train(mesh: jax.sharding.Mesh, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """All that happens with one optimizer in all scenarios, by name."""
    optimizer = OPTIMIZERS[name]()
    start: Any = place(host_gradients("clean", STEPS), mesh)
    where = shardings_of(start, mesh)
    state_where = shardings_of(jax.eval_shape(optimizer.init, start), mesh)
    init = jax.jit(optimizer.init, out_shardings=state_where)
    step = make_step(optimizer, where, state_where)
    for scenario in SCENARIOS:
        params, state = start, init(start)
        for number in range(STEPS):
            grads = place(host_gradients(scenario, number), mesh)
            params, state, updates, metrics = step(params, state, grads)
            prefix = f"{name}/{scenario}/{number}/"
            yield f"{prefix}faults", count_faults(grads)
            yield from named_views(f"{prefix}updates", updates)
            yield from named_views(f"{prefix}params", params)
            yield from named_views(f"{prefix}state", state)
            # As a training loop reads them: every process must hold the number.
            for key, value in metrics.items():
                yield f"{prefix}{key}", np.asarray(float(value))
    assert step._cache_size() == 1


@functools.cache
def begin(mesh: jax.sharding.Mesh) -> tuple[Callable[..., Any], Any]:
    """The step of a run with checkpoints, and what it starts from."""
    optimizer = clip_and_adam()
    params: Any = place(host_gradients("clean", STEPS), mesh)
    where = shardings_of(params, mesh)
    state_where = shardings_of(jax.eval_shape(optimizer.init, params), mesh)
    state = jax.jit(optimizer.init, out_shardings=state_where)(params)

    @functools.partial(jax.jit, out_shardings=(where, state_where))
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, state)


def checkpoints(folder: str) -> Any:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    return ocp.CheckpointManager(folder, options=options)


def save(mesh: jax.sharding.Mesh, folder: str) -> Iterator[tuple[str, np.ndarray]]:
    """A run that is saved on the way, and what it comes to in every step."""
    import orbax.checkpoint as ocp

    step, now = begin(mesh)
    with checkpoints(folder) as manager:
        for number in range(STEPS):
            if number in SAVED:
                manager.save(number, args=ocp.args.StandardSave(now))
            now = step(*now, place(host_gradients("clean", number), mesh))
            yield from named_views(f"{number}/", now)


def resume(mesh: jax.sharding.Mesh, folder: str) -> Iterator[tuple[str, np.ndarray]]:
    """The same from every checkpoint on."""
    import orbax.checkpoint as ocp

    step, target = begin(mesh)
    with checkpoints(folder) as manager:
        for saved in SAVED:
            now = manager.restore(saved, args=ocp.args.StandardRestore(target))
            for number in range(saved, STEPS):
                now = step(*now, place(host_gradients("clean", number), mesh))
                yield from named_views(f"from {saved}/{number}/", now)


def results_of(mesh: jax.sharding.Mesh, what: str) -> Iterator[tuple[str, np.ndarray]]:
    kind, _, folder = what.partition(":")
    return {"save": save, "resume": resume}.get(kind, train)(mesh, folder or what)


def connect(process: int, processes: int, port: int) -> None:
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address,
        processes,
        process,
        # Or the job of a cluster that the tests run in would be joined.
        cluster_detection_method="deactivate",
        initialization_timeout=60,
        # Or all interfaces would listen.
        coordinator_bind_address=address,
    )


def make_mesh() -> jax.sharding.Mesh:
    """The mesh, if its processes can compute something together."""
    try:
        mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,))
        rows = place(host_gradients("clean", 0), mesh)["rows"]
        jax.block_until_ready(jax.jit(jnp.sum)(rows))
    except RuntimeError as error:
        if not any(reason in str(error) for reason in NO_COLLECTIVES_REASONS):
            raise
        print(error)
        sys.exit(NO_COLLECTIVES)
    return mesh


def main(process: int, processes: int, port: int, out: str, *names: str) -> None:
    if processes > 1:
        connect(process, processes, port)
    mesh = make_mesh()
    assert jax.process_count() == processes
    assert jax.local_device_count() * processes == DEVICES
    with jax.set_mesh(mesh):
        results = dict(item for name in names for item in results_of(mesh, name))
    np.savez(out, **results)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:4]), *sys.argv[4:])
    except Exception:
        traceback.print_exc()
        # An ordinary exit would wait for the other processes, and they for this one.
        os._exit(1)
