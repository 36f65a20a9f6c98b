"""Pictures: what must be seen in them is there, and nothing overlaps."""

import itertools
import sys
from typing import Any

import numpy as np
import pytest
from replay_logs import history_of, noise

from adagc_jax import plots, replay as rp
from adagc_jax.plots.canvas import bin_edges, natural, shortened, thinned_line
from adagc_jax.plots.norms import most_changed
from adagc_jax.replay.report import loss_rule
from adagc_jax.spikes import OLMO_CORE, SpikeRule


def test_loss_spikes_are_marked_where_they_are() -> None:
    losses = 2.0 + 0.01 * np.sin(np.arange(20_000.0))
    losses[[5_000, 12_345]] = 9.0
    losses[15_000] = np.nan
    figure = plots.plot_loss({"run": losses}, np.arange(20_000) + 7)
    curve, marks, nan = figure.axes[0].get_lines()
    np.testing.assert_array_equal(marks.get_xdata(), [5_007, 12_352])
    assert len(curve.get_xdata()) < 4_000
    assert {5_007, 12_352} <= set(curve.get_xdata())
    assert list(nan.get_xdata()) == [15_007, 15_007]
    legend = figure.axes[0].get_legend()
    assert legend is not None
    label = legend.get_texts()[0].get_text()
    assert label.startswith("run: 3 spikes, score 0.015 %, largest z ")
    assert float(label.split()[-1]) > 100
    short = plots.plot_loss(losses[:30], rule=SpikeRule(50))
    legend = short.axes[0].get_legend()
    assert legend is not None
    assert "too short" in legend.get_texts()[0].get_text()


def test_a_loss_that_explodes_gets_a_logarithm() -> None:
    losses = np.ones(300)
    assert plots.plot_loss(losses).axes[0].get_yscale() == "linear"
    losses[200] = 50.0
    assert plots.plot_loss(losses).axes[0].get_yscale() == "log"


def _mesh(figure: Any) -> np.ma.MaskedArray:
    (mesh,) = figure.axes[1].collections[:1]
    return mesh.get_array()


def test_one_clipped_step_of_a_long_run_stays_visible() -> None:
    scale = np.ones((50_000, 4), np.float32)
    scale[31_234, 2] = 0.05
    scale[100, 1], scale[200:300, 3] = 0.0, np.nan
    history = history_of(np.ones_like(scale), scale=scale)
    figure = plots.plot_scales(history)
    shown = _mesh(figure)
    assert shown.shape == (4, 1200)
    assert (shown < 0.1).sum() == 2
    assert shown[2].min() == np.float32(0.05)
    lowest = figure.axes[1].collections[0].norm.vmin
    assert shown[1].min() < lowest < np.float32(0.05)  # dropped: below the colours
    assert shown.mask[3].sum() >= 1


def _overlapping(figure: Any, axes: Any) -> bool:
    figure.canvas.draw()
    labels = [label for label in axes.get_yticklabels() if label.get_text()]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda b: b.y0)
    assert len(boxes) > 5
    return any(low.y1 > high.y0 + 1 for low, high in itertools.pairwise(boxes))


