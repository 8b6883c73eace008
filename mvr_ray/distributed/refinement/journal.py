"""Keep the state of a running refinement in the store, so that the same command continues it.

    <staging>/refine-<key>/journal.json            ranks before, accuracy and report of each round done, and of each
                                                   weight tried
    <staging>/refine-<key>/weight-<i>/shard-*.npz  what the i-th weight of feedback views would change in each shard
    <staging>/refine-<key>/round-<r>/shard-*.npz   what round r has changed in each shard
    <staging>/refine-<key>/round-<r>/queries.npy   labelled questions after round r, where they move
    <staging>/refine-<key>/report.json             the outcome, from just before the publish

The key is made of what decides the result: this format, the version refined, the refine section, every question. A
round counts once the journal names it; the journal is replaced as a whole. Only the latest and the best round are kept.
Behind the content of each file is its digest: where one is damaged, the refinement begins anew.
"""

import hashlib
import io
import json
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mvr_ray.checksums import with_trailer
from mvr_ray.config import RunConfig
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
"""Part of the key: what was begun under another one is not continued."""


class RoundRecord(NamedTuple):
    """A finished round; `labelled` and `heldout` (a value for each gate set) in points, as they decide."""

    report: RoundReport
    labelled: float
    heldout: tuple[float, ...]
    num_moved: int


class WeightRecord(NamedTuple):
    """A weight that has been tried; `labelled` and `heldout` in points, as they decide."""

    report: WeightReport
    labelled: float
    heldout: tuple[float, ...]


class Journal:
    """The record of one refinement of one version. Empty where nothing has been done yet."""

    def __init__(self, store: Store, base: Manifest, run: RunConfig, questions: RefineQuestions) -> None:
        decides = (_FORMAT, base.content_digest(), base.version, run.digest("refine"), questions.digest())
        key = hashlib.sha256(repr(decides).encode()).hexdigest()[:16]
        self.store = store
        self.folder = paths.staging_dir(base.index, f"refine-{key}")
        self.before: Ranks | None = None
        self.labelled_before = 0.0
        self.heldout_before: tuple[float, ...] = ()
        self.rounds: list[RoundRecord] = []
        self.weights: list[WeightRecord] = []
        if kept := self._read():
            self.before = Ranks(np.array(kept["answer_ranks"], np.int64), np.array(kept["gold_ranks"], np.int64))
            self.labelled_before = kept["labelled_before"]
            self.heldout_before = tuple(kept["heldout_before"])
            self.rounds = [
                RoundRecord(RoundReport(**row["report"]), row["labelled"], tuple(row["heldout"]), row["num_moved"])
                for row in kept["rounds"]
            ]
            self.weights = [
                WeightRecord(WeightReport(**row["report"]), row["labelled"], tuple(row["heldout"]))
                for row in kept["weights"]
            ]

    @property
    def _path(self) -> str:
        return f"{self.folder}/journal.json"

    def _read(self) -> dict[str, Any] | None:
        """What the journal says; None where there is none, or a damaged one: the refinement begins anew."""
        try:
            return json.loads(read_staged(self.store, self._path)) if self.store.exists(self._path) else None
        except StagingError as error:
            log.warning("refinement begins anew: %s", error)
            self.delete()
            return None

    @property
    def heldout_RG(self) -> tuple[tuple[float, ...], ...]:
        return (self.heldout_before, *(done.heldout for done in self.rounds))

    @property
    def labelled_R(self) -> tuple[float, ...]:
        return (self.labelled_before, *(done.labelled for done in self.rounds))

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
        assert self.before is not None, "a round before the beginning"
        kept = {
            "answer_ranks": self.before.answer_T.tolist(),
            "gold_ranks": self.before.gold_T.tolist(),
            "labelled_before": self.labelled_before,
            "heldout_before": self.heldout_before,
            "rounds": [{**done._asdict(), "report": done.report._asdict()} for done in self.rounds],
            "weights": [{**done._asdict(), "report": done.report._asdict()} for done in self.weights],
        }
        self.store.write_bytes(self._path, with_trailer(json.dumps(kept).encode()))

    def keep_only(self, rounds: set[int]) -> None:
        """Drop the states of other rounds, and of weights that were tried."""
        states = [StateId("round", number) for number in range(1, len(self.rounds) + 1) if number not in rounds]
        for state in [*states, *(StateId("weight", number) for number in range(len(self.weights)))]:
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

    def save_report(self, report: RefineReport) -> None:
        self.store.write_bytes(f"{self.folder}/report.json", with_trailer(report.to_json().encode()))

    def saved_report(self) -> RefineReport | None:
        """The outcome, where it was saved and is not damaged."""
        path = f"{self.folder}/report.json"
        try:
            return RefineReport.from_json(read_staged(self.store, path).decode()) if self.store.exists(path) else None
        except StagingError:
            return None

    def delete(self) -> None:
        if self.store.exists(self.folder):
            self.store.delete_dir(self.folder)
