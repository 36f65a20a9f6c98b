"""Fine-tunes a small decoder with LoRA, through a NaN and an exploding attention.

A byte-level Llama is trained on short pieces of Python's own library, then gets
low-rank adapters on its attention and is tuned on long documents, packed to a longer
context. In one step the queries of a batch are a thousand times too large, in a later
one they are NaN. Twice from the same start and on the same batches:

    protected    guard( AdaGC or AGC -> limit of the global norm -> AdamW )
    unprotected  AdamW

with a warm-up, a cosine with optional warm restarts, and a floor.

    python examples/finetune.py
    python examples/finetune.py --clip agc --restart-every 40
    python examples/finetune.py --base out/base
    python examples/pretrain.py --clip adagc --bursts "" --checkpoint-every 360
    python examples/finetune.py --base out/pretrain
    python examples/finetune.py --quick

Ctrl-C finishes the block of steps, and leaves log and adapters up to there.

Results go to `out/finetune`: the adapters, a log with one JSON object per step, and
`summary.json`.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _analysis import Run, jump
from _base import new_base
from _cli import new_folder, parse_config, refusals
from _interrupt import Interrupt, Interrupted
from _lora import Adapters
from _report import Live, hardware, new_console, versions, write_log, write_summary
from _trainer import new_train_step
from _tuning import (
    QUICK,
    Settings,
    Tuning,
    packed_documents,
    pipeline,
    split,
    unprotected,
)
from rich import box
from rich.console import Console
from rich.table import Table


def blocks(steps: int, size: int = 10) -> Iterator[range]:
    """All steps in turn, some at a time."""
    for start in range(0, steps, size):
        yield range(start, min(start + size, steps))


def fine_tune(
    name: str, optimizer: Any, tuning: Tuning, live: Live, interrupt: Interrupt
) -> tuple[Run, Adapters, Any]:
    """Trains the adapters; returns the log, the adapters and the optimizer state."""
    run, adapters = Run(name), tuning.adapters
    state = optimizer.init(adapters)
    step_fn = new_train_step(optimizer, tuning.loss)
    live.begin(name)
    for steps in blocks(tuning.settings.steps):
        started, pending = time.perf_counter(), []
        for step in steps:
            adapters, state, numbers = step_fn(adapters, state, tuning.batch(step))
            pending.append(numbers)
        fetched = jax.device_get(pending)
        for step, numbers in zip(steps, fetched, strict=True):
            run.add({"step": step, "batch": tuning.kind(step)}, *numbers)
        seconds = (time.perf_counter() - started) / len(steps)
        live.update(name, run.rows[-1], seconds)
        if run.stopped or interrupt.asked:
            break
    return run, adapters, state


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays, or of what would be arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def keep(run: Run, adapters: Adapters, out: Path) -> None:
    """Writes the log and the adapters."""
    write_log(run, out / f"{run.name}.jsonl")
    flat: dict[str, Any] = {
        f"{path}/{part}": np.asarray(x)
        for path, pair in adapters.items()
        for part, x in pair.items()
    }
    np.savez(out / f"{run.name}.npz", **flat)


def summarise(run: Run, adapters: Adapters, tuning: Tuning) -> dict[str, Any]:
    """One run's numbers."""
    losses, step = run.series("loss"), tuning.settings.explode_step
    clean = len(losses) >= step + 6 and step >= 10
    clipped = [row["clip/fraction_clipped"] for row in run.rows]
    return {
        "held_out_loss": tuning.validate(adapters),
        "jump_after_explosion": jump(losses, step, step + 1) if clean else None,
        "norm_at_explosion": run.rows[step]["clip/norm_before"] if clean else None,
        "norm_after_clipping": run.rows[step]["clip/norm_after"] if clean else None,
        "clip_rate": statistics.fmean(clipped),
        "skipped": run.rows[-1].get("guard/skipped"),
        "steps": len(run.rows),
        "stopped": run.stopped,
    }


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One row per run."""
    shown = Table(box=box.SIMPLE, pad_edge=False)
    shown.add_column("run", no_wrap=True)
    headings = {
        "held_out_loss": "held-out\nloss",
        "norm_at_explosion": "norm at\nexplosion",
        "norm_after_clipping": "after\nclipping",
        "jump_after_explosion": "jump of\nthe loss",
        "clip_rate": "clip\nrate",
        "skipped": "skipped\nsteps",
        "steps": "steps\nmade",
    }
    for heading in headings.values():
        shown.add_column(heading, justify="right")
    for name, result in results.items():
        values = (result[key] for key in headings)
        cells = ("-" if v is None else f"{v:.4g}" for v in values)
        shown.add_row(name, *cells)
    return shown


def say_state(tuning: Tuning, state: Any, console: Console) -> dict[str, int]:
    """Prints what the optimizer keeps, and what it would for all parameters."""
    whole = jax.eval_shape(pipeline(tuning.settings).init, tuning.base)
    sizes = {
        "parameters": bytes_of(tuning.base),
        "adapters": bytes_of(tuning.adapters),
        "optimizer_state": bytes_of(state),
        "optimizer_state_without_lora": bytes_of(whole),
    }
    console.print("bytes of " + ", ".join(f"{k}: {v:,}" for k, v in sizes.items()))
    return sizes


def compare(settings: Settings, console: Console, interrupt: Interrupt) -> None:
    """Base model, both runs, the table."""
    out = new_folder("--out", settings.out)
    rows = packed_documents(settings.documents, settings.length)
    base = new_base(
        settings.base, settings.base_config, settings.length, console, interrupt
    )
    console.print(str(base))
    tuning = Tuning(settings, base.job, base.params, *split(rows))
    start = tuning.validate(tuning.adapters)
    console.print(
        f"{len(rows)} packed rows of {settings.length} bytes; before fine-tuning their "
        f"held-out loss is {start:.4f}"
    )
    results, sizes = {}, {}
    with Live(console, settings.steps, lines=4) as live:
        for name, make in (("protected", pipeline), ("unprotected", unprotected)):
            optimizer = make(settings)
            run, adapters, state = fine_tune(name, optimizer, tuning, live, interrupt)
            keep(run, adapters, out)
            if interrupt.asked:
                raise Interrupted(f"{name}: stopped after {len(run.rows)} steps")
            results[name] = summarise(run, adapters, tuning)
            sizes = sizes or say_state(tuning, state, console)
            if run.stopped:
                console.print(f"{name}: {run.stopped}", style="bold red")
    console.print(table(results))
    summary = {
        "settings": dataclasses.asdict(settings),
        "base": dataclasses.asdict(base.config),
        "versions": versions(),
        "hardware": hardware(),
        "held_out_loss_before": start,
        "bytes": sizes,
        "results": results,
    }
    write_summary(summary, out / "summary.json")
    console.print(f"Written to {out}: summary.json, a log and adapters per run")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tunes with and without protection, then compares."""
    description = (__doc__ or "").partition("\n\nResults")[0]
    settings = parse_config(
        Settings, description=description, quick=QUICK, arguments=arguments
    )
    console = new_console()
    try:
        with refusals(), Interrupt() as interrupt:
            compare(settings, console, interrupt)
    except Interrupted as end:
        console.print(
            f"{end}. What was made of the adapters is in {settings.out}; the same "
            "command starts fine-tuning again, and goes on with a base model of which "
            "there is a checkpoint.",
            style="bold yellow",
        )
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
