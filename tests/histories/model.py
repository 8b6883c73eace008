"""Acts upon one store in every role at once, and decides whether each answer could have been given.

    asker      stores a question set, each time another one in its place, about passages of the last corpus
    updater    applies files of changes to the corpus, one after the other
    writer     puts change files into a source
    follower   applies what waits in the source, in the order of its names, and publishes a version of it
    indexer    publishes a version of the corpus that is current, whole or as changes beside the version before
    keeper     compacts or reshards the live version, or rolls back
    collector  removes what no kept version names
    reader     opens the live version, asks it, and looks its hits up
    server     has a version open, and moves to the newest by itself or by a call (promote); asks as a reader does

What a corpus should hold follows from its lists of sources and change files alone: the passages at first, each file of
an update in its order, and each change file that was applied in the order of the names. Updates and change files are
about different passages, so that no order between them matters. What a passage's views should be follows from its text.
So the model takes nothing from the code that it judges but those names.

A history is right if
- every answer is that of brute force over what the answering version's corpus should hold, texts too;
- a reader that did not read a stale list answers from a version no older than any that was acknowledged before, and so
  does a server without a failure in its state; no server goes back to an older version;
- no acknowledged update is lost: each is among the sources of the corpus at the end, once and in an order of its own;
  nor is a change file, which is among the applied ones;
- the question set of the last corpus is one that the asker stored, without questions whose passages were deleted, and
  at the end the last one can be stored;
- no acknowledged version has another content than its publisher gave it;
- only named errors came; and at the end an update and a version of it can be published, whose answers are right.
"""

import contextlib
import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from random_index import D, V, Views, block_of, brute_force
from simulation import OBJECTS, Actor, ActorKill, Schedule, run_in_turn

from mvr_ray.config import PrepareConfig
from mvr_ray.distributed.hot_swap import HotSwapRouter
from mvr_ray.distributed.indexing.rewrite import compact_one, reshard_one, rewritten_manifest, staging_key
from mvr_ray.distributed.indexing.shards import build_shard
from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.errors import MvrRayError
from mvr_ray.index.base import IndexParams
from mvr_ray.serving.catalog import VersionCatalog
from mvr_ray.serving.schemas import RequestError
from mvr_ray.store import embeddings, manifest, paths
from mvr_ray.store.change_files import Backlog, apply_batch, list_change_files
from mvr_ray.store.corpus import Corpus, CorpusInfo, question_sets, shard_of
from mvr_ray.store.delta import open_embeddings, views_by_id, write_changed
from mvr_ray.store.embeddings import EmbeddingWriter
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import add_questions, read_questions
from mvr_ray.store.update import update
from mvr_ray.types import Question
from mvr_ray.versions import verify

INDEX, CORPUS, SET, SHARDS, K = "random", "c", "set", 2, 5
GRACE_S = 3600.0
UPDATED, FOLLOWED = range(12), range(12, 24)
"""Numbers of the passages that updates are about, and those that change files are about."""
Texts = dict[str, str]
Changes = dict[str, str | None]
"""Text by id, None for what is deleted."""


class Answer(NamedTuple):
    """What a reader was given, and the version that was acknowledged last before it asked."""

    version: int
    corpus: CorpusInfo
    hits: list[tuple[str, float, int]]
    texts: Texts
    query: tuple[int, ...]
    known_before: int
    is_stale: bool


def views_of(text: str) -> dict[int, np.ndarray]:
    """What stands in for an encoder: small whole numbers that follow from the text, so that scores tie."""
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]))
    views = sorted(rng.choice(V, rng.integers(1, V + 1), replace=False).tolist())
    return {view: rng.integers(-2, 3, D).astype(np.float32) for view in views}


