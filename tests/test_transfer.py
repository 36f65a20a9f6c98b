"""Taking the state of a running optimizer over into another one.

Most states here are not trained but numbered: every element is another number, so that
where each of them went can be seen from the new state alone.
"""

import collections
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optimizers import EMBED_ALONE, OPTIMIZERS, PARAMS, by_label, initial, numbered
from streams import assert_same

import adagc_jax as aj
from adagc_jax import restore_state, transfer_state

# Optimizers of optax mix int32 counts and float32 moments.
pytestmark = pytest.mark.usefixtures("optax_promotion")


def nodes(state: Any, kind: type) -> Iterator[Any]:
    """The named tuples of one type, at any depth."""
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind)):
        if isinstance(node, kind):
            yield node


def by_name(state: Any) -> dict[str, np.ndarray]:
    """Moments and references by tensor, found by other means than the library's."""
    found = {}
    for adam in nodes(state, optax.ScaleByAdamState):
        for field in ("mu", "nu"):
            moments = jax.tree_util.tree_leaves_with_path(getattr(adam, field))
            for path, value in moments:
                found[f"{field}{jax.tree_util.keystr(path)}"] = np.asarray(value)
    for clip in nodes(state, aj.ClipState):
        _, layout = clip.labels.layouts
        for field, packed in clip.stages[0].rule._asdict().items():
            for path, value in zip(
                layout.paths, layout.unpack(load(packed)), strict=True
            ):
                kind = type(clip.stages[0].rule).__name__
                found[f"{kind}.{field}/{path or layout.paths}"] = np.asarray(value)
    return found


def load(packed: Any) -> tuple[Any, ...]:
    return tuple(jax.tree.leaves(packed))


def paths_of(state: Any) -> set[str]:
    """Paths of all arrays that are not a clipper's."""
    flat = jax.tree_util.tree_leaves_with_path(state)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat]
    return {n for n in names if not re.search("stages|metrics|clip_step", n)}


PAIRS = [
    *((name, "adagc") for name in OPTIMIZERS),
    *(("partition", name) for name in ("stacked", "guard", "wrapped", "partition")),
    *(("guard", name) for name in ("global norm", "masked", "partition")),
]


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_every_number_is_kept_new_or_dropped(old: str, new: str) -> None:
    before, start = numbered(initial(old)), initial(new)
    after, report = transfer_state(before, OPTIMIZERS[new], PARAMS)
    assert jax.tree.structure(after) == jax.tree.structure(start)
    types, wanted = jax.tree.map(lambda x: (x.shape, x.dtype), (after, start))
    assert types == wanted

    was, init, now = by_name(before), by_name(start), by_name(after)
    assert set(now) == set(init)
    for name, value in now.items():
        kept = name in was and was[name].shape == value.shape
        np.testing.assert_array_equal(value, was[name] if kept else init[name], name)

    # Of the new state, kept and new; of the old one, kept and dropped.
    places = report.kept + report.new
    assert len(places) == len(set(places))
    assert paths_of(after) <= set(places)
    origins = {row.origin for row in report.rows if row.status == "kept"}
    assert not origins & set(report.dropped)
    assert paths_of(before) <= origins | set(report.dropped)
    for path, x in jax.tree_util.tree_leaves_with_path(after):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in paths_of(after) and x.dtype != bool:
            assert bool(np.min(x) >= 1000) == (name in report.kept), name


class TestTrainingGoesOn:
    def test_from_global_norm_to_adagc_and_back(self) -> None:
        """Adam steps as if nothing had happened, when the new clipper does nothing."""
        rng = np.random.default_rng(0)
        grads = [
            jax.tree.map(
                lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), PARAMS
            )
            for _ in range(6)
        ]
        alone = optax.adamw(1e-3)
        clips = (optax.clip_by_global_norm(1e9), aj.adagc(lambda_abs=1e9))
        old, new = (optax.chain(clip, alone) for clip in clips)
        step_alone, step_old, step_new = map(
            jax.jit, (alone.update, old.update, new.update)
        )
        want, state = alone.init(PARAMS), old.init(PARAMS)
        for number, grad in enumerate(grads):
            if number == 2:
                count = state[1][0].count
                state, report = transfer_state(state, new, PARAMS)
                assert state[1][0].count is count
                assert report.dropped == []
                assert report.kept == [
                    f"1/0/{name}"
                    for name in (
                        "count",
                        *(
                            f"{m}/{p}"
                            for m in ("mu", "nu")
                            for p in ("embed", "head", "layers/w")
                        ),
                    )
                ]
            if number == 4:
                assert aj.clip_metrics(state)["clip/step"] == 2
                state, report = transfer_state(state, old, PARAMS)
                assert report.new == []
                assert "0/stages/0/rule/gamma/layers/w" in report.dropped
            step = step_new if number in (2, 3) else step_old
            updates, state = step(grad, state, PARAMS)
            expected, want = step_alone(grad, want, PARAMS)
            for got, x in zip(
                *map(jax.tree.leaves, ((updates, state[1]), (expected, want))),
                strict=True,
            ):
                np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-8)

    def test_the_new_state_can_be_donated(self) -> None:
        """One count serves two Adams after the split: never the same array twice."""
        new = by_label(optax.adam(1e-3), optax.adam(1e-4))
        before = numbered(optax.adam(1e-3).init(PARAMS), 5)
        after, report = transfer_state(before, new, PARAMS)
        assert report.new == report.dropped == []
        counts = [int(adam.count) for adam in nodes(after, optax.ScaleByAdamState)]
        assert counts == [5, 5]
        jax.block_until_ready(jax.jit(lambda s: s, donate_argnums=0)(after))


