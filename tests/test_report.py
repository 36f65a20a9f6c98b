"""The report for people: diagnoses from the state, and three ways to look at it."""

import io
import re
import sys
import time
import xml.etree.ElementTree as ElementTree
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console
from streams import of_norms, replay

import adagc_jax as aj
from adagc_jax.diagnosis import KINDS

NAMES = "abcd"
PARAMS = {name: np.ones((2,), np.float32) for name in NAMES}


def state_with(clip: Any, *, step: int = 1000, rule: Any = (), **metrics: Any) -> Any:
    """A state of PARAMS after ``step`` updates with these numbers, one per tensor."""
    state = jax.device_get(clip.init(PARAMS))
    defaults = {"active": [step] * 4, "norm_before": [1.0] * 4, "norm_after": [1.0] * 4}
    numbers = {
        name: np.asarray(values, getattr(state.metrics, name).dtype)
        for name, values in (defaults | metrics).items()
    }
    (stage,) = state.stages
    fields = {
        name: np.asarray(values, getattr(stage.rule, name).dtype)
        for name, values in dict(rule).items()
    }
    if fields:
        stage = stage._replace(rule=stage.rule._replace(**fields))
    return state._replace(
        clip_step=np.int32(step),
        metrics=state.metrics._replace(**numbers),
        stages=(stage,),
    )


def kinds(report: aj.ClipReport) -> dict[str, list[str]]:
    return {row.name: [said.kind for said in row.diagnoses] for row in report.rows}


def helps(report: aj.ClipReport, kind: str) -> str:
    return next(said.remedy for said, _ in report.findings if said.kind == kind)


