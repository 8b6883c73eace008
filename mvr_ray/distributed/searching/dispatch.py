"""Dispatches a request to one replica of every group of searchers, and takes the first answer of each.

    admit    the less loaded replica; where all have `queue` calls waiting, the whole request is refused at once
    wait     until all groups answered or the time is over
    hedge    a group that is slower than its own 95th percentile is asked once more, of another replica (`hedging`)
    replace  a group whose replica died is asked of another one

A replica that died or hung is not asked until it answers again: a call is sent after it that returns when it has
started and opened its shards. What is kept here (loads, latencies, who is down) is what this process knows itself.
"""

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from ray.exceptions import RayActorError, RayTaskError

from mvr_ray import logs
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.searching.hedging import HedgeBudget, Latencies
from mvr_ray.distributed.searching.transport import Connection, ConnectionLost
from mvr_ray.errors import MvrRayError, OverloadedError
from mvr_ray.types import FleetCounts

log = logging.getLogger(__name__)

QUEUE = 64
CALM_S = 1.0
"""For so long after a refusal nobody is asked twice."""
LEAST_RETRY_S = 0.1


class ShardRequest(NamedTuple):
    """A method of a searcher and its message (`messages`)."""

    method: str
    message: pa.Buffer


class Replica(Connection):
    """One searcher, as this process knows it.

    `state` is empty while it answers, else why it does not. `killed` names the life that was ended because it hung.
    """

    def __init__(self, actor: Any, num_threads: int) -> None:
        super().__init__(actor, num_threads)
        self.turn = 0
        self.state = ""
        self.again: Any = None
        self.killed: str | None = None


class _Call(NamedTuple):
    group: int
    replica: Replica
    name: str
    began_s: float


class Responses(NamedTuple):
    """Messages by group, and of every other group why it gave none."""

    answers: dict[int, pa.Buffer]
    silent: dict[int, str]


class _Request(NamedTuple):
    """One request under way: what it asks of each group, what came, who was asked, the calls that run, and
    who was asked because another was slow."""

    requests: Mapping[int, ShardRequest]
    deadline: Deadline
    answers: dict[int, pa.Buffer]
    silent: dict[int, str]
    tried: dict[int, list[Replica]]
    calls: dict[Future[pa.Buffer], _Call]
    hedged: dict[int, Replica]

    @property
    def waits(self) -> bool:
        return len(self.answers) + len(self.silent) < len(self.requests)

    def waits_for(self, group: int) -> bool:
        return group not in self.answers and group not in self.silent

    def is_asked(self, group: int) -> bool:
        return any(call.group == group for call in self.calls.values())


