"""The public face: documented names, a README that runs and agrees with results."""

import importlib.metadata
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import adagc_jax as aj

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"

PUBLIC = [
    name
    for name, value in vars(aj).items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
]
TRANSFORMS = [
    name
    for name in PUBLIC
    if "optax.GradientTransformation" in (inspect.getdoc(getattr(aj, name)) or "")
]


def test_the_list_of_transforms_is_found() -> None:
    assert {"adagc", "agc", "global_gc", "tensor_gc", "zclip"} <= set(TRANSFORMS)
    assert {"clip_by_value", "clip_by_rule"} <= set(TRANSFORMS)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name: str) -> None:
    doc = inspect.getdoc(getattr(aj, name)) or ""
    assert len(doc) > 40
    if inspect.isfunction(getattr(aj, name)):
        assert "Example:" in doc
        assert ">>>" in doc


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_says_what_it_takes_raises_and_comes_from(name: str) -> None:
    function = getattr(aj, name)
    doc = inspect.getdoc(function) or ""
    for section in ("Args:", "Returns:", "Raises:", "Reference:", "https://"):
        assert section in doc, section
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^\s+\*?\**{parameter}: ", doc, re.MULTILINE), parameter


def test_the_version_is_written_once() -> None:
    assert importlib.metadata.version("adagc-jax") == aj.__version__
    assert aj.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_readme_tables_are_made_from_the_results() -> None:
    render = [sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"]
    done = subprocess.run(render, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("optax_promotion")
def test_readme_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        names = {"schedule": 1e-3}
        exec(compile(block, str(README), "exec"), names)


def test_readme_names_every_method() -> None:
    text = README.read_text()
    for name in TRANSFORMS:
        assert re.search(rf"`{name}\b", text), name
