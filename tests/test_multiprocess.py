"""Training on a mesh over several real processes equals training in one.

Two and four processes with four CPU devices in all, connected by jax.distributed on
this machine, run multiprocess_worker.py. Each writes what it holds itself of updates,
parameters, state and metrics after every step.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jax
import multiprocess_worker as worker
import numpy as np
import pytest
from jax.sharding import AxisType

WORKER = Path(worker.__file__).resolve()
TIMEOUT = 120.0  # seconds for one run, which takes about 10 on two idle cores
NONFINITE_GRADS, MAX_NORM = 1, 3  # guard/last_reason


class Processes:
    """The processes of one run; their output goes to files, which never fill up."""

    def __init__(self, folder: Path, count: int, optimizers: Sequence[str]):
        self.optimizers = optimizers
        self.outs = [folder / f"{count}-{process}.npz" for process in range(count)]
        self.logs = [out.with_suffix(".log") for out in self.outs]
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        count, port = len(self.outs), free_port()
        env = environment(worker.DEVICES // count)
        for process, (out, log) in enumerate(zip(self.outs, self.logs, strict=True)):
            arguments = [process, count, port, out, *self.optimizers]
            command = [sys.executable, "-W", "error", WORKER, *map(str, arguments)]
            with log.open("wb") as stream:
                self.running.append(
                    subprocess.Popen(command, env=env, stdout=stream, stderr=stream)
                )

    def wait(self, seconds: float) -> None:
        """Until all have ended, or one has failed: the others would wait for it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            codes = [process.poll() for process in self.running]
            if all(code == 0 for code in codes):
                return
            if worker.NO_COLLECTIVES in codes:
                reason = self.logs[codes.index(worker.NO_COLLECTIVES)].read_text()
                pytest.skip(f"CPU processes cannot work together: {reason[-500:]}")
            if any(codes):
                self.fail(f"exit codes {codes}")
            time.sleep(0.05)
        self.fail(f"not finished after {seconds:.0f} s")

    def fail(self, what: str) -> NoReturn:
        self.kill()
        logs = [f"--- {log.name}\n{log.read_text()[-4000:]}" for log in self.logs]
        pytest.fail("\n".join([f"{len(logs)} processes: {what}", *logs]))

    def kill(self) -> None:
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(devices: int) -> dict[str, str]:
    # A proxy would be asked for the way to this machine itself.
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    flag = f"--xla_force_host_platform_device_count={devices}"
    paths = [str(WORKER.parents[1]), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{kept.get('XLA_FLAGS', '')} {flag}",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def run(folder: Path, count: int, optimizers: Sequence[str]) -> list[worker.Results]:
    """What each process has seen."""
    processes = Processes(folder, count, optimizers)
    try:
        processes.start()
        processes.wait(TIMEOUT)
    finally:
        processes.kill()
    results = []
    for out in processes.outs:
        with np.load(out) as arrays:
            results.append(dict(arrays))
    return results


def merge(results: list[worker.Results]) -> worker.Results:
    """All parts together; what several processes hold is exactly the same."""
    assert len({tuple(result) for result in results}) == 1
    whole = dict(results[0])
    for result in results[1:]:
        for name, part in result.items():
            if name.endswith("/faults"):
                continue  # differ on purpose
            held = part != worker.ELSEWHERE
            twice = held & (whole[name] != worker.ELSEWHERE)
            np.testing.assert_array_equal(part[twice], whole[name][twice], name)
            whole[name] = np.where(held, part, whole[name])
    assert all(np.all(array != worker.ELSEWHERE) for array in whole.values())
    return whole


def check_faults(results: list[worker.Results]) -> None:
    """The NaN is seen by the last process only, the explosion by the first only."""
    nan = f"guard/nan/{worker.NAN_STEP}/faults"
    large = f"guard/explosion/{worker.EXPLOSION_STEP}/faults"
    others = [[0, 0]] * (len(results) - 1)
    assert [result[nan].tolist() for result in results] == [*others, [1, 0]]
    assert [result[large].tolist() for result in results] == [[0, 1], *others]


def check_verdicts(result: worker.Results) -> None:
    """This process skips the steps with a fault, and no other, for the same reason."""
    faults = {
        "nan": (worker.NAN_STEP, NONFINITE_GRADS, "nonfinite_grads"),
        "explosion": (worker.EXPLOSION_STEP, MAX_NORM, "max_norm"),
    }
    for scenario in worker.SCENARIOS:
        fault, code, reason = faults.get(scenario, (None, 0, "max_norm"))
        for step in range(worker.STEPS):
            metrics = f"guard/{scenario}/{step}/guard/"
            skips = int(fault is not None and step >= fault)
            assert result[f"{metrics}last_reason"] == (code if step == fault else 0)
            assert result[f"{metrics}skipped_{reason}"] == skips
            assert result[f"{metrics}skipped"] == skips
            assert result[f"{metrics}step"] == step + 1


def check_skipped_step(whole: worker.Results, scenario: str, step: int) -> None:
    """No part of the updates, parameters or inner state moves, in any process."""
    start = f"guard/{scenario}/{step}/"
    for name, value in whole.items():
        before = name.replace(start, f"guard/{scenario}/{step - 1}/")
        if name.startswith(f"{start}updates"):
            assert not np.any(value), name
        elif name.startswith((f"{start}params", f"{start}state.inner")):
            np.testing.assert_array_equal(value, whole[before], name)


def check_nan_of_one_expert(whole: worker.Results) -> None:
    """Without a guard, the experts of other processes go on learning."""
    step, gamma = worker.NAN_STEP, "state[0].stages[0].rule.gamma[1]"
    before = whole[f"chain/nan/{step - 1}/{gamma}"]
    moved = whole[f"chain/nan/{step}/{gamma}"] != before
    assert moved.tolist() == [True, True, True, False]
    assert whole[f"chain/nan/{worker.STEPS - 1}/clip/nonfinite"] == 1


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> worker.Results:
    """The runs of one process with all devices."""
    (result,) = run(tmp_path_factory.mktemp("alone"), 1, ("guard", "chain"))
    return result


# Compiling takes most of the time, so four processes do it once each.
@pytest.mark.parametrize(
    ("count", "names"), [(2, ("guard", "chain")), (4, ("guard",))], ids=["2", "4"]
)
def test_processes_equal_one(
    count: int, names: tuple[str, ...], alone: worker.Results, tmp_path: Path
) -> None:
    results = run(tmp_path, count, names)
    whole = merge(results)
    assert set(whole) == {name for name in alone if name.startswith(names)}
    for name, value in whole.items():
        if not name.endswith("/faults"):
            np.testing.assert_allclose(value, alone[name], 1e-6, 1e-8, err_msg=name)
    check_faults(results)
    for result in results:
        check_verdicts(result)
    check_skipped_step(whole, "nan", worker.NAN_STEP)
    check_skipped_step(whole, "explosion", worker.EXPLOSION_STEP)
    if "chain" in names:
        check_nan_of_one_expert(whole)


@pytest.mark.usefixtures("optax_promotion")
def test_checkpoints_of_one_process_go_on_in_two_and_back(tmp_path: Path) -> None:
    if jax.device_count() < worker.DEVICES:
        pytest.skip(f"needs {worker.DEVICES} devices, has {jax.device_count()}")
    devices = jax.devices()[: worker.DEVICES]
    mesh = jax.make_mesh(
        (worker.DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,), devices=devices
    )
    ours, theirs = str(tmp_path / "one"), str(tmp_path / "two")
    with jax.set_mesh(mesh):
        want = dict(worker.save(mesh, ours))
        whole = merge(run(tmp_path, 2, (f"resume:{ours}", f"save:{theirs}")))
        back = dict(worker.resume(mesh, theirs))
    assert len(back) == sum(worker.STEPS - saved for saved in worker.SAVED) * (
        len(want) // worker.STEPS
    )
    assert set(whole) == set(want) | set(back)
    for name, value in [*whole.items(), *back.items()]:
        uninterrupted = want[re.sub(r"^from \d/", "", name)]
        error = np.max(np.abs(value - uninterrupted))
        assert error <= 1e-6 * np.max(np.abs(value)), name
