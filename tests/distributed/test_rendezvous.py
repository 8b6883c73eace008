"""Tests of placement: the bound on bytes, moves when a holder joins or leaves, probability proportional to weight."""

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.distributed.searching.rendezvous import Placement, bounds, fair_shares, moves, place

Sizes, Weights = dict[int, int], dict[str, float]
sizes_of = st.dictionaries(st.integers(0, 500), st.integers(0, 1000), min_size=1, max_size=60)
weights_of = st.dictionaries(
    st.text("abcdefgh0123456789.", min_size=1, max_size=12), st.floats(0.1, 10), min_size=1, max_size=9
)
replicas_of = st.integers(1, 4)


def loads(sizes: Sizes, placement: Placement, weights: Weights) -> dict[str, int]:
    return {holder: sum(sizes[shard] for shard in placement if holder in placement[shard]) for holder in weights}


def fill(sizes: Sizes, placement: Placement, weights: Weights, replicas: int) -> float:
    """The fullest holder's bytes over its bound."""
    limits = bounds(sizes, weights, replicas)
    return max(load / limits[h] if load else 0.0 for h, load in loads(sizes, placement, weights).items())


def check_whole(sizes: Sizes, weights: Weights, replicas: int, placement: Placement) -> None:
    """Every shard has its copies on different holders, and the stated bound holds."""
    assert set(placement) == set(sizes)
    for holders in placement.values():
        assert len(set(holders)) == len(holders) == min(replicas, len(weights)) and set(holders) <= set(weights)
    assert fill(sizes, placement, weights, replicas) <= (1 + 1e-9 if replicas == 1 else 1.5)


