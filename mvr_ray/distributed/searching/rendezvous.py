"""Assigns shards to holders by weighted rendezvous hashing under a bound on bytes.

    preference   s(shard, holder) = w / -ln u,   u = hash(shard, holder) in (0, 1)     the highest is the first choice
    share        a holder's target bytes: min(T, l w), with l such that all shares sum to R T
    bound        a holder's bytes <= (1 + slack) share + b,   b the largest shard

The highest preference alone is weighted rendezvous (Schindelhauer and Schomaker 2005; -w / ln u is the race of
exponential clocks, so a holder is first with probability w / W): a holder that joins or leaves moves only its own
shards, but balance is left to chance. Here a shard goes to the first of its choices that stays within its bound, and an
assigned shard stays, unless its holder is over its bound or the shard prefers a new holder. So

    no change                 no shard moves
    a holder leaves           its shards move, and no other: every share grows
    a holder joins            shards move to it; shards of a holder that is now over its bound move too, first to new
                              holders (those without shards) while they have capacity
    one replica (R = 1)       the bound always holds: if no holder had capacity for a shard of x <= b bytes, the
                              holders would have more than sum ((1 + slack) share + b - x) >= T bytes together
    several                   the least preferred copy is displaced where later copies would find no capacity; if they
                              still find none, the least filled holders take them. The worst of 29,000 random clusters
                              was 1.25 bounds; tests assert at most 1.5

Shapes: T bytes of all shards, R replicas, w weight, W all weights. The order of the arguments' items has no effect.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

from mvr_ray.errors import ResourceError

Placement = dict[int, tuple[str, ...]]
"""Shard -> its holders, in order of preference."""

SLACK = 0.1


class Move(NamedTuple):
    """A copy of a shard that `to` must load; `source` releases one, None if the copy is additional."""

    shard: int
    source: str | None
    to: str


def place(
    shard_bytes: Mapping[int, int],
    weights: Mapping[str, float],
    replicas: int = 1,
    before: Mapping[int, tuple[str, ...]] | None = None,
    slack: float = SLACK,
) -> Placement:
    """Assign each shard to `replicas` holders, or to all if there are fewer. `before`: the current holders.

    `weights`: the holders' capacities in any unit, such as bytes of memory. Raises ResourceError without a holder.
    """
    _check(shard_bytes, weights, replicas, slack)
    limits = bounds(shard_bytes, weights, replicas, slack)
    copies = min(replicas, len(weights))
    new_holders = set(weights) - {holder for holders in (before or {}).values() for holder in holders}
    order = sorted(shard_bytes, key=lambda shard: (-shard_bytes[shard], shard))
    choices = {
        shard: sorted(weights, key=lambda holder: (-preference(shard, holder, weights[holder]), holder))
        for shard in order
    }
    current = {
        shard: [holder for holder in choices[shard] if holder in (before or {}).get(shard, ())][:copies]
        for shard in order
    }
    load = _loads(current, shard_bytes, weights)
    for shard in order:
        if any(load[holder] > limits[holder] for holder in current[shard]):
            _move_to_new(shard_bytes[shard], choices[shard][:copies], current[shard], new_holders, load, limits)
    displaced_shards = _remove_over_limit(order, current, shard_bytes, limits)
    load = _loads(current, shard_bytes, weights)
    rest = _Rest(sum(shard_bytes.values()), sum(shard_bytes[s] * (copies - len(current[s])) for s in order))
    for shard in order:
        size, missing = shard_bytes[shard], copies - len(current[shard])
        rest = _Rest(rest.num_bytes - size, rest.demand - size * missing)
        free = [holder for holder in choices[shard] if holder not in current[shard]]
        if shard in displaced_shards:
            free.sort(key=lambda holder: holder not in new_holders)
        for holder in _select_holders(size, missing, free, load, limits, rest):
            current[shard].append(holder)
            load[holder] += size
    for shard in order if before else []:
        _move_to_new(shard_bytes[shard], choices[shard][:copies], current[shard], new_holders, load, limits)
    return {shard: tuple(h for h in choices[shard] if h in current[shard]) for shard in sorted(shard_bytes)}


def bounds(
    shard_bytes: Mapping[int, int], weights: Mapping[str, float], replicas: int, slack: float = SLACK
) -> dict[str, float]:
    """The maximum bytes of each holder."""
    largest = max(shard_bytes.values(), default=0)
    shares = fair_shares(sum(shard_bytes.values()), weights, replicas)
    return {holder: (1 + slack) * share + largest for holder, share in shares.items()}


def fair_shares(total: int, weights: Mapping[str, float], replicas: int) -> dict[str, float]:
    """Bytes in proportion to weight, at most those of all shards once; the other holders share the rest."""
    shares: dict[str, float] = {}
    open_weight, copies = math.fsum(weights.values()), float(min(replicas, len(weights)))
    for holder in sorted(weights, key=lambda holder: (-weights[holder], holder)):
        share = min(1.0, copies * weights[holder] / open_weight) if open_weight > 0 else 0.0
        shares[holder] = share * total
        copies, open_weight = copies - share, open_weight - weights[holder]
    return shares


def preference(shard: int, holder: str, weight: float) -> float:
    """A shard's preference for a holder; `holder` has the largest one with probability w / W."""
    digest = hashlib.blake2b(f"{shard} {holder}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return weight / -math.log(uniform) if uniform < 1 else math.inf


def moves(before: Mapping[int, tuple[str, ...]], after: Mapping[int, tuple[str, ...]]) -> list[Move]:
    """The copies to load to get from one placement to another, by shard; each new copy is paired with an old one."""
    moves: list[Move] = []
    for shard in sorted(after):
        old = [holder for holder in before.get(shard, ()) if holder not in after[shard]]
        new = [holder for holder in after[shard] if holder not in before.get(shard, ())]
        moves += [Move(shard, old[n] if n < len(old) else None, holder) for n, holder in enumerate(new)]
    return moves


def _loads(
    current: Mapping[int, list[str]], shard_bytes: Mapping[int, int], weights: Mapping[str, float]
) -> dict[str, int]:
    load = dict.fromkeys(weights, 0)
    for shard, holders in current.items():
        for holder in holders:
            load[holder] += shard_bytes[shard]
    return load


def _remove_over_limit(
    order: list[int], current: dict[int, list[str]], shard_bytes: Mapping[int, int], limits: Mapping[str, float]
) -> set[int]:
    """Remove the smallest shards of each holder that is over its bound; return the shards that lost a copy."""
    load, displaced_shards = dict.fromkeys(limits, 0), set()
    for shard in order:
        for holder in list(current[shard]):
            if load[holder] + shard_bytes[shard] <= limits[holder]:
                load[holder] += shard_bytes[shard]
            else:
                current[shard].remove(holder)
                displaced_shards.add(shard)
    return displaced_shards


def _move_to_new(
    size: int,
    target: list[str],
    current: list[str],
    new_holders: set[str],
    load: dict[str, int],
    limits: Mapping[str, float],
) -> None:
    """Replace holders outside the shard's first choices by new holders among these."""
    for holder in target:
        outside = [other for other in current if other not in target]
        if holder in new_holders and holder not in current and outside and load[holder] + size <= limits[holder]:
            current.remove(outside[-1])
            load[outside[-1]] -= size
            current.append(holder)
            load[holder] += size


class _Rest(NamedTuple):
    """The shards not assigned yet: their bytes, and the bytes of all copies that they need."""

    num_bytes: int
    demand: int


def _select_holders(
    size: int, missing: int, free: list[str], load: Mapping[str, int], limits: Mapping[str, float], rest: _Rest
) -> list[str]:
    """Select holders for a shard's missing copies: its first choices with capacity, else the least filled.

    A holder can take each later shard only once, so the one with the most capacity may have to take this one.
    """
    fitting = [holder for holder in free if load[holder] + size <= limits[holder]]
    least = sorted((h for h in free if h not in fitting), key=lambda h: ((load[h] + size) / limits[h], free.index(h)))
    holders = [*fitting, *least][:missing]
    others = sorted(fitting[missing:], key=lambda h: (limits[h] - load[h], -free.index(h)))
    for number in reversed(range(min(missing, len(fitting)))):
        capacity = {h: max(0.0, limits[h] - load[h] - size * (h in holders)) for h in limits}
        is_enough = math.fsum(min(one, rest.num_bytes) for one in capacity.values()) >= rest.demand
        if (
            is_enough
            or not others
            or limits[others[-1]] - load[others[-1]] <= limits[holders[number]] - load[holders[number]]
        ):
            break
        holders[number] = others.pop()
    return holders


def _check(shard_bytes: Mapping[int, int], weights: Mapping[str, float], replicas: int, slack: float) -> None:
    if not weights:
        raise ResourceError(f"no holder for {len(shard_bytes)} shards; start a searcher, or wait until one is up")
    invalid = [holder for holder, weight in weights.items() if not 0 < weight < math.inf]
    if invalid:
        raise ValueError(f"holder {invalid[0]!r} has weight {weights[invalid[0]]}; it must be positive and finite")
    assert replicas >= 1 and slack >= 0 and all(size >= 0 for size in shard_bytes.values())
