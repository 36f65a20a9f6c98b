"""AdaGC and AdamW in one kernel against the chain of both, run by an interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adagc_jax as aj
from adagc_jax import kernels
from adagc_jax.kernels import adamw_leaf, tiling
from adagc_jax.kernels.backend import Backend

pytestmark = pytest.mark.usefixtures("optax_promotion")

SHAPES = {"bias": (7,), "stack": (3, 24, 129), "w": (50, 130)}
CLIP: dict[str, Any] = {
    "groups": aj.stacked({"^stack": 0}),
    "phase": "steady",
    "warmup_steps": 0,
    "lambda_rel": 1.1,
}


@pytest.fixture(autouse=True)
def small_leaves_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks per slice, the last one ragged."""
    monkeypatch.setattr(tiling, "SMALLEST", 64)
    monkeypatch.setattr(adamw_leaf, "BLOCK_BYTES", 16 * 256 * 4)


def backend(name: str = "pallas_tpu") -> Backend:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return Backend(name, shardings=here, interpret=True)


def optimizer(by: Any, rate: Any = 1e-2, **kw: Any) -> Any:
    return kernels.adagc_adamw(rate, backend=by, **{**CLIP, **kw})


def chain(rate: Any = 1e-2, **adamw: Any) -> Any:
    return optax.chain(aj.adagc(**CLIP), optax.adamw(rate, **adamw))


def parameters() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in SHAPES.items()}


def gradients(number: int, dtype: str = "float32") -> dict[str, jax.Array]:
    """A stream with a NaN in one tensor, an idle layer and a spike."""
    rng = np.random.default_rng(number + 1)
    g = {
        n: rng.normal(size=s) * (40.0 if number == 3 else 1.0)
        for n, s in SHAPES.items()
    }
    if number == 2:
        g["w"][3, 3] = np.nan
        g["stack"][1] = 0.0
    return {n: jnp.asarray(x, dtype) for n, x in g.items()}


def close(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=5e-7)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("float32", {"weight_decay": 0.0}),
    "decayed, schedule": (
        "bfloat16",
        {"weight_decay": 0.1, "rate": optax.linear_schedule(1e-2, 1e-3, 4)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_and_updates_equal_the_chain(case: str) -> None:
    """And a running job changes over in mid-run, both ways."""
    dtype, kw = CASES[case]
    fused, reference = optimizer(backend(), **kw), chain(**kw)

    @jax.jit
    def both(params: Any, state: Any, grads: Any) -> Any:
        updates, next_state = fused.update(grads, state, params)
        by_update = optax.apply_updates(params, updates), next_state
        return fused.step(params, state, grads), by_update

    @jax.jit
    def plain(params: Any, state: Any, grads: Any) -> Any:
        updates, state = reference.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = parameters()
    ours = mixed = want = params, fused.init(params)
    assert jax.tree.structure(ours[1]) == jax.tree.structure(reference.init(params))
    for number in range(5):
        grads = gradients(number, dtype)
        want = plain(*want, grads)
        ours, by_update = both(*ours, grads)
        close(ours, want)
        close(by_update, want)
        mixed = (both(*mixed, grads)[0]) if number % 2 else plain(*mixed, grads)
    close(mixed, want)
    close(aj.clip_metrics(ours[1]), aj.clip_metrics(want[1]))


def test_without_a_kernel_it_is_the_chain() -> None:
    params, grads = parameters(), gradients(0)
    for by in ("auto", "xla"):
        fused = optimizer(by, mu_dtype=jnp.bfloat16)
        want = chain(mu_dtype=jnp.bfloat16)
        programs = [
            str(jax.make_jaxpr(o.update)(grads, o.init(params), params))
            for o in (fused, want)
        ]
        assert programs[0] == programs[1]


def test_explain_says_which_leaf_the_kernel_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def table(**kw: Any) -> dict[str, Any]:
        rows = aj.explain(optimizer(backend(), **kw), parameters()).rows
        return {row.path: row for row in rows}

    rows = table()
    assert {n: r.backend for n, r in rows.items()} == {
        "bias": "xla",
        "stack": "pallas_tpu",
        "w": "pallas_tpu",
    }
    assert "float32 mu, not bfloat16" in table(mu_dtype=jnp.bfloat16)["w"].why
    monkeypatch.setattr(tiling, "vmem_bytes", lambda kind: tiling.MIB)
    assert "of it; there are 1" in table()["w"].why


def test_what_cannot_be_is_refused() -> None:
    for kw, said in (
        ({"phase": "auto"}, "phase='auto' needs"),
        ({"nonfinite": "skip"}, "nonfinite='skip'"),
        ({"groups": aj.whole_tree()}, "whole_tree"),
        ({"b1": 1.0}, "b1 must be in"),
    ):
        with pytest.raises(ValueError, match=said):
            optimizer(backend(), **kw)
    fused, params = optimizer(backend(), mu_dtype=jnp.bfloat16), parameters()
    with pytest.raises(ValueError, match="can serve none of the 3 leaves"):
        fused.update(params, fused.init(params), params)
    with pytest.raises(ValueError, match="params is None"):
        fused.update(params, fused.init(params))


def test_scan_batches_derivatives_and_64_bits_are_those_of_xla() -> None:
    params, grads = {"w": parameters()["w"]}, {"w": gradients(0)["w"]}

    def results(by: Any) -> Any:
        fused = optimizer(by, groups=None)

        def loss(g: Any, state: Any) -> Any:
            return jnp.sum(fused.update(g, state, params)[0]["w"] ** 2)

        @jax.jit
        def run(g: Any) -> Any:
            state = fused.init(params)

            def body(carry: Any, g: Any) -> Any:
                return fused.step(*carry, g), ()

            two = jax.tree.map(lambda x: jnp.stack([x, 2.0 * x]), g)
            scanned = jax.lax.scan(body, (params, state), two)[0]
            batched = jax.vmap(lambda g: fused.step(params, state, g))(two)
            return scanned, batched, jax.grad(loss)(g, state)

        return run(grads)

    close(results(backend()), results("xla"))
    with jax.enable_x64(True):
        fused = optimizer(backend(), groups=None)
        state = jax.eval_shape(fused.init, params)
        shapes = jax.eval_shape(fused.step, params, state, grads)
        assert jax.tree.map(lambda x: x.dtype, shapes) == jax.tree.map(
            lambda x: x.dtype, (params, state)
        )
