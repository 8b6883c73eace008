"""What a benchmark's figures were measured on, and the most memory that a process held."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DIRTY = "-dirty"
"""After a commit: the files were not those of the commit. What runs write under results/ does not count."""


def peak_bytes() -> int:
    """The most resident bytes of this program since it began, or since `forget_peak`.

    By `VmHWM`: the kernel begins it anew with every program, while `ru_maxrss` is handed down from the process that
    started this one, so that a child seems to grow by nothing until it is larger than its parent ever was.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def forget_peak() -> None:
    """From here on the peak counts from what is resident now, not from what loading a model took."""
    Path("/proc/self/clear_refs").write_text("5")


def hardware() -> dict[str, str]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(ROOT),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB",
        "python": platform.python_version(),
    }


def commit(root: Path) -> str:
    """The short name of the commit that `root` has checked out, and whether its files are others."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return git("rev-parse", "--short", "HEAD") + (DIRTY if changed else "")


def _processor() -> str:
    """The model's name where the system tells it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
