"""Ahead of time for TPU pods and GPUs: what the compiled programs hold.

The compiler needs no accelerator, only a description of one. `benchmarks/aot.py` makes
the whole table; here are small programs that show every property, compiled in a process
of its own. Without libtpu (or a CUDA plugin) the tests that need it are skipped.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

aot = importlib.import_module("_aot")
collectives = importlib.import_module("_collectives")
hlo = importlib.import_module("_hlo")

ENDS, SMALL, LLAMA, MIXTRAL = (
    "Llama-2 7B, 0 layers",
    "Llama-2 7B, 2 layers",
    "Llama-2 7B",
    "Mixtral 8x7B",
)
CLIP, ADAGC, STEADY = "optax.clip_by_global_norm", "adagc", "adagc (steady)"
TP, EP = (("fsdp", 64), ("tensor", 8)), (("fsdp", 64), ("expert", 8))
FOUR = (("data", 4),)

Row = dict[str, Any]


def case(
    target: str,
    model: str,
    layers: str,
    sharding: str,
    mesh: Any,
    clipper: str,
    **kw: Any,
) -> Any:
    return aot.Case(target, model, layers, sharding, mesh, clipper, **kw)


def chip(clipper: str, dtype: str) -> Any:
    one = (("data", 1),)
    return case("v5p-1", ENDS, "unrolled", "replicated", one, clipper, dtype=dtype)


def unrolled(clipper: str) -> Any:
    return case("v5p-512", SMALL, "unrolled", "FSDP x TP", TP, clipper)


def scanned(clipper: str) -> Any:
    return case("v5p-512", LLAMA, "stacked", "FSDP x TP", TP, clipper)


def tensor_only(clipper: str) -> Any:
    mesh = (("data", 64), ("tensor", 8))
    return case("v5p-512", ENDS, "unrolled", "TP", mesh, clipper)


def experts(clipper: str) -> Any:
    kind = "Explicit"
    return case(
        "v5p-512", MIXTRAL, "stacked", "FSDP x EP", EP, clipper, axis_types=kind
    )


def training(clipper: str) -> Any:
    return case(
        "v5p-4",
        "dense",
        "unrolled",
        "replicated",
        FOUR,
        clipper,
        dtype="bfloat16",
        step="train",
    )


def h100(clipper: str) -> Any:
    mesh = (("fsdp", 8), ("expert", 8))
    return case("H100-64", MIXTRAL, "stacked", "FSDP x EP", mesh, clipper)


# Compiling takes seconds each, so every property is shown on one program.
TPU_CASES = [
    *(chip(clipper, "float32") for clipper in ("none", ADAGC)),
    *(chip(clipper, "bfloat16") for clipper in ("none", STEADY)),
    *(unrolled(clipper) for clipper in ("none", CLIP, STEADY)),
    *(scanned(clipper) for clipper in ("none", CLIP, ADAGC)),
    tensor_only(ADAGC),
    *(experts(clipper) for clipper in (CLIP, STEADY)),
    *(training(clipper) for clipper in ("none", CLIP, STEADY)),
]
GPU_CASES = [h100(clipper) for clipper in ("none", CLIP, ADAGC, STEADY)]


def compiled(cases: Sequence[Any]) -> Callable[[Any], Row]:
    for target in {case.target for case in cases}:
        if reason := aot.why_unavailable(target):
            pytest.skip(reason)
    rows = dict(zip(cases, aot.run(cases, seconds=900), strict=True))
    return rows.__getitem__


@pytest.fixture(scope="module")
def tpu() -> Callable[[Any], Row]:
    return compiled(TPU_CASES)


@pytest.fixture(scope="module")
def gpu() -> Callable[[Any], Row]:
    return compiled(GPU_CASES)


def sent(row: Row) -> list[Any]:
    return [
        collectives.Collective(kind, operands, size, tuple(axes))
        for kind, operands, size, axes in row["collectives"]
    ]


def check_collectives(adagc: Row, clip: Row, adamw: Row) -> None:
    """Two all-reduces at most, of a float32 per group, and no more than GlobalGC."""
    assert sent(adamw) == []
    added = sent(adagc)
    assert {c.kind for c in added} == {"all-reduce"}
    assert len(added) <= 2
    assert len(added) <= len(sent(clip))
    assert sum(c.bytes for c in added) <= 4 * adagc["groups"]


@pytest.mark.parametrize(
    ("clipper", "dtype", "adamw", "limit"),
    [(ADAGC, "float32", 28.0, 32.0), (STEADY, "bfloat16", 26.0, 28.0)],
)
def test_one_extra_read_on_one_chip(
    clipper: str, dtype: str, adamw: float, limit: float, tpu: Callable[[Any], Row]
) -> None:
    def bytes_per_parameter(clipper: str) -> float:
        row = tpu(chip(clipper, dtype))
        return row["hbm_bytes"] / row["local_parameters"]

    assert bytes_per_parameter("none") == pytest.approx(adamw, abs=0.005)
    # No less than most of that read: or the count misses what clipping does.
    enough = adamw + 0.8 * (limit - adamw)
    assert enough < bytes_per_parameter(clipper) <= limit + 0.005


@pytest.mark.parametrize(("program", "clipper"), [(unrolled, STEADY), (scanned, ADAGC)])
def test_pod_step_adds_two_small_all_reduces_and_little_traffic(
    program: Callable[[str], Any], clipper: str, tpu: Any
) -> None:
    adamw, clip = tpu(program("none")), tpu(program(CLIP))
    row = tpu(program(clipper))
    check_collectives(row, clip, adamw)
    assert row["hbm_bytes"] <= 1.05 * adamw["hbm_bytes"]
    assert row["hbm_bytes"] <= 1.005 * clip["hbm_bytes"]


def test_true_7b_has_one_group_per_layer_and_tensor(tpu: Any) -> None:
    row = tpu(scanned(ADAGC))
    assert row["groups"] == 291
    replicated = 65 * 4096  # the norms' weights
    assert (row["local_parameters"] - replicated) * 512 == 6738415616 - replicated


def test_tensor_parallel_norms_stay_on_the_tensor_axis(tpu: Any) -> None:
    assert {c.axes for c in sent(tpu(tensor_only(ADAGC)))} == {("tensor",)}


def test_steady_experts_do_not_talk_to_each_other(tpu: Any) -> None:
    assert any("expert" in c.axes for c in sent(tpu(experts(CLIP))))
    steady = sent(tpu(experts(STEADY)))
    assert {c.kind for c in steady} == {"all-reduce"}
    assert {c.axes for c in steady} == {("fsdp",)}


def test_steady_training_step_lets_go_of_each_gradient(tpu: Any) -> None:
    adamw = tpu(training("none"))["temp_bytes"]
    assert tpu(training(STEADY))["temp_bytes"] <= 1.5 * adamw
    assert tpu(training(CLIP))["temp_bytes"] > 2.0 * adamw


def test_h100_step(gpu: Any) -> None:
    adamw, clip = gpu(h100("none")), gpu(h100(CLIP))
    for clipper in (ADAGC, STEADY):
        row = gpu(h100(clipper))
        check_collectives(row, clip, adamw)
        assert row["hbm_bytes"] <= 1.001 * clip["hbm_bytes"]
    assert {c.axes for c in sent(gpu(h100(STEADY)))} == {("fsdp",)}


def test_every_target_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    for target in aot.TARGETS:
        assert "pip install" in aot.why_unavailable(target)


def test_failed_process_is_an_error_with_its_output() -> None:
    with pytest.raises(RuntimeError, match="no such model"):
        list(aot.run([case("v5p-1", "no such model", "unrolled", "TP", FOUR, "none")]))


PROGRAM = """\
HloModule step, is_scheduled=true

