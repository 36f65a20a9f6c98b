"""Reads a log of norms, whatever its format."""

from pathlib import Path

from adagc_jax.replay.csv_log import csv_blocks
from adagc_jax.replay.history import History, load_history
from adagc_jax.replay.jsonl import jsonl_blocks
from adagc_jax.replay.schema import Schema
from adagc_jax.replay.table import build
from adagc_jax.replay.tensorboard import event_block, event_files

_FORMATS = (
    "JSONL (.jsonl), CSV (.csv), TensorBoard event files (or their directory), or "
    "save_history's .npz; .gz for compressed text"
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

    Args:
      path: JSONL with one object a line; CSV with a column for every key, or in long
        form ``step,name,norm``; TensorBoard event files or their directory; a history
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
        return load_history(path)
    schema = Schema(prefix, pattern, loss)
    if kind == "jsonl":
        blocks = jsonl_blocks(path, schema)
    elif kind == "csv":
        blocks = csv_blocks(path, schema, run)
    else:
        blocks = iter([event_block(event_files(path), schema)])
    return build(str(path), blocks, schema)


def _kind(path: Path) -> str:
    if path.is_dir() or "tfevents" in path.name:
        return "events"
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    suffixes = {".ndjson": "jsonl", ".json": "jsonl", ".txt": "jsonl"}
    kind = suffixes.get(suffix, suffix[1:])
    if kind not in ("jsonl", "csv", "npz"):
        raise ValueError(f"{path}: expected {_FORMATS}, got the suffix {suffix!r}.")
    return kind
