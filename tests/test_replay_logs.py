"""Reading logs: every format gives the same history, and bad ones say where."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_logs import (
    LOGGERS,
    history_of,
    noise,
    rows_of,
    write_csv,
    write_jsonl,
)
from tensorboardX.proto import event_pb2, summary_pb2, tensor_pb2
from tensorboardX.record_writer import RecordWriter

from adagc_jax import replay as rp

NORM = noise(12)
NORM[3, 1] = np.nan
NORM[5, 2] = np.inf
ROWS = rows_of(history_of(NORM))


def _gzip(folder: Path) -> Path:
    path = folder / "a.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(folder / "a.jsonl", ROWS).read_bytes()))
    return path


def _shuffled(folder: Path) -> Path:
    # Other orders of the keys, and numbers that nobody asked for.
    rows = [
        {"lr": 0.1, **row} if i % 3 else dict(reversed(row.items()))
        for i, row in enumerate(ROWS)
    ]
    return write_jsonl(folder / "a.jsonl", rows)


def _long(folder: Path) -> Path:
    rows = [
        {
            "step": row["step"],
            "name": key.split("/", 1)[1][: -len("/norm_before")],
            "norm": row[key],
        }
        for row in ROWS
        for key in row
        if key.endswith("norm_before")
    ]
    return write_csv(folder / "a.csv", rows)


def _wandb_jsonl(folder: Path) -> Path:
    def exported(value: Any) -> Any:
        if np.isnan(value):
            return "NaN"
        return "Infinity" if np.isinf(value) else value

    rows = [
        {"_step": row["step"], "_runtime": 1.0, "eval/loss": None}
        | {k: exported(v) for k, v in row.items() if k != "step"}
        for row in ROWS
    ]
    return write_jsonl(folder / "a.jsonl", rows)


def _wandb_chart(folder: Path) -> Path:
    rows = [
        {"Step": row["step"]}
        | {f"run-7 - {k}": v for k, v in row.items() if k != "step"}
        | {f"run-7 - {k}__MIN": 0.0 for k in row if k != "step"}
        | {f"run-8 - {k}": 9.0 for k in row if k != "step"}
        for row in ROWS
    ]
    return write_csv(folder / "a.csv", rows)


def _tensorboard(folder: Path) -> Path:
    with LOGGERS["TensorBoardLogger"](folder / "run") as log:
        for row in ROWS:
            log(row["step"], {k: v for k, v in row.items() if k != "step"})
    return folder / "run"


FORMATS = {
    "jsonl": lambda folder: write_jsonl(folder / "a.jsonl", ROWS),
    "gzip": _gzip,
    "other order": _shuffled,
    "csv": lambda folder: write_csv(folder / "a.csv", ROWS),
    "long csv": _long,
    "wandb jsonl": _wandb_jsonl,
    "wandb chart": _wandb_chart,
    "tensorboard": _tensorboard,
    "tensorboard file": lambda folder: next(_tensorboard(folder).iterdir()),
    "npz": lambda folder: rp.save_history(
        rp.read_history(write_jsonl(folder / "a.jsonl", ROWS)), folder / "a"
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_history(kind: str, tmp_path: Path) -> None:
    run = "run-7" if kind == "wandb chart" else None
    history = rp.read_history(FORMATS[kind](tmp_path), run=run)
    assert sorted(history.names) == [f"layers/{i}/w" for i in range(3)]
    order = [history.index(f"layers/{i}/w") for i in range(3)]
    np.testing.assert_array_equal(history.norm[:, order], NORM)
    np.testing.assert_array_equal(history.steps, np.arange(12))
    np.testing.assert_array_equal(history.updates, np.arange(12))
    assert history.notes == ()
    assert (history.loss is None) == (kind == "long csv")
    if history.loss is not None:
        np.testing.assert_array_equal(history.loss, np.full(12, 1.5))


def test_scales_references_and_the_seen_total_are_read(tmp_path: Path) -> None:
    rows = [
        row
        | {"clip/layers/0/w/scale": 0.5, "clip/layers/1/w/gamma": 0.25}
        | {"clip/norm_seen": 7.0 if row["step"] else 0.0, "clip/step": row["step"] + 1}
        for row in ROWS
    ]
    history = rp.read_history(write_jsonl(tmp_path / "a.jsonl", rows))
    np.testing.assert_array_equal(history.total, [0.0, *[7.0] * 11])
    assert history.scale is not None
    np.testing.assert_array_equal(history.scale[:, 0], np.full(12, 0.5))
    assert np.isnan(history.scale[:, 1:]).all()
    assert history.reference is not None
    np.testing.assert_array_equal(history.reference[:, 1], np.full(12, 0.25))


@pytest.mark.parametrize(
    ("keys", "options", "names"),
    [
        (["train/clip/norm_before", "train/clip/a/b/norm_before"], {}, ["a/b"]),
        (["opt/a/norm_before", "opt/b/norm_before"], {}, ["a", "b"]),
        (["clip/norm/scale/norm_before", "clip/norm/scale/scale"], {}, ["norm/scale"]),
        (["grad_norm/x.y", "grad_norm/z"], {"pattern": "grad_norm/(.+)"}, ["x.y", "z"]),
        (["m/0/norm_before", "m/0/a/norm_before", "m/1/norm_before",
          "m/1/b/norm_before"], {"prefix": "m/1"}, ["b"]),
        (["clip/norm_before"], {}, ["whole tree"]),
        (["clip/norm_before", "clip/worst/0/norm_before"], {}, ["whole tree"]),
    ],
)  # fmt: skip
def test_names_are_found_under_any_prefix(
    keys: list[str], options: dict[str, str], names: list[str], tmp_path: Path
) -> None:
    rows = [{"step": t} | {k: 0.5 + i for i, k in enumerate(keys)} for t in range(2)]
    history = rp.read_history(write_jsonl(tmp_path / "a.jsonl", rows), **options)
    assert list(history.names) == names
    worst = any("worst" in key for key in keys)
    assert any("level='all'" in note for note in history.notes) == worst


def _row(step: int, **norms: float | None) -> dict[str, Any]:
    return {"step": step} | {f"clip/{k}/norm_before": v for k, v in norms.items()}


@pytest.mark.parametrize(
    ("rows", "note", "norm"),
    [
        ([_row(0, a=1), _row(1, a=2, b=3)], "1 tensor appears late, such as b",
         [[1, 0], [2, 3]]),
        ([_row(0, a=1, b=4), _row(1, a=2, b=None), _row(2, a=3, b=5)],
         "1 tensor has gaps, such as b (1 row)", [[1, 4], [2, 0], [3, 5]]),
        ([_row(t, a=t + 1) for t in (0, 10, 20)], "logged every 10 steps",
         [[1], [11], [21]]),
        ([_row(t, a=t + 1) for t in (0, 1, 2, 5)], "2 steps are missing",
         [[1], [2], [3], [6]]),
        ([_row(0, a=1), _row(1, a=2), _row(1, a=7), _row(2, a=8)],
         "1 step logged again at once", [[1], [7], [8]]),
        ([_row(s, a=n) | {"clip/step": c} for s, n, c in
          ((0, 1, 1), (1, 1, 1), (2, 3, 2))], "1 row with the same update",
         [[1], [3]]),
        ([_row(700, a=1), _row(701, a=2)], "the log starts at update 700", [[1], [2]]),
        ([{"config": {"lr": 1}}, _row(0, a=1), {"step": 0, "eval": 3}, _row(1, a=2),
          {"step": 2, "loss": 3}, {"_step": None, "loss": 1}], "4 rows hold no norms",
         [[1], [2]]),
        ([_row(0, a=1) | {"other/a/norm_before": 9}], "other prefixes", [[1]]),
    ],
)  # fmt: skip
def test_what_is_odd_is_handled_and_said(
    rows: list[Any], note: str, norm: list[Any], tmp_path: Path
) -> None:
    prefix = "clip" if "prefixes" in note else None
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    history = rp.read_history(path, prefix=prefix)
    np.testing.assert_array_equal(history.norm, norm)
    assert any(note in text for text in history.notes), history.notes


def test_a_last_line_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    whole = json.dumps(_row(1, a=2.25))
    for length in (1, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps(_row(0, a=1)) + "\n" + whole[:length])
        history = rp.read_history(path)
        np.testing.assert_array_equal(history.norm, [[1.0]])
        assert "cut off" in history.notes[0]


def test_counts_of_updates(tmp_path: Path) -> None:
    one_based = [_row(t, a=1) for t in (1, 2, 3)]
    history = rp.read_history(write_jsonl(tmp_path / "a.jsonl", one_based))
    np.testing.assert_array_equal(history.updates, [0, 1, 2])
    counted = [_row(t, a=1) | {"clip/step": t - 40} for t in (50, 51)]
    history = rp.read_history(write_jsonl(tmp_path / "a.jsonl", counted))
    np.testing.assert_array_equal(history.updates, [9, 10])
    np.testing.assert_array_equal(history.rebased().updates, [0, 1])


def test_a_total_makes_up_for_what_a_row_lacks(tmp_path: Path) -> None:
    rows = [_row(0, a=3.0, b=4.0), _row(1, a=3.0)]
    rows = [row | {"clip/norm_before": 5.0} for row in rows]
    history = rp.read_history(write_jsonl(tmp_path / "a.jsonl", rows))
    np.testing.assert_array_equal(history.total, [0.0, 5.0])
    np.testing.assert_array_equal(history.whole().norm, [[5.0], [5.0]])


GOOD = json.dumps(_row(0, a=1)) + "\n"
HEAD = "step,clip/a/norm_before\n0,1\n"
RUNS = "Step,r1 - clip/a/norm_before,r2 - clip/a/norm_before\n0,1,2\n"


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.jsonl", GOOD + "{oops}\n" + GOOD, "line 2: not JSON .*; expected one obj"),
        ("a.jsonl", GOOD + "[1]\n", "line 2: expected an object such as"),
        ("a.jsonl", GOOD + json.dumps(_row(1, a="x")), "line 2: expected a number"),
        ("a.jsonl", GOOD + json.dumps(_row(1, a=-2)), "line 2: .* not negative"),
        ("a.jsonl", GOOD + json.dumps(_row(1.5, a=2)), "line 2: expected a whole num"),
        ("a.jsonl", GOOD + '{"step": 1e30, "clip/norm_before": 1}', "line 2: .*to 2"),
        ("a.jsonl", GOOD + '{"step": Infinity, "loss": 1}', "line 2: .*'step', got i"),
        ("a.jsonl", GOOD + '{"step": -5, "clip/a/norm_before": 1}', "line 2: .* -5.0"),
        ("a.jsonl", GOOD + "hello", "line 2: not JSON"),
        ("a.jsonl", "[" + GOOD + "]", "line 1: not JSON .*jq -c"),
        ("a.jsonl", "", "a.jsonl: the log is empty"),
        ("tfevents.1", "", "tfevents.1: the log is empty"),
        ("a.csv", "step,clip/a/norm_before\n", "the log is empty: it holds no rows"),
        ("a.csv", "0,1.5\n1,2\n", "line 1: expected a header .* got numbers"),
        ("a.csv", HEAD + '1,"2\n3,4\n5,6\n', "line 3: not CSV .* never closed"),
        ("a.csv", HEAD + "1," + "9" * 140_000 + "\n", "line 3: not CSV .*field limit"),
        ("a.npz", "no archive", "a.npz: expected the .npz of save_history, but it is"),
        ("a.jsonl", '{"clip/a/norm_before": 1}', "line 1: expected a number under 's"),
        ("a.jsonl", '{"step": 0, "loss": 1}', "expected keys such as 'clip/<tensor>"),
        ("a.csv", "", "line 1: expected a header"),
        ("a.csv", HEAD + "1\n", "line 3: expected 2 cells"),
        ("a.csv", HEAD + "1,y\n", "line 3: expected a number under .*, got 'y'"),
        ("a.csv", "step,name,norm\n0,a,1\n0,b\n", "line 3: expected 3 cells or more"),
        ("a.csv", RUNS, r"several runs \(r1, r2\)"),
        ("tfevents.1", "no events at all", "record 1 .*expected a TensorBoard"),
        ("a.npz", None, "expected the arrays of save_history .* got x"),
        ("a.parquet", "x", "expected JSONL .* got the suffix '.parquet'"),
    ],
)  # fmt: skip
def test_bad_files_say_which_line_and_what_was_expected(
    name: str, text: str | None, match: str, tmp_path: Path
) -> None:
    if text is None:
        np.savez(tmp_path / name, x=1)
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=match):
        rp.read_history(tmp_path / name)


def test_several_clippers_ask_for_a_prefix(tmp_path: Path) -> None:
    keys = (
        "m/0/norm_before",
        "m/0/a/norm_before",
        "m/1/norm_before",
        "m/1/b/norm_before",
    )
    path = write_jsonl(tmp_path / "a.jsonl", [{"step": 0} | dict.fromkeys(keys, 1.0)])
    with pytest.raises(ValueError, match=r"several clippers \(m/0, m/1\)"):
        rp.read_history(path)
    with pytest.raises(ValueError, match="one group"):
        rp.read_history(path, pattern="m/.*")
    with pytest.raises(FileNotFoundError, match="nothing is there"):
        rp.read_history(tmp_path / "none.jsonl")


def test_a_folder_of_runs_is_not_a_run(tmp_path: Path) -> None:
    _tensorboard(tmp_path)
    with pytest.raises(ValueError, match=r"there are some in .*run"):
        rp.read_history(tmp_path)


@pytest.mark.parametrize(
    ("fields", "norm"),
    [
        ({"dtype": 1, "tensor_content": np.float32(0.3).tobytes()}, np.float32(0.3)),
        ({"dtype": 1, "float_val": [0.25]}, 0.25),
        ({"dtype": 2, "tensor_content": np.float64(0.5).tobytes()}, 0.5),
        ({"dtype": 2, "double_val": [0.75]}, 0.75),
    ],
)
def test_scalars_of_newer_event_files_are_tensors(
    fields: dict[str, Any], norm: float, tmp_path: Path
) -> None:
    summary = summary_pb2.Summary()
    tensor = tensor_pb2.TensorProto(**fields)
    summary.value.add(tag="clip/w/norm_before", tensor=tensor)
    # A histogram's tensor is no scalar.
    many = tensor_pb2.TensorProto(dtype=1, float_val=[1.0, 2.0])
    summary.value.add(tag="clip/v/norm_before", tensor=many)
    writer = RecordWriter(str(tmp_path / "tfevents.1"))
    writer.write(event_pb2.Event(step=0, summary=summary).SerializeToString())
    writer.close()
    history = rp.read_history(tmp_path)
    assert history.names == ("w",)
    np.testing.assert_array_equal(history.norm, [[norm]])


def test_event_files_that_are_cut_off_or_restarted(tmp_path: Path) -> None:
    run = _tensorboard(tmp_path)
    (file,) = run.iterdir()
    file.with_name("events.out.tfevents.1").write_bytes(file.read_bytes()[:-3])
    file.unlink()
    history = rp.read_history(run)
    assert any("cut off" in note for note in history.notes)
    assert len(history.steps) == 12  # only the last scalar of the last step is lost
    with LOGGERS["TensorBoardLogger"](run) as log:
        log(11, {"clip/layers/2/w/norm_before": 77.0})
    assert len(list(run.iterdir())) == 2
    again = rp.read_history(run)
    assert again.norm[11, again.index("layers/2/w")] == 77.0
