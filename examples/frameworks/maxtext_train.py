"""AdaGC in front of MaxText's optimizer, with its own clipping off.

    python3.12 -m venv mt && mt/bin/pip install "maxtext[tpu]==0.2.5" -e .
    mt/bin/python examples/frameworks/maxtext_train.py
    mt/bin/python examples/frameworks/maxtext_train.py scan_layers=false steps=20

A small model on synthetic data and eight fake CPU devices. Arguments KEY=VALUE go to
MaxText and win over these settings. Each scanned layer has a reference of its own, and
`clip/...` joins the scalars that MaxText logs (metrics_file, TensorBoard). On another
machine call `install` first and `maxtext.trainers.pre_train.train.main` as usual.
"""

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optax

import adagc_jax

SETTINGS = (
    "run_name=adagc base_output_directory=out/maxtext dataset_type=synthetic steps=6 "
    "hardware=cpu skip_jax_distributed_system=true enable_checkpointing=false "
    "base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=4 base_mlp_dim=128 "
    "base_num_decoder_layers=3 head_dim=16 vocab_size=512 max_target_length=64 "
    "per_device_batch_size=2 attention=dot_product dtype=float32 "
    "ici_fsdp_parallelism=4 ici_tensor_parallelism=2"
)


def clipped(
    inner: Any, config: Any, seen: list[Any]
) -> optax.GradientTransformationExtraArgs:
    """AdaGC, then `inner`; layers are found in the tree that comes.

    Every update leaves its numbers in `seen`: MaxText hands the state on as nested
    dicts, in which no clipper can be found.
    """

    def chain(tree: Any) -> optax.GradientTransformationExtraArgs:
        axis = config.param_scan_axis
        scanned = adagc_jax.stacked_scan if config.scan_layers else None
        groups = scanned(tree, axis=axis) if scanned else adagc_jax.per_tensor()
        clip = adagc_jax.adagc(groups=groups, warmup_steps=2)
        return optax.with_extra_args_support(optax.chain(clip, inner))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = chain(updates).update(updates, state, params, **extra)
        seen.append(adagc_jax.clip_metrics(state))
        return updates, state

    return optax.GradientTransformationExtraArgs(
        lambda params: chain(params).init(params), update
    )


def install(optimizers: Any, train: Any) -> None:
    """Puts AdaGC into MaxText's two modules, and its numbers among the scalars."""
    get_optimizer, train_step = optimizers.get_optimizer, train.train_step
    seen: list[Any] = []

    @functools.wraps(get_optimizer)
    def with_clip(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.gradient_clipping_threshold > 0:
            raise ValueError(
                "gradient_clipping_threshold must be 0 with AdaGC in front, got "
                f"{config.gradient_clipping_threshold}: pass "
                "gradient_clipping_threshold=0"
            )
        return clipped(get_optimizer(config, *args, **kwargs), config, seen)

    @functools.wraps(train_step)
    def with_metrics(*args: Any, **kwargs: Any) -> Any:
        state, metrics = train_step(*args, **kwargs)
        # Of the same trace, as the update is part of the step.
        metrics["scalar"].update(seen.pop())
        return state, metrics

    optimizers.get_optimizer, train.train_step = with_clip, with_metrics


def main(argv: Sequence[str] | None = None) -> None:
    """Trains with MaxText's own main function."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="for MaxText")
    given = parser.parse_args(argv).settings
    spec = importlib.util.find_spec("maxtext")
    if spec is None or spec.origin is None:
        raise SystemExit('maxtext is missing: pip install "maxtext[tpu]==0.2.5"')
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    from maxtext.optimizers import optimizers  # pyright: ignore[reportMissingImports]
    from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]

    install(optimizers, train)
    base = Path(spec.origin).parent / "configs" / "base.yml"
    given_keys = {part.partition("=")[0] for part in given}
    ours = [*SETTINGS.split(), "gradient_clipping_threshold=0"]
    kept = [part for part in ours if part.partition("=")[0] not in given_keys]
    train.main([sys.argv[0], str(base), *kept, *given])


if __name__ == "__main__":
    main()
