"""Turns a frozen dataclass of settings into a command line and back."""

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def knob(default: Any, text: str, parse: Callable[[str], Any] | None = None) -> Any:
    """A dataclass field with a help text.

    Args:
      default: Value of the field when the option is not given. False makes the option
        a flag without a value.
      text: What the option means, for `--help`.
      parse: Converts the option's text; the default's type when left out.
    """
    metadata = {"help": text, "parse": parse or type(default)}
    return dataclasses.field(default=default, metadata=metadata)


def one_of(*valid: str) -> Callable[[str], str]:
    """A parser of one word out of `valid`."""

    def parse(text: str) -> str:
        if text not in valid:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(valid)}"
            )
        return text

    return parse


def calls(valid: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated names out of `valid`, options in parentheses."""

    def parse(text: str) -> tuple[str, ...]:
        # A comma within parentheses separates options.
        parts = re.split(r",(?![^(]*\))", text)
        chosen = tuple(re.sub(r"\s+", "", part) for part in parts)
        for part in chosen:
            if (name := part.partition("(")[0]) not in valid:
                raise argparse.ArgumentTypeError(
                    f"unknown name {name!r}; valid names are {', '.join(valid)}"
                )
        if len(set(chosen)) != len(chosen):
            raise argparse.ArgumentTypeError(f"a name is given twice in {text!r}")
        return chosen

    return parse


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _add_option(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
    option, default = "--" + field.name.replace("_", "-"), _shown(field.default)
    if field.default is False:
        parser.add_argument(option, action="store_true", help=field.metadata["help"])
        return
    parser.add_argument(
        option,
        type=field.metadata["parse"],
        metavar="LIST" if isinstance(field.default, tuple) else "VALUE",
        help=field.metadata["help"] + f" (default: {default})" * bool(default),
    )


def parse_config(
    config_class: type[T],
    *,
    description: str,
    quick: Mapping[str, Any],
    expand: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    arguments: Sequence[str] | None = None,
) -> T:
    """Reads the command line into `config_class`.

    Args:
      config_class: A dataclass whose fields come from `knob`.
      description: First paragraph of `--help`.
      quick: Values that `--quick` sets; options given by name win over it.
      expand: What the given options imply for others; those given by name win.
      arguments: The command line, `sys.argv` when left out.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--quick] [options]",
        description=description,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny run that only shows it works"
    )
    for field in dataclasses.fields(config_class):  # pyright: ignore[reportArgumentType]
        _add_option(parser, field)
    given = vars(parser.parse_args(arguments))
    preset = quick if given.pop("quick", False) else {}
    try:
        return config_class(**{**preset, **expand(given), **given})
    except ValueError as error:
        parser.error(str(error))
