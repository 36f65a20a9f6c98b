"""Replay: the scales of a logged run bit for bit, and answers about other settings."""

import inspect
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import as_users
from replay_logs import LOGGERS, history_of, noise, rows_of, train, write_jsonl

import adagc_jax as aj
from adagc_jax import plots, replay as rp
from adagc_jax.replay.cli import main
from adagc_jax.replay.report import Report, as_page, draw, notable
from adagc_jax.replay.summary import make_report
from adagc_jax.replay.tables import grid_table
from adagc_jax.replay.variants import METHODS, labels, option_defaults

ROUND_TRIPS = {
    "adagc": (
        aj.adagc(warmup_steps=20, lambda_abs=0.05),
        {"warmup_steps": 20, "lambda_abs": 0.05},
    ),
    "adagc-ema": (
        aj.adagc(
            warmup_steps=10,
            warmup_init="ema",
            beta=0.9,
            groups=aj.stacked({"layers": 0}),
        ),
        {"warmup_steps": 10, "beta": 0.9},
    ),
    "adagc-global": (
        aj.adagc(warmup_steps=20, groups=aj.whole_tree()),
        {"warmup_steps": 20},
    ),
    "robust_gc": (
        aj.robust_gc(lambda_rel=1.1, tail=1.0, release=4),
        {"lambda_rel": 1.1, "tail": 1.0, "release": 4},
    ),
    "zclip": (aj.zclip(max_grad_norm=None), {"max_grad_norm": None}),
}


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("method", ROUND_TRIPS)
def test_replay_of_a_logged_run_gives_its_scales_bit_for_bit(
    method: str, tmp_path: Path
) -> None:
    clip, options = ROUND_TRIPS[method]
    with LOGGERS["JsonlLogger"](tmp_path / "norms.jsonl") as log:
        train(clip, log)
    history = rp.read_history(tmp_path / "norms.jsonl")
    variant = rp.make_variant(method, **options)
    replayed = rp.replay(history, variant)
    scale = np.broadcast_to(replayed.history.scale, history.scale.shape)
    # z-scores are sums of products, which compilers may round once or twice.
    tolerance = 1e-6 if method == "zclip" else 0.0
    if not as_users():
        # Neither does less optimised code round sums alike in two programs.
        tolerance = max(tolerance, 2.0**-23)
    np.testing.assert_allclose(scale, history.scale, rtol=tolerance, atol=0)
    assert (history.scale < 1.0).any()
    assert (history.scale == 0.0).any(axis=1).sum() == 1  # the batch with a NaN
    if history.reference is not None and not variant.whole:
        ours = np.nan_to_num(replayed.history.reference)
        np.testing.assert_array_equal(ours, history.reference)


def _awkward(seed: int = 0) -> np.ndarray:
    norm = noise(60, 4, seed) * np.float32(0.6)
    rng = np.random.default_rng(seed + 1)
    norm[rng.random(norm.shape) < 0.1] *= 30
    norm[rng.random(norm.shape) < 0.05] = 0.0
    norm[rng.random(norm.shape) < 0.03] = np.nan
    norm[rng.random(norm.shape) < 0.02] = np.inf
    norm[:30, 3] = 0.0
    return norm


def _transform(method: str, nonfinite: str) -> Any:
    whole = METHODS[method].whole
    groups = {"groups": aj.whole_tree() if whole else aj.stacked(0)}
    own = {} if method == "global_gc" else groups
    options = dict(METHODS[method].fixed)
    return METHODS[method].factory(nonfinite=nonfinite, **own, **options)


@pytest.mark.parametrize(
    ("method", "nonfinite"),
    [
        ("adagc", "zero"),
        ("adagc", "skip"),
        ("adagc", "propagate"),
        ("robust_gc", "zero"),
        ("zclip", "skip"),
        ("global_gc", "propagate"),
        ("tensor_gc", "zero"),
    ],
)
def test_replay_is_the_transform_with_zeros_nan_and_late_tensors(
    method: str, nonfinite: str
) -> None:
    norm = _awkward()
    clip = _transform(method, nonfinite)

    def step(state, norms):
        # The norm of a single number is that number.
        _, state = clip.update({"w": norms}, state)
        metrics = aj.clip_metrics(state)
        (scale,) = jax.tree.leaves(state.metrics.scale)
        return state, (scale, metrics["clip/norm_seen"])

    _, (scale, seen) = jax.jit(
        lambda: jax.lax.scan(step, clip.init({"w": norm[0]}), norm)
    )()
    history = history_of(norm).replace(total=np.nan_to_num(np.asarray(seen)))
    replayed = rp.replay(history, rp.make_variant(method), nonfinite=nonfinite)
    got = np.broadcast_to(replayed.history.scale, norm.shape)
    np.testing.assert_allclose(
        got, np.broadcast_to(scale, norm.shape), rtol=1e-6 if method == "zclip" else 0
    )