class TestDiagnoses:
    def test_throttled_by_its_own_reference(self) -> None:
        state = state_with(
            aj.adagc(),
            clipped=[300, 300, 300, 300],
            clipped_in_a_row=[100, 99, 100, 100],
            rule={"gamma": [1, 1, 1, 1], "outliers": [100, 99, 0, 100]},
        )
        report = aj.clip_report(state)
        assert kinds(report) == {
            "a": ["throttled"],
            "b": [],
            "c": ["held by a global limit"],
            "d": ["throttled"],
        }
        for word in ("release=100", "smaller beta", "larger lambda_rel"):
            assert word in helps(report, "throttled")
        assert "lambda_abs" in helps(report, "held by a global limit")
        assert kinds(aj.clip_report(state, throttled_after=99))["b"] == ["throttled"]

    def test_reference_far_below_the_norms(self) -> None:
        state = state_with(
            aj.adagc(),
            norm_before=[2.0, 2.0, 2.0, 50.0],
            clipped=[600, 600, 400, 600],
            clipped_in_a_row=[5, 5, 5, 5],
            rule={
                "gamma": [1.0, 1.01, 0.1, 1.0],
                "outliers": [5, 5, 5, 5],
                "level": [2.0, 2.0, 2.0, 1.5],
            },
        )
        found = kinds(aj.clip_report(state))
        assert found == {"a": ["reference far below"], "b": [], "c": [], "d": []}
        remedy = helps(aj.clip_report(state), "reference far below")
        assert 'warmup_init="ema"' in remedy
        assert "groups=stacked" in remedy
        often = kinds(aj.clip_report(state, often=0.4))
        assert often["c"] == ["reference far below"]
        assert kinds(aj.clip_report(state, far_below=1.5))["b"]

    def test_idle_poisoned_and_never_clipped(self) -> None:
        state = state_with(
            aj.tensor_gc(1.0),
            active=[99, 100, 900, 0],
            clipped=[1, 1, 0, 0],
            nonfinite=[0, 0, 100, 1000],
        )
        report = aj.clip_report(state)
        assert kinds(report) == {
            "a": ["idle"],
            "b": [],
            "c": ["poisoned events", "never clipped"],
            "d": ["poisoned events"],
        }
        assert "guard" in helps(report, "poisoned events")
        assert "exclude" in helps(report, "idle")
        assert [row.name for row in report.findings[0][1]] == ["d", "c"]
        assert kinds(aj.clip_report(state, idle_below=0.101))["b"] == ["idle"]

    def test_too_early_to_tell(self) -> None:
        state = state_with(aj.tensor_gc(1.0), step=19)
        assert set(map(tuple, kinds(aj.clip_report(state)).values())) == {()}
        later = kinds(aj.clip_report(state, min_updates=19))
        assert later["a"] == ["never clipped"]

    @pytest.mark.parametrize(
        ("clip", "word"),
        [
            (aj.tensor_gc(1.0), "max_norm"),
            (aj.zclip(groups=aj.per_tensor()), "max_grad_norm"),
            (aj.agc(unit="tensor"), "clipping"),
        ],
        ids=["tensor_gc", "zclip", "agc"],
    )
    def test_each_rule_has_its_own_remedy(self, clip: Any, word: str) -> None:
        state = state_with(clip, clipped=[500] * 4, clipped_in_a_row=[500, 0, 0, 0])
        report = aj.clip_report(state)
        assert kinds(report)["a"] == ["throttled"]
        assert word in helps(report, "throttled")
        assert "gamma" not in str(report)

    def test_rules_over_the_whole_tree_have_a_row_for_it(self) -> None:
        clip = aj.adagc(groups=aj.whole_tree())
        state = state_with(
            clip,
            clipped=[400] * 4,
            clipped_in_a_row=[200] * 4,
            nonfinite=[0, 3, 0, 0],
            norm_before=[1.0, 3.0, 4.0, 0.0],
            rule={"gamma": [1.0], "outliers": [200], "level": [5.0]},
        )
        report = aj.clip_report(state)
        tree, *tensors = report.rows
        assert tree.name == "(whole tree)"
        assert tree.norm_over_gamma == pytest.approx(26**0.5, rel=1e-6)
        assert [said.kind for said in tree.diagnoses] == [
            "poisoned events",
            "throttled",
        ]
        assert [row.name for row in tensors] == list(NAMES)
        assert kinds(report)["b"] == ["poisoned events"]
        assert kinds(report)["a"] == []
        assert [row.name for row in report.worst("clip_rate")] == ["(whole tree)"]
        assert [row.name for row in report.worst("norm_before")] == ["c", "b", "a"]
        assert "4 tensors" in str(report)

    def test_all_of_it_from_a_real_run(self) -> None:
        """A lasting rise, a late warm-up minimum, an idle tensor, a NaN."""
        steps, quiet = 60, np.ones(60)
        norms = {
            "rises": np.where(np.arange(steps) < 30, 1.0, 8.0),
            "low": np.where(np.arange(steps) == 2, 0.01, 1.0),
            "sleeps": np.where(np.arange(steps) % 20 == 0, 1.0, 0.0),
            "sick": np.where(np.arange(steps) == 7, np.nan, 1.0),
            "calm": quiet,
        }
        stream = {name: of_norms(values, (4,)) for name, values in norms.items()}
        clip = aj.adagc(lambda_abs=1e9, warmup_steps=5)
        state = jax.tree.map(lambda x: x[-1], replay(clip, stream).states)
        report = aj.clip_report(state, throttled_after=30)
        assert kinds(report) == {
            "calm": ["never clipped"],
            "low": ["throttled", "reference far below"],
            "rises": ["throttled", "reference far below"],
            "sick": ["poisoned events", "never clipped"],
            "sleeps": ["idle"],
        }
        assert [row.name for row in report.worst("norm_over_gamma", 1)] == ["low"]
        assert [row.name for row in report.worst("consecutive_clips")] == [
            "low",
            "rises",
        ]


