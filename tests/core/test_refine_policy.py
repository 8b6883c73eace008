"""The refinement policy as a table: held-out numbers in, one action out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvr_ray.core.refining.refine_policy import (
    Continue,
    RefineState,
    Reject,
    Stop,
    TriedWeight,
    choose_weight,
    next_action,
)


def state(
    *rounds: float,
    labelled_top1: list[float] | None = None,
    max_rounds: int = 30,
    patience: int = 3,
    loss: float = 1.0,
    last_moved: int | None = 9,
):
    """One gate set; `labelled_top1` of the labelled questions, which nothing judges unless it is given."""
    top1 = tuple(labelled_top1 or [0.0] * len(rounds))
    return RefineState(tuple((value,) for value in rounds), top1, max_rounds, patience, loss, last_moved)


NO_BETTER = "no round was better for 3 rounds"


@pytest.mark.parametrize(
    ("given_state", "expected"),
    [
        (state(60.0, last_moved=None), Continue()),
        (state(60.0, 61.0), Continue()),
        (state(60.0, 61.0, 60.5, 60.9), Continue()),
        (state(60.0, 61.0, 60.5, 60.9, 60.8), Stop(NO_BETTER, 1)),
        (state(60.0, 61.0, 61.0, 61.0, 61.0), Stop(NO_BETTER, 1)),
        (state(60.0, 61.0, 60.5, 61.2, 60.8), Continue()),
        (state(60.0, 58.0, 59.0, 60.0, 61.0, max_rounds=4), Stop("4 of 4 rounds done", 4)),
        (state(60.0, 63.0, 50.0, max_rounds=2), Stop("2 of 2 rounds done", 1)),
        (state(60.0, 59.4, max_rounds=1), Stop("1 of 1 rounds done", 1)),
        (state(66.9, 65.9, max_rounds=1), Stop("1 of 1 rounds done", 1)),
        (state(60.0, 58.0, max_rounds=9), Continue()),
        (state(60.0, 59.9, max_rounds=1, loss=0.0), Reject("", 0.1)),
        (state(60.0, 58.0, 57.0, max_rounds=2), Reject("", 2.0)),
        (state(60.0, 58.0, 50.0, 40.0, 30.0), Reject("", 2.0)),
        (state(60.0, 60.0, last_moved=0), Stop("round 1 moved nothing", 0)),
        (state(60.0, 62.0, 62.0, last_moved=0), Stop("round 2 moved nothing", 1)),
        (state(60.0, 50.0, 50.0, last_moved=0), Reject("", 10.0)),
        (state(60.0, last_moved=0), Continue()),
        # What the labelled questions gain decides, while the gate loses no more than a point ...
        (state(60.0, 61.0, 60.0, 59.5, 59.2, labelled_top1=[70, 80, 90, 95, 98]), Continue()),
        (state(60.0, 61.0, 60.0, 59.5, max_rounds=3, labelled_top1=[70, 80, 90, 95]), Stop("3 of 3 rounds done", 3)),
        (state(60.0, 61.0, 60.0, 58.9, max_rounds=3, labelled_top1=[70, 80, 90, 95]), Stop("3 of 3 rounds done", 2)),
        # ... rounds that are out go on while they gain, for the gate wavers ...
        (state(60.0, 61.0, 58.0, 57.0, 58.0, labelled_top1=[70, 80, 90, 95, 98]), Continue()),
        (state(60.0, 61.0, 58.0, 57.0, 56.0, labelled_top1=[70, 80, 95, 94, 93]), Continue()),
        (state(60.0, 61.0, 58.0, 57.0, 56.0, 55.0, labelled_top1=[70, 80, 95, 94, 93, 92]), Stop(NO_BETTER, 1)),
        (state(60.0, 61.0, 58.0, 58.0, 58.0, 59.0, labelled_top1=[70, 80, 95, 94, 93, 94]), Continue()),
        # ... and where they gain alike, the gate does.
        (state(60.0, 60.0, 61.0, 61.0, max_rounds=3, labelled_top1=[70, 90, 90, 90]), Stop("3 of 3 rounds done", 2)),
        (
            RefineState(((60.0, 60.0), (63.0, 59.0), (61.5, 61.5)), (70.0, 90.0, 90.0), 2, 3, 1.0, 9),
            Stop("2 of 2 rounds done", 2),  # by the mean of the gate sets, not by their best
        ),
        # They may lose no more themselves: the query side, where the gate can not change, goes by this alone.
        (state(60.0, 60.0, 60.0, max_rounds=2, labelled_top1=[70, 69.5, 69.0]), Stop("2 of 2 rounds done", 1)),
        (state(60.0, 60.0, 60.0, max_rounds=2, labelled_top1=[70, 68.5, 68.0]), Reject("", 1.5)),
        (state(60.0, 60.0, 60.0, 60.0, 60.0, labelled_top1=[70, 90, 80, 75, 60]), Stop(NO_BETTER, 1)),
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
        "2 of 2 rounds done; every round cost the gate or the labelled questions more than the 1 points allowed, the "
        "least harmful 2.5",
        2.5,
    )


def test_one_gate_set_that_loses_too_much_rules_a_round_out_though_all_others_rise():
    rounds, top1 = ((60.0, 60.0), (60.5, 60.2), (90.0, 58.5)), (50.0, 60.0, 99.0)
    assert next_action(RefineState(rounds, top1, 2, 5, 1.0)) == Stop("2 of 2 rounds done", 1)
    assert next_action(RefineState(rounds, top1, 2, 5, 2.0)) == Stop("2 of 2 rounds done", 2)
    assert isinstance(next_action(RefineState((rounds[0], rounds[2]), top1[::2], 1, 5, 1.0)), Reject)


def test_the_least_harmful_round_is_that_whose_worst_set_lost_least():
    gate = ((60.0, 60.0), (70.0, 50.0), (55.0, 55.0), (55.0, 56.0))
    assert RefineState(gate, (0.0,) * 4, 9, 9, 1.0).least_harmful() == 2
    assert RefineState(gate, (50.0, 50.0, 40.0, 47.0), 9, 9, 1.0).least_harmful() == 3


def test_what_was_not_measured_is_refused():
    with pytest.raises(AssertionError):
        RefineState((), (), 1, 1, 1.0)
    with pytest.raises(AssertionError):
        state(60.0, float("nan"))
    with pytest.raises(AssertionError):
        state(60.0, 60.0, labelled_top1=[1.0, float("nan")])
    with pytest.raises(AssertionError):
        RefineState(((1.0,), (1.0,)), (1.0,), 1, 1, 1.0)
    with pytest.raises(AssertionError):
        RefineState(((1.0,), (1.0, 2.0)), (1.0, 1.0), 1, 1, 1.0)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12)), min_size=2, max_size=12),
    st.integers(1, 11),
    st.integers(1, 5),
    st.integers(0, 5),
)
def test_a_published_round_never_costs_more_than_allowed_and_no_such_round_is_better(
    values: list[tuple[int, int, int]], max_rounds: int, patience: int, loss: int
):
    """Pass rounds one after the other until they end. Better: more labelled questions, then the gate, then earlier."""
    rows = [tuple(map(float, row)) for row in values]

    def worth(r: int) -> tuple[float, float, int]:
        top1, *gates = rows[r]
        return top1, sum(gates), -r

    for num_rounds in range(len(rows)):
        gates, top1 = tuple(row[1:] for row in rows[: num_rounds + 1]), tuple(row[0] for row in rows[: num_rounds + 1])
        action = next_action(RefineState(gates, top1, max_rounds, patience, float(loss), 9))
        candidates = [
            r for r in range(1, num_rounds + 1) if all(was - now <= loss for was, now in zip(rows[0], rows[r]))
        ]
        best = max(candidates, key=worth, default=0)
        peak = max(range(1, num_rounds + 1), key=worth, default=0)
        ends = num_rounds >= max_rounds or num_rounds - max(best, peak) >= patience
        if isinstance(action, Continue):
            assert not ends
            continue
        assert ends
        if isinstance(action, Stop):
            assert action.best_round == best > 0
        else:
            assert not candidates
            assert action.lost_points == min(
                max(was - now for was, now in zip(rows[0], rows[r])) for r in range(1, num_rounds + 1)
            )
        return


def trials(*rows: tuple[float, float, tuple[float, ...]]) -> list[TriedWeight]:
    return [TriedWeight(*row) for row in rows]


@pytest.mark.parametrize(
    ("before", "weights", "loss", "expected"),
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
def test_the_weight_that_the_table_says_is_chosen(before, weights, loss, expected):
    assert choose_weight(before, trials(*weights), loss) == expected


@given(
    st.dictionaries(
        st.sampled_from([0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        st.tuples(st.integers(0, 20), st.tuples(st.integers(0, 20), st.integers(0, 20))),
        min_size=1,
    ),
    st.integers(0, 6),
    st.randoms(),
)
def test_the_chosen_weight_gains_most_within_the_bound_in_whatever_order_weights_were_tried(outcomes, loss, order):
    before = (10.0, 10.0)
    rows = [(weight, float(top1), tuple(map(float, gates))) for weight, (top1, gates) in outcomes.items()]
    order.shuffle(rows)
    choice = choose_weight(before, trials(*rows), loss)
    candidates = {weight: top1 for weight, top1, gates in rows if min(gates) >= 10 - loss}
    if candidates:
        assert choice == min(weight for weight in candidates if candidates[weight] == max(candidates.values()))
    else:
        assert choice == max(rows, key=lambda row: (min(row[2]), -row[0]))[0]
