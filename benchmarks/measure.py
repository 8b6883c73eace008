"""Compare cases in one run: interleaved rounds, ratios of the same round, and the floors of the machine.

A part of the suite is one file of this folder. It times its cases with `interleave`, states its targets as `Bar`s, and
ends with `write`, which stores every raw sample in `results/bench/<part>.json`. `suite.py` runs the parts and makes
their common table.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from machine import RESULTS, hardware

from mvr_ray.distributed.cluster.periodic import run_every

FOLDER = RESULTS / "bench"
ROUNDS = 5
KINDS = {"avx2": "with AVX2 alone", "no-amx": "without AMX", "no-bf16": "without bfloat16"}


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

    @classmethod
    def of_kind(cls, name: str, title: str, unit: str, kind: str) -> "Part":
        """Make a part of a kind of processor (one of `KINDS`, or ""), whose figures do not take the place of others."""
        return cls(f"{name}-{kind}", f"{title}, {KINDS[kind]}", unit) if kind else cls(name, title, unit)

    def add(self, samples: Mapping[str, list[float]], work: float) -> None:
        for name, seconds in samples.items():
            self.samples[name], self.work[name] = list(seconds), work


def interleave(cases: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS, warm: int = 1) -> dict[str, list[float]]:
    """Measure the seconds of each case in each round: all cases run once, in turn, before any runs again. The first
    `warm` rounds are not counted."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(warm + rounds):
        for name, run in cases.items():
            gc.collect()
            start_s = time.perf_counter()
            run()
            seconds = time.perf_counter() - start_s
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


@contextmanager
def record_time(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the seconds of a block to those of its stage, and print them."""
    began = time.perf_counter()
    yield
    own = time.perf_counter() - began
    seconds[stage] = seconds.get(stage, 0.0) + own
    print(f"{stage}: {own:.2f} s", flush=True)


class Sampler(Protocol):
    """Looks at something that changes while a block runs."""

    def look(self) -> object: ...


S = TypeVar("S", bound=Sampler)


@contextmanager
def sampling(sampler: S, interval_s: float) -> Iterator[S]:
    """Let a sampler look every `interval_s` seconds while the block runs, and at its end."""
    with run_every(interval_s, sampler.look, type(sampler).__name__, join_s=None):
        yield sampler
    sampler.look()


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
    """Store the part with its raw samples and the machine with its rates, and print it."""
    from floors import one_thread_rates  # floors times its loops by this module

    FOLDER.mkdir(parents=True, exist_ok=True)
    machine = {**hardware(), "one thread": one_thread_rates()}
    report = {**asdict(part), "bars": [{**asdict(bar), "met": bar.is_met} for bar in part.bars], "hardware": machine}
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
    """Return one part as Markdown: its cases, its targets, its settings. Names `A: B` of many A by many B are a grid of
    medians, ratios or facts."""
    lines = [f"## {report['title']}", ""]
    if in_grid(report["samples"]):
        medians = {name: _format_seconds(statistics.median(seconds)) for name, seconds in report["samples"].items()}
        lines += ["Medians:", "", *_grid(_swap(medians))]
    elif report["samples"]:
        lines += [f"| case | median | least..most | {report['unit']}/s | share of the floor |", "|---|---|---|---|---|"]
        for name, seconds in report["samples"].items():
            middle, floor = statistics.median(seconds), report["floors"].get(name)
            share = f"{floor / middle:.0%}" if floor else ""
            spread = f"{_format_seconds(min(seconds))}..{_format_seconds(max(seconds))}"
            rate = report["work"][name] / middle
            lines.append(f"| {name} | {_format_seconds(middle)} | {spread} | {rate:,.4g} | {share} |")
        lines.append("")
    bars = report["bars"]
    if in_grid([bar["what"] for bar in bars]) and len({target(bar) for bar in bars}) == 1:
        ratios = {bar["what"]: f"{bar['measured']:.3g}" if bar["met"] else f"**{bar['measured']:.3g}**" for bar in bars}
        lines += [f"Ratios; asked are {target(bars[0])}, what misses that is bold:", "", *_grid(_swap(ratios))]
    elif bars:
        lines += ["| bar | asked | measured | |", "|---|---|---|---|"]
        lines += [f"| {bar_row(bar)} |" for bar in bars]
        lines.append("")
    for note in dict.fromkeys(bar["note"] for bar in bars if bar["note"]):
        names = [bar["what"] for bar in bars if bar["note"] == note]
        cases = dict.fromkeys(name.split(": ")[0] for name in names) if len(names) > 1 else names
        lines.append(f"- {'; '.join(cases)}: {note}")
    facts = {key: _fact(value) for key, value in report["facts"].items()}
    many = {key: fact for key, fact in facts.items() if ": " in key}
    lines += [f"- {key}: {fact}" for key, fact in facts.items() if key not in many or not in_grid(many)]
    machine = report["hardware"]
    where = describe(machine)
    took = f", in {report['seconds']:.0f} s" if "seconds" in report else ""
    lines.append(f"- measured {machine['date']} at commit {machine['commit']}, {where}{took}")
    if in_grid(many):
        lines += ["", *_grid(many)]
    return "\n".join(lines).rstrip("\n") + "\n"


def describe(machine: Mapping[str, Any]) -> str:
    """Return cores, processor, memory and measured rates; older results have only some of them."""
    kind = [machine["kind"]] if "kind" in machine else []
    if "instructions" in machine:
        kind = [f"family and model {machine['family, model']}", machine["instructions"] or "no vector instructions"]
    text = f"{machine['cores']} cores of {machine['processor']}" + (f" ({'; '.join(kind)})" if kind else "")
    text += f", {machine['memory']} of memory" if "memory" in machine else ""
    return text + (f", one thread {_fact(machine['one thread'])}" if "one thread" in machine else "")


def in_grid(names: Iterable[str]) -> bool:
    """Whether the names are `A: B` of at least three A and three B, in nearly all combinations."""
    pairs = {tuple(name.split(": ", 1)) for name in names}
    sizes = [len({pair[at] for pair in pairs if len(pair) == 2}) for at in (0, 1)]
    return min(sizes) >= 3 and 0.9 * sizes[0] * sizes[1] <= sum(len(pair) == 2 for pair in pairs) == len(pairs)


def _swap(cells: Mapping[str, str]) -> dict[str, str]:
    return {": ".join(reversed(name.split(": ", 1))): cell for name, cell in cells.items()}


def _grid(cells: Mapping[str, str]) -> list[str]:
    """Return the cells of names `row: column` as a table, and a blank line."""
    pairs = {tuple(name.split(": ", 1)): cell for name, cell in cells.items()}
    rows, columns = (list(dict.fromkeys(pair[at] for pair in pairs)) for at in (0, 1))
    lines = [f"| | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    lines += [f"| {row} | {' | '.join(pairs.get((row, column), '') for column in columns)} |" for row in rows]
    return [*lines, ""]


def bar_row(bar: Mapping[str, Any]) -> str:
    """Return target, measurement and whether it is met, as cells of a Markdown table."""
    return f"{bar['what']} | {target(bar)} | {measurement(bar)} | {'met' if bar['met'] else '**missed**'}"


def measurement(bar: Mapping[str, Any]) -> str:
    return f"{bar['measured']:.3g} {bar['unit']}"


def target(bar: Mapping[str, Any]) -> str:
    return f"{'>=' if bar['at_least'] else '<='} {bar['bar']:g} {bar['unit']}"


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(f"{k} {_fact(v)}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def _format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
