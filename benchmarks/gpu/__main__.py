"""Measures on one device, within ten minutes, all that needs a GPU; writes JSON and a page.

python -m benchmarks.gpu                            # on a GPU; call again for what is left
python -m benchmarks.gpu --device cpu --size tiny   # shows that every part works

A part runs in its own process with a time limit; if it fails, its line says why and the others go
on. Parts that the results have of the same code and device are not repeated, except those that did
not run. Needs no network. Writes a file per device, size and version of the code into
benchmarks/results/gpu, and docs/gpu.md; or all into --out.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from contextlib import chdir
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.demo import RESULTS, ROOT, machine
from benchmarks.gpu.page import write_page
from benchmarks.gpu.parts import NO_CUDA, PARTS
from benchmarks.gpu.sizes import WORK, Target, describe_device
from benchmarks.seeds import read_folder
from grpo.runtime.artifacts.files import digest, read_json, write_bytes, write_json

CODE = ("grpo", "stages", "benchmarks", "tests/gpu", "tests/twins")
PACKAGES = ("torch", "transformers", "vllm", "trl")
LIMIT_SECONDS = 570.0  # of a call: a session on a lent GPU may have ten minutes per command
LEAST_SECONDS = 20.0  # for which a part is started
Result = dict[str, Any]


def main() -> None:
    """Runs the missing parts, one after the other, and writes the results after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=WORK, default="full")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="of the whole call")
    parser.add_argument("--out", type=Path, help="folder of all that is written")
    chosen = parser.parse_args()
    end = time.monotonic() + chosen.seconds
    target = Target(device=chosen.device, size=chosen.size)
    if target.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"{NO_CUDA}; --device cpu --size tiny runs every part on a CPU")
    folder = (chosen.out or RESULTS) / "gpu"
    page_file = (chosen.out or ROOT / "docs") / "gpu.md"
    path, run = open_run(folder, target)
    for part in chosen.part or PARTS:
        known = run["parts"].get(part, {"state": "did not run"})
        if known["state"] != "did not run":
            print(f"{part}: {known['state']}, as measured before", flush=True)
            continue
        run["parts"][part] = run_part(part, target, end - time.monotonic())
        print(f"{part}: {describe(run['parts'][part])}", flush=True)
        write_json(path, run)
    write_bytes(page_file, write_page(read_folder(folder)).encode())


def open_run(folder: Path, target: Target) -> tuple[Path, Result]:
    """Returns the file and the content of this device's run with this code."""
    device, code = describe_device(target), digest_code()
    name = re.sub("[^a-z0-9]+", "-", f"{device['name']} {target.size} {code}".lower())
    path = folder / f"{name}.json"
    known: Result = read_json(path) if path.exists() else {}
    about = {"command": f"python -m benchmarks.gpu --device {target.device} --size {target.size}"}
    installed = {each: version(each) for each in PACKAGES if find_spec(each)}
    versions = {**known.get("versions", {}), **installed, "cuda": torch.version.cuda}
    return path, {
        **about,
        "code": code,
        "size": target.size,
        "device": device,
        "machine": machine(),
        "versions": versions,
        "parts": known.get("parts", {}),
    }


def digest_code() -> str:
    """Returns a digest of the code that parts run."""
    with chdir(ROOT):
        files = sorted(file for each in CODE for file in Path(each).rglob("*.py"))
        return digest(files)[:12]


def run_part(name: str, target: Target, seconds_left: float) -> Result:
    """Returns the result of a part, or why there is none."""
    part = PARTS[name]
    obstacle = part.find_obstacle(target)
    if obstacle is None and seconds_left < LEAST_SECONDS:
        obstacle = "the time of this call was over; call the command again"
    if obstacle is not None:
        return {"state": "did not run", "reason": obstacle}
    limit = min(part.seconds, seconds_left) if target.device == "cuda" else seconds_left
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.parts", name]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        try:
            done = subprocess.run(
                [*command, target.device, target.size, str(out)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            is_short = limit < part.seconds  # a later call has more time for it
            state = "did not run" if is_short else "failed"
            return {"state": state, "reason": f"was not done after {limit:.0f} s"}
        seconds = round(time.monotonic() - start, 1)
        if done.returncode != 0 or not out.exists():
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            reason = lines[-1] if lines else f"ended with exit code {done.returncode}"
            return {"state": "failed", "seconds": seconds, "reason": reason}
        return {"state": "done", "seconds": seconds, "result": read_json(out)}


def describe(found: Result) -> str:
    """Returns the state of a part in one line."""
    reason = f", {found['reason']}" if "reason" in found else ""
    took = f" in {found['seconds']} s" if "seconds" in found else ""
    return f"{found['state']}{took}{reason}"


if __name__ == "__main__":
    main()
