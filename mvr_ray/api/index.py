"""Defines an index as one object: build, open, search, change, refine, measure and serve it.

    index = Index.build(passages, model="all-MiniLM-L6-v2", path="wiki")
    index.search("When was the university founded?", k=5)

`path` is a store as the command line and clusters use it, with the run file `run.yaml` in it: `mvr-ray search
wiki/run.yaml "..."` searches the same index. The stages are those of the command line; below `resources.local_passages`
passages they run in this process, without Ray.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, overload

from mvr_ray import versions
from mvr_ray.api import question_stages, rows, searching
from mvr_ray.api.building import build, reindex, vectors_file
from mvr_ray.api.changes import publish_changes
from mvr_ray.api.hits import SearchHits
from mvr_ray.api.progress import progress_callback
from mvr_ray.api.run_settings import absolute, read_run, with_settings
from mvr_ray.config import RunConfig
from mvr_ray.errors import ConfigError, FilterError, count_noun
from mvr_ray.explanation import Explanation
from mvr_ray.serving.schemas import Hybrid
from mvr_ray.store import manifest as manifests
from mvr_ray.store.change_records import ChangeRecord
from mvr_ray.store.corpus import Corpus, question_sets
from mvr_ray.store.feedback import add_judgements
from mvr_ray.store.files import Store
from mvr_ray.store.filters import Filter, parse_filter, to_plain_filter
from mvr_ray.store.formats.records import FilteredDeletion, PassageId, is_id
from mvr_ray.store.manifest import Manifest, VerifyReport
from mvr_ray.types import EmbeddingBlock, FloatArray, Passage, Progress
from mvr_ray.versions import CollectReport, RollbackReport, VersionInfo

if TYPE_CHECKING:
    from mvr_ray.api.encoder import Encoder
    from mvr_ray.distributed.evaluate import EvaluationReport, TuneReport
    from mvr_ray.distributed.hot_swap import HotSwapRouter
    from mvr_ray.distributed.indexing.repair import RepairReport
    from mvr_ray.distributed.mine import MineReport
    from mvr_ray.distributed.refinement.report import RefineReport
    from mvr_ray.distributed.train import TrainedModel
    from mvr_ray.store.formats.rankings import RankedQuestion


class Index:
    """An index of passages. Make it with `Index.build` or `Index.open`; `with` or `close` release its memory.

    Methods that change it (`upsert`, `delete`, `refine`, `rollback`) publish a version; later searches answer from it.
    The first search opens the newest version. A version that another process, or another `Index`, publishes after that
    is searched and shown after `close`, or by another `Index.open`.

    In a Ray session of yours, `close` an index that is searched on Ray before `ray.shutdown`: Ray ends the process if
    threads of the index call it meanwhile. The next search opens the shards again, in the session that is there then.
    """

    def __init__(self, run: RunConfig) -> None:
        """`run` describes an index that is in the store; `build` and `open` call this. Raises ConfigError for anything
        else, such as a path."""
        if not isinstance(run, RunConfig):
            raise ConfigError(f"Index: {run!r:.60} is no run; give it to Index.open, or passages to Index.build")
        self.run = with_settings(run, store={"path": absolute(run.store.path)})  # whatever the working folder later is
        self._store = Store(self.run.store.path)
        self._has_run_file = True
        self._start()

    def _start(self) -> None:
        self._change_lock, self._router_lock, self._open = Lock(), Lock(), ExitStack()
        self._open_router: HotSwapRouter | None = None

    @classmethod
    def build(
        cls,
        passages: Any,
        *,
        model: str | Path | None = None,
        path: str | Path = "index",
        vectors: Any = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        progress: Progress | bool | None = None,
    ) -> Self:
        """Embed and index passages, and publish them as the live version of the store at `path`.

            Index.build(["A first text.", "A second one."], path="texts")
            Index.build([{"id": "p1", "title": "Nile", "text": "...", "year": 1958}], path="rivers")
            Index.build(pandas.read_csv("passages.csv"), model="thenlper/gte-base", path="csv")

        `passages` are texts, tuples (id, text) or (id, title, text), mappings, documents of LangChain, nodes of
        LlamaIndex, a pandas or polars frame, an Arrow table, a Hugging Face dataset, or files: a path, a list of paths,
        or an entry of `prepare.sources` such as `{"path": "news.csv", "fields": {"id": "doc_id", "text": "body"}}`
        (docs/formats.md). Rows are streamed. What a row has besides id, title and text is kept for filters. `model` is
        a folder, a Hugging Face name or `package:NAME/path`; None: the one that `train` trained last in this store, or
        all-MiniLM-L6-v2, which reads English. `settings` are sections of a run file, such as
        `{"encoder": {"num_views": 4}}`.
        `vectors` are those of another program, in place of a model (docs/howto/vectors.md): a Parquet file, or pairs of
        an id and a vector or an array of one row a view. Such an index is searched with vectors.
        `progress`, here and in other methods: True shows it on stderr, as None does on a terminal and in IPython; False
        shows none; a callback gets (what, count, total).

        An existing index gets a new version over these passages alone; unchanged passages are not embedded again, and
        an interrupted build continues. Another index of the store (`index.name`) gets them with its next change, unless
        its `prepare.corpus` is another. Raises ConfigError, DataError, EncoderError, ResourceError; MissingInputError
        for a path that names nothing.
        """
        return cls(build(passages, model, path, vectors, settings, progress))

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        name: str | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Self:
        """Open the index of a store, or the one that a run file (`.yaml`) describes.

        `name` selects one of several indexes of a store. `settings` override the run file. A store of the command line
        has no run file, and that of a store describes the index that was built last: for others what the store records
        takes its place, and other settings have their defaults. Raises MissingInputError if there is none, ConfigError,
        also for another `name` than that of a run file.
        """
        run, has_run_file = read_run(path, name, settings)
        index = cls(run)
        index._has_run_file = has_run_file
        manifests.read(index._store, run.index.name)
        return index

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, as pickle makes one: it opens shards and an encoder of its own."""
        own = {"_open_router", "_open", "_change_lock", "_router_lock"}
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def close(self) -> None:
        """Release the open shards and the encoder; the next search opens those of the newest version."""
        with self._router_lock:
            self._open_router = None
            self._open.close()

    def __len__(self) -> int:
        return self.manifest.num_passages

    def __repr__(self) -> str:
        live = self.manifest
        return (
            f"Index({self._store.name!r}, {count_noun(live.num_passages, 'passage')}, "
            f"{count_noun(live.num_vectors, 'vector')} of {live.dimension}, "
            f"encoder {live.encoder_fingerprint}, version {live.version})"
        )

    @property
    def manifest(self) -> Manifest:
        """The description of the version that searches answer from: encoder, shards, measurements."""
        router = self._open_router
        return self._newest() if router is None else router.manifest

    @property
    def encoder(self) -> "Encoder":
        """The encoder that made the index."""
        from mvr_ray.api.encoder import Encoder
        from mvr_ray.distributed.encoders import open_encoder

        with self._router.pin() as router:
            own = router.manifest.encoder_name, router.manifest.encoder_fingerprint
            return Encoder.of(router.encoder, partial(open_encoder, self._store, *own, only_embeds=False))

    @overload
    def search(
        self,
        query: str,
        k: int = 10,
        *,
        filter: Mapping[str, Any] | None = None,
        hybrid: Hybrid = None,
        version: int | None = None,
    ) -> SearchHits: ...

    @overload
    def search(
        self,
        query: Iterable[str] | Sequence[Sequence[float]] | FloatArray,
        k: int = 10,
        *,
        filter: Mapping[str, Any] | None = None,
        hybrid: Hybrid = None,
        version: int | None = None,
    ) -> list[SearchHits]: ...

    def search(
        self,
        query: str | Iterable[str] | Sequence[Sequence[float]] | FloatArray,
        k: int = 10,
        *,
        filter: Mapping[str, Any] | None = None,
        hybrid: Hybrid = None,
        version: int | None = None,
    ) -> SearchHits | list[SearchHits]:
        """Return the best `k` passages of a question, or of each of several questions or vectors_QD of its encoder.

            hits = index.search("Who built it?", k=3, filter={"year": {"gte": 1958}})
            table = pandas.DataFrame(hits.rows)

        `filter` is an expression over the fields of passages (docs/filters.md). `hybrid` w ranks by BM25 + w times the
        score, "rrf" by the ranks in both, "off" by the score alone; absent: as `search.hybrid` of the settings says. It
        needs an index of words (`index.lexical`). `version` answers from an earlier one of `versions`, with its
        passages, fields and encoder. Raises ConfigError for an empty question or a filter that does not fit,
        MissingInputError for an unknown version.
        """
        is_single = isinstance(query, str)
        queries = [query] if is_single else searching.plain_queries(query)
        own = k, filter, hybrid, version
        results = searching.search(self.run, self._router, queries, *own, is_single=is_single)
        return results[0] if is_single else results

    def explain(
        self,
        questions: str | Sequence[str],
        passages: PassageId | Iterable[PassageId] = (),
        k: int = 3,
        *,
        hybrid: Hybrid = None,
        version: int | None = None,
    ) -> Explanation:
        """Score every view of some passages with one or several questions, at most 256: of the passages with these
        ids, else of the best `k` hits of each question. A notebook shows the result as a page (CAMVR, Figure 4).

            index.explain(["Who built it?", "When was it built?"], "tower_4")

        `hybrid` and `version` as in `search`. Raises ConfigError for an empty question or an unknown id,
        MissingInputError for an unknown version.
        """
        is_single = isinstance(questions, str)
        texts = [questions] if is_single else searching.questions_of(questions)
        ids = rows.passage_ids(passages)
        return searching.explain(self.run, self._router, texts, ids, k, hybrid, version, is_single=is_single)

    def passages(self, ids: PassageId | Iterable[PassageId]) -> dict[str, Passage]:
        """Return passages of the version that searches answer from by id; unknown ids are left out. A whole number is
        the id of its digits, as in `build`. Raises DataError for what is no id."""
        with self._router.pin() as router:
            return router.passages(rows.passage_ids(ids))

    def scan(self, filter: Mapping[str, Any] | None = None) -> Iterator[Passage]:
        """Yield the passages of the version that searches answer from, or those that pass a filter (docs/filters.md),
        always in the same order. A version that is published meanwhile changes nothing of it. Memory does not grow
        with the corpus.

            years = Counter(passage.values.get("year") for passage in index.scan({"source": "a"}))

        Iterating over the index yields all; `"p7" in index` says whether it has a passage of this id. Raises
        ConfigError for a filter that does not fit.
        """
        live = self.manifest
        corpus = Corpus.open(self._store, live.corpus, live.corpus_digest)
        return corpus.scan(None if filter is None else _fitting_filter(filter, corpus))

    def __iter__(self) -> Iterator[Passage]:
        return self.scan()

    def __contains__(self, id: object) -> bool:
        return is_id(id) and bool(self.passages([str(id)]))

    def vectors(self) -> Iterator[EmbeddingBlock]:
        """Yield the stored views of all passages of the version that searches answer from, for other programs.

            blocks = list(index.vectors())
            vectors_ND = np.concatenate([block.vectors_ND for block in blocks]).astype(np.float32)
            ids_N = np.concatenate([np.repeat(block.ids, np.diff(block.row_ptr)) for block in blocks])

        A block has up to 4,096 passages of one shard, in order of id: `ids`, and for passage i the `view_numbers_N` and
        `vectors_ND` from `row_ptr[i]` up to `row_ptr[i + 1]`. Vectors are read-only, mapped from the files or, around
        changes, copied; the numbers of feedback views begin at `manifest.num_views`. Nothing is encoded; views that a
        search cannot find, such as those of deleted passages, are not among them.
        """
        from mvr_ray.distributed.indexing.shards import version_blocks

        return version_blocks(self._store, self.manifest)

    def upsert(self, passages: Any, *, vectors: Any = None, progress: Progress | bool | None = None) -> Manifest:
        """Add passages, or replace those of the same ids, and publish a version. Only their contents are embedded.

            index.upsert([{"id": "p2", "text": "A new text."}, {"id": "p7", "set": {"year": 1959}}])

        `set` changes single fields of a passage, to null for None, and leaves the others and the text: two writers of
        different fields both win, nothing is embedded, and an id that the index lacks changes nothing.

            index.upsert("changes.jsonl")

        A path is a file of changes as `mvr-ray update` reads it, of JSON lines, or a MediaWiki dump: a line may also
        delete a passage (`{"id": "p3", "delete": true}`) or what passes a filter. Everything in it is one version.

        `vectors` as of `build`, for an index of them: those of all new texts, and any others that change.
        Several threads and processes can change an index at once. Raises DataError for a passage without an id,
        NoTokensError for a text that the encoder cannot read, and then changes nothing; MissingInputError for a path
        without a file; PublishConflictError, to call again, if other processes were faster in every try.
        """
        with progress_callback(progress) as callback, vectors_file(self._store, vectors) as file:
            return self._change(rows.upserts(passages), callback, file)

    def delete(
        self,
        ids: PassageId | Iterable[PassageId] | None = None,
        *,
        filter: Mapping[str, Any] | None = None,
        progress: Progress | bool | None = None,
    ) -> Manifest:
        """Remove passages by id, and those that pass a filter, and publish a version. An unknown id changes nothing.

            index.delete(["p3", "p4"])
            index.delete(filter={"year": {"lt": 1958}})

        A filter applies to the newest passages of all writers; of a text that `chunk_words` cut, all chunks go if one
        passes. Raises as `upsert` does, and ConfigError without ids and filter, or for a filter that does not fit.
        """
        if ids is None and filter is None:
            raise ConfigError("delete: neither ids nor a filter are given; give one of them")
        records: list[ChangeRecord] = list(rows.deletion_records(() if ids is None else ids))
        if filter is not None:
            _fitting_filter(filter, manifests.live_corpus(self._store, self.run.index.name))
            records.append(FilteredDeletion(to_plain_filter(filter)))
        with progress_callback(progress) as callback:
            return self._change(records, callback)

    def refine(
        self, questions: Any = None, *, progress: Progress | bool | None = None, **settings: Any
    ) -> "RefineReport":
        """Learn from questions with answers (or, with labels="gold", gold passages), else from the settings'
        `refine.questions` or `refine.feedback`, else from the feedback of `add_feedback`, as `mvr-ray refine` does.

            index.refine([("Who built the tower?", "Gustave Eiffel"), ...])
            index.refine(questions, rounds=10, gate=["held_out"], labels="gold")

        A version is published if neither a set of `gate` nor the labelled questions themselves lose more than
        `max_heldout_loss` points. `settings` are those of the run file's `refine` section; `feedback`, a file, replaces
        what the questions' answers would teach. `questions` as of `add_questions`, or the name of a stored set.
        Raises ConfigError if there is nothing to learn from, or questions beside the run file's own `feedback`.
        """
        with progress_callback(progress) as callback:
            report = question_stages.refine(self.run, questions, callback, settings)
        self._follow()
        return report

    def train(
        self,
        questions: Any = None,
        *,
        dev: Any = None,
        loss: str | Callable[..., Any] | None = None,
        progress: Progress | bool | None = None,
        **settings: Any,
    ) -> "TrainedModel":
        """Train an encoder on questions with positive ids, without any on those of the run file's `train.questions`, or
        if it has none on sentences of the live version's passages, and store it as the newest of its name. `reindex`
        then indexes the passages with it, and so does `Index.build` without `model`, with the settings of the first
        build.

            index.train(questions, dev=dev_questions, epochs=3, lr=2e-5)
            index.train("train", hard_negatives="train_mined", loss=my_loss)

        `questions` and `dev`, whose accuracy selects the best epoch, as of `add_questions`, or names of stored sets;
        `settings` are those of the run file's `train` section. `loss` is one of that section, or a function of the
        signature of `mvr_ray.core.learning.losses.camvr_loss`, which returns the same, or one tensor. A training that
        has finished is found again by its settings, its data, the source of that function, and the numbers and texts
        that it reads from outside, but not by what it calls or other objects. It runs in this process unless
        `resources.train_workers` of the settings is given. Raises ConfigError, DataError.
        """
        with progress_callback(progress) as callback:
            return question_stages.train(self.run, questions, dev, loss, callback, settings)

    def add_feedback(self, judgements: Iterable[tuple[str, PassageId, int] | Mapping[str, Any]]) -> int:
        """Store judgements (question, passage id, 1 or -1), such as clicks, for `refine`; returns how many there are.
        Mappings, and the rows of a frame, have them as `question`, `passage_id` and `label`.

            index.add_feedback([("Who built it?", "p7", 1), ("Who built it?", "p9", -1)])

        Of several judgements of a pair `refine` takes the majority; a draw gives no label. Raises DataError for a wrong
        judgement, and then stores none. Several processes can call it at once.
        """
        return add_judgements(self._store, self.run.index.name, question_stages.judgement_lines(judgements))

    def add_questions(self, questions: Any, name: str) -> str:
        """Store a set of questions with the corpus under a name, which `evaluate`, `refine` and run files take.

        They are a file, or texts, tuples (question, answer or answers), and mappings with question, answers and
        positive_ids. The places of the answers in the first of these are found as `prepare` finds them. Of a text that
        `chunk_words` cut, its own id stands for the chunks that hold the answers, or else the first one. Raises
        DataError, MissingInputError for a positive id that names no passage, and ConfigError for a name that no set can
        have.
        """
        return question_stages.store_questions(self.run, questions, name)

    def evaluate(
        self,
        questions: Any,
        k: int | Sequence[int] | None = None,
        *,
        hybrid: Hybrid = None,
        version: int | None = None,
        progress: Progress | bool | None = None,
    ) -> "EvaluationReport":
        """Measure how well a version answers questions: shares with an answer, and with a gold passage, among the first
        `k` hits, with their 95 % intervals (`rows` of the report); of gold passages also the mean reciprocal rank over
        the first max(k) hits (`gold/mrr`), nDCG over ten, and the share of all of a question's among the first `k`
        (`gold/recall@k`), where some question has several.

            index.evaluate([("Who built the tower?", ["Gustave Eiffel"])]).rows

        `questions` as of `add_questions`, or the name of a stored set; `k` absent: `evaluate.k` of the settings, 1, 5,
        20 and 100 by default; `hybrid` as of `search`, for the `configured_system` of the report; `version` absent: the
        live one. `retrieve.filter` of the settings restricts what is ranked. Raises ConfigError, also for a filter that
        does not fit, DataError, and MissingInputError for an unknown version.
        """
        with progress_callback(progress) as callback:
            return question_stages.evaluate(self.run, questions, k, hybrid, version, callback)

    def retrieve(
        self,
        questions: Any,
        k: int | None = None,
        *,
        filter: Mapping[str, Any] | None = None,
        hybrid: Hybrid = None,
        version: int | None = None,
        progress: Progress | bool | None = None,
    ) -> "list[RankedQuestion]":
        """Rank passages of a version for many questions, for metrics of your own: each question with its best
        `k` passages (`id`, `title`, `text`, `score`, `has_answer`, `view`, `snippet`).

            scores = {one.question.id: {hit.id: hit.score for hit in one.passages} for one in index.retrieve("dev")}
            ir_measures.calc_aggregate([ir_measures.nDCG @ 10], qrels, scores)

        `questions` as of `add_questions`, or the name of a stored set; `filter` and `hybrid` as of `search`; `version`
        absent: the live one. Absent, `k` and `filter` are those of the settings' `retrieve` section, whose other keys
        count too: 100 and no filter by default. `mvr-ray retrieve` writes the same ranking as a file of TREC and other
        formats. Raises ConfigError for a filter that does not fit, before anything is encoded, DataError, and
        MissingInputError for an unknown version.
        """
        with progress_callback(progress) as callback:
            return question_stages.retrieve(self.run, questions, k, filter, hybrid, version, callback)

    def mine(self, questions: Any, *, progress: Progress | bool | None = None, **settings: Any) -> "MineReport":
        """Store the questions with hard negatives, wrong passages that rank high, as the set `output` of the result.

            index.train("train", hard_negatives=index.mine("train", num_negatives=4).output)

        `questions` with positive ids, as of `add_questions`, or the name of a stored set; `settings` are those of the
        run file's `mine` section, such as `output` ("train_mined") and `method` ("bm25", or "index": the live version).
        Raises ConfigError, DataError, MissingInputError.
        """
        with progress_callback(progress) as callback:
            return question_stages.mine(self.run, questions, callback, settings)

    def tune(self, questions: Any, *, progress: Progress | bool | None = None) -> "TuneReport":
        """Measure weights of `hybrid` on questions with positive ids, which no measurement may report on; `setting` of
        the result names the best one, `rows` the accuracy of each.

            index.tune("tuning").setting  # such as "search.hybrid=30"
            index.search("Who built it?", hybrid=30)

        `questions` as of `add_questions`, or the name of a stored set. Raises ConfigError for questions without
        positive ids, ShardIndexError for an index without words (`index.lexical`).
        """
        with progress_callback(progress) as callback:
            return question_stages.tune(self.run, questions, callback)

    def reindex(self, *, progress: Progress | bool | None = None) -> Manifest:
        """Publish a version of the stored passages by the settings of this index, as `mvr-ray index` does: with the
        encoder that `train` trained last, or with other settings, which need no passages again.

            index.train("train")
            index.reindex()
            Index.open("wiki", settings={"index": {"lexical": True}}).reindex()

        Only what another encoder embeds is encoded; the live version is returned if nothing would change. An `Index`
        that is opened without these settings makes its next version without them: put them into the run file to keep
        them. An index of a store without a run file keeps its encoder, unless `settings` name another
        (`{"index": {"encoder": "trained"}}`). Raises as `build` does.
        """
        with progress_callback(progress) as callback, self._change_lock:
            manifest = reindex(self.run, callback)
            self._follow()
            return manifest

    def question_sets(self) -> list[str]:
        """List the names of the question sets that are stored with the live version's corpus."""
        return question_sets(manifests.live_corpus(self._store, self.run.index.name))

    def versions(self) -> list[VersionInfo]:
        """List the published versions, oldest first; the last one is live. As a frame:
        `pandas.DataFrame(version.model_dump() for version in index.versions())`."""
        return versions.act(self.run, "list", None)

    def rollback(self, version: int) -> RollbackReport:
        """Publish the content of an earlier version as a new one. Raises MissingInputError for an unknown
        version."""
        report = versions.act(self.run, "rollback", searching.version_number(version))
        self._follow()
        return report

    def verify(self, version: int | None = None) -> VerifyReport:
        """Compare every file of a version (None: the newest) with its digest; `problems` of the result names what is
        damaged or missing, and what to do. Raises MissingInputError for an unknown version."""
        return versions.act(self.run, "verify", searching.version_number(version))

    def repair(self, version: int | None = None) -> "RepairReport":
        """Restore damaged files of a version (None: the newest) as far as it can be done without encoding. Raises
        MissingInputError for an unknown version."""
        return versions.act(self.run, "repair", searching.version_number(version))

    def collect(self) -> CollectReport:
        """Delete the versions before the last `index.keep_versions` (5) that another replaced `index.grace_s` (an hour)
        ago or earlier, and files that no version names for as long, and report the paths. Each change of an index
        publishes a version; call it after hundreds."""
        return versions.act(self.run, "collect", None)

    def serve(self, **settings: Any) -> None:
        """Answer HTTP requests until interrupted; `settings` are those of the run file's `serve` section, as `port`."""
        from mvr_ray.serving.replica import serve_until_interrupted

        serve_until_interrupted(with_settings(self.run, serve=settings), None, print)

    @property
    def _router(self) -> "HotSwapRouter":
        """A small index is searched in this process, also in a Ray session of others, which may have no CPU left."""
        from mvr_ray.distributed.cluster.session import cluster_address
        from mvr_ray.distributed.hot_swap import open_hot_swap_router

        with self._router_lock:
            self._close_lost()
            if self._open_router is None:
                resources = self.run.resources
                is_remote = bool(cluster_address(resources)) or resources.gpus_per_searcher > 0
                local = not is_remote and self._newest().num_passages <= resources.local_passages
                router = open_hot_swap_router(self.run, local=local or None, batching=False)
                self._open_router = self._open.enter_context(router)
                self._open_router.min_idle_s = 0.0  # no other user waits for the earlier versions that are open
            return self._open_router

    def _newest(self) -> Manifest:
        return manifests.read(self._store, self.run.index.name)

    def _follow(self) -> None:
        """Switch an open router, and one that is being opened, to the newest version."""
        with self._router_lock:
            self._close_lost()
            if self._open_router is not None:
                self._open_router.move_to(None)

    def _close_lost(self) -> None:
        """Close a router whose searchers ended with their Ray session, as after the caller's ray.shutdown."""
        if self._open_router is not None and self._open_router.searchers.is_lost:
            self._open_router = None
            self._open.close()

    def _change(
        self, changes: Sequence[ChangeRecord] | Path, progress: Progress, vectors: str | None = None
    ) -> Manifest:
        with self._change_lock:
            manifest = publish_changes(self.run, changes, progress, vectors, has_run_file=self._has_run_file)
            self._follow()
            return manifest


def _fitting_filter(value: Mapping[str, Any], corpus: Corpus) -> Filter:
    """Parse a filter over a corpus. Raises ConfigError for one that does not fit."""
    try:
        return parse_filter(to_plain_filter(value), corpus.fields)
    except FilterError as error:
        raise ConfigError(str(error)) from None
