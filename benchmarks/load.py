"""Measure a server under load: minutes at its capacity, then ten times that rate.

    python benchmarks/load.py --minutes 10

`mvr-ray serve` runs as for users (Ray Serve's proxy, a replica, searcher actors) over SQuAD's development passages; a
separate process on the same machine sends questions as texts over HTTP.

    capacity   closed loops of 1, 2, 4, ... clients; the number with most answers a second is selected
    steady     that many clients for the given minutes: statuses, p50 and p99, memory of all the server's processes
    flood      ten times that rate, in an open loop: admitted requests are answered in time, others get 503, Retry-After
    after      the steady load once more
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import yaml
from machine import ROOT, process_tree
from measure import Bar, Part, sampling, write
from squad_files import DEV

from mvr_ray.config import RunConfig
from mvr_ray.distributed.indexing import build_index
from mvr_ray.store import prepare
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.questions import read_questions

CLIENTS = (1, 2, 4, 8, 16)
TRY_S = 8.0
WINDOW_S = 10.0
FLOOD = 10
FLOOD_S = 60.0
MOST_CONNECTIONS = 1000
SAMPLE_S = 2.0
SETTLE = 0.1
"""Share of the steady time after which memory counts: until then libraries are loaded and caches filled."""


FLOODED = "what is left of two cores sends, counts and refuses the flood's other requests."
GROWN = "which process grows has not been found out; before, Ray's control store kept 3 kB for each call (notes.md)."


class Reply(NamedTuple):
    at_s: float
    took_s: float
    status: int
    """0: no answer came."""
    retry_after: bool


class Connection:
    """One persistent HTTP/1.1 connection; a client library would take more time than the server."""

    def __init__(self, port: int, token: str) -> None:
        self.port = port
        self.head = (
            f"POST /v1/search HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> Reply:
        """One request; a connection that the server has closed while it was idle is opened anew."""
        began, was_open = time.perf_counter(), self._streams is not None
        try:
            head = await self._exchange(body)
        except (OSError, asyncio.IncompleteReadError, ValueError):
            self.close()
            if was_open:
                return (await self.ask(body))._replace(at_s=began)
            return Reply(began, time.perf_counter() - began, 0, False)
        if b"\r\nconnection: close" in head:
            self.close()
        status, retry = int(head.split(b" ", 2)[1]), b"\r\nretry-after:" in head
        return Reply(began, time.perf_counter() - began, status, retry)

    async def _exchange(self, body: bytes) -> bytes:
        """The head of the answer, whose body has been read."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._streams
        writer.write(self.head + str(len(body)).encode() + b"\r\n\r\n" + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
        return head

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


async def run_closed_loop(port: int, token: str, bodies: Sequence[bytes], clients: int, seconds: float) -> list[Reply]:
    """Each client asks again as soon as it is answered."""
    replies: list[Reply] = []
    until = time.perf_counter() + seconds

    async def client(number: int) -> None:
        connection, turn = Connection(port, token), itertools.count(number, clients)
        while time.perf_counter() < until:
            replies.append(await connection.ask(bodies[next(turn) % len(bodies)]))
        connection.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return replies


async def run_open_loop(port: int, token: str, bodies: Sequence[bytes], per_s: float, seconds: float) -> list[Reply]:
    """Requests come at this rate (Poisson), whether or not others are answered; without a free connection, later."""
    replies: list[Reply] = []
    idle = [Connection(port, token) for _ in range(MOST_CONNECTIONS)]
    running: set[asyncio.Task[None]] = set()
    gaps = random.Random(0)
    due = began = time.perf_counter()

    async def one(connection: Connection, body: bytes) -> None:
        replies.append(await connection.ask(body))
        idle.append(connection)

    for number in itertools.count():
        due += gaps.expovariate(per_s)
        if max(due, time.perf_counter()) - began > seconds:
            break
        while (wait_s := due - time.perf_counter()) > 0 or not idle:
            await asyncio.sleep(max(wait_s, 0.001))
        task = asyncio.create_task(one(idle.pop(), bodies[number % len(bodies)]))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    for connection in idle:
        connection.close()
    return replies


class Memory:
    """The memory of a process and its descendants over time; shared pages count proportionally."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.samples: list[tuple[float, int]] = []

    def between(self, first_s: float, last_s: float) -> list[int]:
        return [size for at, size in self.samples if first_s <= at <= last_s]

    def look(self) -> None:
        self.samples.append((time.perf_counter(), sum(map(pss_bytes, process_tree(self.pid)))))


def pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def run_of(port: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "store": {"path": str(ROOT / "store")},
            "prepare": {
                "corpus": "load",
                "sources": [{"path": str(DEV), "format": "squad", "questions": "load"}],
                "num_shards": 4,
            },
            "encoder": {"name": "load", "use_title": False},
            "index": {"name": "load", "encoder": "untrained"},
            "serve": {"port": port},
            "resources": {"encoders_max": 1, "searchers": 2, "cpus_per_searcher": 0.5, "local_cpus": 4},
        }
    )


@contextmanager
def serving(run: RunConfig, token: str) -> Iterator[int]:
    """Run `mvr-ray serve` until it answers; it must exit cleanly when it is interrupted."""
    file = Path(run.store.path) / "load.yaml"
    file.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    command = [sys.executable, "-m", "mvr_ray.cli", "serve", str(file)]
    environ = os.environ | {"MVR_RAY_READ_TOKEN": token, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as server:
        assert server.stderr
        for line in server.stderr:
            if line.startswith("serving on"):
                break
        rest = threading.Thread(target=server.stderr.read, daemon=True)
        rest.start()
        try:
            yield server.pid
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(120)
    assert server.returncode == 0, f"the server ended with {server.returncode}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rate(replies: Sequence[Reply]) -> float:
    """Return answered requests a second, from the first request to the last answer."""
    good = [reply for reply in replies if reply.status == 200]
    ends = [reply.at_s + reply.took_s for reply in replies]
    return len(good) / (max(ends) - min(reply.at_s for reply in replies))


def percentile(replies: Sequence[Reply], share: float) -> float:
    took = sorted(reply.took_s for reply in replies)
    return took[min(int(share * len(took)), len(took) - 1)]


def windows(replies: Sequence[Reply], share: float) -> list[float]:
    """Return the percentile in every full time window."""
    first = min(reply.at_s for reply in replies)
    groups: dict[int, list[Reply]] = {}
    for reply in replies:
        groups.setdefault(int((reply.at_s - first) // WINDOW_S), []).append(reply)
    return [percentile(groups[number], share) for number in sorted(groups)]


def statuses(replies: Sequence[Reply]) -> str:
    counts = Counter(str(reply.status or "no answer") for reply in replies)
    return ", ".join(f"{status} {count}" for status, count in sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description="A server under load.")
    parser.add_argument("--minutes", type=float, default=1.0, help="minutes of the steady load")
    minutes = parser.parse_args().minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; nothing is written"))  # the server is stopped, too
    token, port = secrets.token_urlsafe(24), free_port()
    run = run_of(port)
    store = Store(run.store.path)
    prepare.prepare(run.prepare, store)
    manifest = build_index.index(run)
    questions = [question.text for question in read_questions(Corpus.open(store, run.prepare.corpus), "load")]
    bodies = [json.dumps({"queries": [text], "k": 10}).encode() for text in questions]
    random.Random(0).shuffle(bodies)
    part = Part("load", f"A server for {minutes:g} minutes at its capacity, and a flood of ten times that", "requests")
    with serving(run, token) as pid, sampling(Memory(pid), SAMPLE_S) as memory:
        asyncio.run(run_closed_loop(port, token, bodies, 2, TRY_S))  # everything is loaded once
        trials = {clients: asyncio.run(run_closed_loop(port, token, bodies, clients, TRY_S)) for clients in CLIENTS}
        rates = {clients: rate(replies) for clients, replies in trials.items()}
        clients = max(rates, key=lambda number: rates[number])
        print("capacity:", {number: round(value, 1) for number, value in rates.items()}, flush=True)
        began = time.perf_counter()
        steady = asyncio.run(run_closed_loop(port, token, bodies, clients, 60 * minutes))
        end_s = time.perf_counter()
        print("steady:", statuses(steady), f"{rate(steady):.1f}/s", flush=True)
        flood = asyncio.run(run_open_loop(port, token, bodies, FLOOD * rate(steady), min(FLOOD_S, 60 * minutes)))
        print("flood:", statuses(flood), f"{rate(flood):.1f}/s", flush=True)
        after = asyncio.run(run_closed_loop(port, token, bodies, clients, TRY_S))
        last = time.perf_counter()
    memory_samples = memory.between(began + SETTLE * (end_s - began), end_s)
    eighth = max(1, len(memory_samples) // 8)
    early, late = statistics.mean(memory_samples[:eighth]), statistics.mean(memory_samples[-eighth:])
    beyond = memory.between(last - TRY_S, last)
    good = [reply for reply in flood if reply.status == 200]
    odd = [reply for reply in flood if reply.status != 200 and not (reply.status == 503 and reply.retry_after)]
    allowed_s = run.serve.timeout_ms / 1000
    part.add({"p50 of 10 s": windows(steady, 0.5), "p99 of 10 s": windows(steady, 0.99)}, 1)
    flood_share = rate(flood) / rate(steady)
    late_answers, memory_growth = sum(r.took_s > allowed_s for r in good), statistics.mean(beyond) / late
    part.bars = [
        Bar("errors at capacity", sum(r.status != 200 for r in steady), 0, False, "errors"),
        Bar("in the flood: neither an answer nor a 503 with Retry-After", len(odd), 0, False, "requests"),
        Bar("in the flood: answers after their deadline", late_answers, 0, False, "answers"),
        Bar(
            "in the flood: answers a second, of those at capacity", flood_share, 0.7, note=FLOODED * (flood_share < 0.7)
        ),
        Bar("errors after the flood", sum(r.status != 200 for r in after), 0, False, "errors"),
        Bar(
            "memory at the end of the steady load over that at its beginning",
            late / early,
            1.05,
            False,
            note=GROWN * (late / early > 1.05),
        ),
        Bar("memory after the flood over that before it", memory_growth, 1.05, False),
    ]
    span = max(r.at_s for r in flood) - min(r.at_s for r in flood)
    part.facts = {
        "index": f"{manifest.num_passages} passages of SQuAD's dev set, {manifest.num_vectors} views, flat, 4 shards",
        "server": "Ray Serve, one replica, 2 searchers; its clients take CPU of the same machine",
        "rate by clients": {str(number): value for number, value in rates.items()},
        "steady": f"{clients} clients, {len(steady)} requests: {statuses(steady)}",
        "steady rate": rate(steady),
        "steady p50 in ms": 1000 * percentile(steady, 0.5),
        "steady p99 in ms": 1000 * percentile(steady, 0.99),
        "flood": f"{len(flood)} requests: {statuses(flood)}",
        "flood rate asked for": FLOOD * rate(steady),
        "flood rate sent": len(flood) / span,
        "flood answered a second": rate(flood),
        "flood p50 and p99 of answers in ms": " and ".join(f"{1000 * percentile(good, at):.0f}" for at in (0.5, 0.99)),
        "flood p50 of refusals in ms": 1000 * percentile([r for r in flood if r.status == 503] or flood, 0.5),
        "after": f"{statuses(after)}, p50 {1000 * percentile(after, 0.5):.1f} ms",
        "memory in MB": {
            "at the beginning": early / 1e6,
            "at the end": late / 1e6,
            "after": statistics.mean(beyond) / 1e6,
        },
    }
    write(part)


if __name__ == "__main__":
    main()
