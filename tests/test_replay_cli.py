"""The command ``adagc-replay``: what it accepts, and how it fails."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from replay_logs import history_of, noise, rows_of, write_jsonl

from adagc_jax import replay as rp
from adagc_jax.replay import cli
from adagc_jax.replay.cli import main
from adagc_jax.replay.console import Console
from adagc_jax.replay.tables import Table


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = rows_of(history_of(noise(60)))
    return write_jsonl(tmp_path_factory.mktemp("log") / "norms.jsonl", rows)


FAST = ("--rule", "tensor_gc", "--max-norm", "0.9", "--window", "25", "--plain")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--pattern", "("], "--pattern must be a regular expression"),
        (["--prefix", "grad"], ".*norms.jsonl: expected .* under --prefix=clip"),
        (["--loss", "x"], ".*norms.jsonl: no key is --loss='x'; the keys are loss"),
        (["--run", "x"], "norms.jsonl: --run= is for"),
        (["--held", "0.5"], "--held and --spike must be 1 <= --held <= --spike"),
        (["--window", "1"], "--window must be at least 2"),
        (["--rule", "foo"], "--rule must be one of"),
        (["--warmup-steps", "3000000000"], "--warmup-steps must be at most 2147483647"),
        (["--warmup-steps", "1e12"], "--warmup-steps must be at most 2147483647"),
        (["--lambda-rel", "x"], "--lambda-rel must be a number"),
        (["--grid", "beta=0.9", "beta=0.99"], "--grid has beta twice"),
        (["--grid", "beta=0.9,,0.99"], "--grid takes OPTION=V1,V2"),
        (["--out", "{log}"], "--out .*norms.jsonl: cannot write there"),
        (["--out", "{log}/x"], "--out .*x: cannot write there"),
        (["--save", "{log}/x"], "--save .*norms.jsonl: cannot write there"),
        (["--save", "."], "--save .: expected the name of a file"),
    ],
)
def test_errors_speak_of_the_options_in_one_line(
    arguments: list[str],
    match: str,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def computed(*args: Any, **kwargs: Any) -> None:
        pytest.fail("nothing may be computed before")

    monkeypatch.setattr(cli, "what_if", computed)
    said = [a.replace("{log}", str(log)) for a in arguments]
    assert main([str(log), *said]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"adagc-replay: .*{match}", line), line


def test_pictures_without_matplotlib_fail_at_once(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(log), "--html"]) == 2
    said = capsys.readouterr()
    assert "pip install 'adagc-jax[plots]'" in said.err
    assert not said.out


def test_the_log_may_stand_behind_the_grid(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = ("--save", str(tmp_path / "norms.v1.5"))
    assert main([*FAST, *save, "--grid", "max_norm=0.5", str(log)]) == 0
    assert "best of 2 settings" in capsys.readouterr().out
    assert rp.load_history(tmp_path / "norms.v1.5.npz").norm.shape == (60, 3)
    with pytest.raises(SystemExit):
        main(["--grid", "beta=0.9"])
    assert "which log?" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_ends_it_quietly(
    log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open(tmp_path / "out", "w") as file:

        class Closed:
            def write(self, text: str) -> int:
                raise BrokenPipeError

            def flush(self) -> None:
                pass

            def fileno(self) -> int:
                return file.fileno()

        monkeypatch.setattr(sys, "stdout", Closed())
        assert main([str(log), *FAST]) == 141
        os.write(file.fileno(), b"what is flushed at the exit")
    assert not (tmp_path / "out").read_text()
    assert not capsys.readouterr().err


def test_names_that_look_like_markup_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["params[w]", "layers[/]q", "[red]x"]
    table = Table("[b]title", ("[i]", "n"), [(name, "[/]") for name in names])
    Console().table(table)
    said = capsys.readouterr().out
    for text in (*names, "[b]title", "[i]", "[/]"):
        assert text in said
