"""Measure the cost of corpus changes: 0.01, 0.1, 1 and 10 % of 100,000 passages, from change file to answer.

    python benchmarks/updates.py [passages]          # 100,000 by default: half an hour on two cores
    python benchmarks/updates.py --sizes 20000 200000    # the same number of changes in ten times the passages

The passages are SQuAD's paragraphs and 10,033 summaries, then texts made of their sentences. Synthetic views
(`made_up`) replace an encoder's; the changes are encoded by the first two of MiniLM's six layers, so that the other
costs of an update weigh three times as much. New contents are paragraphs of SQuAD without their first sentence, for
passages all over the corpus. Each update runs twice, on different passages: by the commands `mvr-ray update` and
`mvr-ray index` and a router opened after them, and by the same functions in a process that has imported everything. For
comparison: the encoding of the same number of contents alone, the build of the whole index, and upserts of as many
vectors in LanceDB and Milvus Lite, in environments of their own. Milvus Lite takes minutes to load ten thousand
passages, so it holds a fifth of them.

Bytes written are those of all files that appeared in the store while the update ran, including scratch files, sampled
twenty times a second: a file that is linked under another name has no new bytes.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import made_up
import numpy as np
import torch
import yaml
from machine import ROOT, cpu_seconds
from measure import Bar, Part, record_time, sampling, write
from peers import PEERS, Peer, environment
from squad_files import DATA
from transformers import AutoModel, AutoTokenizer

from mvr_ray.config import RunConfig, SourceConfig, resolve_model
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.encoders import open_encoder, resolve_encoder
from mvr_ray.distributed.indexing import build_index
from mvr_ray.distributed.indexing.encode import embed_chunk
from mvr_ray.distributed.router import Router, open_router
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.embeddings import Views
from mvr_ray.store.files import Store
from mvr_ray.store.formats.records import PassageRecord
from mvr_ray.store.formats.sources import read_source
from mvr_ray.store.prepare import prepare
from mvr_ray.store.update import update
from mvr_ray.types import Passage

PASSAGES, SHARDS = 100_000, 8
SHARES = (0.0001, 0.001, 0.01, 0.1)
ENCODED_ALONE = 1_000
"""More contents are not encoded a second time: their time is extrapolated in proportion."""
LOOK_S = 0.05
SAMPLE = 200
OVERHEAD_S, TIMES_ENCODING, TIMES_BYTES, MORE_BYTES, TIMES_SIZE = 10.0, 1.5, 3, 1_000_000, 1.3
SIZE_ROUNDS = 3
REWRITTEN = (
    "files of earlier changes that are about as small are written again with the new ones (store.changes.num_kept)"
)
REREAD = (
    "what grows: all ids are listed where changes are checked and where the version is opened, lengths of all texts "
    "are compared with those of the new ones, blocks of 4,096 passages with more than 16 changes are copied"
)
START = (
    "two commands import torch, transformers, nltk with scipy, and read the encoder and the changed shards whole to "
    "compare digests: some ten seconds of a processor, several times as long on a machine that others use"
)
SOURCES = (("squad/train-v1.1.json.gz", "squad"), ("squad/dev-v1.1.json.gz", "squad"))
SUMMARIES = ("wiki_vital/psgs_vital.tsv.gz", "dpr_tsv")
QUESTION = "When was the university founded?"
PINS = {
    "lancedb": ("lancedb==0.40.0", "numpy==2.4.6"),
    "milvus-lite": ("milvus-lite==3.2.2", "pymilvus==3.0.2", "numpy==2.4.6"),
}
ENGINES = {"lancedb": ("lancedb", "fp16", "LanceDB", 1), "milvus-lite": ("milvus", "fp32", "Milvus Lite", 5)}
"""By environment: the engine, its precision, its title, and of how many passages it holds one."""


class Cost(NamedTuple):
    """The cost of one update. `stages`: seconds of each part; `cpu_s`: processor time, including child processes."""

    stages: dict[str, float]
    cpu_s: float
    written_bytes: int
    changed_bytes: int
    num_encoded: int

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


class Seconds(NamedTuple):
    """By the clock, and of all processors."""

    clock: float
    cpu: float

    def times(self, factor: float) -> "Seconds":
        return Seconds(self.clock * factor, self.cpu * factor)


class WrittenBytes:
    """Bytes of the files that appear or grow under a folder, by inode."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most = folder, dict[int, int]()
        self.before = self._sizes()

    @property
    def num_bytes(self) -> int:
        return sum(max(0, size - self.before.get(inode, 0)) for inode, size in self.most.items())

    def look(self) -> None:
        for inode, size in self._sizes().items():
            self.most[inode] = max(self.most.get(inode, 0), size)

    def _sizes(self) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for folder, _, names in os.walk(self.folder):
            for name in names:
                try:
                    stat = Path(folder, name).stat()
                except OSError:
                    continue
                sizes[stat.st_ino] = stat.st_size
        return sizes


