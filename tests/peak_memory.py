"""Measures the peak of this process's memory, for tests that bound it in a process of their own."""

from pathlib import Path


def peak_kb() -> int:
    """The most that this program had resident. `ru_maxrss` would count what its parent had before the program began."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1])
