"""Trains a small byte-level Llama through bursts of bad batches, once per clipper.

Every clipper starts from the same parameters and sees the same batches of Python's own
standard library. At some points several batches in a row are corrupted. The question
is what those gradients do to the model, and at what price a clipper prevents it.

    python examples/pretrain.py
    python examples/pretrain.py --clip global,zclip,adagc --seed 1
    python examples/pretrain.py --model mixtral --optimizer muon --seeds 5
    python examples/pretrain.py --clip "adagc,adagc(lambda_rel=1.1,warmup_init=ema)"
    python examples/pretrain.py --mesh fsdp=4,tensor=2 --scan-layers --dtype bfloat16
    python examples/pretrain.py --checkpoint-every 50 --resume
    python examples/pretrain.py --describe
    python examples/pretrain.py --quick

Two more remedies can be put on top of every clipper. A guard skips the whole step if
the norm of the gradients or the loss stands out, and a NaN then no longer ends the run.
A rollback goes back to a snapshot if the loss spiked, and on with later batches.

    python examples/pretrain.py --guard
    python examples/pretrain.py --rollback 20

Ctrl-C finishes the block of steps and leaves a checkpoint (with orbax-checkpoint), and
`--resume` gives the numbers of a run that was never stopped, after a kill as well.

Results go to `out/pretrain`: a picture, a log per clipper with one JSON object per
step, and `summary.json` with the settings, versions, hardware and results. With more
than one seed each has a folder of its own, and `summary.json` the medians and spread.
"""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from _analysis import Run, reading, summarise
from _cli import parse_config
from _config import QUICK, Config
from _data import Corpus, load_corpus, validation_batches
from _interrupt import Interrupt, Interrupted
from _job import count_parameters, initial, new_job
from _mesh import Placement, fake_devices, join, make_mesh, parse_mesh
from _plot import draw
from _report import (
    Live,
    hardware,
    new_console,
    sizes_table,
    table,
    versions,
    write_summary,
)
from _seeds import over_seeds, seeds_reading, seeds_table
from _sizes import SIZES, size_options
from _trainer import Bench, Trainer, validate
from rich.console import Console


def report(
    config: Config, corpus: Corpus, runs: Sequence[Run], console: Console
) -> dict[str, Any]:
    """Prints one seed's table and its reading, and draws the picture."""
    results = {run.name: summarise(run, config) for run in runs}
    console.print(table(results, [str(burst) for burst in config.bursts]))
    console.print(reading(results))
    draw(runs, config, Path(config.out) / "pretrain.png")
    return {
        "config": dataclasses.asdict(config),
        "corpus": str(corpus),
        "versions": versions(),
        "hardware": hardware(),
        "results": results,
        "reading": reading(results),
    }


def train_seed(config: Config, bench: Bench, console: Console) -> list[Run]:
    """Trains every chosen clipper from one start and on the same batches."""
    place = bench.placement
    job = new_job(config, lambda settings: place.params(lambda: initial(settings)))
    held_out = validation_batches(
        bench.corpus.validation,
        batches=config.validation_batches,
        batch_size=config.batch_size,
        length=config.length,
    )
    validation_loss = jax.jit(job.validation_loss_fn)
    runs = []
    for name in config.clip:
        run, params = Trainer(name, config, job, bench).train()
        if run.stopped:
            console.print(f"{name}: {run.stopped}", style="bold red")
        else:
            placed = [place.batch(batch) for batch in held_out]
            run.validation_loss = validate(params, validation_loss, placed)
        runs.append(run)
    return runs


def train_seeds(config: Config, bench: Bench, console: Console) -> dict[str, Any]:
    """Every seed in a folder of its own, then all of them together."""
    summaries = []
    for seed in range(config.seed, config.seed + config.seeds):
        out = str(Path(config.out) / f"seed-{seed}")
        own = dataclasses.replace(config, seed=seed, seeds=1, out=out)
        Path(out).mkdir(parents=True, exist_ok=True)
        console.print(f"seed {seed}", style="bold")
        runs = train_seed(own, bench, console)
        summaries.append(report(own, bench.corpus, runs, console))
        write_summary(summaries[-1], Path(out) / "summary.json")
    spread = over_seeds([summary["results"] for summary in summaries])
    console.print(seeds_table(spread, config.seeds))
    console.print(seeds_reading(spread))
    shared = {key: summaries[0][key] for key in ("corpus", "versions", "hardware")}
    return {
        "config": dataclasses.asdict(config),
        **shared,
        "over_seeds": spread,
        "reading": seeds_reading(spread),
    }


def describe(config: Config, console: Console) -> None:
    """Prints the parameters of the chosen model, and of every preset."""
    counts = {
        size: {
            model: count_parameters(dataclasses.replace(config, model=model, **shape))
            for model, shape in models.items()
        }
        for size, models in SIZES.items()
    }
    console.print(f"these options: {count_parameters(config):,} parameters")
    console.print(sizes_table(counts))


def resume_command(arguments: Sequence[str] | None) -> str:
    """The command that goes on with this run."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    again = [] if "--resume" in given else ["--resume"]
    return shlex.join(["python", sys.argv[0], *given, *again])


def compare(config: Config, console: Console) -> None:
    """Trains all that was asked for, and writes what came out."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(config.data, config.data_mb)
    console.print(f"{corpus}\nhardware: {hardware()}")
    mesh = make_mesh(parse_mesh(config.mesh)) if config.mesh else None
    with Interrupt() as interrupt, Live(console, config.steps) as live:
        bench = Bench(corpus, Placement(mesh), {}, live, interrupt)
        if config.seeds > 1:
            summary = train_seeds(config, bench, console)
            contents = "summary.json, and a folder per seed"
        else:
            runs = train_seed(config, bench, console)
            summary = report(config, corpus, runs, console)
            contents = "pretrain.png, summary.json and a log per clipper"
    write_summary(summary, out / "summary.json")
    console.print(f"Written to {out}: {contents}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains every chosen clipper, then compares them."""
    description = (__doc__ or "").partition("\n\nResults")[0]
    config = parse_config(
        Config,
        description=description,
        quick=QUICK,
        expand=size_options,
        arguments=arguments,
    )
    if config.mesh:
        fake_devices(parse_mesh(config.mesh))
    config = join(config)
    if config.precision != "default":
        jax.config.update("jax_default_matmul_precision", config.precision)
    console = new_console()
    if config.describe:
        describe(config, console)
        return
    try:
        compare(config, console)
    except Interrupted as end:
        console.print(f"{end}; a checkpoint is written. To go on:", style="bold yellow")
        console.print(resume_command(arguments), soft_wrap=True)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
