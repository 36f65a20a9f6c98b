"""Reading what real logs are like: split, restarted, cut off, damaged, misnamed."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_logs import LOGGERS, write_csv, write_jsonl

from adagc_jax import replay as rp


def _row(step: int, **norms: float | None) -> dict[str, Any]:
    return {"step": step} | {f"clip/{k}/norm_before": v for k, v in norms.items()}


def _rows(steps: range, offset: float = 0.0) -> list[dict[str, Any]]:
    return [
        {"loss": 10.0 + t + offset} | _row(t, a=t + offset, b=2 * t + offset)
        for t in steps
    ]


def _numbers(rows: list[dict[str, Any]]) -> list[tuple[int, str, float]]:
    return [(row["step"], k, v) for row in rows for k, v in row.items() if k != "step"]


def _write_long(path: Path, numbers: list[Any], header: str = "metric,value") -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *header.split(",")])
        writer.writerows(numbers)
    return path


def _check(path: Path, offset: np.ndarray, **options: Any) -> rp.History:
    """That a log is that of `_rows` with an offset for each step."""
    history = rp.read_history(path, **options)
    steps = np.arange(len(offset))
    order = [history.index(name) for name in ("a", "b")]
    want = np.stack([steps + offset, 2 * steps + offset], axis=1)
    np.testing.assert_array_equal(history.steps, steps)
    np.testing.assert_array_equal(history.norm[:, order], want)
    assert len(history.names) == 2
    if history.loss is not None:
        np.testing.assert_array_equal(history.loss, 10 + steps + offset)
    return history


def _by_name(numbers: list[Any]) -> list[Any]:
    return sorted(numbers, key=lambda n: n[1])


def _one_line_each(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"step": step, key: value} for step, key, value in _numbers(rows)]


def _with_nulls(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    nulls = dict.fromkeys(rows[0]) | {"eval/loss": 3.0}
    return [line for row in rows for line in (row, row | nulls | {"step": row["step"]})]


# Each takes rows to a file that holds the same numbers.
LAYOUTS = {
    "melted": lambda p, rows: _write_long(
        p / "a.csv", [(*n, 0) for n in _by_name(_numbers(rows))], "metric,value,other"
    ),
    "long": lambda p, rows: _write_long(p / "a.csv", _numbers(rows)),
    "one line each": lambda p, rows: write_jsonl(p / "a.jsonl", _one_line_each(rows)),
    "by name": lambda p, rows: write_jsonl(
        p / "a.jsonl", sorted(_one_line_each(rows), key=lambda row: list(row)[1])
    ),
    "loss apart": lambda p, rows: write_jsonl(
        p / "a.jsonl",
        [
            {"step": row["step"]} | part
            for row in rows
            for part in ({"loss": row["loss"]}, row)
        ],
    ),
    "nulls": lambda p, rows: write_jsonl(p / "a.jsonl", _with_nulls(rows)),
    "wide": lambda p, rows: write_csv(p / "a.csv", rows),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_a_step_are_merged_however_they_are_laid_out(
    layout: str, tmp_path: Path
) -> None:
    history = _check(LAYOUTS[layout](tmp_path, _rows(range(7))), np.zeros(7))
    assert history.loss is not None
    assert not any("restart" in note for note in history.notes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restart_drops_the_branch_that_it_abandons(
    layout: str, tmp_path: Path
) -> None:
    rows = _rows(range(12)) + _rows(range(4, 9), 0.5)
    offset = np.where(np.arange(9) < 4, 0.0, 0.5)
    history = _check(LAYOUTS[layout](tmp_path, rows), offset)
    (note,) = [note for note in history.notes if "restart" in note]
    assert note.startswith("the step goes back to 4 (1 restart): 8 rows of")


def test_restarts_of_restarts_and_steps_that_only_one_branch_has(
    tmp_path: Path,
) -> None:
    rows = [
        *_rows(range(6)),
        _row(6, a=1, late=5.0),
        *_rows(range(3, 8), 1.0),
        *_rows(range(2, 4), 2.0),
    ]
    history = rp.read_history(write_jsonl(tmp_path / "a.jsonl", rows))
    np.testing.assert_array_equal(history.steps, range(4))
    np.testing.assert_array_equal(history.norm[:, 0], [0, 1, 4, 5])
    assert not history.norm[:, history.index("late")].any()
    assert any("2 restarts" in note for note in history.notes)


def test_a_second_writer_of_event_files_is_a_restart(tmp_path: Path) -> None:
    for name, rows in (("9", _rows(range(12))), ("10", _rows(range(4, 9), 0.5))):
        with LOGGERS["TensorBoardLogger"](tmp_path / name) as log:
            for row in rows:
                log(row["step"], {k: v for k, v in row.items() if k != "step"})
        (file,) = (tmp_path / name).iterdir()
        file.rename(tmp_path / f"events.out.tfevents.{name}.host")
    history = _check(tmp_path, np.where(np.arange(9) < 4, 0.0, 0.5))
    assert any("8 rows of the abandoned" in note for note in history.notes)


def test_damage_in_an_event_file_is_found(tmp_path: Path) -> None:
    with LOGGERS["TensorBoardLogger"](tmp_path) as log:
        log(0, {"clip/a/norm_before": 0.5})
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    at = whole.index(b"norm_before") + 14
    for place in (at, len(whole) - 1, 2, 9):
        bad = bytearray(whole)
        bad[place] ^= 1
        file.write_bytes(bad)
        with pytest.raises(ValueError, match=r"tfevents.*record \d .*checksum"):
            rp.read_history(tmp_path)


def test_long_tables_without_keys_hold_tensors_and_the_loss(tmp_path: Path) -> None:
    rows = [(t, name, 1.0 + t) for name in ("a", "loss", "b") for t in range(3)]
    history = rp.read_history(_write_long(tmp_path / "a.csv", rows))
    assert history.names == ("a", "b")
    assert history.loss is not None
    history = rp.read_history(tmp_path / "a.csv", prefix="grad")
    assert history.names == ("a", "b")


def _text(rows: list[dict[str, Any]], separator: str) -> bytes:
    lines = [rows[0].keys(), *(row.values() for row in rows)]
    return "".join(separator.join(map(str, line)) + "\n" for line in lines).encode()


def _json(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.JSONL", _json(_rows(range(5)))),
        ("a.log", _json(_rows(range(5)))),
        ("a.txt", _text(_rows(range(5)), ",")),
        ("a.JSONL.GZ", gzip.compress(_json(_rows(range(5))))),
        ("bom.jsonl", b"\xef\xbb\xbf" + _json(_rows(range(5)))),
        ("bom.csv", b"\xef\xbb\xbf" + _text(_rows(range(5)), ",")),
        ("a.CSV", _text(_rows(range(5)), ",")),
        ("semicolons.csv", _text(_rows(range(5)), ";")),
        ("a.tsv", _text(_rows(range(5)), "\t")),
        ("crlf.jsonl", _json(_rows(range(5))).replace(b"\n", b"\r\n")),
    ],
)
def test_files_by_other_names_and_from_other_editors(
    name: str, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert _check(tmp_path / name, np.zeros(5)).notes == ()


def test_lines_that_are_cut_off_are_left_out_and_said(tmp_path: Path) -> None:
    lines = _json(_rows(range(4))).decode().splitlines(keepends=True)
    path = tmp_path / "a.jsonl"
    for glue in ("", "\n"):
        for length in range(2, len(lines[1]) - 1):
            path.write_text("".join([lines[0], lines[1][:length], glue, *lines[1:]]))
            history = _check(path, np.zeros(4))
            (note,) = history.notes
            assert note.startswith("line 2 is cut off")
    for bad in ('{"step": oops}', '{"step": 1 "loss": 2}', "}", "{'step': 1}"):
        path.write_text("".join([lines[0], bad + "\n", *lines[1:]]))
        with pytest.raises(ValueError, match="line 2: not JSON"):
            rp.read_history(path)


@pytest.mark.parametrize("header", ["step,a,b", "step,name,norm"])
def test_a_last_line_of_csv_that_is_cut_off(header: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    first = "0,1,1" if "name" not in header else "0,x,1\n1,x,1"
    path.write_text(f"{header}\n{first}\n5,")
    history = rp.read_history(path, pattern="([abx])")
    assert 5 not in history.steps
    assert any("cut off" in note for note in history.notes)


def test_numbers_that_are_none_in_any_spelling(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"step": 0, "clip/a/norm_before": nan, "clip/b/norm_before": inf}\n'
        '{"step": 1, "clip/a/norm_before": 1, "clip/b/norm_before": Infinity}\n'
    )
    norm = rp.read_history(path).norm
    np.testing.assert_array_equal(norm, [[np.nan, np.inf], [1, np.inf]])


@pytest.mark.parametrize(
    ("name", "damage", "match"),
    [
        ("a.jsonl.gz", lambda b: gzip.compress(b)[:-20], "after line .* cut off or"),
        ("a.jsonl.gz", lambda b: b, "after line 0: the compressed file"),
        ("a.jsonl", lambda b: b[:90] + b"\xff\xfe", "line .* expected UTF-8 text"),
        ("a.csv", lambda b: b"\x80" + b, "line 1 .* expected UTF-8 .* 0x80"),
    ],
)
def test_damaged_text_says_where(
    name: str, damage: Any, match: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(damage(_json(_rows(range(9)))))
    with pytest.raises(ValueError, match=f"{name} {match}"):
        rp.read_history(tmp_path / name)


def test_a_saved_history_that_is_damaged_or_lacks_arrays(tmp_path: Path) -> None:
    history = rp.read_history(write_jsonl(tmp_path / "a.jsonl", _rows(range(3))))
    path = rp.save_history(history, tmp_path / "norms.v1.5")
    assert path.name == "norms.v1.5.npz"
    assert rp.save_history(history, path) == path
    _check(path, np.zeros(3))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"norms\.v1\.5\.npz: expected the \.npz of"):
        rp.read_history(path)
    np.savez(path, names=["a"], steps=[0], norm=[[1.0]])
    with pytest.raises(ValueError, match=r"expected the arrays .* got names, norm, st"):
        rp.read_history(path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss": "lossx"}, r"a.jsonl: no key is loss='lossx'; the keys are loss"),
        ({"prefix": "grad"}, r"a.jsonl: expected .*'grad/<.*under prefix=clip"),
        ({"pattern": "x/(.+)"}, r"a.jsonl: .*pattern='x/\(\.\+\)'.*keys are .*clip/a"),
        ({"pattern": "("}, r"pattern must be a regular expression, got '\('"),
        ({"run": "r"}, "a.jsonl: run= is for the columns of a chart export"),
    ],
)
def test_options_that_match_nothing_say_what_there_is(
    options: dict[str, str], match: str, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", _rows(range(3)))
    with pytest.raises(ValueError, match=match):
        rp.read_history(path, **options)
    if "run" in options:
        with pytest.raises(ValueError, match="leave it out"):
            rp.read_history(write_csv(tmp_path / "a.csv", _rows(range(3))), **options)


def test_a_step_that_is_logged_twice_keeps_what_is_not_repeated(
    tmp_path: Path,
) -> None:
    rows = [*_rows(range(6)), *_rows(range(3, 5), 1.0), _row(4, a=7.0)]
    history = rp.read_history(write_jsonl(tmp_path / "a.jsonl", rows))
    np.testing.assert_array_equal(history.norm[3:], [[4, 7], [7, 9]])
    assert any("(1 restart): 3 rows" in note for note in history.notes)
    assert any("1 step logged again at once" in note for note in history.notes)
    twice = [(0, "a", 1.0), (0, "a", 2.0), (0, "b", 3.0)]
    history = rp.read_history(_write_long(tmp_path / "a.csv", twice, "name,norm"))
    np.testing.assert_array_equal(history.norm, [[2, 3]])
    assert history.notes == ("1 step logged again at once: the later numbers count",)
