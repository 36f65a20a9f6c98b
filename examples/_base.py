"""The base model of `finetune.py`: trained there, or what `pretrain.py` has left."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from _checkpoint import Checkpoints, open_folder, saved_notes
from _cli import BadOption, new_folder
from _config import Config
from _data import load_corpus, parse_bursts
from _interrupt import Interrupt
from _job import Job, new_job
from _mesh import Placement
from _optimizers import new_optimizer
from _report import Live
from _same import Settings, checkpoint_folder
from _trainer import Bench, Trainer
from rich.console import Console


@dataclasses.dataclass(frozen=True)
class Base:
    """A base model.

    Attributes:
      config: What it was trained with.
      job: Its losses.
      params: Its parameters.
      folder: Where it is kept; "" if nowhere.
    """

    config: Config
    job: Job
    params: Any
    folder: str

    def __str__(self) -> str:
        config = self.config
        kept = f", in {self.folder}" * bool(self.folder)
        return (
            f"base model: {config.model}, {config.layers} layers of width "
            f"{config.width}, {config.steps} steps with {config.length} bytes of "
            f"context{kept}"
        )


def new_base(
    base: str, own: Config, length: int, console: Console, interrupt: Interrupt
) -> Base:
    """The model in the folder `base`, or else the one that `own` asks for.

    Raises:
      BadOption: If its context is not below `length`, or `base` is no such folder.
    """
    folder = find(base) or checkpoint_folder(own.clip[0], own.out)
    notes = _notes(folder)
    # One that was interrupted when no folder was asked for is the command's own.
    config = _saved(notes, folder) if notes and base else own
    if notes and not base:
        check_own(notes["settings"], own, folder)
    if config.length >= length:
        raise BadOption(
            f"--length must be above the {config.length} bytes of the base model, got "
            f"{length}"
        )
    if notes and notes["step"] == config.steps:
        job, params = _restored(config, folder, notes["step"])
    else:
        job, params = _trained(config, console, interrupt)
    if config.scan_layers:
        config = dataclasses.replace(config, scan_layers=False)
        job, params = new_job(config), _unstacked(params, config.layers)
    return Base(config, job, params, str(folder) if base else "")


def check_own(saved: Settings, own: Config, folder: Path) -> None:
    """Raises BadOption if an interrupted base model was to be another one."""
    options = {"steps": "--base-steps", "length": "--base-length"}
    options |= {name: f"--{name}" for name in ("layers", "width", "seed")}
    changed = [
        f"{option} was {saved[name]} and is {getattr(own, name)}"
        for name, option in options.items()
        if saved[name] != getattr(own, name)
    ]
    if changed:
        raise BadOption(
            f"{folder} has the base model of an interrupted run, of which "
            f"{', '.join(changed)}: give the same options to go on with it, remove "
            "it, or give another --out"
        )


def find(base: str) -> Path | None:
    """The folder of one run's checkpoints in `base`; None if it is yet to be made.

    Raises:
      BadOption: If there are several, or something else.
    """
    root = Path(base)
    if not base or not root.exists():
        return None
    if any(entry.name.isdigit() for entry in root.iterdir()):
        return root
    found = sorted(root.glob("checkpoints/*/"))
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise BadOption(f"--base {base} has several base models, give one: {names}")
    if not found and any(root.iterdir()):
        raise BadOption(
            f"--base {base} has no checkpoints: give a folder that pretrain.py "
            "--checkpoint-every has written, or a new one"
        )
    return found[0] if found else None


def _notes(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        return {}
    manager = open_folder(folder)
    notes = saved_notes(manager)
    manager.close()
    return notes


def _saved(notes: Settings, folder: Path) -> Config:
    """The settings that a checkpoint was made with."""
    saved = dict(notes["settings"])
    sharded = saved.pop("mesh")
    if notes["step"] == saved["steps"]:
        # Its data are not needed any more, and may not be there.
        saved["data"] = "stdlib"
    elif sharded:
        raise BadOption(
            f"--base {folder} stopped at step {notes['step']} of {saved['steps']}: "
            "finish it with pretrain.py --resume"
        )
    fields = {field.name for field in dataclasses.fields(Config)}
    known = {key: value for key, value in saved.items() if key in fields}
    known |= {
        "clip": (saved["clip"],),
        "bursts": parse_bursts(",".join(saved["bursts"])),
        "out": str(folder.parent.parent),
        "resume": True,
        "checkpoint_every": saved["steps"],
    }
    return Config(**known)


def _restored(config: Config, folder: Path, step: int) -> tuple[Job, Any]:
    job = new_job(config)
    state = job.initial, new_optimizer(config.clip[0], config).init(job.initial)
    kept = Checkpoints(folder, 0, {})
    params, _ = kept.state(step, state)
    kept.close()
    return job, params


def _trained(config: Config, console: Console, interrupt: Interrupt) -> tuple[Job, Any]:
    new_folder("--base or --out", config.out)
    corpus, job = load_corpus(config.data, config.data_mb), new_job(config)
    corpus.check(config.length)
    with Live(console, config.steps, lines=2) as live:
        bench = Bench(corpus, Placement(None), {}, live, interrupt)
        run, params = Trainer(config.clip[0], config, job, bench).train()
    if run.stopped:
        raise BadOption(f"The base model: {run.stopped}")
    return job, params


def _unstacked(params: Any, layers: int) -> Any:
    """Layer by layer what was one stacked tree."""
    stacked = params["layers"]
    split = {i: jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(layers)}
    return params | {"layers": split}
