"""Runs the refinement loop: retrieve, label, move or add views, measure, decide, publish (AOpt; feedback views).

    round r:  hits of the labelled questions -> labels -> step -> hits again -> accuracy -> next_action

`refine_policy` decides from numbers; this module acts. Each round's state is stored in the staging folder before the
round counts, so the same command resumes a killed run and gives the same bytes. The best acceptable round is restored,
its changed shards are rewritten and indexed, and the published version shares the others.

Shapes: T questions in the table, L labelled ones (the first of the table), K hits, D dimension.
"""

import dataclasses
import logging

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.refining.refine_policy import MOVES_QUERIES, Reject, Stop
from mvr_ray.core.threads import torch_threads
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.encoders import open_encoder
from mvr_ray.distributed.indexing import shards
from mvr_ray.distributed.refinement.journal import Journal
from mvr_ray.distributed.refinement.loop import RefinementLoop
from mvr_ray.distributed.refinement.publish import describe, save_queries
from mvr_ray.distributed.refinement.questions import RefineQuestions, gather, with_feedback
from mvr_ray.distributed.refinement.refiner_pool import QUERY_BLOCK, RefinerPool
from mvr_ray.distributed.refinement.report import RefineReport
from mvr_ray.distributed.refinement.shard_refiner import RefinerTask
from mvr_ray.errors import ConfigError, StagingError
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import FloatArray, Progress, no_progress

log = logging.getLogger(__name__)


def refine(run: RunConfig, progress: Progress = no_progress) -> RefineReport:
    """Refine the live version of `index.name` and publish the result, unless it costs too much accuracy.
    It learns from `refine.questions` or `refine.feedback`, and without them from the feedback of `Index.add_feedback`.

    Raises MissingInputError (no index, no question set), ConfigError, DataError (feedback), FingerprintError,
    ResourceError, PublishConflictError (another version was published meanwhile).
    """
    store = Store(run.store.path)
    base = manifests.read(store, run.index.name)
    if not base.num_passages:
        raise ConfigError(
            f"refine: index {base.index!r} version {base.version} holds no passage to refine; add passages "
            f"(mvr-ray update CONFIG changes=FILE), and run `mvr-ray index CONFIG`"
        )
    corpus = Corpus.open(store, base.corpus, base.corpus_digest)
    if run.retrieve.filter is not None:
        log.warning(
            "retrieve.filter has no effect on refine, whose labels, gate and report are of hits among all passages"
        )
    run = with_feedback(run, store)
    questions = gather(corpus, run.refine, run.prepare.sources)
    if report := _finished_by(store, base, run, questions):
        return report
    journal = Journal(store, base, run, questions)
    with shards.renew_periodically(store, base, journal.key, run.index.grace_s):
        try:
            report = _refine(run, store, base, questions, journal, progress)
        except StagingError as error:
            log.warning("refinement restarts: index=%s (%s)", base.index, error)
            journal = Journal(store, base, run, questions, resumes=False)
            report = _refine(run, store, base, questions, journal, progress)
    journal.delete()
    return report


def _refine(
    run: RunConfig, store: Store, base: Manifest, questions: RefineQuestions, journal: Journal, progress: Progress
) -> RefineReport:
    cpus = run.resources.cpus_per_searcher
    queries_TD = embed_questions(store, base, questions, run.resources.threads, progress)
    count = min(run.resources.refiners, len(base.shards))
    with session.connect(run.resources, base.num_passages, [session.Need("refiners", count, cpus)]):
        task = RefinerTask(
            store.address,
            base,
            journal.folder,
            run.refine,
            session.scan_threads(run.resources),
            compact_share=run.index.compact_share,
            match=run.evaluate.match,
        )
        with RefinerPool(task, count, cpus) as refiners:
            loop = RefinementLoop(questions, queries_TD, refiners, journal, progress)
            end = loop.run()
            report, manifest = _conclude(run, store, base, loop, end)
    if manifest is not None:
        journal.save_report(report, manifest.content_digest())
        report = dataclasses.replace(report, published=manifests.publish(store, manifest))
    return report


def _conclude(
    run: RunConfig, store: Store, base: Manifest, loop: RefinementLoop, end: Stop | Reject
) -> tuple[RefineReport, Manifest | None]:
    """Make the report, and the manifest to publish, if any."""
    round_number = end.best_round if isinstance(end, Stop) else loop.state().least_harmful()
    accuracy = loop.accuracies(round_number)
    report = RefineReport(
        index=base.index,
        base_version=base.version,
        method=run.refine.method,
        rounds=tuple(record.report for record in loop.journal.rounds),
        best_round=end.best_round if isinstance(end, Stop) else 0,
        accuracy=tuple(accuracy),
        dirty_share=0.0,
        rewritten_shards=0,
        published=None,
        reason=end.reason,
        settings=loop.settings(),
        weights=tuple(record.report for record in loop.journal.weights),
    )
    if isinstance(end, Reject) or end.best_round == 0:
        return report, None
    at = loop.state_id(end.best_round)
    manifest, num_rewritten = describe(run, base, loop.refiners, at, accuracy, report.settings)
    report = dataclasses.replace(report, dirty_share=manifest.dirty_share or 0.0, rewritten_shards=num_rewritten)
    if run.refine.method in MOVES_QUERIES:
        labelled_questions = loop.questions.table[: loop.questions.num_labelled]
        digest = save_queries(store, base.index, labelled_questions, loop.queries_at(end.best_round))
        claim = paths.staged_claim(loop.journal.folder, paths.refined_queries(base.index, digest))
        store.write_bytes(claim, b"")
        name = run.refine.questions or loop.questions.groups[0].name  # `retrieve` finds them by the stored set
        manifest = dataclasses.replace(manifest, refined_queries={**base.refined_queries, name: digest})
    elif not num_rewritten:
        return dataclasses.replace(report, reason=f"{end.reason}; no stored byte changed"), None
    return report, manifest


def _finished_by(store: Store, live: Manifest, run: RunConfig, questions: RefineQuestions) -> RefineReport | None:
    """Return the saved report of this command if the live version is what it published before it was killed."""
    if live.operation != f"refine:{run.refine.method}" or live.parent not in manifests.list_versions(store, live.index):
        return None
    journal = Journal(store, manifests.read(store, live.index, live.parent), run, questions)
    report = journal.saved_report(live.content_digest())
    if report is None:
        return None
    journal.delete()
    return dataclasses.replace(report, published=live)


def embed_questions(
    store: Store, base: Manifest, questions: RefineQuestions, threads: int, progress: Progress
) -> FloatArray:
    """Embed every question with the version's encoder."""
    encoder = open_encoder(store, base.encoder_name, base.encoder_fingerprint)
    texts = [question.text for question in questions.table]
    blocks = []
    for low in range(0, len(texts), QUERY_BLOCK):
        with torch_threads(threads):
            blocks.append(encoder.embed_queries(texts[low : low + QUERY_BLOCK]))
        progress("embed questions", min(low + QUERY_BLOCK, len(texts)), len(texts))
    return np.concatenate(blocks)