def real_passages() -> Iterator[Passage]:
    for file, kind in (*SOURCES, SUMMARIES):
        if (DATA / file).exists():
            for record in read_source(SourceConfig.model_validate({"path": str(DATA / file), "format": kind})):
                if isinstance(record, PassageRecord):
                    yield record.passage


def passages_of(count: int) -> list[tuple[str, str]]:
    """Return titles and texts: real ones first, then random combinations of their sentences."""
    real = [(passage.title, passage.text) for passage in real_passages()]
    if not real:
        real = [("made up", " ".join(made_up.WORDS) + ". " * 5)]
    draw = random.Random(0)
    combinations = (
        (title, ". ".join(draw.choice(real)[1].split(". ")[0] for _ in range(5)) + f". Number {number}.")
        for number, (title, _) in enumerate(draw.choices(real, k=max(0, count - len(real))))
    )
    return [*real[:count], *combinations]


def name(number: int) -> str:
    return f"{number:07d}"


def two_layers(folder: Path) -> Path:
    """Make MiniLM without its last four layers."""
    source = resolve_model(RunConfig().encoder.backbone)
    model = AutoModel.from_pretrained(source)
    model.encoder.layer = model.encoder.layer[:2]
    model.config.num_hidden_layers = 2
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


class Corpora:
    """A store with an index of the given size, and its change files."""

    def __init__(self, folder: Path, passages: int) -> None:
        self.folder, self.passages = folder, passages
        self.texts = passages_of(passages)
        self.store_folder, self.source = folder / "store", folder / "passages.jsonl"
        self.values: dict[str, Any] = {
            "store": {"path": str(self.store_folder)},
            "prepare": {
                "corpus": "updated",
                "sources": [{"path": str(folder / "passages.jsonl")}],
                "num_shards": SHARDS,
            },
            "encoder": {"use_title": False},
            "index": {"name": "updated", "encoder": "untrained"},
            "resources": {"encoders_max": 2},
        }
        self.values["encoder"]["backbone"] = str(two_layers(folder / "backbone"))
        self.run = RunConfig.model_validate(self.values)
        self.config = folder / "run.yaml"
        self.config.write_text(yaml.safe_dump(self.values))
        self.store = Store(self.run.store.path)
        self.num_used = 0

    def build(self) -> dict[str, float]:
        """Prepare the corpus, stage synthetic views and index them; return the seconds of each but the staging."""
        with self.source.open("w") as file:
            for number, (title, text) in enumerate(self.texts):
                file.write(json.dumps({"id": name(number), "title": title, "text": text}) + "\n")
        seconds = {}
        with record_time(seconds, "prepare"):
            prepare(self.run.prepare, self.store)
        made_up.stage(self.run, Corpus.open(self.store, "updated"))
        resources = self.run.resources.model_copy(update={"local_passages": self.passages})
        with record_time(seconds, "index without encoding"):
            build_index.index(self.run.model_copy(update={"resources": resources}))
        return seconds

    def changes(self, count: int) -> tuple[Path, list[Passage]]:
        """Write a file with new contents for `count` passages all over the corpus that were not changed before."""
        step = self.passages // count
        real = max(1, min(self.passages, 20_000))
        passages = []
        for number in range(count):
            title, text = self.texts[(self.num_used + number) * 7 % real]
            row = (number * step + self.num_used) % self.passages
            passages.append(
                Passage(name(row), title, f"{text.partition('. ')[2] or text} Edited {self.num_used + number}.")
            )
        self.num_used += count + 1
        file = self.folder / f"changes-{self.num_used}.jsonl"
        rows = (json.dumps({"id": one.id, "title": one.title, "text": one.text}) + "\n" for one in passages)
        file.write_text("".join(rows))
        return file, passages


