"""What `--rollback` does: from a loss spike back to a snapshot, around bad batches."""

from typing import Any

import numpy as np
from _analysis import Run
from _config import Config

import adagc_jax
from adagc_jax.rollback import Restored


class Recovery:
    """Keeps snapshots, finds spikes, and says where to go on; nothing if not asked to.

    A spike is a loss far above those before it, by the same rule as the guard's. Its
    batch, those since the snapshot and as many more as lie between two snapshots are
    skipped: a bad stretch of data rarely ends with the batch that gave it away.

    Attributes:
      ahead: How many batches the data is ahead of the steps.
    """

    def __init__(self, config: Config):
        self.ahead = 0
        self._config = config
        every = config.rollback
        # Losses arrive once per block, so a snapshot may be later than a spike that
        # nobody has seen yet; after as many steps as in a block, all have been seen.
        self._rollback = (
            adagc_jax.Rollback(every, skip=every, settle=config.log_every)
            if every
            else None
        )

    def keep(self, step: int, state: Any) -> None:
        """Takes a snapshot of the state before `step`, if one is due."""
        if self._rollback is not None:
            self._rollback.keep(step, state)

    def where(self, step: int) -> dict[str, Any]:
        """Number and batch of a step, for the log."""
        index = step + self.ahead
        skips = {"batch_index": index} if self._rollback is not None else {}
        return {"step": step, "batch": self._config.kind(index), **skips}

    def go_back(self, run: Run) -> Restored | None:
        """Undoes all since the snapshot if a loss spiked; else there is None.

        A run that goes on spiking from one and the same snapshot is stopped.
        """
        if self._rollback is None:
            return None
        # What the guard has skipped did no harm.
        made = np.array([not row.get("guard/last_reason") for row in run.rows], bool)
        _, spikes, z = self._config.spike_rule.score(run.series("loss"), made)
        if not spikes.size:
            return None
        spike = int(spikes[0])
        try:
            back = self._rollback.restore(spike)
        except RuntimeError as error:
            run.stopped = f"stopped. {error}"
            return None
        first = back.step + self.ahead
        self.ahead += back.skip
        event = {
            "spike": spike,
            "loss": run.rows[spike]["loss"],
            "z": float(z[spike]),
            "back_to": back.step,
            "skipped_batches": [first, first + back.skip - 1],
        }
        run.undo(back.step, event)
        return back
