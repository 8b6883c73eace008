"""An index as one object: build, open, search, change, refine, measure and serve it.

    index = Index.build(passages, model="all-MiniLM-L6-v2", path="wiki")
    index.search("When was the university founded?", k=5)

`path` is a store as the command line and clusters use it, with the run file `run.yaml` in it: `mvr-ray search
wiki/run.yaml "..."` searches the same index. The stages are those of the command line; below `resources.local_passages`
passages they run in this process, without Ray.
"""

import builtins
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import yaml

from mvr_ray import versions
from mvr_ray.api import rows
from mvr_ray.api.hits import SearchHits
from mvr_ray.config import RunConfig, load_run, parse_run, resolve_path
from mvr_ray.config.train import check_train
from mvr_ray.errors import (
    ConfigError,
    DataError,
    FilterError,
    MissingInputError,
    PublishConflictError,
    StagingError,
    count_noun,
)
from mvr_ray.explanation import Explanation
from mvr_ray.serving.schemas import ExplainRequest, Hybrid, RequestError, SearchRequest, is_text, validate
from mvr_ray.serving.service import SearchService
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.changes import Changes
from mvr_ray.store.corpus import SETTINGS_OF_CHANGES, Corpus, question_sets
from mvr_ray.store.feedback import add_judgements, copy_judgements
from mvr_ray.store.files import Store, address_name, without_keys
from mvr_ray.store.filters import Filter, parse_filter, to_plain_filter
from mvr_ray.store.formats.records import FilteredDeletion, PassageId
from mvr_ray.store.formats.view_vectors import write_pairs
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import (
    add_questions,
    carry_to_chunks,
    checked_questions,
    require_gold_passages,
)
from mvr_ray.store.run_file import load_run_at
from mvr_ray.store.update import ChangeRecord, UpdateReport, is_rolled_back, parent_corpus, update_by_records
from mvr_ray.types import EmbeddingBlock, FloatArray, Passage, Progress, Question, no_progress
from mvr_ray.versions import RollbackReport, VersionInfo

if TYPE_CHECKING:
    from mvr_ray.api.encoder import Encoder
    from mvr_ray.distributed.evaluate import EvaluationReport
    from mvr_ray.distributed.hot_swap import HotSwapRouter
    from mvr_ray.distributed.indexing.external_vectors import ExternalVectors
    from mvr_ray.distributed.refinement.report import RefineReport
    from mvr_ray.distributed.router import Router
    from mvr_ray.distributed.train import TrainedModel
    from mvr_ray.store.formats.rankings import RankedQuestion

T = TypeVar("T")
BATCH_QUERIES = 256
MAX_PUBLISH_TRIES = 20
"""Each that fails means that another process has published a change."""
GIVEN_BY_ARGUMENTS = (
    ("store", "path", "path"),
    ("encoder", "backbone", "model"),
    ("prepare", "sources", "passages"),
    ("index", "vectors", "vectors"),
)
"""Section and key of a setting that `Index.build` refuses, and the argument in its place."""
NO_LIMITS = {
    "max_k": 1_000_000,
    "max_query_chars": 10_000_000,
    "max_batch": BATCH_QUERIES,
    "timeout_ms": 3_600_000,
}
"""Limits of `serve` that do not apply to searches in this process."""