class Dispatcher:
    """Groups of searchers that hold the same shards. Safe to use from several threads."""

    def __init__(self, groups: Sequence[Sequence[Any]], restart: Callable[[int, Any], Any], queue: int = QUEUE) -> None:
        """`restart(group, actor)` sends the call that is answered when the actor holds its shards."""
        self.queue = queue
        self.groups = [[Replica(actor, queue) for actor in actors] for actors in groups]
        self.budget = HedgeBudget()
        self.latencies = [Latencies() for _ in groups]
        self.refused = 0
        self.hedge_wins = 0
        self._restart = restart
        self._lock = threading.Lock()
        self._turns = 0
        self._prefix = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._refused_s = -CALM_S

    def gather(
        self,
        requests: Mapping[int, ShardRequest],
        deadline: Deadline,
        *,
        is_admitted: bool = False,
        on_partial: Callable[[pa.Buffer], None] | None = None,
    ) -> Responses:
        """Each group's first answer. `is_admitted`: a part of a request that was let in before, which no bound refuses.
        `on_partial` is told every group's answer when it comes.

        Raises OverloadedError, and what a searcher raised for the request itself.
        """
        began_s = time.monotonic()
        chosen, silent = self._admit(requests, is_admitted)
        at = _Request(requests, deadline, {}, silent, {group: [replica] for group, replica in chosen.items()}, {}, {})
        unsent = list(chosen.items())
        try:
            while unsent:
                self._call(at, *unsent.pop())
            hedge_s = {group: self._hedge_s(group, began_s) for group in chosen}
            while at.calls and at.waits:
                now_s = time.monotonic()
                for group in [group for group, due_s in hedge_s.items() if due_s <= now_s]:
                    del hedge_s[group]
                    if at.waits_for(group):
                        self._call_other(at, group, hedge=True)
                until_s = min([deadline.due_s, *hedge_s.values()])
                when = FIRST_COMPLETED if self._has_replicas or on_partial else ALL_COMPLETED
                done, running = wait(at.calls, max(until_s - now_s, 0.0), return_when=when)
                for future in done:
                    answer = self._take_answer(at, future)
                    if on_partial and answer is not None:
                        on_partial(answer)
                if running and until_s == deadline.due_s and time.monotonic() >= until_s:
                    break
            for call in at.calls.values():
                if at.waits_for(call.group):
                    at.silent[call.group] = call.replica.state or "late"
        finally:
            self._leave(at.calls)
            for _, replica in unsent:
                replica.book(-1)
        return Responses(at.answers, at.silent)

    @property
    def _has_replicas(self) -> bool:
        return any(len(replicas) > 1 for replicas in self.groups)

    def counts(self) -> FleetCounts:
        """What became of calls so far, and how many wait."""
        with self._lock:
            waiting = [replica.waiting for replicas in self.groups for replica in replicas]
            return FleetCounts(self.budget.hedges, self.hedge_wins, self.refused, sum(waiting), max(waiting, default=0))

    def down(self, replica: Replica, group: int, state: str, killed_life: str | None = None) -> None:
        """Ask this replica no more until it has started again; `killed_life` names the life that must not answer."""
        with self._lock:
            if not replica.state:
                replica.killed = killed_life
                log.warning("searcher lost: group=%d state=%s", group, state)
                replica.state = state
                replica.again = self._restart(group, replica.actor)
                replica.close()

    def replace(self, group: int, number: int, actor: Any) -> Replica:
        """From now on ask another searcher, which has opened the group's shards; gives the one before it."""
        with self._lock:
            before, self.groups[group][number] = self.groups[group][number], Replica(actor, self.queue)
        return before

    def close(self) -> None:
        """Nobody is asked any more."""
        for replicas in self.groups:
            for replica in replicas:
                replica.close()

    def up(self, replica: Replica) -> None:
        """It answers: ask it again."""
        with self._lock:
            replica.state, replica.again = "", None

    def _admit(
        self, requests: Mapping[int, ShardRequest], is_admitted: bool
    ) -> tuple[dict[int, Replica], dict[int, str]]:
        chosen: dict[int, Replica] = {}
        silent: dict[int, str] = {}
        with self._lock:
            for group in requests:
                there = [replica for replica in self.groups[group] if self._answers(group, replica)]
                if not there:
                    silent[group] = self.groups[group][0].state
                    continue
                least = min(there, key=lambda replica: (replica.waiting, replica.turn))
                if least.waiting >= self.queue and not is_admitted:
                    raise self._refuse(group, least)
                chosen[group] = least
            for replica in chosen.values():
                self._book(replica)
                self.budget.call()
        return chosen, silent

    def _refuse(self, group: int, replica: Replica) -> OverloadedError:
        self.refused += 1
        self._refused_s = time.monotonic()
        retry_s = max(LEAST_RETRY_S, replica.waiting * self.latencies[group].median_s() / 2)
        return OverloadedError(
            f"{replica.waiting} calls wait for the least loaded searcher of group {group}, as many as may "
            f"(resources.searcher_queue={self.queue}); ask again in {retry_s:.1f} s, or use more searchers or replicas",
            retry_s,
        )

    def _call_other(self, at: _Request, group: int, hedge: bool = False) -> bool:
        """Ask a replica of the group that was not asked yet; False where there is none, or a hedge is not allowed."""
        with self._lock:
            others = [one for one in self.groups[group] if one not in at.tried[group] and self._answers(group, one)]
            if not others:
                return False
            other = min(others, key=lambda replica: (replica.waiting, replica.turn))
            shedding = time.monotonic() - self._refused_s < CALM_S or other.waiting >= self.queue
            if hedge and (shedding or not self.budget.take()):
                return False
            self._book(other)
        at.tried[group].append(other)
        if hedge:
            at.hedged[group] = other
        self._call(at, group, other)
        return True

    def _call(self, at: _Request, group: int, replica: Replica) -> None:
        name = f"{logs.request_id()}/{self._prefix}-{next(self._numbers)}"
        call = _Call(group, replica, name, time.monotonic())
        method, message = at.requests[group]
        at.calls[replica.call(method, name, message, at.deadline)] = call

    def _hedge_s(self, group: int, began_s: float) -> float:
        after_s = self.latencies[group].hedge_after_s() if len(self.groups[group]) > 1 else None
        return float("inf") if after_s is None else began_s + after_s

    def _answers(self, group: int, replica: Replica) -> bool:
        """Whether a replica may be asked: one that was down, when it has answered the call sent to it since."""
        if not replica.state:
            return True
        done, _ = ray.wait([replica.again], timeout=0)
        if not done:
            return False
        try:
            if ray.get(replica.again) == replica.killed:
                replica.again = self._restart(group, replica.actor)
                return False
        except RayActorError:
            replica.again = self._restart(group, replica.actor)
            return False
        except (MvrRayError, RayTaskError) as error:  # it lives; what it cannot open it tells with every answer
            log.warning("searcher back with damage: group=%d reason=%s", group, error)
        log.info("searcher back: group=%d", group)
        replica.state, replica.again = "", None
        return True

    def _book(self, replica: Replica) -> None:
        self._turns += 1
        replica.turn = self._turns
        replica.book(1)

    def _take_answer(self, at: _Request, future: "Future[pa.Buffer]") -> pa.Buffer | None:
        """Take an answer, or where its searcher died ask another one; gives the answer if it is its group's first."""
        group, replica, _, began_s = at.calls.pop(future)
        try:
            answer = future.result()
        except ConnectionLost as error:
            log.warning("searcher lost: %s", error)
            self.down(replica, group, "died")
            if at.waits_for(group) and not self._call_other(at, group) and not at.is_asked(group):
                at.silent[group] = replica.state or "died"
            return None
        first = at.waits_for(group)
        with self._lock:
            self.hedge_wins += first and at.hedged.get(group) is replica
            self.latencies[group].add(time.monotonic() - began_s)
        return at.answers.setdefault(group, answer) if first else None

    def _leave(self, running: Mapping[Any, _Call]) -> None:
        """Wait no longer for these: those still in a queue are passed by when their turn comes, those that run run.

        Not by `ray.cancel`: it does not reach a call that waits in an actor's concurrency group.
        """
        for call in running.values():
            call.replica.actor.cancel.options(concurrency_group="health").remote(call.name)
            with self._lock:
                self.latencies[call.group].add(time.monotonic() - call.began_s)
