"""Reads a log of norms, whatever its format."""

from pathlib import Path

from adagc_jax.replay.csv_log import csv_blocks
from adagc_jax.replay.history import History, load_history
from adagc_jax.replay.jsonl import jsonl_blocks
from adagc_jax.replay.schema import Schema
from adagc_jax.replay.table import build
from adagc_jax.replay.tensorboard import event_files, event_rows
from adagc_jax.replay.text import Lines, blocks_of_rows

_FORMATS = (
    "JSONL (.jsonl), CSV (.csv, .tsv), TensorBoard event files (or their directory), "
    "or save_history's .npz; .gz for compressed text"
)


def read_history(
    path: str | Path,
    *,
    prefix: str | None = None,
    pattern: str | None = None,
    loss: str | None = None,
    run: str | None = None,
) -> History:
    """Reads the gradient norms that a run has logged.

    A row holds the step and, for every tensor, ``<prefix>/<tensor>/norm_before``, as
    `clip_metrics` names them with ``level="all"``. Used where they are there:
    ``<tensor>/scale`` and ``<tensor>/gamma`` or ``mean``, ``<prefix>/norm_seen`` (the
    whole tree's norm as the run's rule saw it), ``<prefix>/step`` (updates made) and
    the loss. A log that holds nothing but ``<prefix>/norm_before`` is one tensor.

    All that is logged at a step is one row, in however many lines, and nulls overwrite
    nothing. Where the step goes back and the same keys are there again, the run was
    restarted: what it had logged from that step on is dropped, as TensorBoard does.
    Lines that are cut off are left out. The notes say so.

    Args:
      path: JSONL with one object a line; CSV, its cells separated by commas,
        semicolons or tabs, with a column for every key, or in long form
        ``step,name,norm`` (or ``step,metric,value`` with keys such as ``loss`` and
        ``clip/w/norm_before``); TensorBoard event files or their directory; a history
        export of Weights & Biases as CSV or JSONL (an export of a chart is thinned
        out, so prefer the run's history); or what `save_history` wrote.
      prefix: Of the clipper's keys; default: found in the first row with norms.
      pattern: Regular expression for other keys, with one group for the tensor's name
        and matching the whole key: ``"grad_norm/(.+)"``.
      loss: Key of the loss; default: the first of ``loss``, ``train/loss``,
        ``train_loss``, ``training/loss``, ``loss/train``.
      run: Which run of a chart export with several.

    Returns:
      A `History`; its ``notes`` tell of gaps, late tensors, restarts and the like.

    Raises:
      ValueError: for a file that cannot be read so: which line, what was expected.
      FileNotFoundError: if there is nothing at the path.

    Example:
      >>> import pathlib, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     log = pathlib.Path(folder, "norms.jsonl")
      ...     _ = log.write_text('{"step": 0, "loss": 2.5, "clip/w/norm_before": 0.5}')
      ...     history = read_history(log)
      >>> history.names, history.norm.tolist()
      (('w',), [[0.5]])
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected {_FORMATS}; nothing is there.")
    kind = _kind(path)
    if kind == "npz":
        _refuse(path, prefix=prefix, pattern=pattern, loss=loss, run=run)
        return load_history(path)
    if kind != "csv":
        _refuse(path, run=run)
    schema = Schema(prefix, pattern, loss)
    if kind == "jsonl":
        blocks = jsonl_blocks(path, schema)
    elif kind == "csv":
        blocks = csv_blocks(path, schema, run)
    else:
        rows = event_rows(event_files(path), schema)
        blocks = blocks_of_rows(str(path), rows, schema)
    try:
        return build(str(path), blocks, schema)
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def _refuse(path: Path, **options: str | None) -> None:
    """Says that an option means nothing to a format, rather than to ignore it."""
    given = [f"{name}=" for name, value in options.items() if value is not None]
    if given:
        what = "the columns of a chart export (CSV)" if "run=" in given else "a log"
        raise ValueError(
            f"{path}: {', '.join(given)} is for {what} and means nothing here: leave "
            "it out."
        )


def _kind(path: Path) -> str:
    if path.is_dir() or "tfevents" in path.name:
        return "events"
    name = path.name.lower().removesuffix(".gz")
    suffix = Path(name).suffix
    if suffix in (".txt", ".log"):
        return _kind_of_text(path)
    suffixes = {".ndjson": "jsonl", ".json": "jsonl", ".tsv": "csv"}
    kind = suffixes.get(suffix, suffix[1:])
    if kind not in ("jsonl", "csv", "npz"):
        raise ValueError(f"{path}: expected {_FORMATS}, got the suffix {suffix!r}.")
    return kind


def _kind_of_text(path: Path) -> str:
    """By its first line: JSONL begins with a brace, CSV with names of columns."""
    with Lines(path) as lines:
        first = next(lines, "").lstrip()
    table = not first.startswith("{") and any(c in first for c in ",;\t")
    return "csv" if table else "jsonl"
