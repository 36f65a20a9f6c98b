"""The command line of ``adagc-replay``: its options, and errors in its words."""

import argparse
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from adagc_jax.replay.spikes import SpikeMeasure
from adagc_jax.replay.variants import METHODS, option_defaults

_READING = ("prefix", "pattern", "loss", "run")
_MOST = int(np.iinfo(np.int32).max)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line; the log may stand behind ``--grid`` as well."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.log is None and options.grid and "=" not in options.grid[-1]:
        options.log = options.grid.pop()
    if options.log is None:
        parser.error("which log? It is missing: adagc-replay LOG, options behind it")
    return options


def hyper_parameters(options: argparse.Namespace) -> dict[str, Any]:
    """The options of the rule that were given."""
    given = {k[6:]: v for k, v in vars(options).items() if k.startswith("hyper_")}
    return {
        name: _checked(name, _value(text))
        for name, text in given.items()
        if text is not None
    }


def axes(options: argparse.Namespace) -> dict[str, tuple[Any, ...]] | None:
    """The values of a grid by option; None for a default grid."""
    found: dict[str, tuple[Any, ...]] = {}
    for text in options.grid:
        name, equals, values = text.partition("=")
        name = name.replace("-", "_")
        if not equals or not all(values.split(",")):
            raise ValueError(
                f"--grid takes OPTION=V1,V2 such as beta=0.98,0.99: {text!r}."
            )
        if name in found:
            raise ValueError(
                f"--grid has {name} twice: give all its values at once, as in "
                f"{name}=V1,V2,V3."
            )
        found[name] = tuple(_checked(name, _value(v)) for v in values.split(","))
    return found or None


def measure(options: argparse.Namespace) -> SpikeMeasure:
    """What counts as a spike."""
    try:
        return SpikeMeasure(options.window, options.spike, options.held)
    except ValueError as error:
        text = re.sub(r"\b(window|held)\b", r"--\1", str(error))
        raise ValueError(re.sub(r"\bratio\b", "--spike", text)) from error


def in_shell_words(text: str) -> str:
    """An error of the library with the options as they are called in a shell."""
    hypers = {name for method in METHODS for name in option_defaults(method)}
    reading = "|".join(_READING)
    text = re.sub(r"^method (?=must be|')", "--rule ", text)
    text = re.sub(rf"(?<![\w/-])({reading})(?==| must)", r"--\1", text)
    return re.sub(
        rf"(?<![\w/-])({'|'.join(sorted(hypers))})(?= must)",
        lambda match: "--" + match[1].replace("_", "-"),
        text,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adagc-replay",
        usage="%(prog)s LOG [options]",
        description="Runs a clipper on logged gradient norms: what would it have done?",
        epilog="Norms are taken as given: other clipping would have changed the run.",
    )
    parser.add_argument(
        "log",
        nargs="?",
        metavar="LOG",
        help="JSONL, CSV, TensorBoard event files or .npz of --save",
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


def _checked(name: str, value: Any) -> Any:
    """Refuses counts that 32 bits cannot hold."""
    defaults = [option_defaults(method).get(name, 0.5) for method in METHODS]
    count = any(d is None or isinstance(d, int) for d in defaults)
    if count and isinstance(value, int | float) and value > _MOST:
        raise ValueError(f"{name} must be at most {_MOST}, got {value}.")
    return value
