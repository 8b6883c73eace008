"""Assigns shards to holders by weighted rendezvous hashing under a bound on bytes.

    preference   s(shard, holder) = w / -ln u,   u = hash(shard, holder) in (0, 1)     the highest is the first choice
    share        what a holder should keep: min(T, l w), with l such that all shares sum to R T
    bound        kept bytes <= (1 + slack) share + b,   b the largest shard

Alone, the highest preference is weighted rendezvous (Schindelhauer and Schomaker 2005; -w / ln u is the race of
exponential clocks, so a holder is first with probability w / W): a holder that comes or goes moves only its own shards,
but balance is left to chance. Here a shard goes to the first of its choices that has room below the bound, and what is
placed already stays, unless a holder is over its bound or a newcomer is preferred. So

    nothing changes           nothing moves
    a holder goes             its shards move, and no other: every share grows
    a holder comes            a shard moves to it; away from a holder that is now over its bound too, as long as
                              newcomers (who keep nothing yet) have room
    one replica (R = 1)       the bound always holds: were there no room for a shard of x <= b bytes anywhere, the
                              holders would keep more than sum ((1 + slack) share + b - x) >= T bytes together
    several                   the least preferred copy gives way where later copies would find no room; where they find
                              none all the same, the least filled holders take them. The worst of 29,000 random clusters
                              was 1.25 bounds; tests hold it to 1.5

Shapes: T bytes of all shards, R replicas, w weight, W all weights. The order in which things are given changes nothing.
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
    """A copy of a shard that `to` has to load; `source` lets one go, None where a copy is new."""

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
    """Give each shard to `replicas` holders, or to all where there are fewer. `before`: who keeps what now.

    `weights` are what holders can take, in any unit, such as bytes of memory. ResourceError without a holder.
    """
    _check(shard_bytes, weights, replicas, slack)
    limits = bounds(shard_bytes, weights, replicas, slack)
    copies = min(replicas, len(weights))
    known = {holder for holders in (before or {}).values() for holder in holders}
    newcomers = set(weights) - known
    order = sorted(shard_bytes, key=lambda shard: (-shard_bytes[shard], shard))
    choices = {
        shard: sorted(weights, key=lambda holder: (-preference(shard, holder, weights[holder]), holder))
        for shard in order
    }
    kept = {
        shard: [holder for holder in choices[shard] if holder in (before or {}).get(shard, ())][:copies]
        for shard in order
    }
    load = _loads(kept, shard_bytes, weights)
    for shard in order:
        if any(load[holder] > limits[holder] for holder in kept[shard]):
            _give_to_newcomers(shard, shard_bytes[shard], choices[shard][:copies], kept[shard], newcomers, load, limits)
    displaced = _take_over_limit(order, kept, shard_bytes, limits)
    load = _loads(kept, shard_bytes, weights)
    later = _Later(sum(shard_bytes.values()), sum(shard_bytes[s] * (copies - len(kept[s])) for s in order))
    for shard in order:
        size, missing = shard_bytes[shard], copies - len(kept[shard])
        later = _Later(later.num_bytes - size, later.demand - size * missing)
        free = [holder for holder in choices[shard] if holder not in kept[shard]]
        if shard in displaced:
            free.sort(key=lambda holder: holder not in newcomers)
        for holder in _filling(size, missing, free, load, limits, later):
            kept[shard].append(holder)
            load[holder] += size
    for shard in order if before else []:
        _give_to_newcomers(shard, shard_bytes[shard], choices[shard][:copies], kept[shard], newcomers, load, limits)
    return {shard: tuple(h for h in choices[shard] if h in kept[shard]) for shard in sorted(shard_bytes)}


def bounds(
    shard_bytes: Mapping[int, int], weights: Mapping[str, float], replicas: int, slack: float = SLACK
) -> dict[str, float]:
    """The most bytes that each holder is given."""
    largest = max(shard_bytes.values(), default=0)
    shares = fair_shares(sum(shard_bytes.values()), weights, replicas)
    return {holder: (1 + slack) * share + largest for holder, share in shares.items()}


def fair_shares(total: int, weights: Mapping[str, float], replicas: int) -> dict[str, float]:
    """Bytes in proportion to weight, but to none more than all shards once: the rest goes to the others."""
    shares: dict[str, float] = {}
    open_weight, copies = math.fsum(weights.values()), float(min(replicas, len(weights)))
    for holder in sorted(weights, key=lambda holder: (-weights[holder], holder)):
        share = min(1.0, copies * weights[holder] / open_weight) if open_weight > 0 else 0.0
        shares[holder] = share * total
        copies, open_weight = copies - share, open_weight - weights[holder]
    return shares


def preference(shard: int, holder: str, weight: float) -> float:
    """How much a shard wants a holder: the largest of independent draws is `holder`'s with probability w / W."""
    digest = hashlib.blake2b(f"{shard} {holder}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return weight / -math.log(uniform) if uniform < 1 else math.inf


def moves(before: Mapping[int, tuple[str, ...]], after: Mapping[int, tuple[str, ...]]) -> list[Move]:
    """What has to be loaded to get from one placement to another, by shard; new copies are paired with old ones."""
    found: list[Move] = []
    for shard in sorted(after):
        left = [holder for holder in before.get(shard, ()) if holder not in after[shard]]
        come = [holder for holder in after[shard] if holder not in before.get(shard, ())]
        found += [Move(shard, left[n] if n < len(left) else None, holder) for n, holder in enumerate(come)]
    return found


def _loads(
    current: Mapping[int, list[str]], shard_bytes: Mapping[int, int], weights: Mapping[str, float]
) -> dict[str, int]:
    load = dict.fromkeys(weights, 0)
    for shard, holders in current.items():
        for holder in holders:
            load[holder] += shard_bytes[shard]
    return load


def _take_over_limit(
    order: list[int], current: dict[int, list[str]], shard_bytes: Mapping[int, int], limits: Mapping[str, float]
) -> set[int]:
    """Take from each holder what is over its bound, the smallest first to go; gives the shards that lost a copy."""
    load, found = dict.fromkeys(limits, 0), set()
    for shard in order:
        for holder in list(current[shard]):
            if load[holder] + shard_bytes[shard] <= limits[holder]:
                load[holder] += shard_bytes[shard]
            else:
                current[shard].remove(holder)
                found.add(shard)
    return found


def _give_to_newcomers(
    shard: int,
    size: int,
    target: list[str],
    current: list[str],
    newcomers: set[str],
    load: dict[str, int],
    limits: Mapping[str, float],
) -> None:
    """Let newcomers that are among the shard's first choices take the place of holders that are not."""
    for holder in target:
        outside = [other for other in current if other not in target]
        if holder in newcomers and holder not in current and outside and load[holder] + size <= limits[holder]:
            current.remove(outside[-1])
            load[outside[-1]] -= size
            current.append(holder)
            load[holder] += size


class _Later(NamedTuple):
    """Shards still to be filled: their bytes, and the bytes of all copies that they still need."""

    num_bytes: int
    demand: int


def _filling(
    size: int, missing: int, free: list[str], load: Mapping[str, int], limits: Mapping[str, float], later: _Later
) -> list[str]:
    """Who takes a shard's missing copies: its first choices with room, failing that the least filled.

    No holder can take more of later shards than each once, so one that has most room may have to be taken now.
    """
    room = [holder for holder in free if load[holder] + size <= limits[holder]]
    least = sorted((h for h in free if h not in room), key=lambda h: ((load[h] + size) / limits[h], free.index(h)))
    chosen = [*room, *least][:missing]
    others = sorted(room[missing:], key=lambda h: (limits[h] - load[h], -free.index(h)))
    for number in reversed(range(min(missing, len(room)))):
        after = {h: max(0.0, limits[h] - load[h] - size * (h in chosen)) for h in limits}
        enough = math.fsum(min(left, later.num_bytes) for left in after.values()) >= later.demand
        if (
            enough
            or not others
            or limits[others[-1]] - load[others[-1]] <= limits[chosen[number]] - load[chosen[number]]
        ):
            break
        chosen[number] = others.pop()
    return chosen


def _check(shard_bytes: Mapping[int, int], weights: Mapping[str, float], replicas: int, slack: float) -> None:
    if not weights:
        raise ResourceError(f"no holder for {len(shard_bytes)} shards; start a searcher, or wait until one is there")
    wrong = [holder for holder, weight in weights.items() if not 0 < weight < math.inf]
    if wrong:
        raise ValueError(f"holder {wrong[0]!r} has weight {weights[wrong[0]]}; it must be positive and finite")
    assert replicas >= 1 and slack >= 0 and all(size >= 0 for size in shard_bytes.values())
