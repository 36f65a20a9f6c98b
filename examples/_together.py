"""Which settings of the job fit together; `Config` asks when it is made."""

import glob
import math
from pathlib import Path
from typing import TYPE_CHECKING

from _cli import BadOption
from _mesh import parse_mesh

if TYPE_CHECKING:
    from _config import Config


def check_together(config: "Config") -> None:
    """Raises BadOption for the first settings that do not."""
    for check in (_shape, _data, _combination):
        check(config)


def _shape(config: "Config") -> None:
    if config.heads % config.kv_heads or config.width % (2 * config.heads):
        raise BadOption(
            "--heads must be a multiple of --kv-heads and --width of 2 x --heads, "
            f"got --width {config.width} --heads {config.heads} "
            f"--kv-heads {config.kv_heads}"
        )
    sizes = parse_mesh(config.mesh)
    rows = math.prod(sizes[axis] for axis in ("data", "fsdp"))
    if config.batch_size % rows:
        raise BadOption(
            f"--mesh {config.mesh} splits a batch by {rows}, which does not divide "
            f"--batch-size {config.batch_size}"
        )
    if sizes["expert"] > 1 and config.model != "mixtral":
        raise BadOption(
            f"--mesh {config.mesh} splits experts, and --model {config.model} has none"
        )


def _data(config: "Config") -> None:
    known = config.data in ("", "stdlib", "c4") or glob.has_magic(config.data)
    if not known and not Path(config.data).is_dir():
        raise BadOption(
            "--data must be a folder, a pattern such as 'texts/*.txt', stdlib or "
            f"c4: there is no folder {config.data!r}"
        )
    for burst in config.bursts:
        if not 10 <= burst.step <= config.steps - config.burst_length - 5:
            raise BadOption(
                f"--bursts {burst} needs ten steps before it and five after it "
                f"within --steps {config.steps}; '' means no bursts"
            )


def _combination(config: "Config") -> None:
    if config.rollback and config.checkpoint_every:
        raise BadOption(
            f"--rollback {config.rollback} keeps its snapshots in memory, where "
            f"--checkpoint-every {config.checkpoint_every} does not find them: leave "
            "one of them out"
        )
    if not config.distributed:
        return
    if not config.mesh:
        raise BadOption(
            f"--distributed {config.distributed} needs a mesh over the devices of all "
            "processes, such as --mesh fsdp=2"
        )
    if config.checkpoint_every or config.resume:
        raise BadOption(
            "--distributed cannot be combined with --checkpoint-every and --resume: "
            "a run of several processes leaves no checkpoint"
        )