class Index:
    """An index of passages. Make it with `Index.build` or `Index.open`; `with` or `close` release its memory.

    Methods that change it (`upsert`, `delete`, `refine`, `rollback`) publish a version; later searches answer from it.
    The first search opens the newest version. A version that another process, or another `Index`, publishes after that
    is searched and shown after `close`, or by another `Index.open`.
    """

    def __init__(self, run: RunConfig) -> None:
        """`run` describes an index that is in the store; `build` and `open` call this. Raises ConfigError for anything
        else, such as a path."""
        if not isinstance(run, RunConfig):
            raise ConfigError(f"Index: {run!r:.60} is no run; give it to Index.open, or passages to Index.build")
        self.run = run
        self._store = Store(run.store.path)
        self._open = ExitStack()
        self._has_run_file = True
        self._change_lock, self._router_lock = Lock(), Lock()

    @classmethod
    def build(
        cls,
        passages: Any,
        *,
        model: str | Path = "all-MiniLM-L6-v2",
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
        a folder, a Hugging Face name or `package:NAME/path`; the default reads English. `settings` are sections of a
        run file, such as `{"encoder": {"num_views": 4}}`.
        `vectors` are those of another program, in place of a model (docs/howto/vectors.md): a Parquet file, or pairs of
        an id and a vector or an array of one row a view. Such an index is searched with vectors.
        `progress`, here and in other methods: True shows it on stderr, as None does on a terminal and in IPython; False
        shows none; a callback gets (what, count, total).

        An existing index gets a new version over these passages alone; unchanged passages are not embedded again, and
        an interrupted build continues. Raises ConfigError, DataError, EncoderError, ResourceError.
        """
        sources = rows.sources_of(passages)
        own = _sections(settings)
        for section, key, argument in GIVEN_BY_ARGUMENTS:
            if key in own.get(section, {}):
                raise ConfigError(f"Index.build: settings has {section}.{key}; give {argument}= instead")
        own["store"] = {**own.get("store", {}), "path": _absolute(path)}
        backbone = _absolute(model) if isinstance(model, Path) else model
        own["encoder"] = {**own.get("encoder", {}), "backbone": backbone}
        own["prepare"] = {"fields": "infer", **own.get("prepare", {}), "sources": sources or []}
        run = parse_run(own, "Index.build")
        store = Store(run.store.path)
        records = None if sources else rows.passage_records(passages)
        with _progress_callback(progress) as callback, _vectors_file(store, vectors) as file:
            own_run = cls(run)._with(index={"vectors": file})
            _require_buildable(own_run)  # before the last corpus, which updates start from, is replaced
            before = None
            with suppress(MissingInputError):
                before = parent_corpus(store, run.prepare.corpus, run.index.name)
            report = prepare(run.prepare, store, callback, records, run.evaluate.match)
            try:
                manifest = _index(own_run, callback)
            except DataError:  # vectors that do not fit the passages
                last = Corpus.open(store, run.prepare.corpus)
                if before and last.digest == report.digest:
                    before.publish(after=last.number)  # from which the live version's changes go on
                raise
        if vectors is not None:
            run = cls(run)._with(index={"encoder": manifest.encoder_fingerprint})
        own_settings = run.model_dump(mode="json", exclude_unset=True)
        run_file = without_keys(yaml.safe_dump(own_settings, sort_keys=False, allow_unicode=True))
        store.write_bytes(paths.RUN_FILE, run_file.encode())
        return cls(run)

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
        has no run file: what the store records then takes its place, and other settings have their defaults. Raises
        MissingInputError if there is none, ConfigError, also for another `name` than that of a run file.
        """
        location = _absolute(path)
        text = location if str(path).startswith("~") else str(path)
        if address_name(text).endswith((".yaml", ".yml")):
            run = load_run_at(text)
            has_run_file, base = True, run.model_dump(mode="json", exclude_unset=True)
            if name not in (None, run.index.name):
                raise ConfigError(
                    f"Index.open: {text} describes index {run.index.name!r}, not {name!r}; give the path of the store "
                    f"with name=, or settings={{'index': {{'name': {name!r}}}}} for the other settings of this run file"
                )
        else:
            store = Store(text)
            if has_run_file := name is None and store.exists(paths.RUN_FILE):
                base = load_run(store.local_path(paths.RUN_FILE)).model_dump(mode="json", exclude_unset=True)
            else:
                base = _run_of_store(store, name)
            base["store"] = {"path": location}
        for section, values in _sections(settings).items():
            base[section] = {**base.get(section, {}), **values}
        index = cls(parse_run(base, text))
        index._has_run_file = has_run_file
        manifests.read(index._store, index.run.index.name)
        return index

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, as pickle makes one: it opens shards and an encoder of its own."""
        own = {"_router", "_open", "_change_lock", "_router_lock"}
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _open=ExitStack(), _change_lock=Lock(), _router_lock=Lock())

    def close(self) -> None:
        """Release the open shards and the encoder; the next search opens those of the newest version."""
        self._open.close()
        self.__dict__.pop("_router", None)

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
        return self._router.manifest if "_router" in self.__dict__ else self._newest()

    @property
    def encoder(self) -> "Encoder":
        """The encoder that made the index."""
        from mvr_ray.api.encoder import Encoder

        with self._router.pin() as router:
            return Encoder.of(router.encoder)

    @overload
    def search(
        self, query: str, k: int = 10, *, filter: Mapping[str, Any] | None = None, hybrid: Hybrid = None
    ) -> SearchHits: ...

    @overload
    def search(
        self,
        query: Sequence[str] | FloatArray,
        k: int = 10,
        *,
        filter: Mapping[str, Any] | None = None,
        hybrid: Hybrid = None,
    ) -> list[SearchHits]: ...

    def search(
        self,
        query: str | Sequence[str] | FloatArray,
        k: int = 10,
        *,
        filter: Mapping[str, Any] | None = None,
        hybrid: Hybrid = None,
    ) -> SearchHits | list[SearchHits]:
        """Return the best `k` passages of a question, or of each of several questions or vectors_QD of its encoder.

            hits = index.search("Who built it?", k=3, filter={"year": {"gte": 1958}})
            table = pandas.DataFrame(hits.rows)

        `filter` is an expression over the fields of passages (docs/filters.md). `hybrid` w ranks by BM25 + w times the
        score, "rrf" by the ranks in both, "off" by the score alone; absent: as `search.hybrid` of the settings says. It
        needs an index of words (`index.lexical`). Raises ConfigError for an empty question or a filter that does not
        fit.
        """
        plain = [query] if isinstance(query, str) else _plain_queries(query)
        texts = [one if isinstance(one, str) else f"vector {number}" for number, one in enumerate(plain)]
        results: list[SearchHits] = []
        with self._router.pin() as router:  # all queries are answered by one version
            own = {"k": k, "filter": filter, "fields": list(router.corpus.fields), "hybrid": hybrid}
            for start in range(0, len(plain), BATCH_QUERIES):
                with self._service(router, "search", None if isinstance(query, str) else start) as service:
                    request = validate(SearchRequest, queries=plain[start : start + BATCH_QUERIES], **own)
                    response = service.search(request)
                names = texts[start : start + BATCH_QUERIES]
                results += [SearchHits(name, hits, response) for name, hits in zip(names, response.results)]
        return results[0] if isinstance(query, str) else results

    def explain(
        self,
        questions: str | Sequence[str],
        passages: PassageId | Iterable[PassageId] = (),
        k: int = 3,
        *,
        hybrid: Hybrid = None,
    ) -> Explanation:
        """Score every view of some passages with one or several questions, at most 256: of the passages with these
        ids, else of the best `k` hits of each question. A notebook shows the result as a page (CAMVR, Figure 4).

            index.explain(["Who built it?", "When was it built?"], "tower_4")

        `hybrid` as in `search`. Raises ConfigError for an empty question or an unknown id.
        """
        texts = [questions] if isinstance(questions, str) else list(rows.rows_of(questions))
        ids = [str(one) for one in rows.ids_of(passages)]
        with self._service(self._router, "explain", None if isinstance(questions, str) else 0) as service:
            return service.explain(validate(ExplainRequest, questions=texts, passages=ids, k=k, hybrid=hybrid))

    @contextmanager
    def _service(self, router: "Router | HotSwapRouter", method: str, first: int | None) -> Iterator[SearchService]:
        """Answer requests from a router. Raises ConfigError, in the method's name, for one that is refused;
        `first` numbers the request's first query, None: the caller gave a single one."""
        limits = self.run.serve.model_copy(update=NO_LIMITS)
        try:
            yield SearchService(router, limits, hybrid=self.run.search.hybrid)
        except RequestError as error:
            hint = re.sub(r" \(serve\.\w+\)", "", error.hint)  # no setting of the server limits a process
            place = re.match(r"(queries|questions)\.(\d+)", error.field)
            noun = "query" if place and place[1] == "queries" else "question"
            item = f"{noun} {first + int(place[2])}: " if place and first is not None else ""
            raise ConfigError(f"{method}: {item}{error.message}; {hint}") from None

    def passages(self, ids: PassageId | Iterable[PassageId]) -> dict[str, Passage]:
        """Return passages of the live version by id; unknown ids are left out. A whole number is the id of its digits,
        as in `build`."""
        with self._router.pin() as router:
            return router.passages([str(one) for one in rows.ids_of(ids)])

    def scan(self, filter: Mapping[str, Any] | None = None) -> Iterator[Passage]:
        """Yield the passages of the version that searches answer from, or those that pass a filter (docs/filters.md),
        always in the same order. A version that is published meanwhile changes nothing of it. Memory does not grow
        with the corpus.

            years = Counter(dict(passage.fields).get("year") for passage in index.scan({"source": "a"}))

        Iterating over the index yields all; `"p7" in index` says whether it has a passage of this id. Raises
        ConfigError for a filter that does not fit.
        """
        live = self.manifest
        corpus = Corpus.open(self._store, live.corpus, live.corpus_digest)
        return corpus.scan(None if filter is None else _fitting_filter(filter, corpus))

    def __iter__(self) -> Iterator[Passage]:
        return self.scan()

    def __contains__(self, id: object) -> bool:
        return rows.is_id(id) and bool(self.passages([str(id)]))

    def vectors(self) -> Iterator[EmbeddingBlock]:
        """Yield the stored views of all passages of the version that searches answer from, for other programs.

            blocks = list(index.vectors())
            vectors_ND = np.concatenate([block.vectors_ND for block in blocks]).astype(np.float32)
            ids_N = np.concatenate([np.repeat(block.ids, np.diff(block.row_ptr)) for block in blocks])

        A block has up to 4,096 passages of one shard, in order of id: `ids`, and for passage i the `view_numbers_N` and
        `vectors_ND` from `row_ptr[i]` up to `row_ptr[i + 1]`. Vectors are mapped from the files, read-only; the numbers
        of feedback views begin at `manifest.num_views`. Nothing is encoded; views that a search cannot find, such as
        those of deleted passages, are not among them.
        """
        from mvr_ray.distributed.indexing.shards import version_blocks

        return version_blocks(self._store, self.manifest)

    def upsert(self, passages: Any, *, vectors: Any = None, progress: Progress | bool | None = None) -> Manifest:
        """Add passages, or replace those of the same ids, and publish a version. Only their contents are embedded.

            index.upsert([{"id": "p2", "text": "A new text."}, {"id": "p7", "set": {"year": 1959}}])

        `set` changes single fields of a passage, to null for None, and leaves the others and the text: two writers of
        different fields both win, nothing is embedded, and an id that the index lacks changes nothing.

        `vectors` as of `build`, for an index of them: those of all new texts, and any others that change.
        Several threads and processes can change an index at once. Raises DataError for a passage without an id, and
        then changes nothing; PublishConflictError, to call again, if other processes were faster in every try.
        """
        with _progress_callback(progress) as callback, _vectors_file(self._store, vectors) as file:
            return self._change(rows.upsert_records(passages), callback, file)

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
            _fitting_filter(filter, self._live_corpus())
            records.append(FilteredDeletion(filter))
        with _progress_callback(progress) as callback:
            return self._change(records, callback)

    def refine(
        self, questions: Any = None, *, progress: Progress | bool | None = None, **settings: Any
    ) -> "RefineReport":
        """Learn from questions with answers (or, with labels="gold", gold passages), else from the feedback of
        `add_feedback`.

            index.refine([("Who built the tower?", "Gustave Eiffel"), ...])
            index.refine(questions, rounds=10, gate=["held_out"], labels="gold")

        A version is published where no held-out question loses more than `max_heldout_loss` points. `settings` are
        those of the run file's `refine` section; `feedback`, a file, replaces what the questions' answers would teach.
        `questions` as of `add_questions`, or the name of a stored set.
        Raises ConfigError if there is nothing to learn from, or questions beside the run file's own `feedback`.
        """
        from mvr_ray.distributed.refine import refine

        own = dict(settings)
        if questions is not None:
            if self.run.refine.feedback and "feedback" not in own:
                raise ConfigError(
                    f"refine: questions are given, but the run file's refine.feedback, {self.run.refine.feedback}, "
                    f"would be learned from instead; pass feedback=None, or leave the questions out"
                )
            own["questions"] = self._set_of(questions, "refine")
        elif not {"questions", "feedback"} & set(own):
            path = copy_judgements(self._store, self.run.index.name)
            if path is None:
                raise ConfigError("refine: no questions are given and no feedback was added (Index.add_feedback)")
            own["feedback"] = str(self._store.local_path(path).absolute())
        run = self._with(refine=own)
        with _progress_callback(progress) as callback:
            report = refine(run, callback)
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
        """Train an encoder on questions with positive ids, or without any on sentences of the live version's passages,
        and store it as the newest of its name. `Index.build` over the same passages then indexes them with it.

            index.train(questions, dev=dev_questions, epochs=3, lr=2e-5)
            index.train("train", hard_negatives="train_mined", loss=my_loss)

        `questions` and `dev`, whose accuracy selects the best epoch, as of `add_questions`, or names of stored sets;
        `settings` are those of the run file's `train` section. `loss` is one of that section, or a function of the
        signature of `mvr_ray.core.learning.losses.mvr_loss`, which returns the same, or one tensor. A training that has
        finished is found again by its settings, its data, the source of that function, and the numbers and texts that
        it reads from outside, but not by what it calls or other objects. It runs in this process unless
        `resources.train_workers` of the settings is given. Raises ConfigError, DataError.
        """
        from mvr_ray.distributed.train import train

        own = dict(settings)
        for key, value in (("questions", questions), ("dev_questions", dev)):
            if value is not None:
                own[key] = self._set_of(value, "train")
        if isinstance(loss, str):
            own["loss"] = loss
        workers = {} if "train_workers" in self.run.resources.model_fields_set else {"train_workers": 0}
        live = self._newest()
        run = self._with(train=own, resources=workers, prepare={"corpus": live.corpus})
        check_train(run.train)
        with _progress_callback(progress) as callback:
            return train(run, callback, None if isinstance(loss, str) else loss, live.corpus_digest)

    def add_feedback(self, judgements: Iterable[tuple[str, PassageId, int]]) -> int:
        """Store judgements (question, passage id, 1 or -1), such as clicks, for `refine`; returns how many there are.

            index.add_feedback([("Who built it?", "p7", 1), ("Who built it?", "p9", -1)])

        Of several judgements of a pair `refine` takes the majority; a draw gives no label. Raises DataError for a wrong
        judgement, and then stores none. Several processes can call it at once.
        """
        lines = []
        for number, judgement in enumerate(rows.rows_of(judgements)):
            match judgement:
                case (str() as question, passage, (1 | -1) as label) if (
                    question.strip() and rows.is_id(passage) and label is not True
                ):
                    row = {"question": question, "passage_id": str(passage), "label": int(label)}
                    for name, text in (("question", question), ("passage id", str(passage))):
                        if not is_text(text):
                            raise DataError(f"judgement {number}: {name} is not valid UTF-8: {text!r:.60}")
                    lines.append(json.dumps(row, ensure_ascii=False))
                case _:
                    raise DataError(f"judgement {number} is {judgement!r:.80}, not (question, passage id, 1 or -1)")
        return add_judgements(self._store, self.run.index.name, lines)

    def add_questions(self, questions: Any, name: str) -> str:
        """Store a set of questions with the corpus under a name, which `evaluate`, `refine` and run files take.

        They are a file, or texts, tuples (question, answer or answers), and mappings with question, answers and
        positive_ids. Of a text that `chunk_words` cut, its own id stands for the chunks that hold the answers, or else
        the first one. Raises DataError, MissingInputError for a positive id that names no passage, and ConfigError for
        a name that no set can have.
        """
        self._with(evaluate={"questions": [name]})
        corpus = self._live_corpus()
        own = self._with_chunks(corpus, rows.questions_of(questions), name)
        require_gold_passages(name, own, corpus)
        add_questions(corpus, name, own)  # also to the corpus of a change that waits for `index`
        return name

    def evaluate(
        self,
        questions: Any,
        k: int | Sequence[int] = (1, 5, 20, 100),
        *,
        hybrid: Hybrid = None,
        progress: Progress | bool | None = None,
    ) -> "EvaluationReport":
        """Measure how well the live version answers questions: shares with an answer, and with a gold passage, among
        the first `k` hits, with their 95 % intervals (`rows` of the report); of gold passages also the mean reciprocal
        rank over the first max(k) hits (`gold/mrr`), nDCG over ten, and the share of all of a question's among the
        first `k` (`gold/recall@k`), where some question has several.

            index.evaluate([("Who built the tower?", ["Gustave Eiffel"])]).rows

        `questions` as of `add_questions`, or the name of a stored set; `hybrid` as of `search`, for the
        `configured_system` of the report.
        """
        from mvr_ray.distributed.evaluate import evaluate
        from mvr_ray.distributed.retrieve import QuestionSet

        name, sets, own = "evaluate", None, self._questions(questions)
        if isinstance(own, str):
            name = own
        else:
            sets = [QuestionSet(name, self._with_chunks(self._live_corpus(), own, name))]
        depths = list(k) if isinstance(k, Iterable) else [k]
        run = self._with(evaluate={"questions": [name], "k": depths}, search=_weight(hybrid))
        with _progress_callback(progress) as callback:
            return evaluate(run, callback, sets)

    def retrieve(
        self,
        questions: Any,
        k: int = 100,
        *,
        filter: Mapping[str, Any] | None = None,
        hybrid: Hybrid = None,
        progress: Progress | bool | None = None,
    ) -> "list[RankedQuestion]":
        """Rank passages of the live version for many questions, for metrics of your own: each question with its best
        `k` passages (`id`, `title`, `text`, `score`, `has_answer`, `view`, `snippet`).

            scores = {one.question.id: {hit.id: hit.score for hit in one.passages} for one in index.retrieve("dev")}
            ir_measures.calc_aggregate([ir_measures.nDCG @ 10], qrels, scores)

        `questions` as of `add_questions`, or the name of a stored set; `filter` and `hybrid` as of `search`. `mvr-ray
        retrieve` writes the same ranking as a file of TREC and other formats.
        """
        from mvr_ray.distributed.retrieve import QuestionSet, RankSettings, question_set, rank_questions
        from mvr_ray.distributed.router import open_router

        live, own = self._newest(), self._questions(questions)
        corpus = Corpus.open(self._store, live.corpus, live.corpus_digest)
        if isinstance(own, str):
            sets = [question_set(corpus, own)]
        else:
            sets = [QuestionSet("retrieve", self._with_chunks(corpus, own, "retrieve"))]
        run = self._with(retrieve={"k": k}, search=_weight(hybrid))
        options = {"match": run.evaluate.match, "filter": to_plain_filter(filter), "hybrid": run.search.hybrid}
        settings = RankSettings(run.retrieve.k, texts=True, snippets=True, **options)
        with _progress_callback(progress) as callback, open_router(run, live.version) as router:
            return list(rank_questions(run, router, sets, settings, callback))

    def _set_of(self, questions: Any, use: str) -> str:
        """Return the name of a stored set, or store the questions under a name of this use."""
        own = self._questions(questions)
        if isinstance(own, str):
            return own
        digest = hashlib.sha256(repr(own).encode(errors="backslashreplace")).hexdigest()
        return self.add_questions(own, f"{use}-{digest[:12]}")

    def _questions(self, questions: Any) -> str | list[Question]:
        """Return the name of a stored set, or the questions of a file or an iterable."""
        names = question_sets(self._live_corpus())
        if isinstance(questions, str) and questions in names:
            return questions
        try:
            return rows.questions_of(questions)
        except MissingInputError as error:
            known_names = ", ".join(names) or "none"
            raise MissingInputError(f"{error}, or give the name of a stored set (there are: {known_names})") from None

    def versions(self) -> list[VersionInfo]:
        """List the published versions, oldest first; the last one is live. As a frame:
        `pandas.DataFrame(version.model_dump() for version in index.versions())`."""
        return versions.act(self.run, "list", None)

    def rollback(self, version: int) -> RollbackReport:
        """Publish the content of an earlier version as a new one. Raises ConfigError for an unknown version."""
        report = versions.act(self.run, "rollback", version)
        self._follow()
        return report

    def serve(self, **settings: Any) -> None:
        """Answer HTTP requests until interrupted; `settings` are those of the run file's `serve` section, as `port`."""
        from mvr_ray.serving.replica import serve_until_interrupted

        serve_until_interrupted(self._with(serve=settings), None, print)

    def _with(self, **sections: Mapping[str, Any]) -> RunConfig:
        """Return the run with settings of some sections replaced."""
        plain = self.run.model_dump(mode="json", exclude_unset=True)
        for name, values in sections.items():
            plain[name] = {**plain.get(name, {}), **values}
        return parse_run(plain, "Index")

    @cached_property
    def _router(self) -> "HotSwapRouter":
        """A small index is searched in this process, also in a Ray session of others, which may have no CPU left."""
        from mvr_ray.distributed.cluster.session import cluster_address
        from mvr_ray.distributed.hot_swap import open_hot_swap_router

        with self._router_lock:
            if "_router" not in self.__dict__:  # no other thread was faster
                resources = self.run.resources
                is_remote = bool(cluster_address(resources)) or resources.gpus_per_searcher > 0
                local = not is_remote and self._newest().num_passages <= resources.local_passages
                router = open_hot_swap_router(self.run, local=local or None, batching=False)
                self.__dict__["_router"] = self._open.enter_context(router)
            return self.__dict__["_router"]

    def _live_corpus(self) -> Corpus:
        live = self._newest()
        return Corpus.open(self._store, live.corpus, live.corpus_digest)

    def _with_chunks(self, corpus: Corpus, questions: list[Question], name: str) -> list[Question]:
        """Return the questions of a set with the chunks of a corpus in place of gold ids of whole texts."""
        return carry_to_chunks(corpus, checked_questions(questions, name), self.run.evaluate.match)

    def _newest(self) -> Manifest:
        return manifests.read(self._store, self.run.index.name)

    def _follow(self) -> None:
        """Switch an open router, and one that is being opened, to the newest version."""
        with self._router_lock:
            if "_router" in self.__dict__:
                self._router.move_to(None)

    def _change(self, records: Iterable[ChangeRecord], progress: Progress, vectors: str | None = None) -> Manifest:
        """Update the corpus by records of changes, and publish a version of it, with the vectors of a file."""
        changes = list(records)
        with self._change_lock:
            live = self._newest()
            if not self._has_run_file:
                self._require_settings(live)
            own = {"encoder": live.encoder_fingerprint, "vectors": vectors}
            run = self._with(encoder={"name": live.encoder_name}, index=own)
            external = self._external_vectors(live, run)
            check = partial(self._require_vectors, external) if external else None

            def change_corpus() -> UpdateReport:
                return update_by_records(run.prepare, self._store, changes, progress, index=live.index, check=check)

            def publish() -> Manifest:
                if is_rolled_back(Corpus.open(self._store, live.corpus), self._newest()):
                    change_corpus()  # once more: the roll back replaced the change, too
                return _index(run, progress, keep_rollback=True)

            try:
                _with_retries(change_corpus)
            except DataError as error:
                raise DataError(f"{error}; nothing was changed. Correct the items and call the method again") from None
            manifest = _with_retries(publish)  # alone: what others have changed since then stays
            self._follow()
            return manifest

    def _external_vectors(self, live: Manifest, run: RunConfig) -> "ExternalVectors | None":
        """Read the vectors that another program made; None for an index that embeds texts. Raises ConfigError for
        vectors that are not needed."""
        from mvr_ray.distributed.encoders import embeds_texts
        from mvr_ray.distributed.indexing.external_vectors import resolve_vectors

        if run.index.vectors is None and embeds_texts(self._store, live):
            return None
        return resolve_vectors(run, self._live_corpus())[1]

    def _require_vectors(self, external: "ExternalVectors", parent: Corpus, changes: Changes[Passage]) -> None:
        """Raise DataError if vectors of new texts are missing, or their passages; PublishConflictError if the last
        corpus has other texts that wait for their vectors."""
        live = self._live_corpus()
        external.require_passages(parent, changes.upserts.keys(), changes.deletions)
        if missing := external.without_vectors(changes.upserts.values(), live, parent):
            raise DataError(f"upsert: vectors= lacks those of {', '.join(missing[:5])}, whose texts are new")
        parts = zip(parent.info.parts, live.info.parts) if parent.num_shards == live.num_shards else ()
        same_shards = {shard for shard, (own, other) in enumerate(parts) if own.digest == other.digest}
        changed_shards = {*range(parent.num_shards)} - same_shards
        texts = (passage for shard in changed_shards for passage in parent.part(shard).passages())
        others = (text for text in texts if text.id not in changes.deletions)
        others = (text for text in others if changes.upserts.get(text.id, text)[:3] == text[:3])
        if waiting := external.without_vectors(others, live):
            raise PublishConflictError(
                f"{count_noun(len(waiting), 'passage')} of an earlier change, which no version has, without vectors: "
                f"{', '.join(waiting[:5])}; nothing was changed. Call again once that change is published, or give "
                f"these vectors in upsert, too, or delete the passages"
            )

    def _require_settings(self, live: Manifest) -> None:
        """Raise ConfigError if an earlier program did not record a setting that a change needs."""
        corpus, run = parent_corpus(self._store, live.corpus, live.index), self.run
        problem = ""
        if "pruned_views" in live.metrics and "prune_views" not in live.metrics and run.index.prune_views is None:
            problem = "lacks views by an index.prune_views"
        if "chunk_words" not in corpus.info.counts and not run.prepare.chunk_words:
            first_id = next((passage.id for passage in corpus), "")
            if re.search(r"#\d+$", first_id):
                problem = f"has chunks such as {first_id!r} by a prepare.chunk_words"
        if problem:
            raise ConfigError(
                f"index {live.index!r} {problem} that the program which made the store did not record; nothing was "
                f"changed. Open the run file instead: Index.open('CONFIG.yaml')"
            )


@contextmanager
def _progress_callback(progress: Progress | bool | None) -> Iterator[Progress]:
    """Return a callback as it is; for True one that shows progress on stderr, for False none. None is True on a
    terminal and in IPython."""
    if progress is None:
        is_terminal = False
        with suppress(AttributeError, ValueError):  # stderr is None, an object without isatty, or closed
            is_terminal = sys.stderr.isatty()
        progress = is_terminal or hasattr(builtins, "__IPYTHON__")
    if not isinstance(progress, bool):
        yield progress
    elif progress:
        from mvr_ray.progress import Reporter

        with Reporter() as reporter:
            yield reporter
    else:
        yield no_progress


@contextmanager
def _vectors_file(store: Store, vectors: Any) -> Iterator[str | None]:
    """Yield the file of vectors, which is made of others than a path; None without any."""
    if vectors is None or isinstance(vectors, str | Path):
        yield None if vectors is None else _absolute(vectors)
        return
    with store.scratch() as folder:
        write_pairs(folder / "vectors.parquet", vectors)
        yield str(folder / "vectors.parquet")


def _with_retries(publish: Callable[[], T]) -> T:
    for _ in range(MAX_PUBLISH_TRIES - 1):
        with suppress(PublishConflictError, StagingError):  # a faster process removes what both staged
            return publish()
    return publish()


def _weight(hybrid: Hybrid) -> dict[str, Any]:
    """Return the `search` settings of a weight; none if it is absent."""
    return {} if hybrid is None else {"hybrid": None if hybrid == "off" else hybrid}


def _sections(settings: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Return a copy. Raises ConfigError for anything but sections of settings."""
    try:
        return {name: rows.plain(dict(values)) for name, values in (settings or {}).items()}
    except (AttributeError, TypeError, ValueError):
        example = '{"encoder": {"num_views": 4}}'
        raise ConfigError(f"settings is {settings!r:.60}; give sections of a run file, such as {example}") from None


def _require_buildable(run: RunConfig) -> None:
    """Raise what `_index` would raise of the encoder, of the index parameters and of vectors without their passages."""
    from mvr_ray.distributed.encoders import encoder_dimension
    from mvr_ray.distributed.indexing.external_vectors import read_external
    from mvr_ray.distributed.indexing.staging import checked_params

    file = run.index.vectors
    checked_params(run, read_external(run, file).encoder.dimension if file else encoder_dimension(run))


def _fitting_filter(value: Mapping[str, Any], corpus: Corpus) -> Filter:
    """Parse a filter over a corpus. Raises ConfigError for one that does not fit."""
    try:
        return parse_filter(value, corpus.fields)
    except FilterError as error:
        raise ConfigError(str(error)) from None


def _index(run: RunConfig, progress: Progress, keep_rollback: bool = False) -> Manifest:
    from mvr_ray.distributed.indexing.build_index import index

    return index(run, progress, keep_rollback=keep_rollback)


def _absolute(path: str | Path) -> str:
    if not isinstance(path, str | Path) or not str(path).strip():
        raise ConfigError(f"path is {path!r}, which names no store; name a folder, or '.' for the working folder")
    return str(path) if "://" in str(path) else str(resolve_path(str(path)).absolute())


def _run_of_store(store: Store, name: str | None) -> dict[str, Any]:
    """Return the settings of an index without a run file, as its live version and its corpus record them."""
    names = store.list(paths.INDEXES)
    if not names:
        problem = "does not exist" if store.is_local and not store.exists(".") else "holds no index"
        raise MissingInputError(
            f"{store.name} {problem}; correct the path, or make an index there: Index.build(passages, "
            f"path={store.name!r})"
        )
    if name is None and len(names) == 1:
        [name] = names
    if name not in names:
        problem = f"no index {name!r}" if name else "not exactly one index"
        known_names = ", ".join(names)
        raise MissingInputError(f"{store.name} holds {problem} (there are: {known_names}); give name=, or build one")
    live = manifests.read(store, name)
    counts = parent_corpus(store, live.corpus, name).info.counts
    words: dict[str, Any] = {"lexical": live.lexical is not None}
    if live.lexical:
        from mvr_ray.distributed.indexing.lexical import language_of

        words["language"] = language_of(store, name, live.lexical.files)
    return {
        "prepare": {"corpus": live.corpus} | {key: counts[key] for key in SETTINGS_OF_CHANGES if key in counts},
        "encoder": {"name": live.encoder_name},
        "index": {
            **live.index_params,
            "name": name,
            "dtype": live.dtype,
            "encoder": live.encoder_fingerprint,
            **words,
            "prune_views": live.metrics.get("prune_views"),
        },
    }


def _plain_queries(queries: Any) -> list[str | list[float]]:
    problem = f"queries are {queries!r:.60}"
    plain: list[str | list[float]] = []
    try:
        for number, one in enumerate(rows.rows_of(queries)):
            problem = f"query {number} is {one!r:.60}"
            if isinstance(one, Mapping):
                raise TypeError
            plain.append(one if isinstance(one, str) else [float(value) for value in one])
    except (DataError, TypeError, ValueError):
        raise ConfigError(
            f"search: {problem}; give a text, a list of texts, or vectors_QD, one vector as [vector]"
        ) from None
    return plain