class TestClippers:
    def test_tensors_come_and_go(self) -> None:
        """Their places in the packed vectors change, their numbers do not."""
        clip = aj.adagc()
        before = numbered(clip.init(PARAMS))
        smaller = {"head": PARAMS["head"], "layers": PARAMS["layers"]}
        lora = smaller | {"a": jnp.ones((2, 1)), "z": jnp.ones((1, 2))}
        after, report = transfer_state(before, clip, lora)
        old, new = (aj.clip_metrics(s, level="all") for s in (before, after))
        assert new["clip/step"] == old["clip/step"] == 1000
        tensors = {name.split("/")[1] for name in new} - {"step"}
        assert {"a", "head", "layers", "z"} <= tensors
        for name, value in new.items():
            if name.startswith(("clip/head/", "clip/layers/")):
                assert value == old[name], name
            if name.startswith(("clip/a/", "clip/z/")):
                assert value == (name.endswith("/scale")), name
        (rule,) = after.stages
        assert rule.seen.tolist()[::3] == [0, 0]
        assert "stages/0/rule/gamma/a" in report.new
        assert "stages/0/rule/gamma/embed" in report.dropped
        assert "metrics/clipped/layers/w" in report.kept

    def test_tensors_in_another_order(self) -> None:
        clip, names = aj.adagc(), ("head", "embed", "layers")
        before = numbered(clip.init(PARAMS))
        params = collections.OrderedDict((name, PARAMS[name]) for name in names)
        after, report = transfer_state(before, clip, params)
        assert report.new == report.dropped == []
        old, new = (s.stages[0].rule.gamma.tolist() for s in (before, after))
        assert new == [old[1], old[0], old[2]]

    def test_layers_that_were_one_group_start_anew(self) -> None:
        before = numbered(initial("adagc"))
        after, report = transfer_state(before, OPTIMIZERS["stacked"], PARAMS)
        vector, layers = after[0].stages[0].rule.gamma
        assert vector.tolist() == before[0].stages[0].rule.gamma[:2].tolist()
        assert layers.tolist() == [0.0] * 3
        reasons = {r.why for r in report.rows if r.tensor == "layers/w" and r.why}
        assert reasons == {"shape was (), is (3,)"}
        assert after[0].clip_step == 1000
        back, _ = transfer_state(after, OPTIMIZERS["adagc"], PARAMS)
        gamma = back[0].stages[0].rule.gamma
        assert gamma.tolist() == [*vector.tolist(), 0.0]

    @pytest.mark.parametrize("name", ["whole tree", "zclip"])
    def test_another_method_or_other_groups_start_with_a_warm_up(
        self, name: str
    ) -> None:
        before = numbered(initial("adagc"))
        after, report = transfer_state(before, OPTIMIZERS[name], PARAMS)
        assert_same(after[0], initial(name)[0])
        assert_same(after[1][0], before[1][0])
        if name == "zclip":
            rows = [r for r in report.rows if r.part == "0 ClipState"]
            assert {r.why for r in rows if r.status == "new"} == {
                "none of its rules was kept"
            }

    def test_one_reference_for_all_belongs_to_these_tensors(self) -> None:
        clip = aj.adagc(groups=aj.whole_tree())
        before = numbered(clip.init(PARAMS))
        same, _ = transfer_state(
            before, aj.adagc(beta=0.5, groups=aj.whole_tree()), PARAMS
        )
        assert_same(same, before)
        fewer = {"head": PARAMS["head"]}
        after, report = transfer_state(before, clip, fewer)
        assert after.stages[0].rule.gamma == 0.0
        assert report.kept == []

    def test_mean_and_variance_follow_into_another_pass(self) -> None:
        """Rules are matched by type, wherever they are in the pass."""
        rule = aj.EmaRatio(1.05, 0.98, 1.0, 100)
        two = aj.clip_by_rule((aj.FixedNorm(1.0), aj.whole_tree()), rule)
        for clip in (aj.zclip(groups=aj.per_tensor()), aj.adagc()):
            before = numbered(clip.init(PARAMS))
            masked = optax.chain(
                optax.masked(clip, jax.tree.map(lambda _: True, PARAMS))
            )
            after, report = transfer_state(before, masked, PARAMS)
            assert_same(after[0].inner_state, before)
            assert report.new == report.dropped == []
        after, _ = transfer_state(before, two, PARAMS)
        assert_same(after.stages[1], before.stages[0])
        assert_same(after.metrics, before.metrics)
        assert int(jnp.sum(after.stages[0].seen)) == 0

    def test_a_back_stop_does_not_stand_for_the_rule_in_front_of_it(self) -> None:
        """Its tensors are known, but the new rule needs its warm-up."""
        rule = aj.EmaRatio(1.05, 0.98, 1.0, 100)
        two = aj.clip_by_rule(rule, aj.FixedNorm(1.0))
        before = numbered(aj.tensor_gc().init(PARAMS))
        after, report = transfer_state(before, two, PARAMS)
        assert_same(after.stages[1], before.stages[0])
        assert after.clip_step == 0
        assert report.kept == [
            f"stages/1/seen/{n}" for n in ("embed", "head", "layers/w")
        ]

    def test_reset_by_pattern(self) -> None:
        before = numbered(initial("adagc"))
        after, report = transfer_state(
            before, OPTIMIZERS["adagc"], PARAMS, reset=("embed", "^head$")
        )
        assert_same(after[1], before[1])
        assert_same(after[0].metrics, before[0].metrics)
        assert after[0].clip_step == before[0].clip_step
        for old, new in zip(
            *map(jax.tree.leaves, (before[0].stages, after[0].stages)), strict=True
        ):
            assert new.tolist() == [0, 0, old[2]]
        assert {row.why for row in report.rows if row.status == "new"} == {"reset"}
        assert len(report.new) == len(report.dropped) == 8

    def test_reset_of_the_reference_of_the_whole_tree(self) -> None:
        clip = OPTIMIZERS["whole tree"]
        after, _ = transfer_state(initial("whole tree"), clip, PARAMS, reset=(".*",))
        assert_same(after, initial("whole tree"))

    def test_merged_clippers(self) -> None:
        """Numbers of one vector come from two."""
        before = numbered(initial("partition"))
        after, _ = transfer_state(before, OPTIMIZERS["adagc"], PARAMS)
        a, b = nodes(before, aj.ClipState)
        want = jnp.concatenate([a.stages[0].rule.gamma, b.stages[0].rule.gamma])
        assert_same(after[0].stages[0].rule.gamma, want)