NAMES = {
    "nested": [f"layers/{i}/{m}" for i in range(33) for m in "abcdefghi"]
    + ["x", "y/z"],
    "flat": [f"tensor_{i}" for i in range(300)],
    "few": [f"layers/{i}/w" for i in range(60)],
    "one list": [f"layers/{i}/w" for i in range(61)],
    "one long list": [f"model/layers/{i}/{m}" for i in range(126) for m in "abcdefg"],
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_of_many_tensors_do_not_overlap(kind: str) -> None:
    names = NAMES[kind]
    scale = np.full((50, len(names)), 0.5, np.float32)
    history = history_of(scale, scale=scale).replace(names=tuple(names))
    figure = plots.plot_scales(history)
    assert not _overlapping(figure, figure.axes[1])
    labels = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert len(set(labels)) == len(labels) > 20
    worst = plots.plot_scales(history, order="clipped")
    assert len(_mesh(worst)) == 60
    assert not _overlapping(worst, worst.axes[1])


def test_layers_are_in_the_order_of_their_numbers() -> None:
    assert sorted(["l/10/a", "l/9/b", "a"], key=natural) == ["a", "l/9/b", "l/10/a"]
    assert shortened("layers/12/attention/query/kernel", 16) == "layer…ery/kernel"
    assert sorted(["x/²", "x/1", "x/a", "²"], key=natural)[0] == "x/1"


def test_a_short_run_has_a_window_that_fits_and_says_what_it_left_out() -> None:
    losses = 2.0 + 0.05 * np.sin(np.arange(360.0) * 2)
    for start, jump in ((120, 7.0), (220, 5.0), (300, 3.0)):
        losses[start : start + 4] += jump
    rule = loss_rule(360)
    found = rule.score(losses).indices
    assert {120, 220, 300} <= set(found)
    assert loss_rule(10**6).window == OLMO_CORE.window
    figure = plots.plot_loss(losses, rule=rule, stretches=[(119, 125), (300, 300)])
    legend = figure.axes[0].get_legend()
    assert legend is not None
    texts = [text.get_text() for text in legend.get_texts()]
    z = rule.score(losses).z.max()
    assert texts[0].endswith(f"largest z {z:.3g}")
    assert texts[1:] == ["not scored", "norms spike"]
    spans = [patch.get_extents() for patch in figure.axes[0].patches]
    where = [
        figure.axes[0].transData.inverted().transform(box.get_points())[:, 0]
        for box in spans
    ]
    np.testing.assert_allclose(where, [[0, 30], [118.5, 125.5], [299.5, 300.5]])


def test_reference_norms_and_limits_are_drawn_for_the_right_tensor() -> None:
    norm = noise(300)
    norm[150, 1] = 60.0
    replayed = rp.replay(history_of(norm), rp.make_variant("adagc", warmup_steps=10))
    limits = rp.thresholds(replayed, ["layers/1/w"])
    figure = plots.plot_gamma(replayed.history, ["layers/1/w"], limits=limits)
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    assert list(lines) == ["norm before", "norm after", "reference", "limit"]
    np.testing.assert_array_equal(lines["norm before"], norm[:, 1].astype(np.float64))
    assert replayed.history.scale is not None
    assert lines["norm after"][150] == pytest.approx(limits[150, 0], rel=1e-5)
    assert figure.axes[0].get_title(loc="left").startswith("layers/1/w")
    bare = plots.plot_gamma(history_of(norm))
    assert [line.get_label() for line in bare.axes[0].get_lines()] == ["norm before"]
    # Without scales, the tensor that varies most comes first, an idle one last.
    norm[:, 0], norm[3, 1] = 0.0, np.inf
    assert most_changed(history_of(norm))[::2] == ["layers/1/w", "layers/0/w"]
    assert bare.axes[0].get_title(loc="left") == "layers/1/w"


def test_an_episode_lists_those_that_spiked_first() -> None:
    norm = noise(300, 40)
    norm[203, 30] *= 10
    norm[205, :20] *= 50
    history = history_of(norm, loss=np.ones(300))
    (episode,) = rp.find_episodes(history)
    figure = plots.plot_episode(history, episode, rows=10)
    labels = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert labels[0] == "layers/30/w"
    assert len(labels) == 10
    assert figure.get_suptitle() == "Step 203: layers/30/w spikes first"


def test_an_episode_of_one_step_says_so_and_is_filled_up_with_the_largest() -> None:
    norm = np.ones((300, 8), np.float32)
    norm[195, 7] = 2.9  # before the first spike: no matter, neither first nor large
    norm[203, [2, 4]] = 10.0, 20.0
    norm[206, 1], norm[208, 5] = 2.0, 2.5
    history = history_of(norm)
    (episode,) = rp.find_episodes(history)
    figure = plots.plot_episode(history, episode, rows=5)
    rows = [label.get_text()[7] for label in figure.axes[0].get_yticklabels()]
    assert rows == ["4", "2", "5", "1", "0"]
    assert figure.get_suptitle() == (
        "Step 203: 2 tensors spike first, layers/4/w furthest out"
    )
    figure.canvas.draw()
    bar = figure.axes[1]
    assert [t.get_text() for t in bar.get_yticklabels()] == [
        f"{tick} x" for tick in (1, 2, 5, 10, 20)
    ]
    assert not [t for t in bar.get_yticklabels(minor=True) if t.get_text()]


def test_a_norm_that_is_not_finite_is_the_worst_of_an_episode() -> None:
    norm = noise(300)
    norm[250, 0] *= 10
    norm[251, [1, 2]] = np.nan, np.inf
    history = history_of(norm)
    (episode,) = rp.find_episodes(history)
    assert (episode.first, episode.worst) == (250, "layers/1/w")
    figure = plots.plot_episode(
        history, episode._replace(first=251, leaders=("layers/1/w",))
    )
    assert figure.get_suptitle() == "Step 251: layers/1/w is nan"
    assert "not finite" in figure.axes[0].get_title(loc="left")
    mesh = figure.axes[0].collections[0]
    shown = mesh.get_array()
    assert (shown > mesh.norm.vmax).sum() == 2


@pytest.mark.parametrize("factor", [2107.2876, 1890.4298, 1158.4558])
def test_the_largest_finite_ratio_has_a_colour_of_the_scale(factor: float) -> None:
    norm = np.ones((300, 3), np.float32)
    norm[250, 0] = factor
    (episode,) = rp.find_episodes(history_of(norm))
    mesh = plots.plot_episode(history_of(norm), episode).axes[0].collections[0]
    assert np.all(mesh.norm(mesh.get_array()) <= 1.0)


def test_a_grid_puts_the_suggestion_on_top_in_bold() -> None:
    norm = noise(300)
    norm[200, 0] *= 20
    variants = rp.make_grid(
        rp.make_variant("tensor_gc"), {"max_norm": (0.2, 1.5, 40.0)}
    )
    result = rp.what_if(history_of(norm), variants)
    figure = plots.plot_what_if(result)
    labels = figure.axes[0].get_yticklabels()
    assert labels[0].get_text() == "max_norm=1.5"
    assert [label.get_fontweight() for label in labels] == ["bold", "normal", "normal"]
    heights = [bar.get_width() for bar in figure.axes[0].patches[:3]]
    assert heights == [100.0, 100.0, 0.0]
    asked = plots.plot_what_if(result, rows=2, asked=2).axes[0].get_yticklabels()
    assert [label.get_text() for label in asked] == [
        "max_norm=1.5",
        "(asked for) max_norm=40.0",
    ]
    rates = plots.plot_clip_rates(result, 0)
    want = 100 * np.sort(result.tally.clipped[0] / result.tally.active[0])[::-1]
    np.testing.assert_allclose([b.get_width() for b in rates.axes[0].patches], want)
    assert want[0] == 100.0
    assert rates.axes[0].get_xlim()[1] <= 100.0
    assert "up to 300 in a row, 1 spike" in [t.get_text() for t in rates.axes[0].texts]


def test_clipped_means_the_same_in_every_title() -> None:
    norm = np.full((40, 1), 2.0, np.float32)
    norm[:10], norm[10:14] = 0.0, np.nan
    result = rp.what_if(history_of(norm), [rp.make_variant("tensor_gc")])
    replayed = rp.replay(history_of(norm), result.variants[0])
    assert result.clip_rate[0] == 1.0
    title = plots.plot_gamma(replayed.history).axes[0].get_title(loc="left")
    assert "clipped in 100 % of its steps with a gradient" in title
    above = plots.plot_scales(replayed.history).axes[0].collections[0]
    heights = above.get_paths()[0].vertices[:, 1]
    assert set(heights) == {0.0, 100.0}
    at = above.get_paths()[0].vertices
    assert at[at[:, 1] == 100.0, 0].min() == 14


def test_a_limit_is_on_top_and_a_single_step_can_be_seen() -> None:
    history = history_of(noise(1), scale=np.full((1, 3), 0.5, np.float32))
    figure = plots.plot_gamma(history, ["layers/1/w"], limits=[[0.7]])
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert {line.get_marker() for line in lines.values()} == {"."}
    others = [line.get_zorder() for name, line in lines.items() if name != "limit"]
    assert lines["limit"].get_zorder() > max(others)
    (curve, *_) = plots.plot_loss([2.0]).axes[0].get_lines()
    assert curve.get_marker() == "."
    long = plots.plot_gamma(history_of(noise(300))).axes[0].get_lines()[0]
    assert long.get_marker() == "None"


def test_dollars_in_names_are_no_formulas() -> None:
    history = history_of(noise(300), scale=np.ones((300, 3), np.float32))
    history = history.replace(names=("$a/$b", r"c$\frac$", "²"))
    for figure in (
        plots.plot_scales(history),
        plots.plot_gamma(history),
        plots.plot_loss({"$x$": [1.0, 2.0]}),
    ):
        figure.canvas.draw()
    labels = plots.plot_scales(history).axes[1].get_yticklabels()
    assert any(label.get_text() == r"\$a/\$b" for label in labels)


def test_thinning_keeps_peaks_and_gaps() -> None:
    values = np.zeros(10_000)
    values[1234], values[9_999], values[5_000:5_500] = 5.0, -3.0, np.nan
    steps, kept = thinned_line(np.arange(10_000), values, points=100)
    assert len(kept) <= 102
    assert (np.nanmax(kept), np.nanmin(kept)) == (5.0, -3.0)
    assert np.isnan(kept).any()
    assert (np.diff(steps) > 0).all()
    assert len(bin_edges(3, 10)) == 4


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: plots.plot_scales(history_of(noise(5))), "has no scales"),
        (lambda: plots.plot_scales(_scaled(), order="x"), "order must be one of"),
        (
            lambda: plots.plot_scales(_scaled(), tensors=["w"]),
            "must be a logged tensor",
        ),
        (
            lambda: plots.plot_gamma(_scaled(), limits=np.ones((2, 2))),
            "limits must have",
        ),
        (
            lambda: plots.plot_gamma(_scaled(), ["layers/0/w"], limits=[1.0]),
            "limits must have",
        ),
        (lambda: plots.plot_gamma(_scaled(), []), "tensors must have at least one"),
        (
            lambda: plots.plot_scales(_scaled(), tensors=[]),
            "tensors must have at least one",
        ),
        (lambda: plots.plot_gamma(_empty(0, 3)), "history must have at least one"),
        (lambda: plots.plot_scales(_empty(0, 3)), "history must have at least one"),
        (lambda: plots.plot_gamma(_empty(3, 0)), "history must have at least one"),
        (lambda: plots.plot_scales(_empty(3, 0)), "history must have at least one"),
        (lambda: plots.plot_loss([]), "must be a series"),
        (lambda: plots.plot_loss([1.0, 2.0], [1]), "must be a series"),
    ],
)
def test_refusals(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def _empty(steps: int, tensors: int) -> rp.History:
    ones = np.ones((steps, tensors), np.float32)
    return history_of(ones, scale=ones)


def _scaled() -> rp.History:
    return history_of(noise(5), scale=np.ones((5, 3), np.float32))


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"adagc-jax\[plots\]"):
        plots.plot_loss([1.0, 2.0])
