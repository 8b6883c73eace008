"""Describe the machine of a benchmark, and read the peak memory and the processor time of a process."""

import os
import platform
import resource
import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
"""What decides which loops run; a processor's name often does not say which of them it has."""
DIRTY = "-dirty"
"""After a commit: the files were not those of the commit. What runs write under results/ does not count."""


def peak_bytes() -> int:
    """Return the peak resident bytes of this program since it began, or since `forget_peak`.

    Uses `VmHWM`, which the kernel resets for every program; `ru_maxrss` is inherited from the parent process, so a
    child would show no growth until it is larger than its parent's peak.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def forget_peak() -> None:
    """Reset the peak to the current resident bytes, so that it does not include the loading of a model."""
    Path("/proc/self/clear_refs").write_text("5")


def cpu_seconds() -> float:
    """Return the processor seconds of this process and of its ended child processes."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usages)


def process_tree(root: int) -> list[int]:
    """Return the ids of a process and its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    pids = [root]
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def hardware() -> dict[str, str]:
    cpuinfo = _cpuinfo()
    flags = cpuinfo.get("flags", "").split()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(ROOT),
        "processor": cpuinfo.get("model name") or platform.processor() or platform.machine(),
        "family, model": f"{cpuinfo.get('cpu family', '?')}, {cpuinfo.get('model', '?')}",
        "instructions": " ".join(flag for flag in INSTRUCTIONS if flag in flags),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB",
        "python": platform.python_version(),
    }


def commit(root: Path) -> str:
    """Return the short name of the checked-out commit of `root`, and whether its files differ."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout.strip()

    changes = git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return git("rev-parse", "--short", "HEAD") + (DIRTY if changes else "")


def _cpuinfo() -> dict[str, str]:
    """Return what the system says about the first processor, empty where it says nothing."""
    path = Path("/proc/cpuinfo")
    first = path.read_text().partition("\n\n")[0] if path.exists() else ""
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
