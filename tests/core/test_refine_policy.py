"""The refinement policy as a table: held-out numbers in, one action out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvr_ray.core.refine_policy import (
    Continue,
    RefineState,
    Reject,
    Stop,
    TriedWeight,
    choose_weight,
    next_action,
)


def state(*rounds: float, max_rounds: int = 30, patience: int = 3, loss: float = 1.0, moved: int | None = 9):
    return RefineState(tuple((value,) for value in rounds), max_rounds, patience, loss, moved)


@pytest.mark.parametrize(
    ("given_state", "expected"),
    [
        (state(60.0, moved=None), Continue()),
        (state(60.0, 61.0), Continue()),
        (state(60.0, 61.0, 60.5, 60.9), Continue()),
        (state(60.0, 61.0, 60.5, 60.9, 60.8), Stop("no held-out gain for 3 rounds", 1)),
        (state(60.0, 61.0, 61.0, 61.0, 61.0), Stop("no held-out gain for 3 rounds", 1)),
        (state(60.0, 61.0, 60.5, 61.2, 60.8), Continue()),
        (state(60.0, 58.0, 59.0, 60.0, 61.0, max_rounds=4), Stop("4 of 4 rounds done", 4)),
        (state(60.0, 63.0, 50.0, max_rounds=2), Stop("2 of 2 rounds done", 1)),
        (state(60.0, 59.4, max_rounds=1), Stop("1 of 1 rounds done", 1)),
        (state(66.9, 65.9, max_rounds=1), Stop("1 of 1 rounds done", 1)),
        (state(60.0, 58.0, max_rounds=9), Continue()),
        (state(60.0, 59.9, max_rounds=1, loss=0.0), Reject("", 0.1)),
        (state(60.0, 58.0, 57.0, max_rounds=2), Reject("", 2.0)),
        (state(60.0, 58.0, 50.0, 40.0, 30.0), Reject("", 2.0)),
        (state(60.0, 60.0, moved=0), Stop("round 1 moved nothing", 0)),
        (state(60.0, 62.0, 62.0, moved=0), Stop("round 2 moved nothing", 1)),
        (state(60.0, 50.0, 50.0, moved=0), Reject("", 10.0)),
        (state(60.0, moved=0), Continue()),
    ],
)
def test_the_policy_does_what_the_table_says(given_state: RefineState, expected: object):
    action = next_action(given_state)
    if isinstance(expected, Reject):
        assert isinstance(action, Reject)
        assert action.lost_points == pytest.approx(expected.lost_points)
    else:
        assert action == expected


def test_a_rejection_names_the_limit_and_the_least_loss():
    action = next_action(state(60.0, 57.5, 50.0, max_rounds=2))
    assert action == Reject(
        "2 of 2 rounds done; every round cost a gate set more than the 1 points allowed, the least harmful 2.5", 2.5
    )


def test_one_gate_set_that_loses_too_much_rules_a_round_out_though_the_mean_rises():
    rounds = ((60.0, 60.0), (60.5, 60.2), (90.0, 58.5))
    assert next_action(RefineState(rounds, 2, 5, 1.0)) == Stop("2 of 2 rounds done", 1)
    assert next_action(RefineState(rounds, 2, 5, 2.0)) == Stop("2 of 2 rounds done", 2)
    assert isinstance(next_action(RefineState((rounds[0], rounds[2]), 1, 5, 1.0)), Reject)


def test_a_gate_that_was_not_measured_is_refused():
    with pytest.raises(AssertionError):
        RefineState((), 1, 1, 1.0)
    with pytest.raises(AssertionError):
        state(60.0, float("nan"))
    with pytest.raises(AssertionError):
        RefineState(((1.0,), (1.0, 2.0)), 1, 1, 1.0)


@given(
    st.lists(st.floats(0, 100), min_size=2, max_size=12),
    st.integers(1, 11),
    st.integers(1, 5),
    st.floats(0, 5),
)
def test_a_published_round_never_costs_more_than_allowed_and_no_acceptable_round_is_better(
    accuracy: list[float], max_rounds: int, patience: int, loss: float
):
    rounds = 1
    while isinstance(
        action := next_action(state(*accuracy[:rounds], max_rounds=max_rounds, patience=patience, loss=loss)), Continue
    ):
        if rounds == len(accuracy):
            return
        rounds += 1
    assert 1 < rounds <= max_rounds + 1
    seen = accuracy[1:rounds]
    kept = [value for value in seen if accuracy[0] - value <= loss + 1e-9]
    if isinstance(action, Stop):
        assert accuracy[action.best_round] == max(kept)
    else:
        assert not kept


def tried(*rows: tuple[float, float, tuple[float, ...]]) -> list[TriedWeight]:
    return [TriedWeight(*row) for row in rows]


@pytest.mark.parametrize(
    ("before", "weights", "loss", "chosen"),
    [
        ((70.0,), [(0.7, 92.0, (71.0,)), (0.8, 97.0, (69.5,))], 1.0, 0.8),
        ((70.0,), [(0.7, 92.0, (71.0,)), (0.8, 97.0, (68.9,))], 1.0, 0.7),
        ((66.9,), [(0.7, 92.0, (66.9,)), (0.8, 97.0, (65.9,))], 1.0, 0.8),
        ((70.0,), [(0.7, 92.0, (70.0,)), (0.8, 92.0, (75.0,))], 1.0, 0.7),
        ((70.0,), [(0.8, 92.0, (70.0,)), (0.7, 92.0, (70.0,)), (0.9, 91.0, (70.0,))], 1.0, 0.7),
        ((70.0, 60.0), [(0.7, 92.0, (70.0, 60.0)), (0.8, 97.0, (80.0, 58.0))], 1.0, 0.7),
        ((70.0, 60.0), [(0.7, 92.0, (70.0, 60.0)), (0.8, 97.0, (80.0, 58.0))], 2.0, 0.8),
        ((70.0,), [(0.7, 92.0, (60.0,)), (0.8, 97.0, (61.0,)), (0.9, 99.0, (50.0,))], 1.0, 0.8),
        ((70.0,), [(0.8, 97.0, (60.0,)), (0.7, 92.0, (60.0,))], 1.0, 0.7),
        ((70.0,), [(0.8, 50.0, (70.0,))], 0.0, 0.8),
    ],
)
def test_the_weight_that_the_table_says_is_chosen(before, weights, loss, chosen):
    assert choose_weight(before, tried(*weights), loss) == chosen


@given(
    st.dictionaries(
        st.sampled_from([0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        st.tuples(st.integers(0, 20), st.tuples(st.integers(0, 20), st.integers(0, 20))),
        min_size=1,
    ),
    st.integers(0, 6),
    st.randoms(),
)
def test_the_chosen_weight_gains_most_within_the_bound_in_whatever_order_weights_were_tried(found, loss, shuffled):
    before = (10.0, 10.0)
    rows = [(weight, float(known), tuple(map(float, gates))) for weight, (known, gates) in found.items()]
    shuffled.shuffle(rows)
    chosen = choose_weight(before, tried(*rows), loss)
    allowed = {weight: known for weight, known, gates in rows if min(gates) >= 10 - loss}
    if allowed:
        assert chosen == min(weight for weight in allowed if allowed[weight] == max(allowed.values()))
    else:
        assert chosen == max(rows, key=lambda row: (min(row[2]), -row[0]))[0]
