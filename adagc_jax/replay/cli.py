"""``adagc-replay``: what another clipper would have done, from a shell.

adagc-replay norms.jsonl --rule adagc --lambda-rel 1.1 --grid --out replay --html
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adagc_jax.replay.answers import suggest
from adagc_jax.replay.console import Console
from adagc_jax.replay.engine import Replayed, replay
from adagc_jax.replay.history import History, save_history
from adagc_jax.replay.readers import read_history
from adagc_jax.replay.report import Report, write
from adagc_jax.replay.spikes import SpikeMeasure, find_episodes
from adagc_jax.replay.tables import episode_table, grid_table, share, tensor_table
from adagc_jax.replay.variants import METHODS, make_grid, make_variant, option_defaults
from adagc_jax.replay.whatif import WhatIf, what_if


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 2 for what the user can put right."""
    if "JAX_PLATFORMS" not in os.environ:
        # Norms are few: an accelerator would only be slow to start, or be in use.
        jax.config.update("jax_platforms", "cpu")
    options = _parser().parse_args(arguments)
    try:
        _run(options, Console(plain=options.plain))
    except (ValueError, OSError, ImportError) as error:
        print(f"adagc-replay: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace, console: Console) -> None:
    base = make_variant(options.rule, **_hyper_parameters(options))
    variants = [base]
    if options.grid is not None:
        axes = dict(map(_axis, options.grid)) or None
        others = make_grid(base, axes)
        variants += [
            v for v in others if (v.method, v.values) != (base.method, base.values)
        ]
    measure = SpikeMeasure(options.window, options.spike, options.held)
    start = time.perf_counter()
    console.text(f"Reading {options.log} ...")
    history = read_history(
        options.log,
        prefix=options.prefix,
        pattern=options.pattern,
        loss=options.loss,
        run=options.run,
    )
    history = history.rebased() if options.rebase else history
    console.text(f"{_describe(history)}, in {time.perf_counter() - start:.1f} s.")
    for note in history.notes:
        console.text(f"Note: {note}.")
    if options.save:
        console.text(f"Saved as {save_history(history, options.save)}.")
    rows = len(history.steps)
    what = "1 setting" if len(variants) == 1 else f"{len(variants)} settings"
    with console.progress(what, rows * len(variants)) as tick:
        result = what_if(
            history,
            variants,
            measure=measure,
            nonfinite=options.nonfinite,
            progress=tick,
        )
    with console.progress(str(base), rows) as tick:
        replayed = replay(history, base, nonfinite=options.nonfinite, progress=tick)
    report = _report(options, history, result, replayed)
    _show(report, console)
    if options.out or options.html:
        folder = Path(options.out or "replay")
        for path in write(report, folder, page=options.html):
            console.text(f"Wrote {path}")


def _report(
    options: argparse.Namespace, history: History, result: WhatIf, replayed: Replayed
) -> Report:
    episodes = find_episodes(history, result.measure)
    suggestion = suggest(result) if len(result.variants) > 1 else None
    tables = [tensor_table(result), episode_table(history, episodes)]
    if suggestion is not None:
        tables.append(grid_table(result))
    lines = [_describe(history) + ".", _verdict(history, result)]
    lines += _comparison(history, replayed)
    if suggestion is not None:
        setting = suggestion.variant or "none"
        lines += [
            f"Suggestion: {setting}",
            f"Reason: {suggestion.reason}",
            f"But: {suggestion.caveat}",
        ]
    return Report(
        Path(options.log).name,
        history,
        replayed,
        result,
        episodes,
        lines,
        tables,
        suggestion,
    )


def _show(report: Report, console: Console) -> None:
    console.text()
    for table in report.tables:
        console.table(table)
    for line in report.lines[1:]:
        console.text(line)


def _describe(history: History) -> str:
    return (
        f"{len(history.steps)} updates (steps {history.steps[0]} to "
        f"{history.steps[-1]}) of {len(history.names)} tensors"
    )


def _verdict(history: History, result: WhatIf) -> str:
    bad = int((~np.isfinite(history.norm)).sum())
    text = f"{result.variants[0]} clips {share(result.clip_rate[0])} of all gradients"
    if not np.isnan(result.held[0]):
        text += (
            f"; of the {int(result.tally.spikes[0].sum())} spikes it holds "
            f"{share(result.held[0])} to {result.measure.held:g} times their level "
            f"and takes {share(result.ordinary_loss[0])} off ordinary norms"
        )
    return text + (f"; {bad} norms were not finite." if bad else ".")


def _comparison(history: History, replayed: Replayed) -> list[str]:
    """Whether the log's own scales are those of the replay."""
    scale = replayed.history.scale
    if history.scale is None or scale is None:
        return []
    known = ~np.isnan(history.scale)
    logged, ours = history.scale[known], np.broadcast_to(scale, known.shape)[known]
    return [
        f"The run itself clipped {share(((logged > 0) & (logged < 1)).mean())} of its "
        f"gradients; "
        f"{share((logged == ours).mean())} of its logged scales are those of "
        f"{replayed.variant}, bit for bit."
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adagc-replay",
        description="Runs a clipper on logged gradient norms: what would it have done?",
        epilog="Norms are taken as given: other clipping would have changed the run.",
    )
    parser.add_argument(
        "log", help="JSONL, CSV, TensorBoard event files or .npz of --save"
    )
    parser.add_argument(
        "--rule", default="adagc", help=f"one of {', '.join(METHODS)} (default: adagc)"
    )
    parser.add_argument(
        "--grid",
        nargs="*",
        metavar="OPTION=V1,V2",
        help="what-if grid: options and values, rule=... too; none: a default grid",
    )
    parser.add_argument("--out", metavar="DIR", help="write pictures there")
    parser.add_argument(
        "--html", action="store_true", help="one page, report.html, instead of pictures"
    )
    parser.add_argument("--save", metavar="FILE", help="keep the norms as .npz")
    parser.add_argument("--plain", action="store_true", help="plain text, no colours")
    _add_reading(parser.add_argument_group("reading"))
    _add_measure(parser.add_argument_group("spikes"))
    _add_hyper_parameters(parser.add_argument_group("options of the rules"))
    return parser


def _add_reading(group: Any) -> None:
    group.add_argument("--prefix", help="of the clipper's keys (default: found)")
    group.add_argument(
        "--pattern", help="regex for other keys, one group: 'grad_norm/(.+)'"
    )
    group.add_argument("--loss", metavar="KEY", help="key of the loss")
    group.add_argument("--run", help="which run of a chart export with several")
    group.add_argument(
        "--rebase", action="store_true", help="count the first row as the first update"
    )
    group.add_argument(
        "--nonfinite",
        choices=("zero", "skip", "propagate"),
        default="zero",
        help="policy for NaN and infinite norms (default: zero)",
    )


def _add_measure(group: Any) -> None:
    for flag, name, text in (
        ("--window", "window", "updates per median"),
        ("--spike", "ratio", "a spike is beyond so many times the median"),
        ("--held", "held", "and held if at most so many times it are emitted"),
    ):
        default = getattr(SpikeMeasure, name)
        text = f"{text} (default: {default:g})"
        group.add_argument(flag, type=type(default), default=default, help=text)


def _add_hyper_parameters(group: Any) -> None:
    owners: dict[str, list[str]] = {}
    for method in METHODS:
        for name in option_defaults(method):
            owners.setdefault(name, []).append(method)
    for name, methods in owners.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(
            flag, dest=f"hyper_{name}", metavar="VALUE", help=", ".join(methods)
        )


def _hyper_parameters(options: argparse.Namespace) -> dict[str, Any]:
    given = {k[6:]: v for k, v in vars(options).items() if k.startswith("hyper_")}
    return {name: _value(text) for name, text in given.items() if text is not None}


def _axis(text: str) -> tuple[str, tuple[Any, ...]]:
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ValueError(f"--grid takes OPTION=V1,V2 such as beta=0.98,0.99: {text!r}.")
    return name.replace("-", "_"), tuple(_value(v) for v in values.split(","))


def _value(text: str) -> Any:
    """A number, bool or None where the text is one."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