def by_commands(corpora: Corpora, count: int) -> Cost:
    def update_corpus(file: Path) -> None:
        report = command("update", corpora, f"changes={file}")
        assert report["replaced"] == count, report

    stages = {"mvr-ray update": update_corpus, "mvr-ray index": lambda _: command("index", corpora)}
    return measure_update(corpora, count, stages)


def in_process(corpora: Corpora, count: int) -> Cost:
    """Run the update by function calls."""
    stages = {
        "update": lambda file: update(corpora.run.prepare, corpora.store, str(file)),
        "index": lambda _: build_index.index(corpora.run),
    }
    return measure_update(corpora, count, stages)


def measure_update(corpora: Corpora, count: int, stages: Mapping[str, Callable[[Path], Any]]) -> Cost:
    """Measure an update of `count` passages, whose stages get the change file, until a router answers from it."""
    file, passages = corpora.changes(count)
    seconds: dict[str, float] = {}
    cpu_s = cpu_seconds()
    with sampling(WrittenBytes(corpora.store_folder), LOOK_S) as writes:
        for name, run in stages.items():
            with record_time(seconds, name):
                run(file)
        with record_time(seconds, "open and answer"), open_router(corpora.run, local=True) as router:
            check(router, passages)
    cpu_s = cpu_seconds() - cpu_s
    num_encoded = int(router.manifest.metrics["encoded"])
    return Cost(seconds, cpu_s, writes.num_bytes, changed_bytes(router, passages), num_encoded)


def command(stage: str, corpora: Corpora, *words: str) -> dict[str, Any]:
    python = [sys.executable, "-m", "mvr_ray.cli", stage, str(corpora.config), *words, "--json"]
    result = subprocess.run(python, cwd=corpora.folder, capture_output=True, text=True, env=environ())
    if result.returncode:
        sys.exit(f"mvr-ray {stage} failed:\n{result.stderr}")
    return json.loads(result.stdout)


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def check(router: Router, passages: Sequence[Passage]) -> None:
    """Check that the new contents are searched: a view of the last of them must find its passage."""
    last = passages[-1]
    query_D = np.asarray(stored_views(router, [last])[last.id].vectors_ND[0], np.float32)
    answer = router.search(query_D[None], 10)
    assert answer.exact.certified and answer.hits[0][0].passage_id == last.id, answer.hits[0][0]


def stored_views(router: Router, passages: Sequence[Passage]) -> Mapping[str, Views]:
    of_shard: dict[int, list[str]] = {}
    for one in passages:
        of_shard.setdefault(shard_of(one.id, SHARDS), []).append(one.id)
    return router.fleet.views(of_shard, router.manifest.version, Deadline.after(60)).views


def changed_bytes(router: Router, passages: Sequence[Passage]) -> int:
    """Return the stored bytes of the changed rows: their vectors and their texts."""
    texts = sum(len(one.title.encode()) + len(one.text.encode()) for one in passages)
    sample = stored_views(router, passages[:SAMPLE])
    views = sum(len(one.view_numbers_N) for one in sample.values()) / len(sample)
    return texts + int(views * len(passages) * made_up.D * 2)


class Encoding:
    """Encode new contents alone, by as many threads as the updates have encoders."""

    def __init__(self, corpora: Corpora) -> None:
        snapshot = resolve_encoder(corpora.run, Corpus.open(corpora.store, "updated"))
        self.encoder = open_encoder(corpora.store, snapshot.name, snapshot.fingerprint)
        self.index = corpora.run.index

    def took(self, passages: Sequence[Passage]) -> "Seconds":
        torch.set_num_threads(2)
        began, cpu_start_s = time.perf_counter(), time.process_time()
        tokens = self.encoder.tokenize_passages(list(passages))
        ids = [one.id for one in passages]
        embed_chunk(self.encoder, ids, tokens, self.index.tokens_per_batch, self.index.dtype)
        return Seconds(time.perf_counter() - began, time.process_time() - cpu_start_s)


