"""AdaGC in front of Levanter's AdamW, with its own clipping off.

    python3.12 -m venv lev && lev/bin/pip install -e . \
        "marin-levanter==0.2.227.dev40316220070"
    lev/bin/python examples/frameworks/levanter_train.py --steps 20

A small Llama on counting tokens and eight fake CPU devices; run again with more steps,
it goes on from its checkpoint. After `register()` any YAML of Levanter may say
`optimizer: {type: adagc, learning_rate: 6e-4}`, and `clip/...` joins what its trackers
log. Each layer of a `Stacked` has a reference of its own.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optax

import adagc_jax

VOCAB, LENGTH, BATCH = 64, 32, 8


def layers_apart(path: str, leaf: Any) -> int | None:
    """Haliax stacks layers along the first axis of the arrays inside a `Stacked`."""
    del leaf
    return 0 if "/stacked/" in f"/{path}" else None


def logged(
    clip: optax.GradientTransformationExtraArgs, level: str
) -> optax.GradientTransformationExtraArgs:
    """The clipper, whose numbers go to Levanter's trackers with every update."""
    from levanter import tracker  # pyright: ignore[reportMissingImports]

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = clip.update(updates, state, params, **extra)
        tracker.jit_log(adagc_jax.clip_metrics(state, level=level))
        return updates, state

    return optax.GradientTransformationExtraArgs(clip.init, update)


@functools.cache
def register() -> Any:
    """Levanter's optimizer config of type `adagc`."""
    from levanter.optim.config import (  # pyright: ignore[reportMissingImports]
        AdamConfig,
        OptimizerConfig,
    )

    @OptimizerConfig.register_subclass("adagc")
    @dataclasses.dataclass(frozen=True)
    class AdaGCConfig(AdamConfig):
        """Levanter's AdamW, with AdaGC for its clipping."""

        max_grad_norm: float | None = None
        lambda_rel: float = 1.04
        lambda_abs: float = 1.0
        clip_warmup_steps: int = 100
        clip_level: str = "totals"

        def build(self, num_train_steps: int) -> optax.GradientTransformationExtraArgs:
            if self.max_grad_norm is not None:
                raise ValueError(
                    "max_grad_norm must be None with AdaGC in front, got "
                    f"{self.max_grad_norm}: leave it out"
                )
            clip = adagc_jax.adagc(
                self.lambda_rel,
                lambda_abs=self.lambda_abs,
                warmup_steps=self.clip_warmup_steps,
                groups=adagc_jax.stacked(layers_apart),
            )
            adamw = super().build(num_train_steps)
            return optax.chain(logged(clip, self.clip_level), adamw)

    return AdaGCConfig


def trainer_config(steps: int, out: Path) -> Any:
    """Four devices for the parameters and the batch, two for heads and MLPs."""
    from levanter.checkpoint import (  # pyright: ignore[reportMissingImports]
        CheckpointerConfig,
    )
    from levanter.tracker.json_logger import (  # pyright: ignore[reportMissingImports]
        JsonLoggerConfig,
    )
    from levanter.trainer import TrainerConfig  # pyright: ignore[reportMissingImports]
    from levanter.utils.mesh import MeshConfig  # pyright: ignore[reportMissingImports]

    return TrainerConfig(
        id="adagc",
        log_dir=out,
        tracker=JsonLoggerConfig(),
        mesh=MeshConfig(axes={"data": 4, "model": 2}),
        train_batch_size=BATCH,
        num_train_steps=steps,
        checkpointer=CheckpointerConfig(base_path=str(out / "checkpoints"), keep=None),
        log_jaxprs=False,
        log_xla_hlo=False,
        require_accelerator=False,
    )


def train(args: argparse.Namespace) -> Any:
    """Levanter's own trainer, model and loader; returns its last state."""
    import haliax as hax  # pyright: ignore[reportMissingImports]
    import jax
    import numpy as np
    from levanter import trainer as lt  # pyright: ignore[reportMissingImports]
    from levanter.data.dataset import (  # pyright: ignore[reportMissingImports]
        ListAsyncDataset,
    )
    from levanter.models.llama import (  # pyright: ignore[reportMissingImports]
        LlamaConfig,
    )
    from levanter.models.lm_model import LmExample  # pyright: ignore[reportMissingImports]

    model = LlamaConfig(
        max_seq_len=LENGTH,
        hidden_dim=32,
        intermediate_dim=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        scan_layers=not args.unrolled,
    )
    optimizer = register()(
        learning_rate=args.learning_rate,
        lr_schedule="constant",
        lambda_abs=args.lambda_abs,
        clip_warmup_steps=args.warmup,
        clip_level=args.level,
    ).build(args.steps)
    config = trainer_config(args.steps, args.out)
    lt.initialize(config)
    starts = np.random.default_rng(0).integers(VOCAB, size=BATCH * args.steps)
    tokens = (starts[:, None] + np.arange(LENGTH)) % VOCAB
    data = [
        LmExample.causal(hax.named(row.astype(np.int32), model.max_Pos))
        for row in tokens
    ]

    def loss_fn(model: Any, example: Any, *, key: Any = None) -> Any:
        return model.compute_next_token_loss(example, key=key)

    with lt.Trainer(config, optimizer, loss_fn) as trainer:
        vocab = hax.Axis("vocab", VOCAB)
        # Levanter's checkpoints know no typed keys.
        key = jax.random.PRNGKey(0)
        state = trainer.initial_state(
            key, model_init=lambda: model.build(vocab, key=key)
        )
        loader = trainer.data_loader(ListAsyncDataset(data))
        return trainer.train(state, loader.iter_from_step(int(state.step))).state


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--lambda-abs", type=float, default=1.0, help="AdaGC's limit")
    parser.add_argument("--warmup", type=int, default=5, help="updates with that limit")
    parser.add_argument(
        "--level",
        choices=["totals", "worst", "all"],
        default="totals",
        help="which of the clipper's numbers are logged",
    )
    parser.add_argument("--unrolled", action="store_true", help="layers not scanned")
    parser.add_argument("--out", type=Path, default=Path("out/levanter"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and says what was clipped."""
    args = arguments(argv)
    if importlib.util.find_spec("levanter") is None:
        raise SystemExit(
            'levanter is missing: pip install "marin-levanter==0.2.227.dev40316220070"'
        )
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    print(adagc_jax.clip_report(train(args).opt_state))


if __name__ == "__main__":
    main()