AGAIN = aj.adagc(groups=aj.whole_tree())
SWAPS: dict[str, tuple[list[Any], list[Any], list[int | None]]] = {
    "two methods": ([aj.zclip(), aj.adagc()], [aj.adagc(), aj.zclip()], [1, 0]),
    "no memory": ([aj.global_gc(), aj.adagc()], [aj.adagc(), aj.global_gc()], [1, 0]),
    "one replaced": (
        [aj.zclip(), aj.adagc()],
        [aj.robust_gc(), aj.global_gc()],
        [1, None],
    ),
    "other groups": ([aj.adagc(), AGAIN], [AGAIN, aj.adagc()], [1, 0]),
    "one more": (
        [aj.adagc(), AGAIN],
        [aj.global_gc(), AGAIN, aj.zclip(), aj.adagc()],
        [None, 1, None, 0],
    ),
}


class TestOrder:
    @pytest.mark.parametrize("name", SWAPS)
    @pytest.mark.parametrize("wrap", [optax.chain, optax.named_chain], ids=["", "at"])
    def test_clippers_change_places(self, name: str, wrap: Any) -> None:
        old, new, order = SWAPS[name]
        before = numbered(optax.chain(*old).init(PARAMS))
        optimizer = (
            optax.chain(*new)
            if wrap is optax.chain
            else wrap(*((str(i), clip) for i, clip in enumerate(new)))
        )
        after, _ = transfer_state(before, optimizer, PARAMS)
        clippers = list(nodes(after, aj.ClipState))
        for clip, got, source in zip(new, clippers, order, strict=True):
            want = clip.init(PARAMS) if source is None else before[source]
            assert_same(got, want)

    def test_and_a_tensor_is_new(self) -> None:
        """Neither holds the same numbers as before: keys tell them apart."""
        smaller = {name: PARAMS[name] for name in ("embed", "head")}
        before = numbered(optax.chain(aj.adagc(), AGAIN).init(smaller))
        new = optax.chain(AGAIN, aj.adagc())
        after, _ = transfer_state(before, new, PARAMS)
        whole, each = nodes(after, aj.ClipState)
        gamma = before[0].stages[0].rule.gamma
        assert each.stages[0].rule.gamma[:2].tolist() == gamma.tolist()
        assert each.clip_step == before[0].clip_step
        assert whole.stages[0].rule.gamma == whole.clip_step == 0

    def test_metrics_go_with_the_rule_that_remembers(self) -> None:
        rule, limit = aj.EmaRatio(1.05, 0.98, 1.0, 100), aj.FixedNorm(1.0)
        before = numbered(aj.clip_by_rule(rule, limit).init(PARAMS))
        new = optax.chain(aj.clip_by_rule(limit), aj.clip_by_rule(rule))
        (first, second), _ = transfer_state(before, new, PARAMS)
        assert_same(second.metrics, before.metrics)
        assert_same(second.clip_step, before.clip_step)
        assert_same(first.stages[0], before.stages[1])
        assert_same(first.metrics, new.init(PARAMS)[0].metrics)

    def test_metrics_of_two_clippers_that_become_one(self) -> None:
        """They are those of the one that more of the numbers come from."""
        rule = aj.EmaRatio(1.05, 0.98, 1.0, 100)
        before = numbered(optax.chain(AGAIN, aj.adagc()).init(PARAMS))
        new = aj.clip_by_rule((rule, aj.whole_tree()), (rule, aj.per_tensor()))
        after, _ = transfer_state(before, new, PARAMS)
        assert_same(after.stages, (before[0].stages[0], before[1].stages[0]))
        assert_same(after.metrics, before[1].metrics)
        assert_same(after.clip_step, before[1].clip_step)

    def test_places_change_at_two_sites(self) -> None:
        here, there = (aj.adagc(), AGAIN), (AGAIN, aj.adagc())
        old = optax.named_chain(*((n, optax.chain(*here)) for n in ("m", "z")))
        new = optax.named_chain(*((n, optax.chain(*there)) for n in ("z", "m")))
        before = numbered(old.init(PARAMS))
        after, _ = transfer_state(before, new, PARAMS)
        for name in ("m", "z"):
            assert_same(after[name], before[name][::-1])

    def test_groups_of_several_tensors_change_places_and_site(self) -> None:
        parts = [
            optax.masked(AGAIN, {"embed": x, "head": not x}) for x in (True, False)
        ]
        params = {name: PARAMS[name] for name in ("embed", "head")}
        before = numbered(optax.chain(*parts).init(params))
        new = optax.named_chain(("at", optax.chain(*parts[::-1])))
        after, report = transfer_state(before, new, params)
        assert_same(after["at"], before[::-1])
        assert report.new == report.dropped == []

    def test_only_what_has_the_numbers_can_be_meant(self) -> None:
        before = numbered(optax.chain(aj.adagc(), AGAIN, AGAIN).init(PARAMS))
        _, report = transfer_state(before, AGAIN, PARAMS)
        (why,) = {r.why for r in report.rows if r.field == "seen" and r.why}
        both = "1/stages/0 EmaRatioState, 2/stages/0 EmaRatioState"
        assert why == f"ambiguous: fits {both}"


