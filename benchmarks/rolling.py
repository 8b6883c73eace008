"""Measure a rolling upgrade from an older program to this one, under load.

    python benchmarks/rolling.py COMMIT

Two servers of the older program (`mvr-ray serve` of that commit, from git) follow one store; both are replaced by
servers of this program, one after the other, under load. Clients know the servers that answer, as a load balancer does,
and use the next one if a connection fails. This program publishes a version while both programs serve, and another one
after the upgrade. The store and the correct answers are those of tests/fixtures/store-baa77f8; the older program runs
without compiled loops.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from machine import RESULTS, ROOT, hardware

FIXTURE = ROOT / "tests" / "fixtures" / "store-baa77f8"
INDEX, K, ROUNDING = "flat", 5, 1e-5
CLIENTS, PORT, TIMEOUT_S, STEADY_S = 2, 18300, 10, 20


class Rolling:
    """The servers that answer now, and the answers by program."""

    def __init__(self, folder: Path) -> None:
        self.fixture = json.loads((FIXTURE / "answers.json").read_text(encoding="utf-8"))
        self.servers: dict[str, str] = {}
        self.content_of = {1: 1, 2: 2}
        self.answers: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.longest_s = 0.0
        self.has_ended = threading.Event()
        self.folder = folder
        self.store = shutil.copytree(FIXTURE / "store", folder / "store")

    def run_file(self, port: int) -> Path:
        run = {"store": {"path": str(self.store)}, "index": {"name": INDEX}, "serve": {"port": port}}
        path = self.folder / f"{port}.yaml"
        path.write_text(json.dumps(run))
        return path

    def ask(self, first: int) -> None:
        """Send one question after the other until the end, and compare every answer with the known ones."""
        for number in count(first):
            if self.has_ended.is_set():
                return
            question = number % len(self.fixture["questions"])
            began = time.monotonic()
            for address, program in list(self.servers.items())[number % 2 :] + list(self.servers.items())[: number % 2]:
                try:
                    answer = post(f"{address}/v1/search", {"queries": [self.fixture["questions"][question]], "k": K})
                except (OSError, urllib.error.HTTPError) as error:
                    self.errors[f"{program}: {type(error).__name__} {getattr(error, 'code', '')}".strip()] += 1
                    continue
                is_right = self.is_right(question, answer)
                self.answers[f"{program}, version {answer['version']}, {'right' if is_right else 'WRONG'}"] += 1
                break
            else:
                self.answers["no server answered"] += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def is_right(self, question: int, answer: dict[str, Any]) -> bool:
        content = self.content_of.get(answer["version"])
        [old] = [a["hits"][question] for a in self.fixture["answers"] if (a["index"], a["version"]) == (INDEX, content)]
        hits = answer["results"][0]
        same = [hit["id"] for hit in hits] == [name for name, _, _ in old]
        return same and all(abs(hit["score"] - score) <= ROUNDING for hit, (_, score, _) in zip(hits, old))

    @contextmanager
    def server(self, program: str, packages: Path, port: int) -> Iterator[str]:
        """Run a server of a program in the list of answering servers; remove it there before it stops."""
        environ = {**os.environ, "PYTHONPATH": str(packages)}
        command = [sys.executable, "-m", "mvr_ray.cli", "serve", str(self.run_file(port))]
        log = (self.folder / f"{port}.log").open("w")
        with subprocess.Popen(command, env=environ, cwd=packages, stdout=log, stderr=log) as process:
            address = f"http://127.0.0.1:{port}"
            try:
                wait_until(lambda: process.poll() is not None or is_ready(address), 180)
                if process.poll() is not None:
                    sys.exit((self.folder / f"{port}.log").read_text())
                self.servers[address] = program
                yield address
            finally:
                self.servers.pop(address, None)
                time.sleep(1)
                process.send_signal(signal.SIGTERM)
                process.wait(120)

    def publish(self, to: int) -> int:
        """Publish the content of a version again, by this program; return the new version."""
        versions = self.store / "indexes" / INDEX / "versions"
        number = max(int(path.stem) for path in versions.glob("*.json")) + 1
        self.content_of[number] = to
        command = [sys.executable, "-m", "mvr_ray.cli", "versions", str(self.run_file(PORT)), "rollback", str(to)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
        return number

    def version_at(self, address: str) -> int:
        return post(f"{address}/v1/search", {"queries": ["When?"], "k": 1})["version"]


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        return json.loads(reply.read())


def is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/readyz", timeout=TIMEOUT_S) as reply:
            return reply.status == 200
    except OSError:
        return False


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end_s:
            sys.exit("it did not come to that in time")
        time.sleep(0.5)


def main(commit: str) -> None:
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as threads:
        folder = Path(scratch)
        older = folder / "older"
        older.mkdir()
        archive = subprocess.run(["git", "archive", commit, "mvr_ray"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", str(older)], input=archive.stdout, check=True)
        rolling = Rolling(folder)
        with ExitStack() as first, ExitStack() as second, ExitStack() as new:
            first.enter_context(rolling.server("older", older, PORT + 1))
            second_old = second.enter_context(rolling.server("older", older, PORT + 2))
            pool = threads.enter_context(ThreadPoolExecutor(CLIENTS))
            asking = [pool.submit(rolling.ask, number) for number in range(CLIENTS)]
            try:
                time.sleep(STEADY_S)
                print(dict(rolling.answers), flush=True)
                first_new = new.enter_context(rolling.server("this", ROOT, PORT + 3))
                first.close()
                version = rolling.publish(1)
                wait_until(lambda: rolling.version_at(first_new) == version, 60)
                time.sleep(STEADY_S)
                has_followed = rolling.version_at(second_old) == version
                print("followed by the older program:", has_followed, dict(rolling.answers), flush=True)
                second_new = new.enter_context(rolling.server("this", ROOT, PORT + 4))
                second.close()
                version = rolling.publish(2)
                for address in (first_new, second_new):
                    wait_until(lambda address=address: rolling.version_at(address) == version, 60)
                time.sleep(STEADY_S)
            finally:
                rolling.has_ended.set()
            for one in asking:
                one.result()
    report(commit, has_followed, rolling)


def report(commit: str, has_followed: bool, rolling: Rolling) -> None:
    machine = hardware()
    wrong = sum(number for what, number in rolling.answers.items() if "WRONG" in what)
    lines = [
        "# A rolling change of the server's program, under load",
        "",
        f"From commit {commit} to {machine.get('commit', '')}, {time.strftime('%Y-%m-%d')}, two cores: "
        f"{sum(rolling.answers.values()):,} questions of {CLIENTS} clients, {wrong} answers wrong, longest "
        f"{rolling.longest_s:.1f} s. `python benchmarks/rolling.py {commit}`; its first lines say what is done.",
        "",
        f"The version that this program published meanwhile was {'' if has_followed else 'not '}followed by the "
        "older one" + ("." if has_followed else ", which answered on from its own."),
        "",
        "| answered by | answers |",
        "|---|---|",
        *(f"| {what} | {number:,} |" for what, number in sorted(rolling.answers.items())),
        *(f"| error, then asked of the next: {what} | {number:,} |" for what, number in sorted(rolling.errors.items())),
    ]
    (RESULTS / "rolling.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    if wrong or rolling.answers["no server answered"]:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
