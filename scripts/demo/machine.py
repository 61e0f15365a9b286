"""What the numbers were measured on."""

import os
import platform
from pathlib import Path


def describe():
    return {
        "cpu": first_value("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        # Above about half of the cores, other work disturbed the timings.
        "load_before": round(os.getloadavg()[0], 2),
    }


def first_value(path, key):
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def memory_gib():
    total = first_value("/proc/meminfo", "MemTotal")
    return round(int(total.split()[0]) / 2**20, 1) if total else None
