"""Compare cases in one run: interleaved rounds, ratios of the same round, and the floors of the machine.

A part of the suite is one file of this folder. It times its cases with `interleave`, states its targets as `Bar`s, and
ends with `write`, which stores every raw sample in `results/bench/<part>.json`. `suite.py` runs the parts and makes
their common table.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from machine import RESULTS, hardware

FOLDER = RESULTS / "bench"
ROUNDS = 5


@dataclass(frozen=True)
class Bar:
    """A target and its result: `measured` at least (or at most) `bar`."""

    what: str
    measured: float
    bar: float
    at_least: bool = True
    unit: str = "x"
    note: str = ""
    """For a miss: what the profile shows and what was tried."""

    @property
    def is_met(self) -> bool:
        return self.measured >= self.bar if self.at_least else self.measured <= self.bar


@dataclass
class Part:
    """The measurements of one part of the suite. Samples are seconds; `work` is the work of one sample, in `unit`s."""

    name: str
    title: str
    unit: str
    work: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    """Case to the least seconds that this machine's bandwidth or matrix rate allow it."""
    bars: list[Bar] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Settings, measured rates of the machine, versions of the peers, sizes."""

    def add(self, samples: Mapping[str, list[float]], work: float) -> None:
        for name, seconds in samples.items():
            self.samples[name], self.work[name] = list(seconds), work


def interleave(
    cases: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS, warm: int = 1, repeat: int = 1
) -> dict[str, list[float]]:
    """Measure the seconds of each case in each round: all cases run once, in turn, before any runs again. A sample is
    the mean of `repeat` runs, for cases under a millisecond. The first `warm` rounds are not counted."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(warm + rounds):
        for name, run in cases.items():
            gc.collect()
            start_s = time.perf_counter()
            for _ in range(repeat):
                run()
            seconds = (time.perf_counter() - start_s) / repeat
            if number >= warm:
                samples[name].append(seconds)
    return samples


def in_a_row(run: Callable[[], Any], times: int, warm: int = 0) -> list[float]:
    """Measure the seconds of consecutive runs on an otherwise idle machine."""
    seconds = []
    for number in range(warm + times):
        began = time.perf_counter()
        run()
        if number >= warm:
            seconds.append(time.perf_counter() - began)
    return seconds


def speedup(samples: Mapping[str, Sequence[float]], ours: str, peer: str) -> float:
    """Return our speed relative to `peer`: the median over rounds of the ratio within the round."""
    return statistics.median(b / a for a, b in zip(samples[ours], samples[peer], strict=True))


class Line(NamedTuple):
    """A time as a fixed part, and seconds for each further unit."""

    fixed_s: float
    each_s: float


def line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit the straight line of least squares with both parts >= 0."""
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    each, intercept = np.polyfit(x, y, 1)
    if intercept < 0:
        each, intercept = float(x @ y / (x @ x)), 0.0
    if each < 0:
        each, intercept = 0.0, float(y.mean())
    return Line(float(intercept), float(each))


def write(part: Part) -> None:
    """Store the part with its raw samples, and print it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    report = {**asdict(part), "bars": [{**asdict(bar), "met": bar.is_met} for bar in part.bars], "hardware": hardware()}
    target = FOLDER / f"{part.name}.json"
    scratch = target.with_suffix(".part")
    scratch.write_text(json.dumps(report, indent=2, default=_plain) + "\n")
    scratch.replace(target)
    print(markdown(report))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def markdown(report: Mapping[str, Any]) -> str:
    """Return one part as Markdown: its cases, its targets, its settings."""
    lines = [f"## {report['title']}", ""]
    if report["samples"]:
        lines += [f"| case | median | least..most | {report['unit']}/s | share of the floor |", "|---|---|---|---|---|"]
        for name, seconds in report["samples"].items():
            middle, floor = statistics.median(seconds), report["floors"].get(name)
            share = f"{floor / middle:.0%}" if floor else ""
            spread = f"{_format_seconds(min(seconds))}..{_format_seconds(max(seconds))}"
            lines.append(
                f"| {name} | {_format_seconds(middle)} | {spread} | {report['work'][name] / middle:,.4g} | {share} |"
            )
        lines.append("")
    if report["bars"]:
        lines += ["| bar | asked | measured | |", "|---|---|---|---|"]
        lines += [f"| {bar_row(bar)} |" for bar in report["bars"]]
        lines.append("")
        lines += [f"- {bar['what']}: {bar['note']}" for bar in report["bars"] if bar["note"]]
        lines.append("")
    lines += [f"- {key}: {_fact(value)}" for key, value in report["facts"].items()]
    machine = report["hardware"]
    with_memory = f", {machine['memory']} of memory" if "memory" in machine else ""
    where = f"{machine['cores']} cores of {machine['processor']}{with_memory}"
    took = f", in {report['seconds']:.0f} s" if "seconds" in report else ""
    lines.append(f"- measured {machine['date']} at commit {machine['commit']}, {where}{took}")
    return "\n".join(lines) + "\n"


def bar_row(bar: Mapping[str, Any]) -> str:
    """Return target, measurement and whether it is met, as cells of a Markdown table."""
    target = f"{'>=' if bar['at_least'] else '<='} {bar['bar']:g} {bar['unit']}"
    return f"{bar['what']} | {target} | {bar['measured']:.3g} {bar['unit']} | {'met' if bar['met'] else '**missed**'}"


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(f"{k} {_fact(v)}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def _format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
