"""Compiles optimizer steps for TPU pods and H100s, and tables what clipping adds.

    python benchmarks/aot.py                  everything that is not in the results yet
    python benchmarks/aot.py --only v5p-512   one target, with --force: anew
    python benchmarks/aot.py --seconds 1800   begins no program after half an hour

Needs the compilers, and no accelerator: `pip install "adagc-jax[tpu]"` for TPU, and for
H100 `jax-cuda12-plugin` and `jax-cuda12-pjrt` in the version of jax. A target without
its compiler is skipped and says so. All numbers are the compiler's estimates: which
collectives the program holds, the bytes its operations move to and from HBM, the memory
it asks for, the processor time of compiling. Nothing has run.

The result goes to `benchmarks/results/aot.json`, from which `render.py` makes the
README's tables.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _aot import Case, run, why_unavailable
from _programs import CLIPPERS
from _stamp import made

RESULTS = Path(__file__).parent / "results" / "aot.json"
CHIPS = {
    "v5p-512": (64, 8),
    "v5e-256": (32, 8),
    "v6e-256": (32, 8),
    "v7x-128": (16, 8),
    "H100-64": (8, 8),
}
# Compiling a training step takes minutes, so these only.
TRAINED = ("none", "optax.clip_by_global_norm", "adagc (steady)")
LLAMA, MIXTRAL, SMALL = "Llama-2 7B", "Mixtral 8x7B", "Llama-2 7B, 2 layers"
# Others, on TPU only: layers stacked, as models of this size are compiled.
DENSE, EXPERTS = ("Llama-2 70B", "Qwen3-1.7B"), ("ERNIE-like 10B", "DeepSeekMoE 16B")


def programs() -> list[dict[str, Any]]:
    """The programs of the tables: fields of a `Case`, all but the clipper."""
    one_chip = [
        _fields(target, SMALL, "unrolled", "replicated", (1,), dtype=dtype)
        for target in ("v5p-1", "H100-1")
        for dtype in ("float32", "bfloat16")
    ]
    pods = [
        _fields(target, model, layers, sharding, sizes)
        for target, sizes in CHIPS.items()
        for model, layers, sharding in (
            (LLAMA, "unrolled", "FSDP x TP"),
            (LLAMA, "stacked", "FSDP x TP"),
            (MIXTRAL, "stacked", "FSDP x TP"),
            (MIXTRAL, "stacked", "FSDP x EP"),
        )
    ]
    others = [
        _fields(target, model, "stacked", sharding, sizes)
        for target, sizes in CHIPS.items()
        if not target.startswith("H100")
        for models, sharding in ((DENSE, "FSDP x TP"), (EXPERTS, "FSDP x EP"))
        for model in models
    ]
    pod, sizes = "v5p-512", CHIPS["v5p-512"]
    variants = [
        _fields(pod, LLAMA, "stacked", "TP", sizes),
        _fields(pod, LLAMA, "stacked", "FSDP x TP", sizes, dtype="bfloat16"),
        _fields(pod, LLAMA, "stacked", "FSDP x TP", sizes, axis_types="Explicit"),
        _fields(pod, MIXTRAL, "stacked", "FSDP x EP", sizes, axis_types="Explicit"),
    ]
    memory = [
        _fields("v5p-4", model, "unrolled", sharding, (4,), "bfloat16", "train")
        for model, sharding in (("1B, 4 layers", "FSDP"), ("1B", "replicated"))
    ]
    return one_chip + pods + others + variants + memory


def _fields(
    target: str,
    model: str,
    layers: str,
    sharding: str,
    sizes: tuple[int, ...],
    dtype: str = "float32",
    step: str = "optimizer",
    axis_types: str = "Auto",
) -> dict[str, Any]:
    first = "fsdp" if "FSDP" in sharding else "data"
    second = "expert" if "EP" in sharding else "tensor"
    return {
        "target": target,
        "model": model,
        "layers": layers,
        "sharding": sharding,
        "mesh": tuple(zip((first, second), sizes, strict=False)),
        "dtype": dtype,
        "step": step,
        "axis_types": axis_types,
    }


def key(fields: dict[str, Any]) -> str:
    """Name of a program in the results."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in fields["mesh"])
    others = [str(value) for name, value in fields.items() if name != "mesh"]
    return ", ".join([*others, mesh])


def measure(fields: dict[str, Any], report: dict[str, Any]) -> Iterator[str]:
    """Adds the rows that a program lacks to the report, and names each."""
    entry = report["programs"].setdefault(key(fields), {**fields, "rows": {}})
    names = CLIPPERS if fields["step"] == "optimizer" else TRAINED
    missing = [name for name in names if name not in entry["rows"]]
    cases = [Case(clipper=name, **fields) for name in missing]
    for name, row in zip(missing, run(cases) if cases else [], strict=True):
        entry["rows"][name] = row | made()
        yield f"{key(fields)}: {name}: {summary(row)}"


def measure_compile_time(report: dict[str, Any], rounds: int) -> Iterator[str]:
    """Adds processor seconds of compiling, interleaved: every clipper once a round."""
    if "compile" in report:
        return
    fields = _fields("v5p-512", LLAMA, "unrolled", "FSDP x TP", CHIPS["v5p-512"])
    cases = [Case(clipper=clipper, **fields) for clipper in CLIPPERS] * rounds
    seconds: dict[str, list[float]] = {name: [] for name in CLIPPERS}
    for case, row in zip(cases, run(cases), strict=True):
        seconds[case.clipper].append(row["seconds"])
        yield f"compile time: {case.clipper}: {row['seconds']} s"
    report["compile"] = {**fields, "seconds": seconds, **made()}


def summary(row: dict[str, Any]) -> str:
    """One line on one program."""
    said = [
        f"{row['temp_bytes'] / 1e6:.0f} MB temporary, {row['operations']} operations"
    ]
    if "hbm_bytes" in row:
        said.append(f"{row['hbm_bytes'] / row['local_parameters']:.3f} B/param")
        said.append(f"{row['cycles']} cycles")
        said += [
            f"{kind} of {size} B over {'+'.join(axes)}"
            for kind, _, size, axes in row["collectives"]
        ]
    return ", ".join(said)


def main() -> None:
    """Measures what is missing and writes it, program by program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--force", action="store_true", help="measure them anew")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="the next call goes on"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="for compile time; 0: none"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    report = {"programs": {}}
    if options.out.exists():
        report = json.loads(options.out.read_text())
    chosen = [fields for fields in programs() if options.only in key(fields)]
    for fields in chosen:
        if options.force:
            report["programs"].pop(key(fields), None)
        if reason := why_unavailable(fields["target"]):
            print(f"skipped {key(fields)}: {reason}")
            continue
        if time.monotonic() > deadline:
            raise SystemExit("the time is over: the same command goes on from here")
        _write(measure(fields, report), report, options.out)
    if options.rounds and not why_unavailable("v5p-512"):
        if options.force:
            report.pop("compile", None)
        _write(measure_compile_time(report, options.rounds), report, options.out)


def _write(lines: Iterator[str], report: dict[str, Any], out: Path) -> None:
    for line in lines:
        print(line, flush=True)
        _save(report, out)
    _save(report, out)


def _save(report: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
