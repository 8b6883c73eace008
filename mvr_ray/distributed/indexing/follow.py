"""Follow a source of change files: every batch becomes a corpus version, and that an index version.

    list -> the next corpus, which records the result of every file -> index -> collect -> list again

The last corpus alone records the applied files, so the same command resumes after any crash, and applies no file twice.
A corpus that the live version does not hold yet is indexed first. The index keeps its encoder, whatever was trained
since. Ray and its encoders run only while versions are made: as many encoders as the batch has chunks, at most
`resources.encoders_max`, and none where no passage needs encoding.

After a rollback to other passages than the last corpus has, changes wait until `mvr-ray index` has published the last
corpus, or an update was made on top of the rollback: this command does not undo an operator's rollback.
"""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from mvr_ray.config import ResourcesConfig, RunConfig
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.job_metrics import with_metrics
from mvr_ray.distributed.encoders import keep_external_encoder
from mvr_ray.distributed.indexing import build_index
from mvr_ray.errors import ConfigError, MvrRayError, NoTokensError, count_noun
from mvr_ray.store import manifest as manifests
from mvr_ray.store.change_files import (
    Backlog,
    Batches,
    BatchReport,
    apply_batch,
    list_change_files,
    open_source,
    row_of,
)
from mvr_ray.store.change_records import require_settings
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 600.0
"""Maximum pause after failures; each failure doubles the pause."""
Say = Callable[[str], None]


@dataclass
class FollowReport:
    """Totals since the command started. `left_out` maps each file that was not applied to its problem."""

    batches: int = 0
    files_applied: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    version: int = 0
    """The newest index version."""


def follow(
    run: RunConfig, report: FollowReport, say: Say, progress: Progress = no_progress, *, once: bool = False
) -> None:
    """Apply change files as they arrive, without end; `once`: until none waits. `report` is updated after each batch.

    With `once` no batch waits until `follow.max_age_s` has passed.

    Raises ConfigError and MissingInputError before any work. Later errors are reported with `say`, and the work is
    retried after a pause; with `once` they are raised.
    """
    if once:
        run = run.model_copy(update={"follow": run.follow.model_copy(update={"max_age_s": 0})})
    follower = Follower(run, report, say, progress)
    pause_s = run.follow.poll_s
    while True:
        try:
            waiting = follower.make_versions()
            if once and (not waiting or follower.is_paused):
                return
            pause_s = run.follow.poll_s
        except ConfigError:
            raise
        except MvrRayError as error:
            if once:
                raise
            pause_s = min(2 * pause_s, max(LONGEST_PAUSE_S, run.follow.poll_s))
            log.error("batch failed: index=%s reason=%s", run.index.name, error)
            say(f"failed: {error}; tried again in {pause_s:g} s")
        time.sleep(pause_s)


