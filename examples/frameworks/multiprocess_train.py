"""AdaGC over two processes, joined by `jax.distributed`, each with half of a batch.

    python examples/frameworks/multiprocess_train.py

It starts both processes on this machine's CPU. Batches are sharded over them and
parameters are not, so gradients are summed by XLA and both clip alike: both print the
same references. On a cluster you start the processes and pass no addresses.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from _toy import arguments, batches, optimizer, show
from jax.sharding import NamedSharding, PartitionSpec as P
from plain_scan_train import init_params, loss_fn

import adagc_jax

PROCESSES = 2
_RANK, _ADDRESS = "ADAGC_EXAMPLE_RANK", "ADAGC_EXAMPLE_ADDRESS"
_SECONDS = 120


def work(argv: Sequence[str]) -> None:
    """One process: joins the other, trains, and the first one prints."""
    rank, address = int(os.environ[_RANK]), os.environ[_ADDRESS]
    args = arguments(__doc__, argv)
    jax.distributed.initialize(
        address,
        PROCESSES,
        rank,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,
    )
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    tx = optimizer(adagc_jax.stacked({"^layers/": 0}))

    def train_step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(train_step, out_shardings=everywhere)
    start = jax.tree.map(np.asarray, init_params())
    params = jax.device_put(start, everywhere)
    state = jax.jit(tx.init, out_shardings=everywhere)(params)
    losses = []
    for x in batches(args.steps, args.bad_step):
        data = jax.make_array_from_callback(x.shape, split, x.__getitem__)
        params, state, loss = step(params, state, data)
        losses.append(float(loss))
    rate = float(adagc_jax.clip_metrics(state)["clip/clip_rate"])
    print(f"process {rank} of {PROCESSES}: loss {losses[-1]:.6f}, clip rate {rate:.4f}")
    if rank == 0:
        show("multiprocess", losses, args.bad_step, state)


def start(argv: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Both processes, one CPU device each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    # A proxy would be asked for the way to this machine itself.
    env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", _ADDRESS: address}
    command = [sys.executable, __file__, *argv]
    return [
        subprocess.Popen(command, env=env | {_RANK: str(rank)})
        for rank in range(PROCESSES)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Starts the processes and waits for them."""
    argv = sys.argv[1:] if argv is None else argv
    if _RANK in os.environ:
        work(argv)
        return
    arguments(__doc__, argv)
    running = start(argv)
    try:
        codes = [process.wait(timeout=_SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    if any(codes):
        raise SystemExit(f"a process failed: exit codes {codes}")


if __name__ == "__main__":
    main()
