"""Store the state of a running refinement, so that the same command resumes it.

    <staging>/refine-<key>/journal.json            ranks before, accuracy and report of each finished round and
                                                   trial weight
    <staging>/refine-<key>/weight-<i>/shard-*.npz  changes of the i-th weight of feedback views to each shard
    <staging>/refine-<key>/round-<r>/shard-*.npz   changes of round r to each shard
    <staging>/refine-<key>/round-<r>/queries.npy   labelled questions after round r, if they move
    <staging>/refine-<key>/report.json             the outcome, with a digest of what was to be published, from just
                                                   before the publish

The key is a digest of everything that determines the result: this format, the base version, the refine section,
`evaluate.match`, every question. A round counts once the journal names it; the journal is replaced as a whole. Only the
latest and the best round are kept. Each file ends with its digest: where one is damaged, the refinement restarts, and
writes each file anew in its turn. It deletes none before, as the same command may run beside it, with the same bytes.
"""

import hashlib
import io
import json
import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from mvr_ray.checksums import with_trailer
from mvr_ray.config import RunConfig
from mvr_ray.config.base import describe_problems
from mvr_ray.distributed.refinement.measure import Ranks
from mvr_ray.distributed.refinement.questions import RefineQuestions
from mvr_ray.distributed.refinement.report import RefineReport, RoundReport, WeightReport
from mvr_ray.distributed.refinement.state import StateId, read_staged
from mvr_ray.errors import StagingError
from mvr_ray.store import paths
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import FloatArray

log = logging.getLogger(__name__)

_FORMAT = 2
"""Part of the key: a refinement started under another format is not resumed."""


class RoundRecord(NamedTuple):
    """A finished round; `labelled_top1` and `heldout` (a value for each gate set) in points, for the policy."""

    report: RoundReport
    labelled_top1: float
    heldout: tuple[float, ...]
    num_moved: int


class WeightRecord(NamedTuple):
    """A finished trial of a weight; `labelled_top1` and `heldout` in points, for the policy."""

    report: WeightReport
    labelled_top1: float
    heldout: tuple[float, ...]


_ROUNDS, _WEIGHTS = TypeAdapter(list[RoundRecord]), TypeAdapter(list[WeightRecord])


class Journal:
    """The record of one refinement of one version, empty at first, or as an earlier try left it if it `resumes`."""

    def __init__(
        self, store: Store, base: Manifest, run: RunConfig, questions: RefineQuestions, *, resumes: bool = True
    ) -> None:
        decides = (_FORMAT, base.content_digest(), base.version, run.digest("refine"), questions.digest())
        self.key = "refine-" + hashlib.sha256(repr(decides).encode()).hexdigest()[:16]
        self.store = store
        self.folder = paths.staging_dir(base.index, self.key)
        self.before: Ranks | None = None
        self.labelled_before = 0.0
        self.heldout_before: tuple[float, ...] = ()
        self.rounds: list[RoundRecord] = []
        self.weights: list[WeightRecord] = []
        try:
            if resumes:
                self._read()
        except StagingError as error:
            log.warning("refinement restarts: %s", error)

    @property
    def _path(self) -> str:
        return f"{self.folder}/journal.json"

    def _read(self) -> None:
        """Read the journal, if there. Raises StagingError for a damaged one or a newer program's."""
        if not self.store.exists(self._path):
            return
        fields = json.loads(read_staged(self.store, self._path))
        try:
            rounds, weights = _ROUNDS.validate_python(fields["rounds"]), _WEIGHTS.validate_python(fields["weights"])
        except ValidationError as error:
            where = self.store.where(self._path)
            raise StagingError(f"{where} is of another program ({describe_problems(error)})") from error
        self.rounds, self.weights = rounds, weights
        self.before = np.array([fields["answer_ranks"], fields["gold_ranks"]], np.int64)
        self.labelled_before = fields["labelled_before"]
        self.heldout_before = tuple(fields["heldout_before"])

    def begin(self, before: Ranks, labelled_points: float, heldout: Sequence[float]) -> None:
        self.before, self.labelled_before, self.heldout_before = before, labelled_points, tuple(heldout)
        self._write()

    def commit(self, record: RoundRecord) -> None:
        self.rounds.append(record)
        self._write()

    def commit_weight(self, record: WeightRecord) -> None:
        self.weights.append(record)
        self._write()

    def _write(self) -> None:
        assert self.before is not None, "a round before `begin`"
        answer_ranks, gold_ranks = self.before.tolist()
        fields = {
            "answer_ranks": answer_ranks,
            "gold_ranks": gold_ranks,
            "labelled_before": self.labelled_before,
            "heldout_before": self.heldout_before,
            "rounds": [{**record._asdict(), "report": record.report._asdict()} for record in self.rounds],
            "weights": [{**record._asdict(), "report": record.report._asdict()} for record in self.weights],
        }
        self.store.write_bytes(self._path, with_trailer(json.dumps(fields).encode()))

    def keep_only(self, rounds: set[int]) -> None:
        """Delete the states of other rounds, and after the first one those of trial weights."""
        states = [StateId("round", number) for number in range(1, len(self.rounds) + 1) if number not in rounds]
        weights = [StateId("weight", number) for number in range(len(self.weights)) if len(self.rounds) == 1]
        for state in [*states, *weights]:
            if self.store.exists(folder := state.folder(self.folder)):
                self.store.delete_dir(folder)

    def save_queries(self, number: int, queries_LD: FloatArray) -> None:
        buffer = io.BytesIO()
        np.save(buffer, queries_LD, allow_pickle=False)
        self.store.write_bytes(self._queries_path(number), with_trailer(buffer.getvalue()))

    def load_queries(self, number: int) -> FloatArray:
        return np.load(io.BytesIO(read_staged(self.store, self._queries_path(number))), allow_pickle=False)

    def _queries_path(self, number: int) -> str:
        return f"{StateId('round', number).folder(self.folder)}/queries.npy"

    def save_report(self, report: RefineReport, content: str) -> None:
        """Save the outcome with the digest of the content that is about to be published."""
        fields = {**json.loads(report.to_json()), "content": content}
        self.store.write_bytes(f"{self.folder}/report.json", with_trailer(json.dumps(fields, indent=1).encode()))

    def saved_report(self, content: str) -> RefineReport | None:
        """Return the saved outcome, if present, not damaged, and of this content: a faster refinement may have
        published another."""
        path = f"{self.folder}/report.json"
        try:
            text = read_staged(self.store, path).decode() if self.store.exists(path) else "{}"
        except StagingError:
            return None
        return RefineReport.from_json(text) if json.loads(text).get("content") == content else None

    def delete(self) -> None:
        if self.store.exists(self.folder):
            self.store.delete_dir(self.folder)
