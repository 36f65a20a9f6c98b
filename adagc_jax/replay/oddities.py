"""What is odd about the steps of a log, in words for its reader."""

import numpy as np

from adagc_jax.replay.words import number_of


def updates_of(
    steps: np.ndarray, clip_steps: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Updates before each row: the clipper's own count where it is logged."""
    if (clip_steps > 0).all():
        updates = clip_steps - 1
    else:
        updates = steps - (1 if steps[0] == 1 else 0)
    notes = []
    if back := int((np.diff(updates) < 0).sum()):
        times = number_of(back, "time")
        notes.append(
            f"the clipper's own count goes back {times} (rollbacks): the replay goes "
            "on with the references that it has"
        )
    if updates[0] > 0:
        notes += [
            f"the log starts at update {updates[0]}: references start from its first "
            "norms, and a warm-up that was over by then is not replayed"
        ]
    return updates, notes


def gaps(names: tuple[str, ...], steps: np.ndarray, unlogged: np.ndarray) -> list[str]:
    """What the log lacks: steps, tensors from some step on, and single norms."""
    notes = []
    stride = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    if stride > 1:
        notes.append(
            f"logged every {stride} steps: the rule learns from logged steps only, so "
            f"its memory is {stride} times as long in steps as that of a real run"
        )
    elif len(steps) > 1 and (holes := int(steps[-1] - steps[0] + 1 - len(steps))):
        are = "step is" if holes == 1 else "steps are"
        notes.append(f"{holes} {are} missing: the rule learns nothing there")
    late = [n for n, gap in zip(names, unlogged.T, strict=True) if gap[0]]
    if late:
        appear = "tensor appears" if len(late) == 1 else "tensors appear"
        notes.append(f"{len(late)} {appear} late, such as {late[0]}")
    holes = unlogged & (np.cumsum(~unlogged, axis=0) > 0)
    if holes.any():
        worst = int(np.argmax(holes.sum(axis=0)))
        count = int(holes.any(axis=0).sum())
        have = "tensor has" if count == 1 else "tensors have"
        rows = number_of(int(holes[:, worst].sum()), "row")
        notes.append(
            f"{count} {have} gaps, such as {names[worst]} ({rows}): to the rule there "
            "is no gradient there"
        )
    return notes
