"""What all pictures share: figures without pyplot, colours, and thinning."""

import itertools
import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart under every common colour blindness.
GREY, ORANGE, BLUE, GREEN, RED = "#8c8c8c", "#E69F00", "#0072B2", "#009E73", "#D55E00"
COLOURS = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9", "#000000", GREY)
DPI = 140
_FEW = 40


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure that belongs to no window.

    Raises:
      ImportError: without matplotlib, naming the extra that brings it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "adagc_jax.plots needs matplotlib: pip install 'adagc-jax[plots]'."
        ) from error
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: "Axes", grid: str = "y") -> None:
    """A light grid and no box."""
    axes.grid(axis=grid, color="0.92", lw=0.8)  # pyright: ignore[reportArgumentType]
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def heading(axes: "Axes", text: str, **kwargs: Any) -> None:
    """A title at the left, where reading starts."""
    axes.set_title(text, loc="left", fontsize=11, **kwargs)


def thinned_line(
    steps: np.ndarray, values: np.ndarray, points: int = 3000
) -> tuple[np.ndarray, np.ndarray]:
    """At most about ``points`` points that keep every peak and every dip.

    Of each stretch, its smallest and its largest value stay, in their order.
    """
    if len(values) <= points:
        return steps, values
    edges = bin_edges(len(values), points // 2)
    keep: set[int] = set()
    for start, end in itertools.pairwise(edges):
        part = values[start:end]
        if np.isnan(part).all():
            keep.add(int(start))
            continue
        keep |= {int(start + np.nanargmin(part)), int(start + np.nanargmax(part))}
    rows = sorted(keep)
    return steps[rows], values[rows]


def bin_edges(length: int, bins: int) -> np.ndarray:
    """Edges of ``bins`` stretches of about the same length, or of single steps."""
    return np.unique(np.linspace(0, length, min(bins, length) + 1).astype(int))


def pooled(values: np.ndarray, edges: np.ndarray, reduce: Any) -> np.ndarray:
    """Reduces the rows of each stretch with a ufunc such as ``np.fmin``."""
    return reduce.reduceat(values, edges[:-1], axis=0)


def cell_edges(steps: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Steps at which stretches begin, and the one where the last of them ends."""
    return np.append(steps[edges[:-1]], steps[-1] + 1)


def natural(name: str) -> list[Any]:
    """A key that sorts ``layers/2`` before ``layers/10``."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts]


def shortened(name: str, length: int = 34) -> str:
    """A name that fits beside a plot, less its middle; a dollar begins no formula."""
    if len(name) > length:
        head = (length - 1) // 3
        name = f"{name[:head]}…{name[-(length - 1 - head) :]}"
    return name.replace("$", r"\$")


def dots(values: np.ndarray) -> dict[str, Any]:
    """Markers for a line of few points, which would be hard to see, or not be there."""
    return {"marker": ".", "ms": 6} if len(values) <= _FEW else {}


def check_drawable(name: str, steps: int, tensors: int) -> None:
    """Refuses what would be an empty picture."""
    if not steps or not tensors:
        raise ValueError(
            f"{name} must have at least one step and one tensor, got {steps} and "
            f"{tensors}: there is nothing to draw."
        )


def percent(share: float) -> str:
    """``3.1 %``, or ``n/a`` for NaN."""
    return "n/a" if np.isnan(share) else f"{100 * share:.3g} %"
