"""AdaGC in front of MaxText's optimizer, with its own clipping off.

    python3.12 -m venv mt && mt/bin/pip install "maxtext[tpu]==0.2.5" -e .
    mt/bin/python examples/frameworks/maxtext_train.py
    mt/bin/python examples/frameworks/maxtext_train.py --level all scan_layers=false \
        steps=20 metrics_file=out/metrics.jsonl enable_checkpointing=true

A small model on synthetic data and eight fake CPU devices. Arguments KEY=VALUE go to
MaxText and win over these settings; with checkpoints a stopped run goes on, references
and all. Each layer has a reference of its own, scanned or not, and `clip/...` joins the
scalars that MaxText logs (metrics_file, TensorBoard). On another machine call `install`
first and `maxtext.trainers.pre_train.train.main` as usual.
"""

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optax

import adagc_jax

SETTINGS = (
    "run_name=adagc dataset_type=synthetic steps=6 "
    "hardware=cpu skip_jax_distributed_system=true enable_checkpointing=false "
    "base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=4 base_mlp_dim=128 "
    "base_num_decoder_layers=3 head_dim=16 vocab_size=512 max_target_length=64 "
    "per_device_batch_size=2 attention=dot_product dtype=float32 "
    "ici_fsdp_parallelism=4 ici_tensor_parallelism=2"
)


def clipped(
    inner: Any, config: Any, seen: list[Any], level: str, options: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
    """AdaGC, then `inner`; layers are found in the tree that comes.

    Every update leaves its numbers in `seen`: MaxText hands the state on as nested
    dicts, in which no clipper can be found.
    """

    def chain(tree: Any) -> optax.GradientTransformationExtraArgs:
        groups = adagc_jax.per_tensor()
        if config.scan_layers:
            groups = adagc_jax.stacked_scan(tree, axis=config.param_scan_axis)
        clip = adagc_jax.adagc(groups=groups, **options)
        return optax.with_extra_args_support(optax.chain(clip, inner))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = chain(updates).update(updates, state, params, **extra)
        seen.append(adagc_jax.clip_metrics(state, level=level))
        return updates, state

    return optax.GradientTransformationExtraArgs(
        lambda params: chain(params).init(params), update
    )


def install(
    optimizers: Any, train: Any, *, level: str = "totals", **options: Any
) -> None:
    """Puts AdaGC with these options into two modules of MaxText.

    Its numbers of this level join the scalars that MaxText logs.
    """
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
        return clipped(
            get_optimizer(config, *args, **kwargs), config, seen, level, options
        )

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
    parser.add_argument(
        "--lambda-abs",
        type=float,
        default=0.5,
        help="AdaGC's limit in its warm-up; 0.5 is less than this model's norms",
    )
    parser.add_argument("--warmup", type=int, default=2, help="updates with that limit")
    parser.add_argument(
        "--level",
        choices=["totals", "worst", "all"],
        default="totals",
        help="which of the clipper's numbers are logged",
    )
    args = parser.parse_intermixed_args(argv)
    spec = importlib.util.find_spec("maxtext")
    if spec is None or spec.origin is None:
        raise SystemExit('maxtext is missing: pip install "maxtext[tpu]==0.2.5"')
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    from maxtext.optimizers import optimizers  # pyright: ignore[reportMissingImports]
    from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]

    install(
        optimizers,
        train,
        level=args.level,
        lambda_abs=args.lambda_abs,
        warmup_steps=args.warmup,
    )
    base = Path(spec.origin).parent / "configs" / "base.yml"
    given_keys = {part.partition("=")[0] for part in args.settings}
    # Checkpoints need an absolute path.
    out = f"base_output_directory={Path('out/maxtext').absolute()}"
    ours = [*SETTINGS.split(), out, "gradient_clipping_threshold=0"]
    kept = [part for part in ours if part.partition("=")[0] not in given_keys]
    train.main([sys.argv[0], str(base), *kept, *args.settings])


if __name__ == "__main__":
    main()
