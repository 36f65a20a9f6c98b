"""Regenerates the results of the benchmarks, part by part.

    python benchmarks/all.py --list
    python benchmarks/all.py                      everything that this Python can
    python benchmarks/all.py --only step_time,render
    python benchmarks/all.py --python aot=/path/to/python --python torch=/path/to/python

A part whose packages or device are missing is skipped, with the reason, and its old
results stay. Parts may run in Pythons of their own, as PyTorch and the compilers for
TPU and GPU need not live together. The last part, `render`, makes the tables. Results
of the examples are made by the commands that the README names.
"""

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Part:
    """One script.

    Attributes:
      script: Where it is.
      options: What it is called with.
      needs: Modules; one of a group such as ``"libtpu|jax_cuda12_plugin"`` suffices.
      accelerator: Whether it runs on a GPU or TPU only.
    """

    script: Path
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    accelerator: bool = False


PARTS = {
    "step_time": Part(FOLDER / "step_time.py"),
    "torch": Part(FOLDER / "step_time.py", ("--only-torch",), ("torch", "zclip")),
    "linearity": Part(FOLDER / "linearity.py"),
    "fidelity": Part(
        FOLDER / "fidelity.py", ("--torch",), ("torch", "zclip", "pytorch_optimizer")
    ),
    "aot": Part(FOLDER / "aot.py", (), ("libtpu|jax_cuda12_plugin",)),
    "gpu": Part(FOLDER / "gpu_check.py", accelerator=True),
    "comparison": Part(FOLDER / "comparison.py", (), ("pip",)),
    "schedule": Part(FOLDER / "plot_schedule.py", (), ("matplotlib",)),
    "study": Part(FOLDER / "study" / "run.py", (), ("flax", "matplotlib")),
    "render": Part(FOLDER / "render.py"),
}
# What the chosen Python is asked; the answer is a line, empty if nothing is missing.
QUESTION = """
import importlib.util, sys
groups, accelerator = sys.argv[2:], sys.argv[1] == "True"
lacks = [g for g in groups if not any(map(importlib.util.find_spec, g.split("|")))]
said = [f"no {' or '.join(g.split('|'))}" for g in lacks]
if accelerator:
    import jax
    if jax.default_backend() == "cpu":
        said.append("no GPU or TPU")
print(", ".join(said))
"""


def why_not(part: Part, python: str) -> str:
    """What this Python lacks for a part; empty if nothing."""
    needs = ("jax", "optax", "adagc_jax", *part.needs)
    command = [python, "-c", QUESTION, str(part.accelerator), *needs]
    try:
        asked = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"cannot start {python}: {error.strerror}"
    if asked.returncode:
        return f"{python} fails: {asked.stderr.strip() or asked.returncode}"
    return asked.stdout.strip()


def run(names: Sequence[str], pythons: dict[str, str]) -> list[str]:
    """Runs parts in turn; returns those that failed."""
    failed = []
    for name in names:
        part, python = PARTS[name], pythons.get(name, sys.executable)
        if reason := why_not(part, python):
            print(f"{name}: skipped, {reason}", flush=True)
            continue
        print(f"{name}: {part.script.name} {' '.join(part.options)}", flush=True)
        code = subprocess.run([python, str(part.script), *part.options]).returncode
        if code:
            print(f"{name}: failed with exit code {code}", flush=True)
            failed.append(name)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    parser.add_argument("--list", action="store_true", help="say what would run")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PART=PATH", help="repeatable"
    )
    options = parser.parse_args()
    names = options.only.split(",")
    pythons = dict(pair.split("=", 1) for pair in options.python if "=" in pair)
    if len(pythons) < len(options.python):
        parser.error(f"--python: {options.python} are not all PART=PATH")
    if unknown := [name for name in [*names, *pythons] if name not in PARTS]:
        parser.error(f"{unknown} are no parts: there are {', '.join(PARTS)}")
    if options.list:
        for name in names:
            reason = why_not(PARTS[name], pythons.get(name, sys.executable))
            print(f"{name:12} {'skipped, ' + reason if reason else 'would run'}")
    elif failed := run(names, pythons):
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