def alone(encoding: Encoding, corpora: Corpora, count: int) -> "Seconds":
    few = corpora.changes(min(count, ENCODED_ALONE))[1]
    return encoding.took(few).times(count / len(few))


def peer_costs(folder: Path, passages: int, counts: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Measure each peer: the seconds to load all vectors, and of each upsert until it is in an answer."""
    data = folder / "peers"
    data.mkdir()
    for file, first, count in (("vectors.npy", 0, passages), ("changed.npy", 9_000, max(counts))):
        vectors = np.lib.format.open_memmap(data / file, "w+", np.float16, (count, made_up.V, made_up.D))
        for number, start in enumerate(range(0, count, made_up.BLOCK)):
            size = min(made_up.BLOCK, count - start)
            vectors[start : start + size] = made_up.views(first + number, size).reshape(size, made_up.V, made_up.D)
        vectors.flush()
    np.save(data / "fields.npy", np.arange(passages) % 100)
    np.save(data / "queries.npy", made_up.queries(16))
    costs: dict[str, dict[str, Any]] = {}
    for peer_name, (engine, precision, title, one_of) in ENGINES.items():
        num_passages = passages // one_of
        (data / "task.json").write_text(
            json.dumps({"passages": num_passages, "views": made_up.V, "dimension": made_up.D})
        )
        python = environment(PEERS, peer_name, PINS[peer_name])
        with Peer(python, "engine_peer.py", str(data), engine, precision, "2", threads=2) as peer:
            cost: dict[str, Any] = {"passages": num_passages, "build": peer.ask("build")["seconds"]}
            for count in counts:
                with sampling(WrittenBytes(data), LOOK_S) as writes:
                    reply = peer.ask(f"update {num_passages // count}")
                cost[f"{count}"] = {"seconds": reply["seconds"], "written_bytes": writes.num_bytes}
            costs[title] = cost
            print(title, cost, flush=True)
    return costs


def table(part: Part, passages: int, count: int, ways: Mapping[str, Cost], encoding: Seconds) -> None:
    """Add one share of changes: its samples, and its targets."""
    share = f"{100 * count / passages:g} %"
    alone_name = "encoding alone, extrapolated" if count > ENCODED_ALONE else "encoding alone"
    for way, cost in ways.items():
        part.add({f"{share} of {passages:,} changed, {way}": [cost.seconds]}, count)
        part.facts[f"{share}, {way}"] = (
            f"{', '.join(f'{stage} {seconds:.1f} s' for stage, seconds in cost.stages.items())}; "
            f"{cost.cpu_s:.1f} s of processors; {cost.num_encoded:,} passages encoded; "
            f"{cost.written_bytes / 1e6:.1f} MB written for {cost.changed_bytes / 1e6:.2f} MB of changed rows"
        )
        limit = TIMES_BYTES * cost.changed_bytes + MORE_BYTES
        megabytes = cost.written_bytes / 1e6
        what, note = f"{share}, {way}: bytes written", "" if cost.written_bytes <= limit else REWRITTEN
        part.bars.append(Bar(what, megabytes, limit / 1e6, at_least=False, unit="MB", note=note))
        part.bars.append(
            Bar(f"{share}, {way}: passages encoded", cost.num_encoded, count, at_least=False, unit="passages")
        )
    part.add({f"{share} of {passages:,}, {alone_name}": [encoding.clock]}, count)
    many = f", from those of {ENCODED_ALONE:,} contents" if count > ENCODED_ALONE else ""
    part.facts[f"{share}, {alone_name}"] = f"{encoding.clock:.1f} s, {encoding.cpu:.1f} s of processors{many}"
    for way, cost in ways.items():
        for kind, own, alone_s in (
            ("seconds", cost.seconds, encoding.clock),
            ("processor seconds", cost.cpu_s, encoding.cpu),
        ):
            what = f"{share}, {way}: {kind} against {TIMES_ENCODING:g} x {alone_name} + {OVERHEAD_S:g} s"
            most = TIMES_ENCODING * alone_s + OVERHEAD_S
            part.bars.append(Bar(what, own, most, at_least=False, unit="s", note=START if own > most else ""))


def measure(passages: int) -> None:
    torch.set_num_threads(2)
    part = Part("updates", f"Updates of {passages:,} passages", "passages")
    with tempfile.TemporaryDirectory(dir=PEERS) as scratch:
        folder = Path(scratch)
        corpora = Corpora(folder, passages)
        counts = [max(1, round(passages * share)) for share in SHARES]
        build = corpora.build()
        encoding = Encoding(corpora)
        within = {}
        for count in counts[:-1]:
            within[count] = in_process(corpora, count), alone(encoding, corpora, count)
            print(count, within[count], flush=True)
        for count in counts:
            ways = {"commands": by_commands(corpora, count)}
            print(count, ways, flush=True)
            if count in within:
                ways["in a process"] = within[count][0]
                encoding_took = within[count][1]
            else:
                encoding_took = within[counts[-2]][1].times(count / counts[-2])
            table(part, passages, count, ways, encoding_took)
        rate = counts[-2] / within[counts[-2]][1].clock
        part.facts["full build"] = (
            f"{', '.join(f'{stage} {seconds:.1f} s' for stage, seconds in build.items())}; encoding, at the "
            f"{rate:.0f} passages/s of {counts[-2]:,} contents alone, {passages / rate:.0f} s more"
        )
        part.facts |= peer_facts(peer_costs(folder, passages, counts), counts)
    finish(part)


def peer_facts(costs: Mapping[str, Mapping[str, Any]], counts: Sequence[int]) -> dict[str, str]:
    return {
        f"{title}, vectors given": f"{cost['passages']:,} passages loaded in {cost['build']:.1f} s; "
        + "; ".join(
            f"{count:,} upserted and answered from in {cost[str(count)]['seconds']:.2f} s, "
            f"{cost[str(count)]['written_bytes'] / 1e6:.1f} MB written"
            for count in counts
        )
        for title, cost in costs.items()
    }


def measure_sizes(sizes: Sequence[int]) -> None:
    """Measure the same number of changes, a hundredth of the smaller corpus, in corpora of these sizes in turn, by
    function calls: the start of a command would hide how the rest grows."""
    small, large = sizes
    part = Part("updates-sizes", f"The same update of {small:,} and of {large:,} passages", "passages")
    count = small // 100
    with tempfile.TemporaryDirectory(dir=PEERS) as scratch:
        corpora = {}
        for size in sizes:
            folder = Path(scratch) / str(size)
            folder.mkdir()
            corpora[size] = Corpora(folder, size)
            corpora[size].build()
            in_process(corpora[size], 1)
        costs: dict[int, list[Cost]] = {size: [] for size in sizes}
        for _ in range(SIZE_ROUNDS):
            for size in sizes:
                costs[size].append(in_process(corpora[size], count))
                print(size, costs[size][-1], flush=True)
        for size, own in costs.items():
            part.add({f"{count} of {size:,} changed, in a process": [cost.seconds for cost in own]}, count)
            part.add({f"{count} of {size:,} changed, processor time": [cost.cpu_s for cost in own]}, count)
            stages = {stage: [round(cost.stages[stage], 2) for cost in own] for stage in own[0].stages}
            part.facts[f"{size:,} passages"] = f"{stages} s; MB written {[cost.written_bytes / 1e6 for cost in own]}"
        for kind in ("seconds", "cpu_s"):
            ratios = [getattr(b, kind) / getattr(a, kind) for a, b in zip(costs[small], costs[large])]
            unit = "processor seconds" if kind == "cpu_s" else "seconds"
            what = f"{count} changes, {large // small} times the passages: times the {unit}"
            part.bars.append(Bar(what, float(np.median(ratios)), TIMES_SIZE, at_least=False, note=REREAD))
    finish(part)


def finish(part: Part) -> None:
    part.facts |= {
        "index": f"{SHARDS} shards of up to {made_up.V} views of {made_up.D} dimensions in fp16, kind flat",
        "contents": "of the updates encoded by two layers of MiniLM (snippet means); all other views made up",
        "peers": ", ".join(pin for pins in PINS.values() for pin in pins[:1]),
        "load average at the end": Path("/proc/loadavg").read_text().split()[0],
    }
    write(part)


if __name__ == "__main__":
    PEERS.mkdir(exist_ok=True)
    if "--sizes" in sys.argv:
        measure_sizes([int(word) for word in sys.argv[2:4]])
    else:
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else PASSAGES)
