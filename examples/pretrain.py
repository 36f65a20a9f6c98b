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
`--resume` gives the numbers of a run that was never stopped, after a kill as well. It
leaves out clippers and seeds that were finished. With a rollback there is no
checkpoint, and the run that was stopped starts again.

Two processes, which could be on two machines, share the devices of one mesh:

    python examples/pretrain.py --mesh fsdp=2 --distributed 127.0.0.1:9000,2,0 &
    python examples/pretrain.py --mesh fsdp=2 --distributed 127.0.0.1:9000,2,1

Results go to `out/pretrain`: a picture, a log per clipper with one JSON object per
step, and `summary.json` with the settings, versions, hardware and results. With more
than one seed each has a folder of its own, and `summary.json` the medians and spread.
"""

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from _analysis import Run, reading, summarise
from _asked_loggers import check_loggers
from _cli import check_installed, new_folder, parse_config, refusals
from _config import QUICK, Config, implied
from _data import Corpus, load_corpus, validation_batches
from _finished import Finished
from _interrupt import Interrupt, Interrupted
from _job import Job, count_parameters, initial, new_job
from _memory import check_memory
from _mesh import Placement, join, make_mesh, parse_mesh
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
from _same import settings_of
from _seeds import each_seed, over_seeds, seeds_reading, seeds_table
from _sizes import SIZES
from _trainer import Bench, Trainer, checkpoints_of, validate
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
    loss_fn = jax.jit(job.validation_loss_fn)

    def held_out_loss(params: Any) -> float:
        return validate(params, loss_fn, map(place.batch, held_out))

    runs = []
    for name in config.clip:
        runs.append(train_one(name, config, job, bench, held_out_loss))
        if runs[-1].stopped:
            console.print(f"{name}: {runs[-1].stopped}", style="bold red")
    return runs


def train_one(
    name: str,
    config: Config,
    job: Job,
    bench: Bench,
    held_out_loss: Callable[[Any], float],
) -> Run:
    """One clipper's run, made or, if it was finished before, read."""
    finished = Finished(name, config, settings_of(name, config, bench.corpus))
    if config.resume and (run := finished.load()):
        bench.live.say(name, f"was finished after {len(run.rows)} steps")
        return run
    finished.forget()
    trainer = Trainer(name, config, job, bench)
    if config.resume:
        bench.live.say(name, f"goes on from step {trainer.first}")
    run, params = trainer.train()
    if not run.stopped:
        run.validation_loss = held_out_loss(params)
    finished.save(run)
    return run


def train_seeds(config: Config, bench: Bench, console: Console) -> dict[str, Any]:
    """Every seed in turn, then all of them together."""
    summaries = []
    for own in each_seed(config):
        console.print(f"seed {own.seed}", style="bold")
        runs = train_seed(own, bench, console)
        summaries.append(report(own, bench.corpus, runs, console))
        write_summary(summaries[-1], Path(own.out) / "summary.json")
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


def check_folders(config: Config, corpus: Corpus) -> None:
    """Before anything is trained: can all be written, and what is there continued?"""
    check_loggers(config)
    if config.checkpoint_every:
        check_installed("--checkpoint-every", "orbax.checkpoint", "orbax-checkpoint")
    for own in each_seed(config):
        new_folder("--out", own.out)
        for name in config.clip:
            checkpoints = checkpoints_of(name, own, corpus)
            checkpoints.notes(config.resume)
            checkpoints.close()
            if config.resume:
                Finished(name, own, settings_of(name, own, corpus)).check()


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
    corpus = load_corpus(config.data, config.data_mb)
    corpus.check(config.length)
    console.print(f"{corpus}\nhardware: {hardware()}")
    mesh = make_mesh(parse_mesh(config.mesh)) if config.mesh else None
    check_folders(config, corpus)
    check_memory(config, list(mesh.devices.flat) if mesh else jax.devices()[:1])
    with Interrupt() as interrupt, Live(console, config.steps) as live:
        bench = Bench(corpus, Placement(mesh), {}, live, interrupt)
        if config.seeds > 1:
            summary = train_seeds(config, bench, console)
            contents = "summary.json, and a folder per seed"
        else:
            runs = train_seed(config, bench, console)
            summary = report(config, corpus, runs, console)
            contents = "pretrain.png, summary.json and a log per clipper"
    write_summary(summary, Path(config.out) / "summary.json")
    console.print(f"Written to {config.out}: {contents}")


def run(config: Config, arguments: Sequence[str] | None) -> None:
    """Joins other processes, and does what the settings say."""
    config = join(config)
    if config.precision != "default":
        jax.config.update("jax_default_matmul_precision", config.precision)
    console = new_console()
    console.quiet = bool(config.distributed and jax.process_index())
    if config.describe:
        describe(config, console)
        return
    try:
        compare(config, console)
    except Interrupted as end:
        console.print(f"{end}.", style="bold yellow")
        if not config.distributed:
            console.print("To go on with what is not finished:")
            console.print(resume_command(arguments), soft_wrap=True)
        raise SystemExit(130) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains every chosen clipper, then compares them."""
    config = parse_config(
        Config,
        description=(__doc__ or "").partition("\n\nResults")[0],
        quick=QUICK,
        expand=implied,
        arguments=arguments,
    )
    with refusals():
        run(config, arguments)


if __name__ == "__main__":
    main()
