"""Decide from numbers alone what the refinement loop does next.

Accuracy of the gate sets (held-out questions) and of the labelled questions is measured before the first round and
after each. The gate limits the cost of a refinement: a round is *acceptable* if no gate set, nor the labelled
questions, lost more than `max_heldout_loss` points. A round is better than another if it answers more of the labelled
questions, then if the mean of the gate sets is higher, then if it is earlier. Rounds continue until `patience` of them
have brought no better one, acceptable or not (a small gate fluctuates about its bound), or `max_rounds` is reached, or
nothing moves. Then the best acceptable round is restored; without one, refinement is rejected. The loss is no
criterion: it falls while accuracy collapses.

Before that, `choose_weight` selects the weight of feedback views among trials: within the gate's bound, the weight with
the highest accuracy of the labelled questions.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ONE_SHOT = ("linear", "rocchio")
"""Methods of one round, without a loss."""
MOVES_QUERIES = ("query", "hybrid", "rocchio")
KEEPS_PASSAGES = ("query", "rocchio")
"""Methods that move only queries: every passage stays as published."""
_POINT_NOISE = 1e-9  # 66.9 - 65.9 is a little more than 1 in floating point


@dataclass(frozen=True)
class RefineState:
    """Accuracy in points (0..100) after each round r; r = 0 is before refinement.

    `heldout_RG[r][g]` is that of gate set g, `labelled_R[r]` that of the labelled questions, all 0 where their
    answers are unknown. `last_moved`: vectors that the latest round moved or added, None where unknown or before the
    first round.
    """

    heldout_RG: tuple[tuple[float, ...], ...]
    labelled_R: tuple[float, ...]
    max_rounds: int
    patience: int
    max_heldout_loss: float
    last_moved: int | None = None

    def __post_init__(self) -> None:
        assert self.heldout_RG and self.heldout_RG[0], "held-out accuracy before refinement is missing"
        assert all(len(row) == len(self.heldout_RG[0]) for row in self.heldout_RG), "gate sets differ between rounds"
        assert len(self.labelled_R) == len(self.heldout_RG), "a round lacks the accuracy of the labelled questions"
        assert all(math.isfinite(value) for row in self.heldout_RG for value in row), "held-out accuracy is not finite"
        assert all(map(math.isfinite, self.labelled_R)), "accuracy of the labelled questions is not finite"

    @property
    def num_rounds(self) -> int:
        return len(self.heldout_RG) - 1

    def loss_after(self, r: int) -> float:
        """Return the largest loss of any set after round r, in points (negative if all have gained)."""
        return worst_loss((self.labelled_R[0], *self.heldout_RG[0]), (self.labelled_R[r], *self.heldout_RG[r]))

    def acceptable(self, last: int) -> list[int]:
        """Return the acceptable ones of rounds 1 to `last`."""
        return [r for r in range(1, last + 1) if self.loss_after(r) <= self.max_heldout_loss + _POINT_NOISE]

    def best(self, rounds: Iterable[int]) -> int | None:
        """Return the best of some rounds, the earliest of equals; None without rounds."""
        return max(rounds, key=lambda r: (self.labelled_R[r], math.fsum(self.heldout_RG[r]), -r), default=None)

    def least_harmful(self) -> int:
        """Return the round whose worst loss is smallest, the earliest of equals."""
        return min(range(1, self.num_rounds + 1), key=self.loss_after)


@dataclass(frozen=True)
class Continue:
    """Run one more round."""


@dataclass(frozen=True)
class Stop:
    """Restore this round and publish it; round 0: publish nothing."""

    reason: str
    best_round: int


@dataclass(frozen=True)
class Reject:
    """Publish nothing. `lost_points`: the worst set's loss in the least harmful round."""

    reason: str
    lost_points: float


Action = Continue | Stop | Reject


@dataclass(frozen=True)
class TriedWeight:
    """Top-1 of the labelled questions and of each gate set after a first round with this weight, in points."""

    weight: float
    labelled_top1: float
    heldout_G: tuple[float, ...]


def choose_weight(before_G: tuple[float, ...], trials: Sequence[TriedWeight], max_heldout_loss: float) -> float:
    """Choose the weight of highest labelled accuracy among those that cost no gate set more than `max_heldout_loss`.

    Where every weight costs more, choose the one with the smallest worst loss: rounds then end as for one weight. Ties
    go to the smaller weight.
    """
    loss_of = {trial.weight: worst_loss(before_G, trial.heldout_G) for trial in trials}
    acceptable = [trial for trial in trials if loss_of[trial.weight] <= max_heldout_loss + _POINT_NOISE]
    if acceptable:
        return max(acceptable, key=lambda trial: (trial.labelled_top1, -trial.weight)).weight
    return min(loss_of, key=lambda weight: (loss_of[weight], weight))


def worst_loss(before_G: Sequence[float], now_G: Sequence[float]) -> float:
    """Return the largest loss of any gate set, in points (negative if all have gained)."""
    return max(before - now for before, now in zip(before_G, now_G, strict=True))


def next_action(state: RefineState) -> Action:
    """Decide what the loop does next: Continue, Stop or Reject."""
    num_rounds = state.num_rounds
    if num_rounds and state.last_moved == 0:
        return _finish(state, num_rounds - 1, f"round {num_rounds} moved nothing")
    if num_rounds >= state.max_rounds:
        return _finish(state, num_rounds, f"{num_rounds} of {state.max_rounds} rounds done")
    peak, best = state.best(range(1, num_rounds + 1)) or 0, state.best(state.acceptable(num_rounds)) or 0
    if num_rounds - max(peak, best) >= state.patience:
        return _finish(state, num_rounds, f"no round was better for {state.patience} rounds")
    return Continue()


def _finish(state: RefineState, last: int, reason: str) -> Action:
    """End after round `last`: with the best round, or a rejection."""
    if last < 1:
        return Stop(reason, 0)
    best = state.best(state.acceptable(last))
    if best is not None:
        return Stop(reason, best)
    least_loss = min(state.loss_after(r) for r in range(1, last + 1))
    return Reject(
        f"{reason}; every round cost the gate or the labelled questions more than the {state.max_heldout_loss:g} "
        f"points allowed, the least harmful {least_loss:.1f}",
        least_loss,
    )
