"""Facts about the machine that results depend on. No TensorFlow."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

# Variables that change how fast TensorFlow, XLA and oneDNN run.
ENVIRONMENT = (
    "XLA_FLAGS",
    "TF_XLA_FLAGS",
    "TF_ENABLE_ONEDNN_OPTS",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "OMP_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "TF_CUDNN_USE_AUTOTUNE",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
)
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")
SECONDS = 2  # for nvidia-smi, which hangs where a driver does


def describe() -> dict:
    """Describe CPU, GPUs, memory, load and the variables of `ENVIRONMENT`; None for what is not known."""
    information = cpu_information()
    flags = information.get("flags", "").split()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    return {
        "platform": platform.platform(),
        "cpu": information.get("model name") or platform.processor() or platform.machine(),
        "logical_cores": os.cpu_count(),
        "usable_cores": usable,
        "cpu_flags": {name: name in flags for name in CPU_FLAGS} if flags else None,
        "memory_bytes": pages,
        "gpus": nvidia_gpus(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
    }


def cpu_information() -> dict[str, str]:
    """Read the first processor of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def nvidia_gpus() -> list[str]:
    """List name, driver and memory of each NVIDIA card; empty where nvidia-smi is missing, fails or hangs."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines() if answer.returncode == 0 else []