@given(sizes_of, weights_of, replicas_of, st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_every_shard_is_held_within_the_bound_in_whatever_order_things_are_named(sizes, weights, replicas, rng):
    placement = place(sizes, weights, replicas)
    check_whole(sizes, weights, replicas, placement)
    shards, holders = list(sizes), list(weights)
    rng.shuffle(shards)
    rng.shuffle(holders)
    assert place({s: sizes[s] for s in shards}, {h: weights[h] for h in holders}, replicas) == placement


@given(sizes_of, weights_of, replicas_of)
def test_nothing_moves_when_nothing_changes(sizes, weights, replicas):
    placement = place(sizes, weights, replicas)
    if fill(sizes, placement, weights, replicas) <= 1:
        assert place(sizes, weights, replicas, before=placement) == placement
        assert moves(placement, placement) == []


@given(sizes_of, weights_of.filter(lambda weights: len(weights) > 1), replicas_of, st.data())
@settings(max_examples=300)
def test_when_a_holder_goes_its_shards_move_and_no_other(sizes, weights, replicas, data):
    placement = place(sizes, weights, replicas)
    lost_holder = data.draw(st.sampled_from(sorted(weights)))
    rest = {holder: weight for holder, weight in weights.items() if holder != lost_holder}
    after = place(sizes, rest, replicas, before=placement)
    check_whole(sizes, rest, replicas, after)
    if fill(sizes, placement, weights, replicas) <= 1 and len(rest) >= replicas:
        assert {move.source for move in moves(placement, after)} <= {lost_holder}
        assert {move.shard for move in moves(placement, after)} == {
            s for s, holders in placement.items() if lost_holder in holders
        }


@given(sizes_of, weights_of, replicas_of, st.floats(0.1, 10))
@settings(max_examples=300)
def test_when_a_holder_comes_shards_move_to_it_or_off_a_holder_over_its_bound(sizes, weights, replicas, weight):
    before = place(sizes, weights, replicas)
    new_weights = {**weights, "newcomer": weight}
    after = place(sizes, new_weights, replicas, before=before)
    check_whole(sizes, new_weights, replicas, after)
    limits, load = bounds(sizes, new_weights, replicas), loads(sizes, before, weights)
    for shard, holders in after.items():
        sources = set(before[shard]) - set(holders)
        elsewhere = set(holders) - set(before[shard]) - {"newcomer"}
        assert len(elsewhere) <= len({holder for holder in sources if load[holder] > limits[holder]})


@given(sizes_of, weights_of, st.floats(0.1, 10))
@settings(max_examples=300)
def test_one_copy_moves_to_an_old_holder_only_where_no_new_one_has_capacity(sizes, weights, weight):
    before = place(sizes, weights)
    new_weights = {**weights, "newcomer": weight}
    after = place(sizes, new_weights, before=before)
    limits, load = bounds(sizes, new_weights, 1), loads(sizes, after, new_weights)
    old = {holder for holders in before.values() for holder in holders}
    for move in moves(before, after):
        empty = set(new_weights) - old
        assert move.to in empty or all(load[holder] + sizes[move.shard] > limits[holder] for holder in empty)


@given(sizes_of, weights_of, st.floats(0.1, 10))
def test_without_a_bound_the_placement_before_has_no_effect(sizes, weights, weight):
    """Pure rendezvous: a new holder takes the shards that prefer it, and gives all of them back."""
    free = {"slack": 1e12}
    alone = place(sizes, weights, **free)
    after = place(sizes, {**weights, "newcomer": weight}, **free)
    assert {move.to for move in moves(alone, after)} <= {"newcomer"}
    assert place(sizes, weights, before=after, **free) == alone
    assert place(sizes, {**weights, "newcomer": weight}, before=alone, **free) == after


def test_a_holder_is_first_in_proportion_to_its_weight():
    weights = {"small": 1.0, "middle": 2.0, "large": 5.0}
    num = 20_000
    first = Counter(holders[0] for holders in place(dict.fromkeys(range(num), 1), weights, slack=1e12).values())
    for holder, weight in weights.items():
        chance = weight / 8
        assert abs(first[holder] - num * chance) < 4 * math.sqrt(num * chance * (1 - chance))


def test_a_placement_is_the_same_on_every_machine_and_in_every_release():
    placement = place({shard: 10 + shard for shard in range(6)}, {"a": 1, "b": 1, "c": 2}, replicas=2)
    assert placement == {0: ("c", "a"), 1: ("c", "a"), 2: ("a", "b"), 3: ("a", "c"), 4: ("c", "b"), 5: ("c", "b")}


@given(st.integers(0, 10_000), weights_of, replicas_of)
def test_fair_shares_sum_to_all_copies_and_none_is_over_all_shards_once(total, weights, replicas):
    shares = fair_shares(total, weights, replicas)
    assert math.fsum(shares.values()) == pytest.approx(total * min(replicas, len(weights)))
    assert all(share <= total * (1 + 1e-12) for share in shares.values())
    full = [weights[h] for h, share in shares.items() if share >= total * (1 - 1e-9)]
    part = [h for h in weights if shares[h] < total * (1 - 1e-9)]
    assert all(weights[h] <= min(full) * (1 + 1e-9) for h in part if full)
    for one, other in pairwise(part):
        assert shares[one] * weights[other] == pytest.approx(shares[other] * weights[one])


def test_a_bound_is_a_share_with_slack_and_the_largest_shard():
    limits = bounds({0: 5, 1: 9, 2: 4}, {"a": 1.0, "b": 3.0}, 1, 0.25)
    assert limits == pytest.approx({"a": 1.25 * 18 / 4 + 9, "b": 1.25 * 54 / 4 + 9})


@given(st.integers(0, 2**20))
def test_moves_lead_from_one_placement_to_the_other(seed):
    rng = random.Random(seed)
    sizes = {shard: rng.randint(1, 9) for shard in range(12)}
    before, after = (place(sizes, {f"h{rng.randint(0, 9)}": 1.0 for _ in range(5)}, 2) for _ in range(2))
    holders_of = {shard: set(holders) for shard, holders in before.items()}
    for move in moves(before, after):
        assert move.to not in holders_of[move.shard]
        holders_of[move.shard].add(move.to)
        if move.source:
            holders_of[move.shard].remove(move.source)
    assert all(set(after[shard]) <= holders_of[shard] for shard in after)
