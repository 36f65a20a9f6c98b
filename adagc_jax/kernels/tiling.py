"""How an array is cut up for a kernel: views, blocks and memory limits, without JAX.

A TPU kernel sees (slices, rows, columns), a GPU kernel (slices, elements). Either is a
view: an array whose view would have to be copied is left to XLA, and `tpu_refusal` and
`gpu_refusal` say why.
"""

import dataclasses
import math

LANES = 128
SUBLANES = 8
MIB = 1 << 20
# Large enough to hide the latency of HBM, small enough for four buffers on any TPU.
BLOCK_BYTES = MIB
MAX_SLICES = 4096
# Elements that an array of a tree must have; XLA fuses sums of fewer. Not measured.
SMALLEST = 1 << 14
GPU_BLOCK = 8192

# MiB of VMEM that the compiler gives one kernel, by generation as in device kinds.
_VMEM = {"v4": 15, "v5 lite": 127, "v5e": 127, "v5": 63, "v6": 127, "7x": 63}
_SMALLEST_VMEM = 15


@dataclasses.dataclass(frozen=True)
class View:
    """An array as (slices, rows, columns).

    Attributes:
      slices: Product of the kept axes.
      rows: Product of the other axes but one.
      cols: The other axis.
      swapped: Whether the last two axes change places first, as in memory.
    """

    slices: int
    rows: int
    cols: int
    swapped: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the view."""
        return self.slices, self.rows, self.cols


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of a slice: (rows, cols) each, of which there are ``grid``."""

    rows: int
    cols: int
    grid: tuple[int, int]


def tpu_refusal(shape: tuple[int, ...], keep: tuple[int, ...], dtype: str) -> str:
    """Why the TPU kernels cannot serve such an array; empty if they can."""
    if dtype not in ("float32", "bfloat16"):
        return f"its TPU kernels read float32 and bfloat16, not {dtype}"
    if reason := _refusal(shape, keep):
        return reason
    rest = shape[len(keep) :]
    if len(rest) < 2:
        return "its TPU kernels reduce two axes or more, and there is less to reduce"
    second, minor = inner_axes(shape, dtype)
    if min(second, minor) < len(shape) - 2:
        return (
            f"XLA keeps {list(shape)} in tiles of axes {second} and {minor} on TPU, "
            "and its kernels would need a copy"
        )
    rows = shape[second]
    if math.prod(rest[:-2]) > 1 and rows % SUBLANES:
        return (
            f"axes {list(rest)} cannot be seen as rows and columns without a copy: "
            f"{rows} is no multiple of {SUBLANES}"
        )
    if slices(shape, keep) > MAX_SLICES:
        return f"more than {MAX_SLICES} slices are too many for its TPU kernels"
    return ""


def gpu_refusal(shape: tuple[int, ...], keep: tuple[int, ...], dtype: str) -> str:
    """Why the GPU kernel cannot serve such an array; empty if it can."""
    if dtype not in ("float32", "bfloat16", "float16"):
        return f"its GPU kernel reads float32, bfloat16 and float16, not {dtype}"
    if math.prod(shape) + GPU_BLOCK >= 2**31:
        return f"its GPU kernel counts in 32 bits, and there are {math.prod(shape)}"
    return _refusal(shape, keep)


def slices(shape: tuple[int, ...], keep: tuple[int, ...]) -> int:
    """How many slices the kept leading axes make."""
    return math.prod(shape[: len(keep)])


def tpu_view(shape: tuple[int, ...], keep: tuple[int, ...], dtype: str) -> View:
    """The view of an array that was not refused."""
    second, minor = inner_axes(shape, dtype)
    return View(
        slices=slices(shape, keep),
        rows=math.prod(shape[len(keep) : -2]) * shape[second],
        cols=shape[minor],
        swapped=second > minor,
    )


def inner_axes(shape: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """The two axes that XLA puts into tiles on TPU: those that take least memory.

    It prefers the last two, in their order.
    """
    axes = range(len(shape) - 1, -1, -1)
    pairs = sorted(
        ((second, minor) for minor in axes for second in axes if second != minor),
        key=lambda pair: (-min(pair), pair[0] > pair[1]),
    )

    def padded(pair: tuple[int, int]) -> int:
        second, minor = (shape[axis] for axis in pair)
        tiles = _sublanes(second, dtype) * _up(minor, LANES)
        return tiles * math.prod(shape) // (second * minor)

    return min(pairs, key=padded)


def blocks(view: View, itemsize: int) -> Blocks:
    """Blocks of at most `BLOCK_BYTES`: all columns if they fit, then all rows."""
    target, tile = BLOCK_BYTES, 32 // itemsize
    cols, rows = view.cols, view.rows
    if tile * _up(cols, LANES) * itemsize > target:
        cols = max(LANES, target // (tile * itemsize) // LANES * LANES)
    width = _up(cols, LANES) * itemsize
    if _up(rows, tile) * width > target:
        rows = max(tile, target // width // tile * tile)
    return Blocks(rows, cols, (-(-view.rows // rows), -(-view.cols // cols)))


def resident_bytes(view: View, itemsize: int) -> int:
    """VMEM of a kernel that holds one slice: the slice and a few blocks beside it."""
    tile = 32 // itemsize
    slice_bytes = _up(view.rows, tile) * _up(view.cols, LANES) * itemsize
    return slice_bytes + 4 * BLOCK_BYTES


def fits(view: View, itemsize: int, device_kind: str) -> bool:
    """Whether one slice at a time can be held in VMEM."""
    whole_rows = blocks(view, itemsize).cols == view.cols
    return whole_rows and resident_bytes(view, itemsize) <= vmem_bytes(device_kind)


def vmem_bytes(device_kind: str) -> int:
    """What one kernel may use on a TPU such as ``"TPU v5 lite"``.

    The smallest there is for a device that is not known.
    """
    for name, size in _VMEM.items():
        if "TPU" in device_kind and name in device_kind:
            return size * MIB
    return _SMALLEST_VMEM * MIB


def _refusal(shape: tuple[int, ...], keep: tuple[int, ...]) -> str:
    if math.prod(shape) == 0:
        return "there is nothing in it to read"
    if keep != tuple(range(len(keep))):
        return f"kept axes {keep} are not the leading ones, and would need a copy"
    return ""


def _sublanes(rows: int, dtype: str) -> int:
    """Rows in memory: whole tiles, or a smaller tile if there are fewer rows."""
    if rows >= SUBLANES:
        return _up(rows, SUBLANES)
    smallest = 1 if dtype == "float32" else 2
    return max(smallest, 1 << (rows - 1).bit_length())


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
