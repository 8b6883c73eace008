"""What the refinement loop does next, from numbers alone.

Held-out (gate) accuracy is measured before the first round and after each. Rounds go on until the mean over the gate
sets has not risen for `patience` rounds, or rounds are used up, or nothing moves. Then the best *acceptable* round is
restored: one in which no gate set lost more than `max_heldout_loss` points. Where there is none, refinement is
rejected. The loss is not asked: it falls while accuracy collapses.

Before that, the weight of feedback views is chosen among some that were tried (`choose_weight`): within the same
bound, what the labelled questions gain decides, for that is what a larger weight buys.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_POINT_NOISE = 1e-9  # 66.9 - 65.9 is a little more than 1 in floating point


@dataclass(frozen=True)
class RefineState:
    """heldout_RG[r][g] is the accuracy in points (0..100) of gate set g after round r; r = 0 is before refinement.

    `last_moved` is how many vectors the latest round moved or added, None where that is unknown or no round ran.
    """

    heldout_RG: tuple[tuple[float, ...], ...]
    max_rounds: int
    patience: int
    max_heldout_loss: float
    last_moved: int | None = None

    def __post_init__(self) -> None:
        assert self.heldout_RG and self.heldout_RG[0], "held-out accuracy before refinement is missing"
        assert all(len(row) == len(self.heldout_RG[0]) for row in self.heldout_RG), "gate sets differ between rounds"
        assert all(math.isfinite(value) for row in self.heldout_RG for value in row), "held-out accuracy is not finite"


@dataclass(frozen=True)
class Continue:
    """Run one more round."""


@dataclass(frozen=True)
class Stop:
    """Restore this round and publish it; round 0 means that there is nothing to publish."""

    reason: str
    best_round: int


@dataclass(frozen=True)
class Reject:
    """Publish nothing. `lost_points` is what the worst gate set lost in the least harmful round."""

    reason: str
    lost_points: float


Action = Continue | Stop | Reject


@dataclass(frozen=True)
class TriedWeight:
    """After a first round with this weight: top-1 of the labelled questions and of each gate set, in points."""

    weight: float
    labelled: float
    heldout_G: tuple[float, ...]


def choose_weight(before_G: tuple[float, ...], tried: Sequence[TriedWeight], max_heldout_loss: float) -> float:
    """The weight with the highest labelled accuracy, of those that cost no gate set more than `max_heldout_loss`.

    Where every weight costs more, the one whose worst gate set lost least: rounds then end as for one weight. Ties go
    to the smaller weight.
    """
    lost = {one.weight: worst_loss(before_G, one.heldout_G) for one in tried}
    acceptable = [one for one in tried if lost[one.weight] <= max_heldout_loss + _POINT_NOISE]
    if acceptable:
        return max(acceptable, key=lambda one: (one.labelled, -one.weight)).weight
    return min(lost, key=lambda weight: (lost[weight], weight))


def worst_loss(before_G: Sequence[float], now_G: Sequence[float]) -> float:
    """Points that the worst gate set has lost (negative if all have gained)."""
    return max(before - now for before, now in zip(before_G, now_G, strict=True))


def next_action(state: RefineState) -> Action:
    """Continue, Stop or Reject. Ties between rounds go to the earliest, which has moved least."""
    done = len(state.heldout_RG) - 1
    if done and state.last_moved == 0:
        return _finish(state, done - 1, f"round {done} moved nothing")
    if done >= state.max_rounds:
        return _finish(state, done, f"{done} of {state.max_rounds} rounds done")
    if done:
        best = max(range(1, done + 1), key=lambda r: (_mean(state, r), -r))
        if done - best >= state.patience:
            return _finish(state, done, f"no held-out gain for {state.patience} rounds")
    return Continue()


def _finish(state: RefineState, last: int, reason: str) -> Action:
    """The end after round `last`: the best acceptable round, or a rejection."""
    if last < 1:
        return Stop(reason, 0)
    acceptable = [r for r in range(1, last + 1) if _lost(state, r) <= state.max_heldout_loss + _POINT_NOISE]
    if acceptable:
        return Stop(reason, max(acceptable, key=lambda r: (_mean(state, r), -r)))
    lost = min(_lost(state, r) for r in range(1, last + 1))
    return Reject(
        f"{reason}; every round cost a gate set more than the {state.max_heldout_loss:g} points allowed, "
        f"the least harmful {lost:.1f}",
        lost,
    )


def _mean(state: RefineState, round_number: int) -> float:
    row = state.heldout_RG[round_number]
    return math.fsum(row) / len(row)


def _lost(state: RefineState, round_number: int) -> float:
    return worst_loss(state.heldout_RG[0], state.heldout_RG[round_number])