class TestData:
    def test_rows_are_the_numbers_of_the_metrics(self) -> None:
        state = state_with(
            aj.adagc(), clipped=[1, 2, 3, 4], rule={"gamma": [1.0, 2.0, 0.5, 4.0]}
        )
        metrics = aj.clip_metrics(state, level="all")
        rows = aj.clip_report(state).rows
        assert [row.name for row in rows] == list(aj.group_names(state))
        for row in rows:
            for column in ("clip_rate", "norm_before", "scale", "active", "gamma"):
                value = getattr(row, column)
                assert value == metrics[f"clip/{row.name}/{column}"]
                assert isinstance(value, int | float)
        assert [row.norm_over_gamma for row in rows] == [1.0, 0.5, 2.0, 0.25]

    def test_what_is_not_a_number_is_worst(self) -> None:
        state = state_with(
            aj.adagc(),
            norm_before=[1.0, np.nan, 5.0, np.inf],
            rule={"gamma": [1.0, 1.0, 1.0, 0.0]},
        )
        worst = aj.clip_report(state).worst("norm_over_gamma")
        assert [row.name for row in worst] == ["b", "c", "a"]
        assert aj.clip_report(state).worst("consecutive_clips") == []
        with pytest.raises(ValueError, match="'beauty'"):
            aj.clip_report(state).worst("beauty")

    def test_findings_are_in_order(self) -> None:
        assert len(KINDS) == len(set(KINDS))
        state = state_with(
            aj.tensor_gc(1.0),
            active=[1000, 1000, 5, 1000],
            clipped=[900, 1000, 0, 0],
            clipped_in_a_row=[200, 800, 0, 0],
            nonfinite=[0, 0, 0, 1],
        )
        found = [
            (said.kind, [row.name for row in rows])
            for said, rows in aj.clip_report(state).findings
        ]
        assert found == [
            ("poisoned events", ["d"]),
            ("throttled", ["b", "a"]),
            ("idle", ["c"]),
            ("never clipped", ["d"]),
        ]

    @pytest.mark.parametrize(
        ("argument", "value"),
        [
            ("top", 0),
            ("throttled_after", 0),
            ("idle_below", 1.5),
            ("far_below", 0.5),
            ("often", -0.1),
            ("min_updates", 2.5),
        ],
    )
    def test_bad_thresholds(self, argument: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"{argument}.*{value}"):
            aj.clip_report(state_with(aj.adagc()), **{argument: value})

    def test_traced_states_are_refused(self) -> None:
        with pytest.raises(ValueError, match="outside jit"):
            jax.jit(lambda s: len(aj.clip_report(s).rows))(state_with(aj.adagc()))

    def test_no_clipper(self) -> None:
        with pytest.raises(ValueError, match="opt_state holds no clipping state"):
            aj.clip_report(optax.EmptyState())


def throttled_and_poisoned() -> aj.ClipReport:
    return aj.clip_report(
        state_with(
            aj.adagc(),
            clipped=[900, 1000, 0, 0],
            clipped_in_a_row=[200, 800, 0, 0],
            nonfinite=[0, 0, 0, 1],
            rule={"gamma": [0.5] * 4, "outliers": [200, 800, 0, 0]},
        )
    )


