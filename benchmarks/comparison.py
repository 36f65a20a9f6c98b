"""Checks what the README says about other libraries against their released code.

    python benchmarks/comparison.py

Downloads one wheel per library (30 MB; nothing is installed or run), looks up the line
of code behind every cell of `claims.toml`, and writes `results/comparison.json`, from
which `render.py` makes the table. Fails where the code says otherwise.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

CLAIMS = Path(__file__).parent / "claims.toml"
RESULTS = Path(__file__).parent / "results" / "comparison.json"

OURS = {
    "global": "yes, `global_gc`",
    "adagc": "yes, `adagc`",
    "agc": "yes, `agc`, stacked or not",
    "zclip": "yes, `zclip`, of any group",
    "layers": "yes, every method",
    "nonfinite": "yes, `guard`; or per group",
    "spike": "yes, `guard`",
    "float32": "yes",
    "per_tensor": "yes, in the state",
    "resume": "yes",
}


def download(requirement: str, folder: Path) -> Path:
    """The wheel of a library's release."""
    command = [sys.executable, "-m", "pip", "download", "-qqq", "--no-deps", "--pre"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def sources(wheel: zipfile.ZipFile, path: str) -> list[str]:
    """The text of one file, or of every Python file of a folder but its tests."""
    names = [
        name
        for name in wheel.namelist()
        if name == path
        or (name.startswith(f"{path}/") and name.endswith(".py") and "test" not in name)
    ]
    if not names:
        raise ValueError(f"{wheel.filename} has no {path}")
    return [wheel.read(name).decode() for name in names]


def holds(claim: dict[str, str], wheel: zipfile.ZipFile) -> bool:
    """Whether the code shows what the claim says."""
    wanted = "pattern" in claim
    pattern = claim["pattern" if wanted else "absent"]
    texts = sources(wheel, claim["file"])
    return any(re.search(pattern, text) for text in texts) == wanted


def check(library: str, version: str, claims: dict[str, dict[str, str]]) -> None:
    """Raises if the library's code does not show what is claimed."""
    with tempfile.TemporaryDirectory() as folder:
        path = download(f"{library}=={version}", Path(folder))
        with zipfile.ZipFile(path) as wheel:
            wrong = {f: c for f, c in claims.items() if not holds(c, wheel)}
    if wrong:
        raise ValueError(f"{library} {version} does not show: {wrong}")


def table() -> tuple[str, list[str], list[list[str]]]:
    """Caption, header and rows of the README's table."""
    report = json.loads(RESULTS.read_text())
    libraries = report["libraries"]
    header = ["", "adagc_jax"]
    header += list(libraries)
    rows = [
        [label, OURS[feature]]
        + [said["answers"][feature] for said in libraries.values()]
        for feature, label in report["features"].items()
    ]
    versions = ", ".join(
        f"{name} {said['version']}" for name, said in libraries.items()
    )
    caption = f"Checked on {report['date']} against the released code of {versions}."
    return caption, header, rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    said: dict[str, Any] = tomllib.loads(CLAIMS.read_text())
    libraries = {}
    for library, claims in said["libraries"].items():
        version = claims.pop("version")
        if missing := said["features"].keys() - claims.keys():
            raise ValueError(f"{CLAIMS.name}: {library} lacks {sorted(missing)}")
        check(library, version, claims)
        print(f"{library} {version}: {len(claims)} claims hold")
        answers = {feature: claims[feature]["answer"] for feature in said["features"]}
        libraries[library] = {"version": version, "answers": answers}
    report = {
        "date": datetime.date.today().isoformat(),
        "features": said["features"],
        "libraries": libraries,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