def slowly(count: Any) -> Any:
    return 1.0 - 0.01 * count


class TestSchedules:
    PAIRS = (
        optax.sgd(slowly),
        optax.inject_hyperparams(optax.sgd)(slowly),
        optax.chain(aj.tensor_gc(), optax.inject_hyperparams(optax.sgd)(slowly)),
    )

    @pytest.mark.parametrize(("old", "new"), [(0, 1), (1, 0), (0, 2), (1, 2), (2, 0)])
    def test_into_injected_hyper_parameters_and_out(self, old: int, new: int) -> None:
        before = numbered(self.PAIRS[old].init(PARAMS), 50)
        after, report = transfer_state(before, self.PAIRS[new], PARAMS)
        (row,) = [r for r in report.rows if "Schedule" in r.part]
        assert (row.status, row.field) == ("kept", "count")
        assert "Schedule" in row.source
        was, now = (
            {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in flat}
            for flat in map(jax.tree_util.tree_leaves_with_path, (before, after))
        )
        assert now[row.path] == was[row.origin] >= 50

    def test_the_rate_goes_on(self) -> None:
        old, new = self.PAIRS[:2]
        grads, state = {"w": jnp.ones(())}, old.init({"w": jnp.ones(())})
        for _ in range(3):
            _, state = old.update(grads, state)
        after, _ = transfer_state(state, new, grads)
        updates, _ = new.update(grads, after, grads)
        assert_same(updates, old.update(grads, state)[0])

    def test_a_schedule_becomes_two(self) -> None:
        both = optax.inject_hyperparams(optax.sgd)(slowly, momentum=slowly)
        before = numbered(self.PAIRS[0].init(PARAMS), 50)
        after, _ = transfer_state(before, both, PARAMS)
        counts = [int(s.count) for s in after.hyperparams_states.values()]
        assert counts == [50, 50]

    def test_a_schedule_that_is_new_says_so(self) -> None:
        clip = optax.inject_hyperparams(aj.adagc)(lambda_rel=slowly)
        before = numbered(self.PAIRS[0].init(PARAMS), 50)
        _, report = transfer_state(before, optax.chain(clip, self.PAIRS[0]), PARAMS)
        assert "not in the old state: the schedule starts at 0" in str(report)
        assert "1/1/count" in report.kept