class Follower:
    """Make versions of the batches of a source that are due."""

    def __init__(self, run: RunConfig, report: FollowReport, say: Say, progress: Progress = no_progress) -> None:
        self.run = run
        self.report = report
        self.say = say
        self.progress = with_metrics("follow", run.index.name, progress)
        self.store = Store(run.store.path)
        self.source = open_source(run.follow)
        self.batches = Batches(run.follow, shows_whole_files=not self.source.is_local)
        self.is_paused = False
        require_settings(Corpus.open(self.store, run.prepare.corpus), run.prepare)
        report.version = manifests.latest_version(self.store, run.index.name)

    def make_versions(self) -> int:
        """Make a version of each batch that is due; returns the number of files that wait."""
        with ExitStack() as stack:
            while True:
                corpus = Corpus.open(self.store, self.run.prepare.corpus)
                listing = list_change_files(self.source)
                backlog = Backlog.of(listing, corpus.info.change_files)
                live = self._live()
                if self._waits_for_operator(corpus, live):
                    return len(backlog.waiting)
                if live is None or live.corpus_digest != corpus.digest:  # an earlier try ended here
                    try:
                        self._index(stack, corpus.num_passages if live is None else 0, live)
                    except NoTokensError as error:
                        if not backlog.waiting:
                            raise
                        self.say(f"failed: {error}; a file that waits may correct it")
                batch = self.batches.next(backlog.waiting, time.monotonic())
                if not batch and not backlog.late:
                    return len(backlog.waiting)
                start = time.monotonic()
                name = self.run.index.name
                result = apply_batch(corpus, self.run.prepare, self.source, batch, listing, self.progress, name)
                version = self._live()
                if version is None or version.corpus_digest != result.update.digest:
                    version = self._index(stack, result.update.added + result.update.replaced, version)
                self._note(result, version, time.monotonic() - start)

    def _live(self) -> Manifest | None:
        is_there = manifests.latest_version(self.store, self.run.index.name)
        return manifests.read(self.store, self.run.index.name) if is_there else None

    def _waits_for_operator(self, corpus: Corpus, live: Manifest | None) -> bool:
        was_paused = self.is_paused
        self.is_paused = live is not None and manifests.is_rolled_back(corpus, live)
        if live is not None and self.is_paused and not was_paused:
            self.say(
                f"changes wait: version {live.version} has other passages than the last corpus, by a roll back; "
                f"publish that one (mvr-ray index CONFIG), and they are applied"
            )
        return self.is_paused

    def _index(self, stack: ExitStack, num_passages: int, live: Manifest | None) -> Manifest:
        """Publish the last corpus, with `num_passages` new ones (0: unknown). `stack` holds the Ray session."""
        corpus = Corpus.open(self.store, self.run.prepare.corpus)
        info = stack.enter_context(session.connect(self.run.resources, corpus.num_passages))
        run = keep_external_encoder(self.run)
        index = run.index
        if live is not None and live.encoder_name == run.encoder.name:
            index = index.model_copy(update={"encoder": live.encoder_fingerprint, "precision": "auto"})
        resources = self.run.resources
        if num_passages:
            resources = with_encoders(resources, -(-num_passages // index.sort_window), info)
        run = run.model_copy(update={"index": index, "resources": resources})
        try:
            version = build_index.index(run, self.progress, keep_rollback=True)
        except NoTokensError as error:
            before = Corpus.open(self.store, live.corpus, live.corpus_digest).info.change_files if live else ()
            if place := row_of(error.passage_id, self.source, corpus, self.run.prepare, before):
                hint = f"it is the row {place}: add a later change file with a text of it, or with its deletion"
                error.args = (f"{error}; {hint}",)
            raise
        collect(self.store, index.name, keep=index.keep_versions, grace_s=index.grace_s, skips_runs=True)
        self.report.version = version.version
        return version

    def _note(self, batch: BatchReport, version: Manifest, seconds: float) -> None:
        update, files = batch
        left_out = {file.name: file.problem for file in files if file.problem}
        self.report.version = version.version
        self.report.batches += len(files) > len(left_out)
        self.report.files_applied += len(files) - len(left_out)
        self.report.left_out |= left_out
        for name, problem in left_out.items():
            log.error("change file left out: index=%s file=%s reason=%s", version.index, name, problem)
            self.say(f"left out, nothing of it was applied: {name}: {problem}")
        if names := [file.name for file in files if not file.problem]:
            what = names[0] if len(names) == 1 else f"{len(names)} files up to {names[-1]}"
            self.say(
                f"version {version.version}: {what}; {count_noun(update.added, 'passage')} added, {update.replaced} "
                f"replaced, {update.deleted} deleted; {version.metrics.get('encoded', 0):g} encoded; "
                f"{seconds:.1f} s"
            )


def with_encoders(resources: ResourcesConfig, num_chunks: int, info: session.ClusterInfo) -> ResourcesConfig:
    """Set the number of encoders to the chunks of work, within the limits of the run and the cluster."""
    num = min(resources.encoders_max, num_chunks)
    if not info.can_grow:
        places = [session.num_places(max(info.cpus - 1, 0), resources.cpus_per_encoder)]
        places += [session.num_places(info.gpus, resources.gpus_per_encoder)] if resources.gpus_per_encoder else []
        num = max(min(num, *places), min(resources.encoders_min, num))
    return resources.model_copy(update={"encoders_min": num, "encoders_max": num})
