"""The example loggers: exact numbers, one transfer, nothing of it in the core."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replay_logs import LOGGERS, ROOT

import adagc_jax as aj
from adagc_jax import replay as rp

VALUES = {
    "loss": jnp.float32(0.1),
    "clip/w/norm_before": jnp.float32(jnp.nan),
    "clip/w/scale": np.float32(1 / 3),
    "clip/step": jnp.int32(7),
    "lr": 0.5,
}


def test_jsonl_keeps_every_bit_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for step in (3, 4):
        with LOGGERS["JsonlLogger"](path) as log:
            log(step, VALUES)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 4]
    assert list(rows[0]) == ["step", *VALUES]
    assert np.float32(rows[0]["loss"]) == np.float32(0.1)
    assert np.float32(rows[0]["clip/w/scale"]) == np.float32(1 / 3)
    assert np.isnan(rows[0]["clip/w/norm_before"])
    assert rows[0]["clip/step"] == 7
    assert isinstance(rows[0]["clip/step"], int)


def test_metrics_are_fetched_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = aj.adagc()
    state = clip.init({"a": jnp.ones(2), "b": jnp.ones(3)})
    metrics = jax.jit(lambda s: aj.clip_metrics(s, level="all"))(state)
    fetched: list[int] = []
    get = jax.device_get

    def counting(tree: Any) -> Any:
        fetched.append(len(tree))
        return get(tree)

    monkeypatch.setattr(jax, "device_get", counting)
    with LOGGERS["JsonlLogger"](tmp_path / "log.jsonl") as log:
        log(0, metrics)
    assert fetched == [len(metrics)]


def test_weights_and_biases_gets_the_step() -> None:
    calls: list[Any] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append((step, values))

        def finish(self) -> None:
            calls.append("finished")

    with LOGGERS["WandbLogger"](Run()) as log:
        log(5, {"loss": jnp.float32(2.0)})
    assert calls == [(5, {"loss": 2.0}), "finished"]


def test_a_row_is_in_the_file_at_once_and_never_behind_half_of_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0, "a": 1.0}\n{"step": 1, "a"')
    with LOGGERS["JsonlLogger"](path) as log:
        for step in (np.int64(1), jnp.int32(2)):
            log(step, {"a": 0.5})
        lines = path.read_text().splitlines()
    assert lines[1] == '{"step": 1, "a"'
    assert lines[2:] == ['{"step": 1, "a": 0.5}', '{"step": 2, "a": 0.5}']
    assert path.read_text().count("\n") == 4
    history = rp.read_history(path, pattern="(a)")
    assert history.norm.tolist() == [[1.0], [0.5], [0.5]]
    assert "line 2 is cut off" in history.notes[0]


def test_what_cannot_be_logged_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LOGGERS["JsonlLogger"](tmp_path / "log.jsonl") as log:
        with pytest.raises(ValueError, match=r"'b' must be a scalar, .* \(2,\)"):
            log(0, {"a": 1.0, "b": jnp.ones(2)})
        with pytest.raises(TypeError, match="integer"):
            log(1.5, {"a": 1.0})
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        LOGGERS["TensorBoardLogger"](tmp_path)


def test_the_core_imports_no_logger() -> None:
    for path in (ROOT / "adagc_jax").rglob("*.py"):
        text = path.read_text()
        assert not re.search(
            r"import (_loggers|tensorboardX|wandb)|from (_log|ten)", text
        )
