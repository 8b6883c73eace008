"""Measured rates for the simulation: from the parts on file, else from a quick measurement of its own, which is told.

A part tells a rate in `facts["rates"]`, by one of the names below; where it does not, the name of a case that can only
mean that rate is looked for, and its rate is its work over its median.
"""

import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

OURS = r"(ours|mvr_ray)"
KNOWN = {
    "encoded passages/s": ("encoding", rf"{OURS}.*(fp32|float32)"),
    "encoded passages/s, int8": ("encoding", rf"{OURS}.*int8"),
    "encoded passages/s, GPU": ("gpu", rf"{OURS}.*packed.*bf16"),
    "scanned vectors/s, fp16, one query": ("search", None),
    "scanned vectors/s, int8, one query": ("search", None),
    "indexed passages/s": ("growth", r"index\b.*(1,000,000|1 ?M|1000 ?k)"),
    "published versions/s": ("growth", r"publish.*(1,000,000|1 ?M|1000 ?k)"),
    "updated passages/s": ("refinement", rf"{OURS}.*update"),
}
"""Name of a rate: the part that measures it, and what its case is called (None: only `facts["rates"]` can tell it)."""


class Rate(NamedTuple):
    """So many a second, and where that is from."""

    value: float
    source: str


def read_rates(folder: Path) -> dict[str, Rate]:
    """Every rate of KNOWN that a part on file tells."""
    found = {}
    for name, (part, pattern) in KNOWN.items():
        path = folder / f"{part}.json"
        if path.is_file():
            rate = told(name, json.loads(path.read_text()), pattern)
            if rate is not None:
                found[name] = rate
    return found


def told(name: str, report: Mapping, pattern: str | None) -> Rate | None:
    """The rate in one part's report; None where it tells none, or several cases could mean it."""
    source = f"{report['name']}.json of {report['hardware']['date']}"
    stated = report["facts"].get("rates", {})
    if name in stated:
        return Rate(float(stated[name]), source)
    cases = [case for case in report["samples"] if pattern and re.search(pattern, case, re.IGNORECASE)]
    if len(cases) != 1:
        return None
    [case] = cases
    return Rate(report["work"][case] / statistics.median(report["samples"][case]), f"{source}, case {case!r}")