class TestMultiSteps:
    @pytest.mark.parametrize("step", [0, 3])
    def test_an_open_window_is_told_of(self, step: int) -> None:
        before = optax.MultiSteps(optax.sgd(1.0), 4).init(PARAMS)
        before = before._replace(mini_step=jnp.asarray(step, jnp.int32))
        new = optax.MultiSteps(optax.sgd(1.0), 2)
        after, report = transfer_state(before, new, PARAMS)
        assert_same(after, before)
        assert ("a window is open at mini_step 3: with another k" in str(report)) == (
            step > 0
        )


class Slow(NamedTuple):
    slow: Any


def remember_params() -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, state

    return optax.GradientTransformation(lambda params: Slow(params), update)


class TestOtherStates:
    def test_hyper_parameters_are_those_of_the_new_optimizer(self) -> None:
        def injected(lambda_rel: float, rate: float) -> Any:
            clip = optax.inject_hyperparams(aj.adagc)(lambda_rel=lambda_rel)
            return optax.chain(clip, optax.inject_hyperparams(optax.adam)(rate))

        before = numbered(injected(1.05, 1e-3).init(PARAMS))
        after, report = transfer_state(before, injected(1.5, 1e-4), PARAMS)
        assert after[0].hyperparams["lambda_rel"] == np.float32(1.5)
        assert after[1].hyperparams["learning_rate"] == np.float32(1e-4)
        assert_same(after[0].inner_state, before[0].inner_state)
        assert_same(after[1].inner_state, before[1].inner_state)
        assert all("hyperparams" in path for path in report.new + report.dropped)

    def test_two_adams_are_told_apart_by_order_or_not_at_all(self) -> None:
        def adams(count: int) -> Any:
            return optax.chain(*(optax.scale_by_adam() for _ in range(count)))

        before = numbered(adams(2).init(PARAMS))
        after, _ = transfer_state(before, adams(2), PARAMS)
        assert_same(after, before)
        after, report = transfer_state(before, adams(3), PARAMS)
        assert_same(after, adams(3).init(PARAMS))
        reasons = {row.why for row in report.rows if row.status == "new"}
        ambiguous = "ambiguous: fits 0 ScaleByAdamState, 1 ScaleByAdamState"
        assert reasons == {ambiguous, "none of its tensors was kept"}
        assert len(report.dropped) == len(report.new) * 2 // 3

    def test_moments_are_given_away_once(self) -> None:
        adam = optax.scale_by_adam()
        before = numbered(adam.init(PARAMS))
        after, report = transfer_state(before, optax.chain(adam, adam), PARAMS)
        assert_same(after, (before, adam.init(PARAMS)))
        reasons = {row.why for row in report.rows if row.status == "new"}
        assert "belongs to another part of the new state" in reasons

    def test_two_adams_are_told_apart_by_their_labels(self) -> None:
        """Here the one that comes first in the new state is not that of the first."""
        adam = optax.scale_by_adam()
        old, new = (
            optax.named_chain(*((name, optax.masked(adam, True)) for name in names))
            for names in (("m", "z"), ("z", "a", "m"))
        )
        before = numbered(old.init(PARAMS))
        after, _ = transfer_state(before, new, PARAMS)
        assert_same(after["m"], before["m"])
        assert_same(after["z"], before["z"])
        assert after["a"].inner_state.count == 0

    def test_schedules_of_partitions(self) -> None:
        """Counts have no tensors to tell them apart."""
        parts = {
            "a": optax.scale_by_schedule(jnp.cos),
            "b": optax.scale_by_schedule(jnp.sin),
        }
        old = optax.partition(parts, EMBED_ALONE)
        before = numbered(old.init(PARAMS))
        more = parts | {"0": optax.scale_by_schedule(jnp.tan)}
        labels = EMBED_ALONE | {"head": "0"}
        after, report = transfer_state(before, optax.partition(more, labels), PARAMS)
        counts = {k: int(v.inner_state.count) for k, v in after.inner_states.items()}
        assert counts == {"0": 0, "a": 1000, "b": 1001}
        single, report = transfer_state(before, parts["a"], PARAMS)
        assert single.count == 0
        assert report.rows[0].why.startswith("ambiguous: fits inner_states/a/")

    def test_a_record_is_not_torn_apart(self) -> None:
        """A count of values in a window means nothing in a window of another size."""
        inner = optax.sgd(1e-3)
        before = numbered(aj.guard(inner).init(PARAMS))
        wide = aj.guard(inner, spike=aj.SpikeRule(window=64))
        after, report = transfer_state(before, wide, PARAMS)
        assert after.norm_window.seen == 0
        assert after.guard_step == before.guard_step
        assert "values: shape was (128,), is (64,)" in str(report)

    def test_a_moment_in_another_dtype_is_new_and_its_sibling_is_kept(self) -> None:
        before = numbered(optax.scale_by_adam().init(PARAMS))
        half = optax.scale_by_adam(mu_dtype=jnp.bfloat16)
        after, report = transfer_state(before, half, PARAMS)
        assert_same(after.nu, before.nu)
        assert after.count == before.count
        assert report.new == ["mu/embed", "mu/head", "mu/layers/w"]
        assert "dtype was float32, is bfloat16" in str(report)

    def test_boxes_and_named_tuples_of_parameters(self) -> None:
        class Pair(NamedTuple):
            kernel: Any
            bias: Any

        pair = {"dense": Pair(jnp.ones((2, 2)), jnp.zeros(2))}
        boxed = jax.tree.map(lambda x: nn.Partitioned(x, names=(None,) * x.ndim), pair)
        optimizer = OPTIMIZERS["adagc"]
        before = numbered(optimizer.init(pair))
        after, report = transfer_state(before, optimizer, boxed)
        assert report.new == report.dropped == []
        assert {row.part for row in report.rows if row.part.startswith("1/")} == {
            "1/0 ScaleByAdamState"
        }
        assert isinstance(after[1][0].mu["dense"].kernel, nn.Partitioned)
        assert_same(jax.tree.leaves(after), jax.tree.leaves(before))

    def test_parameters_in_the_state(self) -> None:
        """Values of concrete parameters are there; abstract ones have none."""
        after, _ = transfer_state(optax.EmptyState(), remember_params(), PARAMS)
        assert_same(after.slow, PARAMS)
        abstract = jax.eval_shape(lambda: PARAMS)
        kept, _ = transfer_state(Slow(PARAMS), remember_params(), abstract)
        assert kept.slow["head"] is PARAMS["head"]
        with pytest.raises(TypeError, match="ShapeDtypeStruct"):
            transfer_state(optax.EmptyState(), remember_params(), abstract)

    def test_numbers_from_numpy(self) -> None:
        before = jax.device_get(numbered(initial("adagc")))
        after, _ = transfer_state(before, OPTIMIZERS["adagc"], PARAMS)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(after))
        assert_same(after, before)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> jax.sharding.Mesh:
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, has {jax.device_count()}")
    devices = jax.devices()[:4]
    return jax.make_mesh((4,), ("x",), axis_types=(request.param,), devices=devices)