def test_without_a_logged_total_the_norms_give_it() -> None:
    norm = noise(40)
    replayed = rp.replay(history_of(norm), rp.make_variant("global_gc", max_norm=0.5))
    want = 0.5 / np.sqrt(np.square(norm.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(replayed.history.scale[:, 0], want, rtol=1e-6)
    assert replayed.history.names == ("whole tree",)


def test_a_logged_total_counts_more_than_the_norms() -> None:
    norm = noise(40)
    history = history_of(norm).replace(total=np.full(40, 8.0, np.float32))
    warm = rp.replay(history, rp.make_variant("adagc", warmup_steps=100))
    np.testing.assert_array_equal(warm.history.scale, np.float32(1 / 8))
    whole = rp.replay(history, rp.make_variant("global_gc"))
    np.testing.assert_array_equal(whole.history.scale, np.float32(1 / 8))


def test_a_total_of_finite_tensors_hides_no_nan_from_the_whole_tree() -> None:
    norm = noise(5)
    norm[2, 1] = np.nan
    history = history_of(norm).replace(total=np.ones(5, np.float32))
    scale = rp.replay(history, rp.make_variant("global_gc")).history.scale[:, 0]
    np.testing.assert_array_equal(scale == 0.0, [False, False, True, False, False])


def test_chunks_do_not_show() -> None:
    norm = noise(2300, 2)
    full = rp.replay(history_of(norm), rp.make_variant("adagc"))
    assert full.history.scale.shape == norm.shape
    part = rp.replay(history_of(norm[:1400]), rp.make_variant("adagc"))
    np.testing.assert_array_equal(part.history.scale, full.history.scale[:1400])
    np.testing.assert_array_equal(part.history.reference, full.history.reference[:1400])


GRID = [
    rp.make_variant("adagc", lambda_rel=1.04, warmup_steps=20),
    rp.make_variant("adagc", lambda_rel=1.3, warmup_steps=35),
    rp.make_variant("tensor_gc", max_norm=1.1),
    rp.make_variant("adagc", lambda_rel=1.2, warmup_steps=20, warmup_init="ema"),
    rp.make_variant("zclip", max_grad_norm=None),
    rp.make_variant("tensor_gc", max_norm=0.8),
]
MEASURE = rp.SpikeMeasure(window=25, ratio=3.0, held=1.5)


def _spiky() -> np.ndarray:
    norm = noise(300)
    norm[[80, 140, 141, 222], [0, 1, 1, 2]] *= 12
    norm[100, 0], norm[101, 1] = np.nan, 0.0
    return norm


def _naive_counts(scale: np.ndarray, norm: np.ndarray, start: int) -> dict[str, Any]:
    """The same counts as a `Tally`, tensor by tensor and step by step."""
    counts = dict.fromkeys(("active", "clipped", "longest", "spikes", "held"), 0)
    row = 0
    for t, n in enumerate(norm):
        if not np.isfinite(n) or n == 0 or scale[t] == 0:
            continue
        counts["active"] += 1
        row = row + 1 if scale[t] < 1 else 0
        counts["clipped"] += scale[t] < 1
        counts["longest"] = max(counts["longest"], row)
        block = t // 25
        windows = [norm[25 * b : 25 * b + 25] for b in (block - 1, block) if b >= 0]
        level = max(np.median(w[np.isfinite(w) & (w > 0)]) for w in windows)
        if t >= start and n > 3 * level:
            counts["spikes"] += 1
            counts["held"] += scale[t] * n <= 1.5 * level
    return counts


def test_a_grid_counts_what_single_replays_do() -> None:
    norm = _spiky()
    history = history_of(norm)
    ticks = []
    result = rp.what_if(history, GRID, measure=MEASURE, progress=ticks.append)
    assert sum(ticks) == len(norm) * len(GRID)
    assert result.scored_from == 35
    for number, variant in enumerate(GRID):
        scale = rp.replay(history, variant).history.scale
        scale = np.broadcast_to(scale, norm.shape)
        for tensor in range(norm.shape[1]):
            want = _naive_counts(scale[:, tensor], norm[:, tensor], 35)
            got = {k: int(getattr(result.tally, k)[number, tensor]) for k in want}
            assert got == want, (str(variant), tensor)
        positive = np.where(scale > 0, scale, 1.0)
        np.testing.assert_allclose(
            result.tally.min_scale[number],
            positive.min(axis=0),
            rtol=1e-6 if variant.method == "zclip" else 0,
        )
    assert result.tally.spikes[0].sum() == 4


def test_costs_are_shares_of_ordinary_norms() -> None:
    norm = np.full((100, 2), 2.0, np.float32)
    variants = [rp.make_variant("tensor_gc", max_norm=m) for m in (1.0, 1.5, 4.0)]
    result = rp.what_if(history_of(norm), variants, measure=MEASURE)
    np.testing.assert_allclose(result.ordinary_loss, [0.5, 0.25, 0.0])
    np.testing.assert_array_equal(result.clip_rate, [1.0, 1.0, 0.0])
    np.testing.assert_array_equal(result.ordinary_clip_rate, [1.0, 1.0, 0.0])
    assert np.isnan(result.held).all()
    # The first window has no level yet, so it is not scored.
    np.testing.assert_array_equal(result.tally.ordinary, np.full((3, 2), 75))


def test_the_suggestion_holds_the_spikes_and_costs_least() -> None:
    norm = np.ones((200, 2), np.float32)
    norm[120, 1] = 10.0
    variants = [rp.make_variant("tensor_gc", max_norm=m) for m in (0.5, 1.2, 1.0, 9.0)]
    suggestion = rp.suggest(rp.what_if(history_of(norm), variants, measure=MEASURE))
    # 1.2 and 1.0 both cost nothing; the one with the smaller leak is better.
    assert suggestion.variant == variants[2]
    assert "It holds 100.0 % of 1 spike (" in suggestion.reason
    assert "in 1 tensor; scored from step 25 on" in suggestion.reason
    assert "taken as given" in suggestion.caveat
    # Holding the spikes comes before costing little.
    variants = [rp.make_variant("tensor_gc", max_norm=m) for m in (9.0, 0.9)]
    suggestion = rp.suggest(rp.what_if(history_of(norm), variants, measure=MEASURE))
    assert suggestion.variant == variants[1]


def test_nothing_is_suggested_without_spikes() -> None:
    result = rp.what_if(history_of(noise(200)), GRID[2:3], measure=MEASURE)
    suggestion = rp.suggest(result)
    assert suggestion.variant is None
    assert "no spikes" in suggestion.reason


def test_all_settings_are_measured_against_the_same_spikes() -> None:
    norm = _spiky()
    norm[222, 0] = np.nan  # drops the whole tree, and in it the spike of tensor 2
    variants = [
        rp.make_variant(method, max_norm=max_norm)
        for method in ("tensor_gc", "global_gc")
        for max_norm in (0.8, 100.0)
    ]
    result = rp.what_if(history_of(norm), variants, measure=MEASURE)
    np.testing.assert_array_equal(result.tally.spikes, [[1, 2, 1]] * 4)
    # Nothing came through where all was dropped, so that one was held.
    assert result.tally.held[:, 2].tolist() == [1, 0, 1, 1]
    skipped = rp.what_if(history_of(norm), variants, measure=MEASURE, nonfinite="skip")
    np.testing.assert_array_equal(skipped.tally.spikes, result.tally.spikes)
    assert skipped.tally.held[:, 2].tolist() == [1, 1, 1, 1]


PLAIN = [rp.make_variant("tensor_gc", max_norm=m) for m in (0.5, 1.2)]


def _adagc(*warmups: int) -> list[rp.Variant]:
    return [rp.make_variant("adagc", warmup_steps=n) for n in warmups]


@pytest.mark.parametrize(
    ("warmups", "scored_from", "scored"),
    [
        ((20, 30, 1000), 30, [True, True, False]),  # longer than the log
        ((20, 230), 25, [True, False]),  # behind every spike
        ((20, 130), 130, [True, True]),  # leaves three of four
        ((230,), 230, [True]),  # alone, it is scored on what there is
        ((300, 1000), 300, [False, False]),
    ],
)
def test_one_long_warmup_does_not_end_the_scoring_of_all(
    warmups: tuple[int, ...], scored_from: int, scored: list[bool]
) -> None:
    history = history_of(_spiky())
    history = history.replace(steps=history.steps + 5000)
    result = rp.what_if(history, _adagc(*warmups), measure=MEASURE)
    assert (result.scored_from, result.scored.tolist()) == (scored_from, scored)
    np.testing.assert_array_equal(np.isnan(result.ordinary_loss), ~result.scored)
    held = [row[1] for row in grid_table(result).rows]
    assert held.count("too short") == scored.count(False)
    suggestion = rp.suggest(result)
    if any(scored):
        assert f"scored from step {5000 + scored_from} on" in suggestion.reason
    else:
        assert suggestion.variant is None
        assert "too short: nothing was scored (300 updates" in suggestion.reason
    if suggestion.variant is not None:
        assert result.scored[result.variants.index(suggestion.variant)]


def test_a_warmup_longer_than_a_log_without_spikes_is_not_scored() -> None:
    result = rp.what_if(history_of(noise(60)), _adagc(20, 1000), measure=MEASURE)
    assert (result.scored_from, result.scored.tolist()) == (25, [True, False])
    assert np.isfinite(result.ordinary_loss[0])


def test_a_window_longer_than_the_log_is_said() -> None:
    measure = rp.SpikeMeasure(window=400)
    report = _report(history_of(_spiky()), PLAIN, measure)
    said = "too short: nothing was scored (300 updates in the log; the window of a "
    assert said in report.lines[1]
    assert any(line.startswith(f"Reason: The log is {said}") for line in report.lines)


def _report(
    history: rp.History,
    variants: list[rp.Variant],
    measure: rp.SpikeMeasure = MEASURE,
) -> Report:
    result = rp.what_if(history, variants, measure=measure)
    return make_report("log", history, result, rp.replay(history, variants[0]))


def test_table_and_verdict_count_the_same_spikes_or_say_which_are_left_out() -> None:
    report = _report(history_of(_spiky()), _adagc(100))
    assert (
        "of 3 spikes (scored from step 100 on; 1 spike before it left"
        in (report.lines[1])
    )
    steps = [row[0] for row in report.tables[1].rows]
    # The one of step 100 is a NaN, which no rule holds or lets through.
    assert steps == ["80 (not scored)", "100", "140-141", "222"]
    every = _report(history_of(_spiky()), PLAIN)
    assert "of 4 spikes (scored from step 25 on) it" in every.lines[1]


def test_the_first_norm_that_is_not_finite_is_part_of_the_answer() -> None:
    norm = noise(200)
    norm[150, 1], norm[151, :] = np.inf, np.nan
    report = _report(history_of(norm), PLAIN)
    assert "Not finite: 4 norms, the first at step 150: layers/1/w (inf)." in (
        report.lines
    )
    (row,) = report.tables[1].rows
    assert row == ("150-151", "layers/1/w", "3", "layers/0/w", "not finite")
    assert report.tables[1].title == "Spikes of norms: 1 stretch"
    norm[140] = np.nan
    report = _report(history_of(norm), PLAIN)
    assert "step 140: layers/0/w and 2 more in the same step (nan)" in report.lines[2]


def test_the_comparison_counts_as_the_tables_do() -> None:
    norm = np.full((60, 1), 2.0, np.float32)
    norm[:20], norm[20:25] = 0.0, np.nan
    variant = rp.make_variant("tensor_gc")
    logged = rp.replay(history_of(norm), variant).history
    report = _report(logged, [variant])
    assert "clips 100.00 % of all gradients" in report.lines[1]
    assert any("run itself clipped 100.00 % of its" in line for line in report.lines)
    assert report.lines[0].endswith("of 1 tensor.")


def test_pictures_of_spikes_are_of_the_first_and_of_the_largest() -> None:
    norm = noise(300)
    norm[100, [0, 1]], norm[200, 2] = 8.0, 50.0
    pictures = draw(_report(history_of(norm), PLAIN))
    assert pictures["first_spike"].get_suptitle().startswith("Step 100: 2 tensors")
    assert pictures["largest_spike"].get_suptitle().startswith("Step 200: layers/2/w")
    assert "loss" not in pictures
    first, second = rp.find_episodes(history_of(norm))
    assert notable([first, second]) == {"first_spike": first, "largest_spike": second}
    assert notable([second, first]) == {"first_spike": second}


def test_a_page_explains_itself_and_marks_a_suggestion_only() -> None:
    for norm, marks in ((_spiky(), 1), (noise(300), 0)):
        report = _report(history_of(norm), PLAIN)
        picture = plots.plot_scales(report.replayed.history)
        page = as_page(report, {"scales": picture})
        assert page.count('class="marked"') == marks
        for word in ("spikes held:", "largest leak:", "off ordinary norms:"):
            assert word in page
        assert page.count("<figcaption>") == 1


def test_thresholds_are_where_clipping_begins() -> None:
    history = history_of(_spiky())
    variant = rp.make_variant("adagc", warmup_steps=20, lambda_rel=1.2)
    replayed = rp.replay(history, variant)
    limits = rp.thresholds(replayed, ["layers/1/w"])[:, 0]
    assert np.isnan(limits[:20]).all()
    gamma = replayed.history.reference[19:-1, 1]
    np.testing.assert_allclose(limits[20:], 1.2 * gamma, rtol=1e-6)
    zscore = rp.make_variant("zclip", max_grad_norm=None, warmup_steps=20)
    replayed = rp.replay(history, zscore)
    mean, var = (np.asarray(field)[21:, 0] for field in replayed.states)
    np.testing.assert_allclose(
        rp.thresholds(replayed)[21:, 0], mean + 2.5 * np.sqrt(var), rtol=1e-4
    )


def test_episodes_name_the_first_tensor_and_not_a_lasting_rise() -> None:
    norm = noise(601)
    norm[400:500] *= np.float32(6.0)  # a new level, not a spike
    norm[505, 1] = 4.5  # nor is this, so soon after it
    norm[210, 2] *= 9
    norm[212] *= 20
    norm[300, 0] *= 15
    norm[600, 1] *= 12
    first, second, last = rp.find_episodes(history_of(norm))
    assert (last.first, last.leaders) == (600, ("layers/1/w",))
    assert (first.first, first.last, first.tensors) == (210, 212, 3)
    assert first.leaders == ("layers/2/w",)
    assert first.worst.startswith("layers/")
    assert first.ratio > 10
    assert (second.first, second.leaders) == (300, ("layers/0/w",))
    assert rp.find_episodes(history_of(noise(600))) == []


def test_grids_multiply_options_and_methods() -> None:
    base = rp.make_variant("adagc", warmup_steps=7)
    grid = rp.make_grid(
        base, {"rule": ("adagc", "zclip"), "beta": (0.9, 0.99), "alpha": (0.5,)}
    )
    assert [str(v) for v in grid] == [
        "adagc(warmup_steps=7, beta=0.9)",
        "adagc(warmup_steps=7, beta=0.99)",
        "zclip(warmup_steps=7, alpha=0.5)",
    ]
    assert len(rp.make_grid(base)) == 30
    shared, names = labels(grid[:2])
    assert (shared, names) == ("adagc, warmup_steps=7", ["beta=0.9", "beta=0.99"])


def test_methods_of_a_grid_keep_what_makes_them() -> None:
    rules = {"rule": ("adagc", "adagc-ema", "robust_gc")}
    for base in (
        rp.make_variant("adagc-ema", eps=0.1),
        rp.make_variant("adagc", eps=0.1, warmup_init="min"),
    ):
        grid = rp.make_grid(base, rules)
        inits = [variant.values["warmup_init"] for variant in grid]
        assert inits[:2] == ["min", "ema"]
        assert [variant.values["eps"] for variant in grid] == [0.1] * 3


def test_defaults_are_those_of_the_factories() -> None:
    assert option_defaults("robust_gc")["tail"] == 3.0
    assert option_defaults("adagc")["warmup_init"] == "min"
    assert option_defaults("adagc-ema")["warmup_init"] == "ema"
    assert "groups" not in option_defaults("zclip")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: rp.make_variant("agc"), "no parameters"),
        (lambda: rp.make_variant("sgd"), "method must be one of adagc"),
        (
            lambda: rp.make_variant("adagc", tail=1.0),
            "has no option 'tail'; it has lam",
        ),
        (lambda: rp.make_variant("adagc-ema", warmup_init="min"), "has warmup_init="),
        (lambda: rp.make_variant("adagc", beta=1.5), "beta must be in"),
        (lambda: rp.make_variant("adagc", beta=jnp.sin), "not a schedule"),
        (lambda: rp.make_grid(GRID[0], {"alpha": (1,)}), "no method .* has the option"),
        (lambda: rp.replay(history_of(noise(3)[:0]), GRID[0]), "no steps"),
        (lambda: rp.replay(history_of(noise(3)), GRID[0], nonfinite="x"), "nonfinite"),
        (lambda: rp.replay(history_of(noise(3)[:, :0]), GRID[0]), "no tensors"),
        (lambda: rp.what_if(history_of(noise(3)), []), "at least one variant"),
        (lambda: rp.what_if(history_of(noise(3)[:, :0]), GRID), "and one tensor"),
        (lambda: rp.SpikeMeasure(held=4.0), "1 <= held <= ratio"),
        (lambda: rp.SpikeMeasure(window=1), "window must be at least 2"),
        (lambda: history_of(noise(3)).index("layers/0"), "there are layers/0/w"),
        (lambda: history_of(noise(3), loss=np.ones(2)), "loss has shape"),
    ],
)
def test_refusals_say_what_is_wrong(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = rows_of(history_of(_spiky()))
    return write_jsonl(tmp_path_factory.mktemp("log") / "norms.jsonl", rows)


SHORT = ("--window", "25", "--warmup-steps", "20")


def test_the_command_answers_and_writes_pictures(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    grid = ("--grid", "lambda_rel=1.04,1.5", "--out", str(out), "--plain")
    assert main([str(log), *SHORT, *grid]) == 0
    said = capsys.readouterr()
    assert "300 updates (steps 0 to 299) of 3 tensors" in said.out
    assert "What if: the best of 2 settings" in said.out
    assert "Suggestion: adagc(warmup_steps=20, lambda_rel=1.5)" in said.out
    assert "not finite" in said.out
    assert "100 %" in said.err
    names = {path.stem for path in out.iterdir()}
    spikes = {"first_spike", "largest_spike"}
    assert names == {"scales", "gamma", "clip_rates", "grid", "loss"} | spikes


def test_the_command_makes_a_page_that_stands_alone(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "norms.npz"
    arguments = ("--rule", "tensor_gc", "--max-norm", "0.9", "--window", "25")
    assert main([str(log), *arguments, "--save", str(saved)]) == 0
    assert "Suggestion" not in capsys.readouterr().out
    assert main([str(saved), *arguments, "--html", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 6
    assert "tensor_gc(max_norm=0.9)" in page
    assert "http" not in page


def test_the_command_compares_with_logged_scales(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(history_of(np.full((50, 1), 2.0)))
    for row in rows:
        row["clip/layers/0/w/scale"] = 0.5 if row["step"] % 2 else 0.25
    path = write_jsonl(tmp_path / "log.jsonl", rows)
    assert main([str(path), "--rule", "tensor_gc", "--plain"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "clipped 100.00 % of its gradients; 50.00 % of its logged scales" in said


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["no.jsonl"], "nothing is there"),
        (["{log}", "--rule", "agc"], "no parameters"),
        (["{log}", "--rule", "zclip", "--beta", "0.9"], "zclip has no option 'beta'"),
        (["{log}", "--grid", "beta"], "OPTION=V1,V2"),
        (["{log}", "--beta", "high"], "beta must be a number"),
    ],
)
def test_the_command_fails_with_one_clear_line(
    arguments: list[str], match: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a.replace("{log}", str(log)) for a in arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("adagc-replay: ")
    assert match in said
    assert len(said.splitlines()) == 1


def test_without_rich_there_is_plain_text(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main([str(log), "--rule", "tensor_gc", "--window", "25"]) == 0
    said = capsys.readouterr()
    assert "  tensor      clip rate  longest row" in said.out
    assert "tensor_gc() [##############################] 100 %" in said.err


@pytest.mark.parametrize("module", [rp, plots])
def test_every_public_name_is_documented(module: Any) -> None:
    names = [n for n, v in vars(module).items() if inspect.isfunction(v)]
    assert len(names) >= 6
    for name in names:
        doc = inspect.getdoc(getattr(module, name)) or ""
        assert "Example:" in doc, name
        for parameter in inspect.signature(getattr(module, name)).parameters:
            assert f"{parameter}: " in doc, (name, parameter)


def test_help_names_every_option_of_every_rule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    names = set(itertools.chain(*(option_defaults(m) for m in METHODS)))
    for name in names:
        assert "--" + name.replace("_", "-") in text
