"""Dispatches a request to one replica of every group of searchers, and takes the first answer of each.

    admit    the least loaded replica; if all replicas of a group have `queue` calls waiting, the request is refused
    wait     until all groups answered or the deadline
    hedge    a group slower than its own 95th percentile gets a second call, to another replica (`hedging`)
    replace  a group whose replica died gets a call to another one

A replica that died or hung first gets the call that opens its shards, and no other until it has answered that one.
Loads, latencies and replica states are those that this process observes.
"""

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
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
HEDGE_PAUSE_S = 1.0
"""Seconds after a refusal without second calls."""
MIN_RETRY_S = 0.1


class Replica(Connection):
    """One searcher, as this process knows it.

    `state` is empty while it answers, else the reason why it does not. `open_ref` is the pending call that opens its
    shards after a restart. `killed_instance` was killed because it hung. `last_call` numbers its last call. Calls that
    began before `up_s`, when it came back, tell nothing about it.
    """

    def __init__(self, actor: Any, num_threads: int) -> None:
        super().__init__(actor, num_threads)
        self.last_call = 0
        self.state = ""
        self.up_s = 0.0
        self.open_ref: Any = None
        self.killed_instance: str | None = None


class _Call(NamedTuple):
    group: int
    replica: Replica
    name: str
    began_s: float
    is_hedge: bool


class Responses(NamedTuple):
    """Messages by group, and the reasons of the groups without one."""

    answers: dict[int, pa.Buffer]
    failures: dict[int, str]


class _Request(NamedTuple):
    """A running request: its method and messages, responses, the replicas called and the running calls."""

    method: str
    messages: Mapping[int, pa.Buffer]
    deadline: Deadline
    answers: dict[int, pa.Buffer]
    failures: dict[int, str]
    attempts: dict[int, list[Replica]]
    calls: dict[Future[pa.Buffer], _Call]

    @property
    def is_pending(self) -> bool:
        return len(self.answers) + len(self.failures) < len(self.messages)

    def needs_answer(self, group: int) -> bool:
        return group not in self.answers and group not in self.failures

    def has_call(self, group: int) -> bool:
        return any(call.group == group for call in self.calls.values())