def where(x: Any) -> P | None:
    assert isinstance(x.sharding, NamedSharding)
    return P(*(entry for entry in x.sharding.spec if entry is not None))


def spread_ones(mesh: jax.sharding.Mesh) -> jax.Array:
    return jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, P("x")))


class TestShardings:
    @pytest.mark.parametrize("abstract", [False, True])
    def test_arrays_stay_or_go_to_their_parameter(
        self, mesh: jax.sharding.Mesh, abstract: bool
    ) -> None:
        spread = NamedSharding(mesh, P("x"))
        params: Any = {
            name: jax.device_put(jnp.ones((4, n)), spread)
            for name, n in (("b", 2), ("c", 3), ("gamma", 5))
        }
        groups = aj.stacked({"c": 0})
        old = optax.chain(aj.adagc(groups=groups), optax.adam(1e-3))
        with jax.set_mesh(mesh):
            before = numbered(old.init({"b": params["b"], "c": params["c"]}))
        before = jax.device_put(before, NamedSharding(mesh, P()))
        if abstract:
            params = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                params,
            )
        after, _ = transfer_state(before, old, params)
        adam = after[1][0]
        assert adam.mu["b"] is before[1][0].mu["b"]
        assert where(adam.mu["gamma"]) == P("x")
        (vector, layers), (old_vector, old_layers) = (
            s[0].stages[0].rule.gamma for s in (after, before)
        )
        assert layers is old_layers
        assert where(vector) == P()
        assert vector.tolist() == [*old_vector.tolist(), 0.0]
        assert {x.sharding.mesh for x in jax.tree.leaves(after)} == {mesh}

    def test_from_no_clipper(self, mesh: jax.sharding.Mesh) -> None:
        """Not an array of the new state is left off the mesh."""
        spread = NamedSharding(mesh, P("x"))
        params: Any = {n: jax.device_put(jnp.ones((4, 2)), spread) for n in "bc"}
        old = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
        new = optax.chain(aj.adagc(groups=aj.stacked({"c": 0})), optax.adam(1e-3))
        after, _ = transfer_state(old.init(params), new, params)
        with jax.set_mesh(mesh):
            want = new.init(params)
        for got, x in zip(
            jax.tree.leaves(after[0]), jax.tree.leaves(want[0]), strict=True
        ):
            assert got.sharding.mesh == mesh
            assert where(got) == where(x)

    def test_a_new_stack_alone(self, mesh: jax.sharding.Mesh) -> None:
        """Nothing else that is new says on which devices."""
        params: Any = {n: spread_ones(mesh) for n in "bcd"}
        clip = aj.adagc(groups=aj.stacked({"[cd]": 0}))
        with jax.set_mesh(mesh):
            before = numbered(clip.init({n: params[n] for n in "bc"}))
            want = clip.init(params).stages[0].rule.gamma
        after, report = transfer_state(before, clip, params)
        assert {row.tensor for row in report.rows if row.status == "new"} == {"d"}
        for got, x in zip(after.stages[0].rule.gamma[2:], want[2:], strict=True):
            assert got.sharding.mesh == mesh
            assert where(got) == where(x)

    def test_arrays_of_other_shapes_than_their_parameter(
        self, mesh: jax.sharding.Mesh
    ) -> None:
        params = {"w": spread_ones(mesh)}
        factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
        after: Any = transfer_state(optax.EmptyState(), factored, params).state
        assert after.v["w"].shape == (1,)
        assert {x.sharding.mesh for x in jax.tree.leaves(after)} == {mesh}
        assert where(after.v["w"]) == P()

    def test_parameters_on_other_devices(self, mesh: jax.sharding.Mesh) -> None:
        """Old numbers decide where a vector of old and new ones is."""
        few = jax.make_mesh(
            (2,), ("x",), axis_types=mesh.axis_types, devices=jax.devices()[:2]
        )
        clip = aj.adagc()
        before = numbered(clip.init({"b": jnp.ones(2)}))
        before = jax.device_put(before, NamedSharding(mesh, P()))
        params = {n: spread_ones(few) for n in "bc"}
        after, _ = transfer_state(before, clip, params)
        assert {x.sharding.mesh for x in jax.tree.leaves(after)} == {mesh}
        gamma = after.stages[0].rule.gamma
        assert gamma.sharding.mesh == mesh
        assert gamma.tolist() == [*before.stages[0].rule.gamma.tolist(), 0.0]

    def test_references_of_shards_belong_to_a_mesh(
        self, mesh: jax.sharding.Mesh
    ) -> None:
        sizes = (2, 2)
        other = jax.make_mesh(
            sizes, ("x", "y"), axis_types=mesh.axis_types * 2, devices=mesh.devices
        )
        states = []
        for on in (mesh, other):
            spread = NamedSharding(on, P("x"))
            params = {n: jax.device_put(jnp.ones((4, 2)), spread) for n in "bc"}
            clip = aj.adagc(groups=aj.per_shard(dict.fromkeys("bc", spread)))
            with jax.set_mesh(on):
                if on is mesh:
                    before = numbered(jax.jit(clip.init)(params))
                after, report = transfer_state(before, clip, params)
            states.append(after)
            rows = [r for r in report.rows if r.field == "rule/gamma"]
            assert {r.status for r in rows} == (
                {"kept"} if on is mesh else {"new", "dropped"}
            )
        assert_same(states[0], before)
        gamma, _ = states[1].stages[0].rule.gamma
        assert gamma.tolist() == [0.0] * 2
        assert where(gamma) == P("x")
        assert gamma.sharding.mesh == other


