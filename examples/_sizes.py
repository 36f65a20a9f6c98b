"""Models and their sizes: presets for the options of the job, and what they count."""

from collections.abc import Mapping
from typing import Any

MODELS = ("llama", "qwen", "mixtral")


def _shape(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab: int,
    experts: int,
) -> dict[str, int]:
    """One preset; the last number counts only for Mixtral."""
    return {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden": hidden,
        "vocab": vocab,
        "experts": experts,
    }


# Data are bytes: a larger vocabulary than 256 only gives the published shapes.
_SAME = {
    "toy": _shape(2, 64, 4, 2, 176, 256, 4),
    "small": _shape(6, 384, 6, 2, 1024, 256, 8),
    # TinyLlama 1.1B, and the same blocks in the other two models.
    "1b": _shape(22, 2048, 32, 4, 5632, 32_000, 8),
}
SIZES: dict[str, dict[str, dict[str, int]]] = {
    **{size: dict.fromkeys(MODELS, shape) for size, shape in _SAME.items()},
    # Llama-2 7B, Qwen3-8B, Mixtral 8x7B.
    "7b": {
        "llama": _shape(32, 4096, 32, 32, 11_008, 32_000, 8),
        "qwen": _shape(36, 4096, 32, 8, 12_288, 151_936, 8),
        "mixtral": _shape(32, 4096, 32, 8, 14_336, 32_000, 8),
    },
}


def size_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `--size` and `--model` on a command line set."""
    if "size" not in given:
        return {}
    return dict(SIZES[given["size"]][given.get("model", MODELS[0])])
