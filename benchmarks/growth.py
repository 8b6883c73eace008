"""Measure how time and memory grow with the corpus, against the estimate of `mvr-ray plan`.

    python benchmarks/growth.py             # 10 k, 30 k and 100 k passages x 8 views
    python benchmarks/growth.py --large     # 1 M passages, and 10 M views; in results/bench/growth-large.json

Synthetic views (384 dimensions, fp16) replace those of encoders; then the stages run as the commands run them: index,
refine (feedback views from gold passages, a question for every 40 passages, these anywhere in the corpus; a gate of 64;
one round), retrieve (256 questions, k = 100). The searches of refine grow with questions times passages, so their time
is reported per question, and refine's own without it. Publish is refine's last part: changed shards are rewritten, and
a manifest names them. Every size has a process and a Ray session of its own. Memory is the kernel's own record of each
process's peak resident bytes (VmHWM), mapped pages of files included.

A stage has seconds that do not depend on the size and hide its growth: so beside the exponent the report has the line
t = a + b x passages.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up
import numpy as np
from machine import RESULTS, ROOT, hardware, process_tree
from measure import Bar, Part, line, sampling, write

SIZES, LARGE, TEN_MILLION_VIEWS = (10_000, 30_000, 100_000), (1_000_000,), 1_250_000
SHARDS, SEARCHERS, PASSAGES_A_QUESTION, GATE, ASKED = 8, 2, 40, 64, 256
STAGES = ("index", "refine", "search of refine, a question", "publish", "retrieve")
ROLES = {"build_one": "index builder", "ShardRefiner": "refiner", "SearcherActor": "searcher"}
"""The task or actor that Ray names in a process's title, and what `mvr-ray plan` calls it."""
LARGE_FILE = RESULTS / "bench" / "growth-large.json"
BOUND = 1.05
VECTORS = "made up before the clock starts: index encodes nothing, its passages/s are those of building alone"
UPPER = "the plan says what a process takes at most; a refiner's labels did not change all that it counts"


def config(store: Path) -> Any:
    from mvr_ray.config import RunConfig

    return RunConfig.model_validate(
        {
            "store": {"path": str(store)},
            "prepare": {"corpus": "made", "num_shards": SHARDS},
            "index": {"name": "made", "encoder": "untrained"},
            "refine": {
                "questions": "known",
                "gate": ["gate"],
                "labels": "gold",
                "feedback_weight": 0.7,
                "feedback_clusters": 1,
                "rounds": 1,
            },
            "retrieve": {"k": 100, "batch": 64},
            "resources": {"searchers": SEARCHERS, "refiners": SEARCHERS, "encoders_max": 1},
        }
    )


