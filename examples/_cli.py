"""Turns a frozen dataclass of settings into a command line and back."""

import argparse
import contextlib
import dataclasses
import importlib
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_LIMITS = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt}


class BadOption(ValueError):
    """What was asked for cannot be; the message is one line that says what can."""


def knob(
    default: Any,
    text: str,
    parse: Callable[[str], Any] | None = None,
    only: Sequence[str] = (),
    **limits: float,
) -> Any:
    """A dataclass field with a help text.

    Args:
      default: Value of the field when the option is not given. False makes the option
        a flag without a value.
      text: What the option means, for `--help`.
      parse: Converts the option's text; the default's type when left out.
      only: Another field, and the values of it with which this one is read at all.
      **limits: Of a number, `at_least`, `above` or `below`; see `check_numbers`.
    """
    metadata = {"help": text, "parse": parse or type(default), "only": only}
    return dataclasses.field(default=default, metadata=metadata | {"limits": limits})


def option(name: str) -> str:
    """A field's name as it is given on a command line."""
    return "--" + name.replace("_", "-")


def check_numbers(settings: Any) -> None:
    """Raises BadOption for the first number beyond its limits."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        for words, limit in field.metadata["limits"].items():
            if not _LIMITS[words](value, limit):
                wanted = f"{words.replace('_', ' ')} {limit}"
                raise BadOption(f"{option(field.name)} must be {wanted}, got {value}")


def _check_read(settings: Any, given: Mapping[str, Any]) -> None:
    """Raises BadOption for an option that nothing would read."""
    for field in dataclasses.fields(settings):
        if field.name not in given or not field.metadata["only"]:
            continue
        other, *readers = field.metadata["only"]
        chosen = _shown(getattr(settings, other))
        if not re.search(rf"(?<![\w-])({'|'.join(readers)})(?![\w-])", chosen):
            raise BadOption(
                f"{option(field.name)} is read with {option(other)} "
                f"{' or '.join(readers)} only: {given[field.name]} would change "
                f"nothing with {chosen}"
            )


def check_installed(asked_by: str, package: str, install: str = "") -> None:
    """Raises BadOption if a package that an option needs is missing."""
    try:
        importlib.import_module(package)
    except ImportError:
        needed = f"{asked_by} needs {package}: pip install {install or package}"
        raise BadOption(needed) from None


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Ends the program with one line and status 2 if something asked for cannot be."""
    try:
        yield
    except BadOption as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def new_folder(asked_by: str, path: str | Path) -> Path:
    """The folder, made if it is not there.

    Raises:
      BadOption: If it cannot be made, or nothing can be written into it.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (probe := folder / ".writable").touch()
        probe.unlink()
    except OSError as error:
        raise BadOption(
            f"{asked_by} {path}: {error.strerror}, choose another"
        ) from None
    return folder


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
    name, default = option(field.name), _shown(field.default)
    if field.default is False:
        parser.add_argument(name, action="store_true", help=field.metadata["help"])
        return
    parser.add_argument(
        name,
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
        allow_abbrev=False,
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
        settings = config_class(**{**preset, **expand(given), **given})
        _check_read(settings, given)
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    return settings
