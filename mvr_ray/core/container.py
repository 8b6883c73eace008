"""Read the limits of the container that this process runs in, by cgroup v2; there are none elsewhere."""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cgroup_text(name: str) -> str:
    """Return the text of a file of the container's group; empty where it is not there."""
    path = CGROUP / name
    return path.read_text().strip() if path.is_file() else ""


def memory_limit() -> int | None:
    """Return the most bytes that the container may use; None without a limit."""
    text = cgroup_text("memory.max")
    return int(text) if text.isdigit() else None


def cpu_limit() -> float | None:
    """Return the number of processors whose time the container may use; None without a limit."""
    quota, _, period = cgroup_text("cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() else None