class Dispatcher:
    """Dispatches calls to groups of searchers that hold the same shards. Safe to use from several threads."""

    def __init__(self, groups: Sequence[Sequence[Any]], reopen: Callable[[int, Any], Any], queue: int = QUEUE) -> None:
        """`reopen(group, actor)` sends the call that an actor answers when it holds its shards."""
        self.queue = queue
        self.groups = [[Replica(actor, queue) for actor in actors] for actors in groups]
        self.budget = HedgeBudget()
        self.latencies = [Latencies() for _ in groups]
        self.refusals = 0
        self.hedge_wins = 0
        self._reopen = reopen
        self._lock = threading.RLock()
        self._prefix = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._refused_s = -HEDGE_PAUSE_S

    def gather(
        self,
        method: str,
        messages: Mapping[int, pa.Buffer],
        deadline: Deadline,
        *,
        admit: bool = False,
        on_partial: Callable[[pa.Buffer], None] | None = None,
    ) -> Responses:
        """Call a method of the searchers; return each group's first answer to its message. `admit`: never refuse the
        request, since an earlier round was admitted. `on_partial` is called with every group's answer when it arrives.

        Raises OverloadedError, and what a searcher raised for the request itself.
        """
        began_s = time.monotonic()
        replicas, failures = self._admit(messages, admit)
        attempts = {group: [one] for group, one in replicas.items()}
        running = _Request(method, messages, deadline, {}, failures, attempts, {})
        has_replicas = any(len(own) > 1 for own in self.groups)
        unsent_calls = list(replicas.items())
        try:
            while unsent_calls:
                self._call(running, *unsent_calls.pop())
            hedge_s = {group: self._hedge_s(group, began_s) for group in replicas}
            while running.calls and running.is_pending:
                now_s = time.monotonic()
                for group in [group for group, due_s in hedge_s.items() if due_s <= now_s]:
                    del hedge_s[group]
                    if running.needs_answer(group):
                        self._call_other(running, group, hedge=True)
                until_s = min([deadline.due_s, *hedge_s.values()])
                when = FIRST_COMPLETED if has_replicas or on_partial else ALL_COMPLETED
                completed_futures, others = wait(running.calls, max(until_s - now_s, 0.0), return_when=when)
                for future in completed_futures:
                    answer = self._take_answer(running, future)
                    if on_partial and answer is not None:
                        on_partial(answer)
                if others and until_s == deadline.due_s and time.monotonic() >= until_s:
                    break
            for call in running.calls.values():
                if running.needs_answer(call.group):
                    running.failures[call.group] = call.replica.state or "late"
        finally:
            self._cancel(running.calls)
            for _, replica in unsent_calls:
                replica.add_waiting(-1)
        return Responses(running.answers, running.failures)

    def counts(self) -> FleetCounts:
        """Return the counts of hedged and refused calls so far, and of waiting calls."""
        with self._lock:
            waiting = [replica.waiting for replicas in self.groups for replica in replicas]
            return FleetCounts(
                self.budget.hedges, self.hedge_wins, self.refusals, sum(waiting), max(waiting, default=0)
            )

    def mark_down(self, replica: Replica, group: int, state: str, killed_instance: str | None = None) -> None:
        """Send this replica no calls until it has restarted; `killed_instance` names the instance that was killed."""
        with self._lock:
            if not replica.state:
                replica.killed_instance = killed_instance
                log.warning("searcher lost: group=%d state=%s", group, state)
                replica.state = state
                replica.open_ref = self._reopen(group, replica.actor)
                replica.close()

    def replace(self, group: int, number: int, actor: Any) -> Replica:
        """Send calls to another searcher, which has opened the group's shards; return the former one."""
        with self._lock:
            before, self.groups[group][number] = self.groups[group][number], Replica(actor, self.queue)
        return before

    def close(self) -> None:
        """Close all connections."""
        for replicas in self.groups:
            for replica in replicas:
                replica.close()

    def mark_up(self, replica: Replica) -> None:
        """Send calls to a replica that answers again."""
        with self._lock:
            replica.state, replica.open_ref, replica.up_s = "", None, time.monotonic()

    def _admit(self, groups: Iterable[int], admit: bool) -> tuple[dict[int, Replica], dict[int, str]]:
        replicas: dict[int, Replica] = {}
        failures: dict[int, str] = {}
        with self._lock:
            for group in groups:
                least = self._least_loaded(group)
                if least is None:
                    failures[group] = self.groups[group][0].state
                    continue
                if least.waiting >= self.queue and not admit:
                    raise self._refuse(group, least)
                replicas[group] = least
            for replica in replicas.values():
                self._count_call(replica)
                self.budget.call()
        return replicas, failures

    def _refuse(self, group: int, replica: Replica) -> OverloadedError:
        self.refusals += 1
        self._refused_s = time.monotonic()
        retry_s = max(MIN_RETRY_S, replica.waiting * self.latencies[group].median_s() / 2)
        return OverloadedError(
            f"{replica.waiting} calls wait for the least loaded searcher of group {group}, the most that may "
            f"(resources.searcher_queue={self.queue}); ask again in {retry_s:.1f} s, or use more searchers or replicas",
            retry_s,
        )

    def _call_other(self, running: _Request, group: int, hedge: bool = False) -> bool:
        """Call a further replica of the group; False if there is none, or a hedge is not allowed."""
        with self._lock:
            other = self._least_loaded(group, running.attempts[group])
            if other is None:
                return False
            is_shedding = time.monotonic() - self._refused_s < HEDGE_PAUSE_S or other.waiting >= self.queue
            if hedge and (is_shedding or not self.budget.take()):
                return False
            self._count_call(other)
        running.attempts[group].append(other)
        self._call(running, group, other, hedge)
        return True

    def _call(self, running: _Request, group: int, replica: Replica, hedge: bool = False) -> None:
        name = f"{logs.request_id()}/{self._prefix}-{next(self._numbers)}"
        began_s = time.monotonic()
        future = replica.call(running.method, name, running.messages[group], running.deadline)
        running.calls[future] = _Call(group, replica, name, began_s, hedge)

    def _hedge_s(self, group: int, began_s: float) -> float:
        after_s = self.latencies[group].hedge_after_s() if len(self.groups[group]) > 1 else None
        return float("inf") if after_s is None else began_s + after_s

    def _least_loaded(self, group: int, others: Sequence[Replica] = ()) -> Replica | None:
        """Return the available replica with the fewest waiting calls, except `others`."""
        replicas = [one for one in self.groups[group] if one not in others and self._is_available(group, one)]
        return min(replicas, key=lambda replica: (replica.waiting, replica.last_call), default=None)

    def _is_available(self, group: int, replica: Replica) -> bool:
        """Return whether a replica may be called: one that was down, if it has answered its `open_ref`."""
        if not replica.state:
            return True
        ready, _ = ray.wait([replica.open_ref], timeout=0)
        if not ready:
            return False
        try:
            has_restarted = ray.get(replica.open_ref) != replica.killed_instance
        except RayActorError:
            has_restarted = False
        except (MvrRayError, RayTaskError) as error:  # it runs; its answers report the shards that it cannot open
            has_restarted = True
            log.warning("searcher back with damage: group=%d reason=%s", group, error)
        if not has_restarted:
            replica.open_ref = self._reopen(group, replica.actor)
            return False
        log.info("searcher back: group=%d", group)
        self.mark_up(replica)
        return True

    def _count_call(self, replica: Replica) -> None:
        replica.last_call = next(self._numbers)
        replica.add_waiting(1)

    def _take_answer(self, running: _Request, future: "Future[pa.Buffer]") -> pa.Buffer | None:
        """Take an answer and return it if it is its group's first; if the searcher died, call another one."""
        group, replica, _, began_s, is_hedge = running.calls.pop(future)
        try:
            answer = future.result()
        except ConnectionLost as error:
            log.warning("searcher lost: %s", error)
            if began_s >= replica.up_s:
                self.mark_down(replica, group, "died")
            if running.needs_answer(group) and not self._call_other(running, group) and not running.has_call(group):
                running.failures[group] = replica.state or "died"
            return None
        first = running.needs_answer(group)
        with self._lock:
            self.hedge_wins += first and is_hedge
            self.latencies[group].add(time.monotonic() - began_s)
        return running.answers.setdefault(group, answer) if first else None

    def _cancel(self, calls: Mapping[Any, _Call]) -> None:
        """Cancel these calls: searchers skip those still queued and finish those that run.

        `ray.cancel` does not reach a call that waits in an actor's concurrency group.
        """
        for future, call in calls.items():
            future.cancel()
            call.replica.actor.cancel.options(concurrency_group="health").remote(call.name)
            with self._lock:
                self.latencies[call.group].add(time.monotonic() - call.began_s)