class TestRefusals:
    def test_a_state_without_types(self) -> None:
        raw = jax.tree.map(np.asarray, [{"clip_step": 0}, {"count": 3}])
        with pytest.raises(ValueError, match=r"list without.*restore_state\("):
            transfer_state(raw, OPTIMIZERS["adagc"], PARAMS)

    def test_a_state_without_names(self) -> None:
        state = initial("adagc")
        lost = state[0]._replace(labels=type(state[0].labels)())
        with pytest.raises(ValueError, match=r"'0' in old_state.*restore_state"):
            transfer_state((lost, state[1]), OPTIMIZERS["adagc"], PARAMS)
        again = restore_state((lost, state[1]), OPTIMIZERS["adagc"], PARAMS)
        _, report = transfer_state(again, OPTIMIZERS["adagc"], PARAMS)
        assert report.new == []

    @pytest.mark.parametrize(
        ("name", "reset", "words"),
        [
            ("adagc", ("embd",), ["'embd'", r"as embed, head, layers/w."]),
            ("whole tree", ("a/",), ["'a/'", r"as '' (the whole tree)."]),
            ("adagc", ("(",), ["^reset: '\\(' is no regular expr", "unterminated"]),
            ("adagc", (None,), ["^reset: None is no regular expr", "must be string"]),
            ("adagc", "embed", ["reset", "'embed'"]),
            ("global norm", ("embed",), ["reset", "no clipper"]),
        ],
    )
    def test_resets_that_would_do_nothing(
        self, name: str, reset: Any, words: list[str]
    ) -> None:
        with pytest.raises(ValueError, match=words[0]) as caught:
            transfer_state(initial(name), OPTIMIZERS[name], PARAMS, reset=reset)
        assert words[1] in str(caught.value)

    def test_states_and_optimizers_are_not_mixed_up(self) -> None:
        optimizer, state = OPTIMIZERS["adagc"], initial("adagc")
        for old in (optimizer, optax.MultiSteps(optimizer, 2)):
            with pytest.raises(ValueError, match=r"^old_state is an optimizer"):
                transfer_state(old, optimizer, PARAMS)
        with pytest.raises(ValueError, match=r"^old_state is None"):
            transfer_state(None, optimizer, PARAMS)
        with pytest.raises(ValueError, match=r"^new_optimizer must have an init"):
            transfer_state(state, state, PARAMS)

    def test_an_update_with_a_state_of_another_kind(self) -> None:
        guard = OPTIMIZERS["guard"]
        raw = [{"guard_step": 0}]
        with pytest.raises(ValueError, match=r"GuardState, got a list.*restore_state"):
            guard.update(PARAMS, raw, PARAMS)


def test_the_report_prints_as_a_table() -> None:
    params = {"w": jnp.ones(2)}
    old = optax.chain(optax.trace(0.9), optax.scale_by_adam())
    new = optax.chain(
        aj.tensor_gc(), optax.scale_by_adam(), optax.scale_by_schedule(abs)
    )
    _, report = transfer_state(old.init(params), new, params)
    lines = str(report).splitlines()
    assert lines[0].split() == [
        "part",
        "arrays",
        "fields",
        "tensors",
        "from,",
        "or",
        "why",
    ]
    assert [re.split(r"  +", line) for line in lines[1:]] == [
        ["kept", "1 ScaleByAdamState", "3", "count, mu, nu", "w", "the same place"],
        [
            "new",
            "0 ClipState",
            "9",
            "clip_step, norm_before, norm_after, and 6 more",
            "w",
            "not in the old state",
        ],
        ["new", "0/stages/0 StageState", "1", "seen", "w", "not in the old state"],
        [
            "new",
            "2 ScaleByScheduleState",
            "1",
            "count",
            "not in the old state: the schedule starts at 0",
        ],
        ["dropped", "0 TraceState", "1", "trace", "w"],
    ]
    assert report.dropped == ["0/trace/w"]