class Watch:
    """Record the peak memory of each kind of process of this session, by the kernel's record."""

    def __init__(self) -> None:
        self.peaks: dict[str, dict[str, int]] = {}
        self.at_ends: dict[str, dict[str, int]] = {}
        """By stage: what each kind of process that then runs holds."""

    def end_of(self, stage: str) -> None:
        """Record the current memory."""
        self.at_ends[stage] = self.look()

    def look(self) -> dict[str, int]:
        resident_bytes: dict[str, int] = {}
        for pid in process_tree(os.getpid()):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                status = Path(f"/proc/{pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            fields = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if "kB" in line}
            role = next((role for name, role in ROLES.items() if f"ray::{name}" in command), "")
            role = "driver" if pid == os.getpid() else role
            if role and "VmHWM" in fields:
                peak = self.peaks.setdefault(role, {"most": 0, "own": 0})
                peak["most"] = max(peak["most"], 1024 * int(fields["VmHWM"]))
                peak["own"] = max(peak["own"], 1024 * int(fields["RssAnon"]))
                resident_bytes[role] = max(resident_bytes.get(role, 0), 1024 * int(fields["VmRSS"]))
        return resident_bytes


def measure(passages: int, folder: Path, whole: bool) -> dict[str, Any]:
    """Measure one size, start to end; `whole`: all stages, else only build and serve."""
    from mvr_ray import capacity
    from mvr_ray.distributed import refine as refining
    from mvr_ray.distributed.cluster import session
    from mvr_ray.distributed.indexing import build_index
    from mvr_ray.distributed.refinement.refiner_pool import RefinerPool
    from mvr_ray.distributed.retrieve import retrieve
    from mvr_ray.store import manifest

    run = config(folder)
    num_known = passages // PASSAGES_A_QUESTION
    corpus = made_up.prepare(run, passages, {"known": num_known, "gate": GATE, "asked": ASKED})
    staging_bytes = made_up.stage(run, corpus)
    plan = capacity.plan(
        run, capacity.corpus_size(run), capacity.most_feedback_views(run, passages), capacity.passage_bytes(run)
    )
    seconds: dict[str, float] = {}
    figures: dict[str, Any] = {"passages": passages, "seconds": seconds, "disk": {"staging": staging_bytes}}

    def with_timer(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return act(*args, **kwargs)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
                watch.end_of(name)
                print(f"{passages:,} {name}: {seconds[name]:.2f} s", flush=True)

        return within

    with session.connect(run.resources), sampling(Watch(), 0.1) as watch:
        version = with_timer("index", build_index.index)(run)
        figures["disk"]["corpus"] = bytes_under(folder / "corpora")
        figures["disk"]["encoder snapshot"] = bytes_under(folder / "encoders")
        figures["disk"]["embeddings"] = version.num_bytes
        if whole:
            refining.describe = with_timer("publish", refining.describe)
            publish, manifest.publish = manifest.publish, with_timer("publish", manifest.publish)
            search, RefinerPool.search = RefinerPool.search, with_timer("search of refine", RefinerPool.search)
            report = with_timer("refine", refining.refine)(run)
            manifest.publish, RefinerPool.search = publish, search
            search_s = seconds.pop("search of refine")
            seconds["refine"] -= search_s
            seconds["search of refine, a question"] = search_s / (num_known + GATE)
            assert report.published and report.rewritten_shards == SHARDS, report.reason
            figures["disk"]["one more version"] = report.published.num_bytes
            figures["dirty"] = report.dirty_share
            with_timer("retrieve", lambda: retrieve(run, "asked", folder / "ranking.json"))()
        figures["served"] = measure_serving(run)
    figures["memory"], figures["memory at ends"] = watch.peaks, watch.at_ends
    require_roles(figures, whole)
    figures["plan"] = {f"{line.kind} {line.what}": [line.bytes_each, line.count] for line in plan.lines}
    return figures


def require_roles(report: dict[str, Any], whole: bool) -> None:
    """Exit if a kind of process was never seen: Ray renamed it, and its figures would be missing without notice."""
    roles = {"driver", *ROLES.values()} - (set() if whole else {"refiner"})
    lacking = sorted(roles - set(report["memory"]))
    if lacking:
        raise SystemExit(
            f"growth: no process of {report['passages']:,} passages was a {' or a '.join(lacking)}; "
            f"Ray's titles for them are no longer {', '.join(ROLES)}: put the new ones into ROLES, and measure again"
        )


def measure_serving(run: Any) -> dict[str, float]:
    """Open the live version, and search it repeatedly for one query and for 32."""
    from mvr_ray.distributed.router import open_router

    with open_router(run) as router:
        latencies = {}
        for batch, rounds in ((1, 9), (32, 5)):
            queries_QD = made_up.queries(batch)
            samples = []
            for _ in range(rounds):
                began = time.perf_counter()
                answer = router.search(queries_QD, 100)
                samples.append(time.perf_counter() - began)
                assert answer.exact.certified and answer.coverage_share == 1
            latencies[f"p50 ms, batch {batch}"] = 1e3 * float(np.median(samples))
    return latencies


def bytes_under(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def run_one(passages: int, whole: bool = True) -> dict[str, Any]:
    """Run `measure` in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="mvr-growth-") as folder:
        subprocess.run(
            [sys.executable, __file__, "--one", str(passages), folder, str(int(whole))],
            cwd=ROOT,
            check=True,
            env={**os.environ, "RAY_worker_niceness": "0"},
        )
        return json.loads((Path(folder) / "figures.json").read_text())


def exponent(sizes: list[int], values: list[float]) -> float:
    """Return the slope of the straight line through the logarithms, or of its last piece if that is steeper."""
    x, y = np.log(sizes), np.log(values)
    return max(float(np.polyfit(x, y, 1)[0]), float((y[-1] - y[-2]) / (x[-1] - x[-2])))


def off(one: dict[str, Any]) -> dict[str, float]:
    """Return the difference of each used resource from its plan, as a share of the used one."""
    plan = {what: each * count for what, (each, count) in one["plan"].items() if what.startswith("disk ")}
    shares = {f"disk, {what}": plan[f"disk {what}"] / num_bytes - 1 for what, num_bytes in one["disk"].items()}
    for role, peak in one["memory"].items():
        if f"memory {role}" in one["plan"]:
            shares[f"memory, {role}"] = one["plan"][f"memory {role}"][0] / peak["most"] - 1
    return shares


def main(large: bool) -> None:
    if large:
        large_runs = [run_one(size) for size in LARGE] + [run_one(TEN_MILLION_VIEWS, whole=False)]
        LARGE_FILE.write_text(json.dumps({"runs": large_runs, "hardware": hardware()}, indent=2) + "\n")
    runs = [run_one(size) for size in SIZES]
    large_report = json.loads(LARGE_FILE.read_text()) if LARGE_FILE.exists() else {"runs": []}
    runs += [one for one in large_report["runs"] if "retrieve" in one["seconds"]]
    for one in [*runs, *large_report["runs"]]:
        require_roles(one, "retrieve" in one["seconds"])
    part = Part("growth", "Growth", "passages")
    sizes = [one["passages"] for one in runs]
    for stage in STAGES:
        for one in runs:
            part.add({f"{stage}, {one['passages']:,} passages": [one["seconds"][stage]]}, one["passages"])
        slope = exponent(sizes, [one["seconds"][stage] for one in runs])
        fit = line(sizes, [one["seconds"][stage] for one in runs])
        part.bars.append(Bar(f"exponent of {stage}'s time, {sizes[0]:,} to {sizes[-1]:,}", slope, BOUND, False, ""))
        part.facts[f"{stage}: t = a + b x passages"] = {"a, s": fit.fixed_s, "b, us a passage": 1e6 * fit.each_s}
    for role in sorted({role for one in runs for role in one["memory"]}):
        slope = exponent(sizes, [one["memory"][role]["most"] for one in runs])
        part.bars.append(Bar(f"exponent of a {role}'s memory", slope, BOUND, False, ""))
    largest = runs[-1]
    for what, share in off(largest).items():
        name = f"plan off what was used, {largest['passages']:,}: {what}"
        part.bars.append(Bar(name, 100 * abs(share), 10, False, "%", UPPER if "memory" in what else ""))
    for one in [*runs, *(one for one in large_report["runs"] if "retrieve" not in one["seconds"])]:
        name = f"{one['passages']:,} passages x {made_up.V} views"
        part.facts[f"{name}, most MB"] = {role: peak["most"] / 1e6 for role, peak in one["memory"].items()}
        part.facts[f"{name}, own MB"] = {role: peak["own"] / 1e6 for role, peak in one["memory"].items()}
        for stage, resident_bytes in one["memory at ends"].items():
            part.facts[f"{name}, MB at the end of {stage}"] = {
                role: size / 1e6 for role, size in resident_bytes.items()
            }
        part.facts[f"{name}, plan off by"] = off(one)
        part.facts[f"{name}, served"] = one["served"]
        if "retrieve" not in one["seconds"]:
            part.facts[f"{name}, index seconds"] = one["seconds"]["index"]
    part.facts["vectors"] = VECTORS
    if large_report["runs"]:
        part.facts["1 M passages and 10 M views"] = f"measured once, at {large_report['hardware']['commit']}"
    write(part)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        count, where, everything = sys.argv[2:5]
        result = measure(int(count), Path(where), everything == "1")
        (Path(where) / "figures.json").write_text(json.dumps(result))
    else:
        main("--large" in sys.argv[1:])
