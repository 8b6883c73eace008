"""The suite: every part in a process of its own, one after the other, and one table of them all.

    python benchmarks/suite.py                # what is not on file for this commit; --all measures all of it again
    python benchmarks/suite.py search router  # these parts alone

Raw samples stand in results/bench/<part>.json, the table in results/bench.md. A part that fails is named at the end,
and the table is made of the others.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from machine import RESULTS, ROOT, hardware
from measure import FOLDER, bar_row, markdown

PARTS = ("search", "approximate", "encoding", "training", "refinement", "router", "growth", "simulate")
HEAD = """# How fast, how small, how linear

Every figure is a ratio of two things measured in turn in one run on one machine, or a share of the least time that the
machine's measured memory bandwidth or matrix rate allows. A sample is one run; cases are interleaved; what is compared
is the median over rounds of the ratio within a round. Made by `make bench`; raw samples are in [bench/](bench).
"""


def on_file(part: str) -> bool:
    path = FOLDER / f"{part}.json"
    return path.exists() and json.loads(path.read_text())["hardware"]["commit"] == hardware()["commit"]


def collect() -> Path:
    """The table of all parts on file, the bars first."""
    kept = [part for part in (*PARTS, "load", "gpu") if _kept(part)]
    reports = {part: json.loads((FOLDER / f"{part}.json").read_text()) for part in kept}
    lines = [HEAD, "| part | bar | asked | measured | |", "|---|---|---|---|---|"]
    for part, report in reports.items():
        lines += [f"| {part} | {bar_row(bar)} |" for bar in report["bars"]]
    missing = [part for part in PARTS if part not in reports]
    lines += [f"| {part} | every bar of `python benchmarks/{part}.py` | | not measured yet | |" for part in missing]
    if "gpu" not in reports:
        lines.append("| gpu | every bar of `python benchmarks/gpu.py` | | not measured: no GPU | |")
    lines.append("")
    target = RESULTS / "bench.md"
    target.write_text("\n".join([*lines, *(markdown(report) for report in reports.values())]))
    return target


def _kept(part: str) -> bool:
    return (FOLDER / f"{part}.json").exists()


def main(names: list[str]) -> int:
    again = "--all" in names
    asked = [name for name in names if name != "--all"]
    unknown = [name for name in asked if name not in PARTS]
    if unknown:
        print(f"no part is called {unknown[0]!r}; the parts are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    failed = []
    for part in asked or PARTS:
        if not asked and not again and on_file(part):
            print(f"{part}: on file for this commit", flush=True)
            continue
        print(f"{part}: measuring", flush=True)
        started = time.monotonic()
        if subprocess.run([sys.executable, f"benchmarks/{part}.py"], cwd=ROOT).returncode:
            failed.append(part)
        print(f"{part}: {time.monotonic() - started:.0f} s", flush=True)
    print(f"the table is {collect().relative_to(ROOT)}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
