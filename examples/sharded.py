"""Trains a mixture of experts on a mesh, and shows where the clipper's numbers live.

Layers and experts are stacked, parameters are sharded over three mesh axes, and every
expert of every layer has its own reference. On a machine without accelerators the
devices are fake ones on the CPU.

    python examples/sharded.py
    python examples/sharded.py --mesh fsdp=4,expert=2 --steps 100

It ends with two tables: the references with their shapes and shardings, and the
collectives that each clipper adds to the optimizer step, counted in compiled programs.
"""

import argparse
import functools
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import optax
from _cli import refusals
from _data import load_corpus, train_batch
from _mesh import fake_devices, init_state, make_mesh, parse_mesh
from _moe import SPECS, Sizes, init, loss
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rich.console import Console
from rich.table import Table

import adagc_jax as aj
from adagc_jax.metrics import find_clip_states

# Experts first: the first pattern that is found in a path wins.
GROUPS = aj.stacked({"experts/": (0, 1), "layers/": 0})


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Trains a mixture of experts on a mesh."
    )
    parser.add_argument("--mesh", default="fsdp=2,tensor=2,expert=2", type=parse_mesh)
    parser.add_argument("--steps", default=40, type=int)
    parser.add_argument("--batch", default=16, type=int)
    parser.add_argument("--time", default=64, type=int)
    return parser.parse_args()


def train(
    console: Console, mesh: Mesh, shardings: Any, args: argparse.Namespace
) -> tuple[Any, Any]:
    """Trains a few steps; the parameters and the optimizer state."""
    sizes = Sizes()
    optimizer = optax.chain(aj.adagc(warmup_steps=10, groups=GROUPS), optax.adamw(3e-3))
    params = jax.jit(init, static_argnums=1, out_shardings=shardings)(
        jax.random.key(0), sizes
    )
    opt_state = init_state(optimizer, params)

    @functools.partial(jax.jit, out_shardings=(shardings, None, None))
    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens, sizes)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    text = load_corpus().train
    by_row = NamedSharding(mesh, P(("data", "fsdp")))
    for number in range(args.steps):
        inputs, targets = train_batch(
            text, seed=0, step=number, batch_size=args.batch, length=args.time
        )
        tokens = np.concatenate([inputs, targets[:, -1:]], axis=1)
        params, opt_state, value = step(
            params, opt_state, jax.device_put(tokens, by_row)
        )
        if number % 10 == 9:
            numbers = aj.clip_metrics(jax.device_get(opt_state))
            console.print(
                f"step {number + 1:4d}  loss {value:.3f}  "
                f"global norm {numbers['clip/norm_before']:.3f}  "
                f"clipped {numbers['clip/fraction_clipped']:.0%} of the tensors"
            )
    return params, opt_state


def gamma_table(opt_state: Any) -> Table:
    """Every reference array: what it belongs to, its shape, and where it lives."""
    table = Table("references of", "shape", "sharding", title="Where gamma lives")
    (state,) = find_clip_states(opt_state)
    layout = state.labels.layouts[1]
    vector, *apart = jax.tree.leaves(state.stages[0].rule.gamma)
    whole = [p for p, axes in zip(layout.paths, layout.axes, strict=True) if not axes]
    kept = [p for p, axes in zip(layout.paths, layout.axes, strict=True) if axes]
    for paths, gamma in [(", ".join(whole), vector), *zip(kept, apart, strict=True)]:
        table.add_row(paths, str(gamma.shape), str(tuple(gamma.sharding.spec)))
    return table


def collectives(optimizer: Any, params: Any, shardings: Any) -> Counter[str]:
    """Collectives in the compiled optimizer step."""
    update = jax.jit(optimizer.update, out_shardings=(shardings, None))
    state = init_state(optimizer, params)
    text = update.lower(params, state, params).compile().as_text()
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return Counter(re.findall(rf" ({kinds})(?:-start)?\(", text or ""))


def collectives_table(params: Any, shardings: Any) -> Table:
    """What each clipper adds to AdamW."""
    clippers = {
        "AdamW alone": optax.identity(),
        "optax.clip_by_global_norm": optax.clip_by_global_norm(1.0),
        "adagc": aj.adagc(groups=GROUPS),
        "adagc, steady phase": aj.adagc(groups=GROUPS, phase="steady"),
        "adagc per shard, steady phase": aj.adagc(
            groups=aj.per_shard(shardings, stacked={"experts/": (0, 1), "layers/": 0}),
            phase="steady",
        ),
    }
    table = Table("clipper", "collectives", title="Collectives of the optimizer step")
    for name, clipper in clippers.items():
        found = collectives(optax.chain(clipper, optax.adamw(1e-3)), params, shardings)
        shown = ", ".join(f"{n} {kind}" for kind, n in sorted(found.items()))
        table.add_row(name, shown or "none")
    return table


def main() -> None:
    """Trains and shows both tables."""
    args = parse_args()
    fake_devices(args.mesh)
    console = Console()
    with refusals():
        mesh = make_mesh(args.mesh)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        SPECS,
        is_leaf=lambda x: isinstance(x, P),
    )
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    console.print(f"{mesh.size} {jax.default_backend()} devices: {axes}")
    params, opt_state = train(console, mesh, shardings, args)
    console.print(gamma_table(opt_state))
    console.print(collectives_table(params, shardings))


if __name__ == "__main__":
    main()
