"""Builds, tests and measures on a machine with a CUDA device: one command, a few minutes.

    python bench/cuda_check.py
    python bench/cuda_check.py --only build,collectives

The results go to bench/results/cuda-DEVICE.json and .txt: each step's figures, and what failed; the
exit code is 1 if any did. Needs nvcc, CMake, ninja, nanobind, pytest and a PyTorch for CUDA in this
interpreter, and no network: ranks are started by torchrun. They share the device if there are more
of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
TORCH = ("torch_training", "torch_optimizers", "torch_arrays", "torch_exchanges", "torch_ops")
TORCH += ("torch_amp", "torch_joining", "torch_state", "torch_closures", "torch_complex")


def run(words: list[str], seconds: float, **variables: str) -> tuple[int, str]:
    """A command's exit code, 124 if it takes longer, and what it printed."""
    try:
        ended = subprocess.run(
            words,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        return 124, output.decode(errors="replace") if isinstance(output, bytes) else output
    return ended.returncode, ended.stdout


def ranks(count: int, *words: str) -> list[str]:
    """The command that starts ranks without MPI."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    return [*torchrun, "--master-addr", "127.0.0.1", "--master-port", "29577", *words]


def facts() -> dict[str, Any]:
    """What this was run on."""
    import torch

    device = torch.cuda.get_device_properties(0)
    driver = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 20)[1]
    nvcc = run(["nvcc", "--version"], 20)[1]
    return {
        "device": device.name,
        "devices": torch.cuda.device_count(),
        "bytes": device.total_memory,
        "capability": f"{device.major}.{device.minor}",
        "driver": driver.strip(),
        "nvcc": (re.findall(r"release (\S+),", nvcc) or ["none"])[0],
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }


def build(report: dict[str, Any]) -> bool:
    """The engine, into ringdl/."""
    import nanobind

    folder = str(ROOT / "build" / "cuda")
    commands = [
        [
            "cmake",
            "-S",
            "csrc",
            "-B",
            folder,
            "-G",
            "Ninja",
            "--log-level=WARNING",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
            "-DRINGDL_TESTS=ON",
        ],
        ["cmake", "--build", folder],
        ["cmake", "--build", folder, "--target", "device_executor_test"],
        ["cmake", "--install", folder, "--prefix", str(ROOT)],
    ]
    for words in commands:
        code, output = run(words, 300)
        if code != 0:
            report["output"] = output[-3000:]
            return False
    return True


def doctor(report: dict[str, Any]) -> bool:
    """What ringdl says of the device."""
    code, output = run([sys.executable, "-m", "ringdl", "doctor", "--quick"], 60)
    report["said"] = [line for line in output.splitlines() if "CUDA" in line]
    return code == 0 and "compute capability" in output


def checks(
    report: dict[str, Any], cases: list[tuple[str, int, tuple[str, ...], dict[str, str]]]
) -> bool:
    """Jobs of tests.ranks: what each said in the end, and all of it if it failed."""
    is_well = True
    for name, count, modules, variables in cases:
        code, output = run(ranks(count, "-m", "tests.ranks", *modules), 120, **variables)
        said = re.findall(r"\d+ checks on .*", output)
        report[name] = said[-1] if said else f"exit code {code}"
        if code != 0:
            report[f"{name}: output"] = output[-6000:]
            is_well = False
    return is_well


def collectives(report: dict[str, Any]) -> bool:
    """Every collective, dtype and reduction, on 1 to 4 ranks that share the device."""
    return checks(
        report,
        [
            (
                f"{count} ranks{' without shared memory' * (shared == '0')}",
                count,
                ("_devices", "_cupy", "_nccl"),
                {"RINGDL_SHARED_MEMORY": shared},
            )
            for count in (1, 2, 3, 4)
            for shared in ("1", "0")
            if count > 1 or shared == "1"
        ],
    )


def training(report: dict[str, Any]) -> bool:
    """The CPU's checks of ringdl.torch, with tensors on the device."""
    variables = {"RINGDL_TEST_DEVICE": "cuda"}
    cases = [(f"{module}, 2 ranks", 2, (module,), variables) for module in TORCH]
    return checks(report, [("torch_training, 3 ranks", 3, TORCH[:1], variables), *cases])


def libraries(report: dict[str, Any]) -> bool:
    """JAX, DDP, FSDP2 and Numba; graphs; 100,000 works."""
    lazily = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # ranks share the device's memory
    variables = {"RINGDL_TEST_DEVICE": "cuda"}
    cases = [(f"{n} ranks", n, ("_on_cuda",), variables) for n in (1, 2)]
    return checks(report, [("JAX, 2 ranks", 2, ("_jax",), lazily), *cases])


def kernels(report: dict[str, Any]) -> bool:
    """Each kernel, dtype and reduction: the CPU's bits; also under NVIDIA's compute-sanitizer."""
    test = [str(ROOT / "build" / "cuda" / "tests" / "device_executor_test")]
    cases = {"the CPU's bits": (test, 60)}
    if shutil.which("compute-sanitizer") is not None:
        for tool in ("memcheck", "racecheck"):
            words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
            cases[tool] = ([*words, *test], 120)
    is_well = True
    for name, (words, limit) in cases.items():
        code, output = run(words, limit, RINGDL_TEST_DRIVER="real")
        report[name] = output.splitlines()[-2:] if code == 0 else output[-3000:]
        is_well &= code == 0
    return is_well


def speed(report: dict[str, Any]) -> bool:
    """Copies, allreduces and a training step of two ranks that share the device."""
    answer = ROOT / "build" / "cuda-speed.json"
    for peers in ("1", "0"):
        answer.unlink(missing_ok=True)
        words = ranks(2, "bench/cuda_ranks.py", str(answer))
        code, output = run(words, 150, RINGDL_CUDA_PEERS=peers)
        if code != 0 or not answer.exists():
            report["output"] = output[-4000:]
            return False
        report.update(json.loads(answer.read_text()))
    return True


STEPS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "build": build,
    "doctor": doctor,
    "kernels": kernels,
    "collectives": collectives,
    "training": training,
    "libraries": libraries,
    "speed": speed,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(STEPS), help="steps, separated by commas")
    parser.add_argument("--into", type=Path, default=RESULTS, help="the folder of the results")
    chosen = parser.parse_args()
    found: dict[str, Any] = {"command": "python bench/cuda_check.py", "machine": facts()}
    failed = []
    for name in chosen.only.split(","):
        begin = time.monotonic()
        report: dict[str, Any] = {}
        try:
            is_well = STEPS[name](report)
        except Exception as error:
            is_well, report["error"] = False, repr(error)
        report["seconds"] = round(time.monotonic() - begin, 1)
        found[name] = {"passed": is_well} | report
        failed += [] if is_well else [name]
        sys.stdout.write(f"== {name}: {'passed' if is_well else 'FAILED'}\n{_text(report)}\n")
        sys.stdout.flush()
    stem = "cuda-" + re.sub(r"\W+", "-", found["machine"]["device"]).strip("-").lower()
    chosen.into.mkdir(parents=True, exist_ok=True)
    (chosen.into / f"{stem}.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = [f"{key}: {value}" for key, value in found["machine"].items()]
    for name in chosen.only.split(","):
        lines += ["", f"== {name}: {'FAILED' if name in failed else 'passed'}", _text(found[name])]
    (chosen.into / f"{stem}.txt").write_text("\n".join(lines) + "\n")
    return 1 if failed else 0


def _text(report: dict[str, Any], indent: str = "  ") -> str:
    lines = []
    for key, value in report.items():
        inner = f"\n{_text(value, indent + '  ')}" if isinstance(value, dict) else f" {value}"
        lines.append(f"{indent}{key}:{inner}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
