"""Is a redescending clipper better than AdaGC? Trains small models to find out.

    python benchmarks/study/run.py                about an hour on two cores
    python benchmarks/study/run.py --reduced      a minute: fewer of everything
    python benchmarks/study/run.py --jobs 1       in one process

Every clipper may choose among the same number of settings, by its mean validation loss
over the tuning scenarios; then all meet other scenarios and other seeds. What is done
stays in `out/study` and is not done again: stop it, and start it again. It ends by
writing `benchmarks/results/study.json` and two pictures, from which `render.py` makes
the README's tables.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# One core per process: many small operations gain nothing from more.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

import plan  # noqa: E402
from cells import Task, train  # noqa: E402
from summary import write  # noqa: E402


def work(tasks: Sequence[Task], folder: Path) -> None:
    """Trains the tasks one after another, saying how far it is."""
    started, done = time.perf_counter(), 0
    total = sum(task.runs for task in tasks)
    for task in tasks:
        for line in train(task, folder):
            done += task.runs // len(task.scenarios)
            spent = time.perf_counter() - started
            left = spent * (total - done) / max(done, 1) / 60
            print(f"{done}/{total} runs, {left:.0f} min left: {line}", flush=True)


def share_out(phase: str, args: argparse.Namespace) -> None:
    """Trains a phase in several processes, each with a share of its tasks."""
    command = [sys.executable, str(Path(__file__)), "--phase", phase]
    command += ["--folder", str(args.folder), "--jobs", str(args.jobs)]
    command += ["--reduced"] if args.reduced else []
    workers = [
        subprocess.Popen([*command, "--share", str(share)])
        for share in range(args.jobs)
    ]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        sys.exit(f"{phase}: a process failed; what is done is in {args.folder}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reduced", action="store_true", help="fewer of everything")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("out/study"))
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/results, or, reduced, --folder"
    )
    parser.add_argument("--phase", choices=plan.PHASES, help="only this phase")
    parser.add_argument("--share", type=int, help="only this share of the phase")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    sizes = plan.REDUCED if args.reduced else plan.FULL
    if args.share is not None:
        tasks = plan.tasks(args.phase, sizes, args.folder)
        work(tasks[args.share :: args.jobs], args.folder)
        return
    for phase in [args.phase] if args.phase else plan.PHASES:
        if args.jobs == 1:
            work(plan.tasks(phase, sizes, args.folder), args.folder)
        else:
            share_out(phase, args)
    if not args.phase:
        whole = HERE.parent / "results"
        out = args.out or (args.folder if args.reduced else whole)
        print(*write(sizes, args.folder, out), sep="\n")


if __name__ == "__main__":
    main()
