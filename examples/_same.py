"""What must be the same for a run to be continued, and for a finished one to count."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _cli import BadOption, option
from _clippers import slug
from _config import Config
from _data import Corpus

Settings = Mapping[str, Any]

# Settings that do not change a run's numbers. Which other clippers and seeds there are
# does not either, and what the finished log is looked at with.
_FREE = ("out", "resume", "checkpoint_every", "log_every", "tensorboard", "wandb")
_FREE += ("describe", "clip", "seeds", "window", "n_sigma")


def settings_of(name: str, config: Config, corpus: Corpus) -> dict[str, Any]:
    """All that decides the numbers of one clipper's run, as JSON gives it back."""
    settings = dataclasses.asdict(config)
    kept = {key: value for key, value in settings.items() if key not in _FREE}
    if config.rollback:
        # A spike is found when its block ends, and decides what is skipped.
        kept["log_every"] = config.log_every
    kept |= {"bursts": [str(burst) for burst in config.bursts]}
    kept |= {"clip": name, "data_sha256": corpus.sha256}
    return json.loads(json.dumps(kept))


def checkpoint_folder(name: str, out: str | Path) -> Path:
    """Where a clipper's checkpoints are."""
    return Path(out) / "checkpoints" / slug(name)


def check_same(saved: Settings, settings: Settings, path: Path) -> None:
    """Raises BadOption that names what differs."""
    changed = [
        f"{option(key)} was {_text(saved.get(key))} and is {_text(value)}"
        for key, value in settings.items()
        if saved.get(key) != value
    ]
    if changed:
        raise BadOption(
            f"--resume: {'; '.join(changed)} for {path}: give the options of that run, "
            "or another --out"
        )


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
