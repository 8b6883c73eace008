"""Read measured rates for the simulation: from the parts on file, else from a quick measurement, which is reported.

A part states a rate in `facts["rates"]` under one of the names below; if it does not, the rate is that of a case: its
work over its median. Of cases that differ only in size, the largest counts.
"""

import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cluster_model import Scan
from measure import line

KNOWN = {
    "encoded passages/s": ("encoding", r"mvr_ray fp32"),
    "encoded passages/s, bf16": ("encoding", r"mvr_ray bf16"),
    "encoded passages/s, int8": ("encoding", r"mvr_ray int8"),
    "encoded passages/s, GPU": ("gpu", r"ours, packed, bf16"),
    "indexed passages/s": ("growth", r"index, ([\d,]+) passages"),
    "re-indexed passages/s, 5 % of them dirty": ("refinement", r"re-index, changed alone"),
    "updated passages/s": ("refinement", r"update, closed form"),
}
"""Name of a rate: the part that measures it, and what its case is called."""
SCANS = {"fp16": "fp16", "int8": "int8 + re-scoring"}
"""What is scanned: how the part `search` calls it."""
FEW, MANY = 1, 32


class Rate(NamedTuple):
    """A rate per second, its source, and the fixed seconds before."""

    value: float
    source: str
    fixed_s: float = 0.0


def read_rates(folder: Path) -> dict[str, Rate]:
    """Return every rate of KNOWN that a part on file has."""
    rates = {}
    for name, (part, pattern) in KNOWN.items():
        path = folder / f"{part}.json"
        if path.is_file():
            rate = read_rate(name, json.loads(path.read_text()), pattern)
            if rate is not None:
                rates[name] = rate
    return rates


def read_rate(name: str, report: Mapping, pattern: str) -> Rate | None:
    """Return the rate in one part's report, None if it has none."""
    source = f"{report['name']}.json of {report['hardware']['date']}"
    rates = report["facts"].get("rates", {})
    if name in rates:
        return Rate(float(rates[name]), source)
    matches = [match for case in report["samples"] if (match := re.fullmatch(pattern, case))]
    if not matches:
        return None
    by_size = {int(match[1].replace(",", "")): match.string for match in matches if match.groups()}
    if len(by_size) > 1:
        fit = line(list(by_size), [statistics.median(report["samples"][case]) for case in by_size.values()])
        if fit.each_s:
            sizes = f"a line through {len(by_size)} sizes from {min(by_size):,} to {max(by_size):,}"
            return Rate(1 / fit.each_s, f"{source}, {sizes}", fit.fixed_s)
    case = by_size[max(by_size)] if by_size else matches[0].string
    return Rate(report["work"][case] / statistics.median(report["samples"][case]), f"{source}, case {case!r}")


def read_scans(folder: Path, threads: int) -> tuple[dict[str, Scan], str]:
    """Return the part `search`'s measurements of exhaustive search on `threads`, and its date; empty if it has none."""
    path = folder / "search.json"
    if not path.is_file():
        return {}, ""
    report = json.loads(path.read_text())
    name, scans = f"{threads} thread{'s' * (threads > 1)}", {}
    for kind, case in SCANS.items():
        samples = [report["samples"].get(f"{name}, batch {batch}, {case}") for batch in (FEW, MANY)]
        if all(samples) and "vectors" in report["facts"]:
            one, many = samples
            spread = float(np.std(np.log(one)))
            medians = statistics.median(one), statistics.median(many)
            scans[kind] = Scan(int(report["facts"]["vectors"]), *medians, MANY, spread, threads)
    return scans, report["hardware"]["date"]
