"""Report a refinement: its rounds, and accuracy before and after, separate by protocol.

Accuracies are shares in 0..1. "answer" counts a question with an answer-bearing passage in its top k, "gold" one with a
gold passage in its top k. Transductive rows measure the labelled questions themselves, never together with held-out
ones.
"""

import json
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pydantic import TypeAdapter

from mvr_ray.distributed.refinement.questions import Protocol
from mvr_ray.distributed.text_table import text_table
from mvr_ray.store.manifest import Manifest

REPORT_DEPTHS = (1, 5, 20, 100)
Kind = Literal["answer", "gold"]


class Accuracy(NamedTuple):
    """Top-k accuracy of one group of questions before and after, one column each so that rows print as a table."""

    group: str
    protocol: Protocol
    kind: Kind
    num_questions: int
    top_1_before: float
    top_1_after: float
    top_5_before: float
    top_5_after: float
    top_20_before: float
    top_20_after: float
    top_100_before: float
    top_100_after: float

    @property
    def before(self) -> tuple[float, ...]:
        """In the order of REPORT_DEPTHS."""
        return self.top_1_before, self.top_5_before, self.top_20_before, self.top_100_before

    @property
    def after(self) -> tuple[float, ...]:
        return self.top_1_after, self.top_5_after, self.top_20_after, self.top_100_after


class RoundReport(NamedTuple):
    """One round: its labels, its moves, and accuracy after it.

    moved_share   passages (or, on the query side, labelled questions) that moved by any amount (churn)
    drift_mean    mean and maximum distance of the moved vectors from their original values
    skipped_*     views or questions not moved: outside the loss's domain, without a positive, without a negative
    """

    number: int
    loss: float
    num_positives: int
    num_negatives: int
    moved_share: float
    drift_mean: float
    drift_max: float
    skipped_domain: int
    skipped_no_positive: int
    skipped_no_negative: int
    labelled_top1: float
    labelled_gold_top1: float
    gate_top1: float
    gate_gold_top1: float


class WeightReport(NamedTuple):
    """A trial of a weight of feedback views in the first round: top-1 shares, and the loss of the worst gate set."""

    weight: float
    labelled_top1: float
    labelled_gold_top1: float
    gate_top1: float
    gate_gold_top1: float
    lost_points: float


@dataclass(frozen=True)
class RefineReport:
    """Result of a refinement. `published` is None without a publication; `reason` says why, or why the rounds ended.

    `settings` of the feedback views, as in the manifest; `weights` are the trials, if several.
    """

    index: str
    base_version: int
    method: str
    rounds: tuple[RoundReport, ...]
    best_round: int
    accuracy: tuple[Accuracy, ...]
    dirty_share: float
    rewritten_shards: int
    published: Manifest | None
    reason: str
    settings: dict[str, float] = field(default_factory=dict)
    weights: tuple[WeightReport, ...] = ()

    def __repr__(self) -> str:
        """Show the outcome, and accuracy before and after in percent, as a table."""
        outcome = f"version {self.published.version} published" if self.published else "not published"
        title = f"index {self.index}, {self.method} of version {self.base_version}: {outcome} ({self.reason})"
        lines = []
        for row in self.accuracy:
            shares = (f"{100 * before:.1f} to {100 * after:.1f}" for before, after in zip(row.before, row.after))
            lines.append((row.group, row.protocol, row.kind, f"{row.num_questions:,}", *shares))
        depths = tuple(f"top-{depth}" for depth in REPORT_DEPTHS)
        return text_table(title, ("group", "protocol", "kind", "questions", *depths), lines)

    def to_json(self) -> str:
        """Convert to plain JSON; the manifest is named by its version."""
        rows = {name: [row._asdict() for row in getattr(self, name)] for name in ("rounds", "weights", "accuracy")}
        version = self.published.version if self.published else None
        return json.dumps({**vars(self), **rows, "published": version}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "RefineReport":
        """Read a saved report; `published` stays None."""
        return TypeAdapter(cls).validate_python({**json.loads(text), "published": None})