%fused (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0} parameter(0)
  ROOT %double = f32[8,128]{1,0} add(%p, %p)
}

%inner (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %negated = f32[4]{0} negate(%q)
}

ENTRY %main.1_spmd (a: f32[8,128], b: bf16[16], c: f32[4]) -> (f32[8,128], f32[4]) {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %b = bf16[16]{0:T(128)(2,1)} parameter(1)
  %c = f32[4]{0} parameter(2)
  %fetch = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %fetched = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%fetch)
  %cut = ((f32[8,128]{1,0}), f32[2,128]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a)
  %part = f32[2,128]{1,0:S(1)} slice-done(%cut)
  %fusion.1 = f32[8,128]{1,0:T(8,128)} fusion(%fetched), kind=kLoop, calls=%fused
  %wide = (f32[16]{0}, /*index=1*/f32[]) fusion(%b), kind=kLoop, calls=%fused
  %call.1 = f32[4]{0} call(%c), to_apply=%inner
  ROOT %out = (f32[8,128]{1,0}, f32[4]{0}) tuple(%fusion.1, %call.1)
}
"""


def test_traffic_counts_hbm_only() -> None:
    module = hlo.parse(PROGRAM)
    moved = {
        instruction.name: size
        for instruction, size in hlo.traffic_by_instruction(module, module.entry)
    }
    assert moved == {
        "fetch": 4096,  # read from HBM, written to the chip
        "cut": 1024,  # the slice only
        "fusion.1": 4096,  # its operand is on the chip
        "wide": 32 + 64 + 4,
        "negated": 16 + 16,
    }
    assert hlo.traffic(module) == sum(moved.values())
    assert hlo.operations(module) == 5


def test_work_that_another_core_is_called_for_counts() -> None:
    elsewhere = PROGRAM.replace("call(%c)", "call-start(%c)")
    assert hlo.traffic(hlo.parse(elsewhere)) == hlo.traffic(hlo.parse(PROGRAM))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bf16[16]", "f4e2m1[16]", "unknown HLO dtype 'f4e2m1'"),
        ("call(%c), to_apply", "while(%c), body", "is a while"),
        ("call(%c), to_apply", "conditional(%c), true", "is a conditional"),
        ("slice-start(", "async-start(", "async-start is not known"),
        ("ENTRY ", "", "no ENTRY"),
        ("tuple(%fusion.1, %call.1)", "tuple((%fusion.1, %call.1)", "unbalanced"),
    ],
)
def test_unknown_text_is_an_error(old: str, new: str, message: str) -> None:
    assert old in PROGRAM
    with pytest.raises(ValueError, match=message):
        hlo.traffic(hlo.parse(PROGRAM.replace(old, new)))


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{}", ("x", "y")),
        ("{{0,1,2,3,4,5}}", ("x", "y")),
        ("{{0,1},{2,3},{4,5}}", ("y",)),
        ("{{0,2,4},{1,3,5}}", ("x",)),
        ("{{0},{1},{2},{3},{4},{5}}", ()),
        ("[3,2]<=[6]", ("y",)),
        ("[2,3]<=[3,2]T(1,0)", ("x",)),
        ("mesh['a'=3,'b'=2] {'b'}", ("y",)),
        ("mesh['a'=3,'b'=2] {'a','b'}", ("x", "y")),
        ("mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b'}", ("x",)),
        ("mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'a'}", ("y",)),
        ("mesh['a'=6], device_ids=([6]) {'a'}", ("x", "y")),
    ],
)
def test_axes_of_replica_groups(groups: str, axes: tuple[str, ...]) -> None:
    text = f"""\
ENTRY %main (a: f32[3]) -> f32[3] {{
  %a = f32[3]{{0}} parameter(0)
  %b = s32[] constant(0)
  %r = (f32[3]{{0}}, s32[]) all-reduce-start(%a, %b), replica_groups={groups}, x=%s
  ROOT %d = (f32[3]{{0}}, s32[]) all-reduce-done(%r)
}}
"""
    found = collectives.collectives(hlo.parse(text), {"x": 3, "y": 2})
    assert found == [collectives.Collective("all-reduce", 2, 16, axes)]


def test_permutes_and_unknown_groups() -> None:
    pairs = collectives.device_groups("source_target_pairs={{0,1},{1,0}}", 2)
    np.testing.assert_array_equal(pairs, [[0, 1], [1, 0]])
    with pytest.raises(ValueError, match="unknown form of replica groups"):
        collectives.device_groups("replica_groups=mesh['a'=4] {'a':(1)2}", 4)