class TestViews:
    def test_plain_text(self) -> None:
        text = str(throttled_and_poisoned())
        lines = text.splitlines()
        assert lines[0] == "Clipping report: 4 tensors, 1,000 updates"
        assert "47.5 % of all tensors and updates clipped" in lines[1]
        assert "non-finite norms so far 1" in lines[2]
        (at,) = (i for i, x in enumerate(lines) if x == "Clipped longest in a row")
        assert lines[at + 1].split() == [
            "b",
            "100.0",
            "%",
            "800",
            "1",
            "2",
            "1,000",
            "0",
        ]
        assert lines[at + 2].split() == [
            "a",
            "90.0",
            "%",
            "200",
            "1",
            "2",
            "1,000",
            "0",
        ]
        assert lines[at + 3] == "Norm highest above its reference gamma"
        assert "throttled: 2 tensors" in lines
        assert max(map(len, lines)) <= 100
        assert text.isascii()

    def test_one_that_clips_everything_says_so(self) -> None:
        state = state_with(aj.tensor_gc(1.0), clipped=[901, 900, 900, 900])
        assert "normalises gradients" in str(aj.clip_report(state))
        state = state_with(aj.tensor_gc(1.0), clipped=[899, 900, 900, 900])
        assert "normalises gradients" not in str(aj.clip_report(state))

    def test_html_is_well_formed_and_escaped(self) -> None:
        evil = "<script>alert('x&y')</script>\x00\n"
        state = aj.tensor_gc(1.0).init({evil: jnp.ones(2)})
        state = state._replace(clip_step=jnp.int32(50))
        report = aj.clip_report(state)
        page = report._repr_html_()
        assert "<script" not in page
        assert "\x00" not in page
        assert evil.strip() not in str(report)
        tree = ElementTree.fromstring(page)
        assert [item.text for item in tree.iter("code")] == [
            "<script>alert('x&y')</script>\\x00\\n"
        ]
        page = throttled_and_poisoned()._repr_html_()
        table = ElementTree.fromstring(page).find("table")
        assert table is not None
        cells = [["".join(td.itertext()) for td in tr] for tr in table.iter("tr")]
        assert ["b", "100.0 %", "800", "1", "2", "1,000", "0"] in cells
        assert len({len(row) for row in cells if len(row) > 1}) == 1

    def test_rich_shows_what_the_text_says(self) -> None:
        report = throttled_and_poisoned()
        out = io.StringIO()
        Console(file=out, width=100).print(report)

        def words(text: str) -> list[str]:
            return sorted(text.split())

        assert words(out.getvalue()) == words(str(report))
        narrow = io.StringIO()
        Console(file=narrow, width=60).print(report)
        assert "throttled: 2 tensors" in narrow.getvalue()

    @pytest.mark.parametrize("installed", [True, False])
    def test_rich_only_in_a_terminal_and_if_there(
        self,
        installed: bool,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        report = throttled_and_poisoned()
        report.show()
        assert capsys.readouterr().out == f"{report}\n"
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("FORCE_COLOR", "1")
        if not installed:
            for module in ("rich", "rich.console", "rich.text", "rich.table"):
                monkeypatch.setitem(sys.modules, module, None)
            with pytest.raises(ImportError, match="pip install rich"):
                report.__rich__()
        report.show()
        out = capsys.readouterr().out
        assert ("\x1b[" in out) == installed
        assert "throttled: 2 tensors" in re.sub(r"\x1b\[[0-9;]*m", "", out)

    def test_2000_groups_with_long_names(self) -> None:
        layer = "params/decoder/scanned_layers/self_attention_with_a_long_name/query"
        params = {f"{layer}/kernel": jnp.ones((2000, 2)), "end": jnp.ones(2)}
        clip = aj.tensor_gc(1.0, groups=aj.stacked({"kernel": 0}))
        state = clip.init(params)._replace(clip_step=jnp.int32(50))
        started = time.perf_counter()
        report = aj.clip_report(state)
        shown = str(report), report._repr_html_()
        assert time.perf_counter() - started < 2.0
        assert len(report.rows) == 2001
        assert "... and 1,996 more" in shown[0]
        assert max(map(len, shown[0].splitlines())) <= 100
        assert len(shown[1]) < 5000
        Console(file=io.StringIO(), width=80).print(report)

    @pytest.mark.parametrize(
        ("make", "title"),
        [
            (lambda: aj.adagc().init(jnp.ones(3)), "1 tensor, 0 updates"),
            (lambda: aj.adagc().init({}), "0 tensors, 0 updates"),
            (lambda: aj.global_gc(1.0).init({}), "0 tensors, 0 updates"),
            (
                lambda: optax.chain(aj.global_gc(1.0), aj.adagc()).init(PARAMS),
                "8 tensors, 0 updates",
            ),
            (
                lambda: optax.masked(aj.adagc(), {k: k in "ab" for k in NAMES}).init(
                    PARAMS
                ),
                "2 tensors, 0 updates",
            ),
            (
                lambda: optax.partition(
                    {"x": aj.global_gc(1.0), "y": aj.global_gc(2.0)},
                    {"a": "x", "b": "x", "c": "y", "d": "y"},
                ).init(PARAMS),
                "4 tensors, 0 updates",
            ),
        ],
        ids=["bare", "empty", "empty whole", "two clippers", "masked", "partition"],
    )
    def test_before_the_first_update(self, make: Any, title: str) -> None:
        report = aj.clip_report(make())
        text = str(report)
        assert text.splitlines()[0] == f"Clipping report: {title}"
        assert "no update was made yet" in text
        assert report.findings == []
        ElementTree.fromstring(report._repr_html_())
        names = [row.name for row in report.rows]
        assert len(set(names)) == len(names)