class History:
    """One store, what its actors did, and the outcomes that they got."""

    def __init__(self, root: Path, address: str, seed: int, faults: frozenset[str]) -> None:
        self.draw = random.Random(seed)
        self.files = root / "files"
        self.files.mkdir(parents=True)
        self.address = address
        self.source = address if address.startswith(OBJECTS) else str(root / "source")
        """Where change files are; on objects beside the store's own folders."""
        if not address.startswith(OBJECTS):
            (root / "source").mkdir()
        self.schedule = Schedule(seed, faults)
        self.first: Texts = {f"p{n:02d}": f"text {n}" for n in range(self.draw.randint(2, 20))}
        self.changes: dict[str, Changes] = {}
        """What each update asks for, by the digest of its file."""
        self.change_files: dict[str, Changes] = {}
        """By name."""
        self.acknowledged_updates: list[str] = []
        self.acknowledged_files: list[str] = []
        self.sets: list[list[Question]] = []
        """In the order in which the asker stored them, or tried to."""
        self.acknowledgments: dict[int, Manifest] = {}
        self.answers: list[Answer] = []
        self.config = PrepareConfig(
            corpus=CORPUS,
            num_shards=SHARDS,
            sources=[{"path": str(self._write("first", self.first)), "format": "jsonl"}],
        )
        prepare(self.config, Store(address))
        self.first_source = Corpus.open(Store(address), CORPUS).info.sources[0].sha256
        self.index(Store(address), whole=True)

    def _write(self, name: str, changes: Changes | Texts) -> Path:
        file = self.files / f"{name}.jsonl"
        file.write_bytes(_json_lines(changes))
        return file

    def expected(self, info: CorpusInfo) -> Texts:
        """What a corpus of these sources and change files should hold."""
        texts = dict(self.first)
        updates = [self.changes[source.sha256] for source in info.sources[1:]]
        updates += [self.change_files[file.name] for file in info.change_files if not file.problem]
        for changes in updates:
            for name, text in changes.items():
                texts.pop(name, None) if text is None else texts.update({name: text})
        return texts

    def _draw_changes(self, number: str, passages: range) -> Changes:
        names = [f"p{n:02d}" for n in self.draw.sample(passages, self.draw.randint(1, 4))]
        keep = names[0] if self.draw.random() < 0.8 else None  # a file mostly adds something
        return {i: None if i != keep and self.draw.random() < 0.3 else f"text {number} of {i}" for i in names}

    # what actors do

    def update(self, store: Store) -> None:
        own = self._draw_changes(f"{len(self.changes)}", UPDATED)
        file = self._write(f"changes-{len(self.changes)}", own)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        self.changes[digest] = own
        report = update(self.config, store, str(file))
        if report.digest != report.parent:  # else nothing was to be changed
            self.acknowledged_updates.append(digest)

    def add_set(self, store: Store) -> None:
        corpus, number = Corpus.open(store, CORPUS), len(self.sets)
        names = sorted(self.expected(corpus.info))
        names = self.draw.sample(names, min(len(names), 6))
        self.sets.append([Question(f"{number} {name}", "?", positive_ids=(name,)) for name in names])
        add_questions(corpus, SET, self.sets[-1])

    def write(self, store: Store) -> None:
        name = f"{len(self.change_files):03d}.jsonl"
        self.change_files[name] = self._draw_changes(name, FOLLOWED)
        Store(self.source).write_bytes(name, _json_lines(self.change_files[name]))

    def follow(self, store: Store) -> None:
        """What `Follower.make_versions` does, but for Ray."""
        source, corpus = Store(self.source), Corpus.open(store, CORPUS)
        listing = list_change_files(source)
        backlog = Backlog.of(listing, corpus.info.change_files)
        batch = backlog.waiting[: self.draw.randint(1, 3)]
        if batch or backlog.late:
            report = apply_batch(corpus, self.config, source, batch, listing)
            self.acknowledged_files += [file.name for file in report.files if not file.problem]
        if manifest.read(store, INDEX).corpus_digest != Corpus.open(store, CORPUS).digest:
            self.index(store, whole=False)

    def index(self, store: Store, whole: bool) -> None:
        """Publish a version of the corpus as it is: every shard anew, or the changes beside those of the live one."""
        corpus = Corpus.open(store, CORPUS)
        live = manifest.read(store, INDEX) if manifest.list_versions(store, INDEX) else None
        views = {passage.id: views_of(passage.text) for n in range(SHARDS) for passage in corpus.part(n).passages()}
        draft = Manifest(
            index=INDEX,
            operation="index",
            encoder_name="none",
            encoder_fingerprint="f" * 16,
            similarity="inner_product",
            num_views=V,
            dimension=D,
            dtype="fp16",
            corpus=corpus.name,
            corpus_digest=corpus.digest,
            index_params=dataclasses.asdict(IndexParams()),
            shards=(),
            parent=live.version if live else 0,
        )
        entries = []
        for shard in range(SHARDS):
            own = {i: one for i, one in views.items() if shard_of(i, SHARDS) == shard}
            with store.scratch() as scratch:
                folder = scratch / "shard"
                folder.mkdir()
                before = live.shards[shard] if live and not whole and len(live.shards) == SHARDS else None
                if before and not self._write_beside(store, before, own, folder):
                    entries.append(before)
                    continue
                if before is None:
                    with EmbeddingWriter(folder / paths.EMBEDDINGS, D, V, "fp16") as writer:
                        writer.write(block_of(own))
                entries.append(build_shard(store, draft, shard, folder).entry)
        self._acknowledge(manifest.publish(store, dataclasses.replace(draft, shards=tuple(entries))))

    def _write_beside(self, store: Store, entry: manifest.ShardEntry, own: Views, folder: Path) -> bool:
        shard = open_embeddings(manifest.open_shard(store, INDEX, entry), entry.files)
        earlier = {
            i: {int(n): vector for n, vector in zip(view.view_numbers_N, view.vectors_ND)}
            for i, view in views_by_id(shard.blocks()).items()
        }
        upserts = {i: one for i, one in own.items() if i not in earlier or not _same(earlier[i], one)}
        deletions = sorted(set(earlier) - set(own))
        if not upserts and not deletions:
            return False
        arrays = {
            i: embeddings.Views(np.array(list(one), np.int16), np.array(list(one.values()), np.float32))
            for i, one in upserts.items()
        }
        write_changed(shard, folder, arrays, deletions)
        return True

    def keep(self, store: Store, what: str) -> None:
        live = manifest.read(store, INDEX)
        match what:
            case "compact":
                shards = [
                    compact_one(store.address, live, one).entry if paths.CHANGES in one.files else one
                    for one in live.shards
                ]
                next_version = dataclasses.replace(live, parent=live.version, shards=tuple(shards))
                self._acknowledge(manifest.publish(store, next_version))
            case "reshard":
                key = staging_key(live, SHARDS)
                shards = [reshard_one(store.address, live, SHARDS, key, shard) for shard in range(SHARDS)]
                self._acknowledge(manifest.publish(store, rewritten_manifest(live, "reshard", shards)))
            case _:
                to = self.draw.choice(manifest.list_versions(store, INDEX))
                if not self._damage(store, manifest.read(store, INDEX, to)):  # as `versions.rollback` does
                    self._acknowledge(manifest.rollback(store, INDEX, to))

    def _acknowledge(self, version: Manifest) -> None:
        assert version.version not in self.acknowledgments, (
            f"version {version.version} was acknowledged to two publishers"
        )
        self.acknowledgments[version.version] = version

    @staticmethod
    def _damage(store: Store, version: Manifest) -> list[manifest.Problem]:
        """What `verify` finds, but that no history has an encoder."""
        return [one for one in verify(store, version).problems if "encoder" not in one.path]

    def read(self, store: Store) -> None:
        known_before, turns = max(self.acknowledgments, default=0), len(self.schedule.turns)
        live = manifest.read(store, INDEX)
        self._ask(Router(store, live, LocalSearchers(_searcher_task(store, live))), known_before, turns)

    def _server(self) -> Callable[[Store], None]:
        """What a server does at its turn; it keeps what it has open from one turn to the next."""
        servers: list[HotSwapRouter] = []

        def serve(store: Store) -> None:
            known_before, turns = max(self.acknowledgments, default=0), len(self.schedule.turns)
            if not servers:
                live = manifest.read(store, INDEX)
                servers.append(HotSwapRouter(store, live, LocalSearchers(_searcher_task(store, live))))
            [server] = servers
            before = server.state.version
            if self.draw.random() < 0.5:  # promote, as SearchService does
                VersionCatalog(store, INDEX).one(manifest.latest_version(store, INDEX))
            server.follow()
            assert server.state.version >= before
            with server.pin() as router:
                self._ask(router, before if server.state.failure else known_before, turns)

        return serve

    def _ask(self, router: Router, known_before: int, turns: int) -> None:
        """Search with a query, look the hits up, and keep the answer. `turns` is how many were over when it began."""
        query = tuple(self.draw.randint(-2, 2) for _ in range(D))
        answer = router.search(np.array([query], np.float32), K)
        assert answer.coverage_share == 1.0
        hits = [(hit.passage_id, hit.score, hit.view) for hit in answer.hits[0]]
        texts = {name: passage.text for name, passage in router.passages([name for name, _, _ in hits]).items()}
        is_stale = any(turn.fate == "stale" for turn in self.schedule.turns[turns:])
        self.answers.append(
            Answer(router.manifest.version, router.corpus.info, hits, texts, query, known_before, is_stale)
        )

    # what the model says of it

    def run(self) -> None:
        """Let the actors act, and judge the history."""
        roles: list[Actor] = []
        for number in range(self.draw.randint(1, 2)):
            roles.append(self._actor(f"updater {number}", 3, self.update))
        if self.draw.random() < 0.5:
            roles.append(self._actor("asker", 3, self.add_set))
        for number in range(self.draw.randint(1, 2)):
            roles.append(self._actor(f"indexer {number}", 3, partial(self.index, whole=self.draw.random() < 0.3)))
        for what in self.draw.sample(["compact", "reshard", "rollback"], self.draw.randint(0, 2)):
            roles.append(self._actor(what, 2, partial(self.keep, what=what)))
        if self.draw.random() < 0.5:
            keep = self.draw.randint(1, 3)
            roles.append(self._actor("collector", 3, lambda store: collect(store, INDEX, keep, GRACE_S)))
        for number in range(self.draw.randint(1, 2)):
            roles.append(self._actor(f"reader {number}", 4, self.read, pace=0.3))
        for number in range(self.draw.randint(0, 2)):
            roles.append(self._actor(f"server {number}", 4, self._server(), pace=0.3))
        for number in range(self.draw.randint(0, 2)):
            roles.append(self._actor(f"follower {number}", 4, self.follow))
            roles.append(self._actor(f"writer {number}", 3, self.write, pace=0.1))
        with run_in_turn(self.schedule, self.address):
            self.schedule.run(roles)
        for role in roles:
            assert role.error is None or isinstance(role.error, ActorKill), f"{role.name} raised {role.error!r}"
        self._judge_answers()
        self._judge_end()

    def _actor(self, name: str, times: int, work: Callable[[Store], object], pace: float = 1.0) -> Actor:
        def act() -> None:
            for _ in range(times):
                with contextlib.suppress(
                    MvrRayError, RequestError
                ):  # a named error is an answer; the next try may succeed
                    work(Store(self.address))

        return Actor(name, act, pace)

    def _judge_answers(self) -> None:
        for answer in self.answers:
            texts = self.expected(answer.corpus)
            views = {name: views_of(text) for name, text in texts.items()}
            right = brute_force(views, np.array(answer.query, np.float32), K)
            assert answer.hits == right, f"{answer} is not {right}"
            assert answer.texts == {name: texts[name] for name, _, _ in right}
            assert answer.is_stale or answer.version >= answer.known_before, answer

    def _judge_end(self) -> None:
        store, has_leapt = Store(self.address), self.schedule.clock_s > 0
        for number in manifest.list_versions(store, INDEX):
            if number in self.acknowledgments:
                assert manifest.read(store, INDEX, number) == self.acknowledgments[number]
        live = manifest.read(store, INDEX)
        assert has_leapt or live.version >= max(self.acknowledgments)
        if not has_leapt:  # then a version may be torn, and its publisher got an error
            problems = self._damage(store, live)
            assert not problems, problems
        info = Corpus.open(store, CORPUS).info
        file_names = [file.name for file in info.change_files if not file.problem]
        losses = [name for name in self.acknowledged_files if name not in file_names]
        assert not losses, f"{losses} are lost"
        sources = [source.sha256 for source in info.sources[1:]]
        assert len(sources) == len(set(sources))
        losses = [digest for digest in self.acknowledged_updates if digest not in sources]
        assert not losses, f"{len(losses)} acknowledged updates are lost"
        if SET in question_sets(Corpus.open(store, CORPUS)):
            self._judge_questions(store, self.sets)
        if has_leapt:
            prepare(self.config, store)  # parts of the corpus may be gone
        answers = len(self.answers)
        self.add_set(store)
        self.update(store)
        self._judge_questions(store, self.sets[-1:])
        self.index(store, whole=has_leapt)
        self.read(store)
        assert len(self.answers) == answers + 1
        self._judge_answers()

    def _judge_questions(self, store: Store, sets: Sequence[list[Question]]) -> None:
        """Judge the set of the last corpus, which is one of these."""
        corpus = Corpus.open(store, CORPUS)
        questions = {*read_questions(corpus, SET)}
        names = self.expected(corpus.info)
        assert all(one.positive_ids[0] in names for one in questions)
        changes = [*self.changes.values(), *self.change_files.values()]
        deletions = {name for own in changes for name, text in own.items() if text is None}
        lasting = [{one for one in own if one.positive_ids[0] not in deletions} for own in sets]
        assert any(few <= questions <= {*own} for few, own in zip(lasting, sets)), f"{questions} are none of {sets}"


def _searcher_task(store: Store, live: Manifest) -> SearcherTask:
    return SearcherTask(store.address, live)


def _json_lines(changes: Changes | Texts) -> bytes:
    rows = (
        {"id": i, "delete": True} if text is None else {"id": i, "title": "", "text": text}
        for i, text in changes.items()
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _same(earlier: dict[int, np.ndarray], own: dict[int, np.ndarray]) -> bool:
    return list(earlier) == list(own) and all(np.array_equal(earlier[view], own[view]) for view in own)
