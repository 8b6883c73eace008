"""One call to one replica of every group of searchers, and the first answer of each.

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
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayTaskError

from mvr_ray import logs
from mvr_ray.distributed.failures import unwrapped
from mvr_ray.distributed.searching.channel import Channel, Channels, Cut, wait
from mvr_ray.distributed.searching.hedging import HedgeBudget, Latencies
from mvr_ray.errors import MvrRayError, OverloadedError
from mvr_ray.types import FleetCounts

log = logging.getLogger(__name__)

QUEUE = 64
CALM_S = 1.0
"""For so long after a refusal nobody is asked twice."""
LEAST_RETRY_S = 0.1


class Ask(NamedTuple):
    """What is asked of a searcher: a method and its arguments, without the call's name, which comes last.

    `by_ray` sends the same to an actor, as a call of this name, and gives the reference of its answer.
    """

    method: str
    args: tuple[Any, ...]
    by_ray: Callable[[Any, str], Any]


class Replica:
    """One searcher, as this process knows it.

    `state` is empty while it answers, else why it does not. `killed` names the life that was ended because it hung;
    `left` are calls that nobody waits for any more.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.channels = Channels(actor)
        self.waiting = 0
        self.turn = 0
        self.state = ""
        self.again: Any = None
        self.killed: str | None = None
        self.left: list[Any] = []


class _Call(NamedTuple):
    group: int
    replica: Replica
    name: str
    began_s: float


class Replies(NamedTuple):
    """Answers by group, and of every other group why it gave none."""

    answers: dict[int, list[Any]]
    silent: dict[int, str]


class _Request(NamedTuple):
    """One request under way: what it asks of each group, what came, who was asked, the calls that run, and
    who was asked because another was slow."""

    requests: Mapping[int, Ask]
    answers: dict[int, list[Any]]
    silent: dict[int, str]
    tried: dict[int, list[Replica]]
    calls: dict[Any, _Call]
    hedged: dict[int, Replica]

    @property
    def waits(self) -> bool:
        return len(self.answers) + len(self.silent) < len(self.requests)

    def waits_for(self, group: int) -> bool:
        return group not in self.answers and group not in self.silent

    def is_asked(self, group: int) -> bool:
        return any(call.group == group for call in self.calls.values())


class _Lost:
    """In place of an answer: the searcher is gone."""


class Scatter:
    """Groups of searchers that hold the same shards. Safe to use from several threads."""

    def __init__(self, groups: Sequence[Sequence[Any]], restart: Callable[[int, Any], Any], queue: int = QUEUE) -> None:
        """`restart(group, actor)` sends the call that is answered when the actor holds its shards."""
        self.groups = [[Replica(actor) for actor in actors] for actors in groups]
        self.queue = queue
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
        requests: Mapping[int, Ask],
        timeout_s: float,
        *,
        admitted: bool = False,
        hear: Callable[[list[Any]], None] | None = None,
    ) -> Replies:
        """Each group's first answer. `admitted`: a part of a request that was let in before, which no bound refuses.
        `hear` is told every group's answer when it comes.

        Raises OverloadedError, and what a searcher raised for the request itself.
        """
        began_s = time.monotonic()
        deadline_s = began_s + max(timeout_s, 0.0)
        chosen, silent = self._admit(requests, admitted)
        at = _Request(requests, {}, silent, {group: [replica] for group, replica in chosen.items()}, {}, {})
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
                until_s = min([deadline_s, *hedge_s.values()])
                wanted = 1 if self._replicated or hear else len(at.calls)
                done = wait(list(at.calls), wanted, until_s - now_s)
                for ref in done:
                    answer = self._ended(at, ref)
                    if hear and answer is not None:
                        hear(answer)
                if len(done) < wanted and until_s == deadline_s:
                    break
            for call in at.calls.values():
                if at.waits_for(call.group):
                    at.silent[call.group] = call.replica.state or "late"
        finally:
            self._leave(at.calls)
            for _, replica in unsent:
                self._unbook(replica)
        return Replies(at.answers, at.silent)

    @property
    def _replicated(self) -> bool:
        return any(len(replicas) > 1 for replicas in self.groups)

    def counts(self) -> FleetCounts:
        """What became of calls so far, and how many wait."""
        with self._lock:
            waiting = [self._load(replica) for replicas in self.groups for replica in replicas]
            return FleetCounts(self.budget.hedges, self.hedge_wins, self.refused, sum(waiting), max(waiting, default=0))

    def down(self, replica: Replica, group: int, state: str, killed: str | None = None) -> None:
        """Ask this replica no more until it has started again; `killed` names the life that must not answer."""
        with self._lock:
            if not replica.state:
                replica.killed = killed
                log.warning("searcher lost: group=%d state=%s", group, state)
                replica.state = state
                replica.again = self._restart(group, replica.actor)
                replica.channels.cut()

    def replace(self, group: int, number: int, actor: Any) -> Replica:
        """From now on ask another searcher, which has opened the group's shards; gives the one before it."""
        with self._lock:
            before, self.groups[group][number] = self.groups[group][number], Replica(actor)
        return before

    def close(self) -> None:
        """Nobody is asked any more."""
        for replicas in self.groups:
            for replica in replicas:
                replica.channels.cut()

    def up(self, replica: Replica) -> None:
        """It answers: ask it again."""
        with self._lock:
            replica.state, replica.again = "", None

    def _admit(self, requests: Mapping[int, Ask], admitted: bool) -> tuple[dict[int, Replica], dict[int, str]]:
        chosen: dict[int, Replica] = {}
        silent: dict[int, str] = {}
        with self._lock:
            for group in requests:
                there = [replica for replica in self.groups[group] if self._answers(group, replica)]
                if not there:
                    silent[group] = self.groups[group][0].state
                    continue
                least = min(there, key=lambda replica: (self._load(replica), replica.turn))
                if least.waiting >= self.queue and not admitted:
                    raise self._overloaded(group, least)
                chosen[group] = least
            for replica in chosen.values():
                self._book(replica)
                self.budget.call()
        return chosen, silent

    def _overloaded(self, group: int, replica: Replica) -> OverloadedError:
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
            other = min(others, key=lambda replica: (self._load(replica), replica.turn))
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
        try:
            ask = at.requests[group]
            under_way = replica.channels.call(ask.method, (*ask.args, name)) or ask.by_ray(replica.actor, name)
        except BaseException:
            self._unbook(replica)
            raise
        at.calls[under_way] = call

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
            born = _fetched(replica.again, "opening shards")
            if isinstance(born, _Lost) or born == replica.killed:
                replica.again = self._restart(group, replica.actor)
                return False
        except (MvrRayError, RayTaskError) as error:  # it lives; what it cannot open it tells with every answer
            log.warning("searcher back with damage: group=%d reason=%s", group, error)
        log.info("searcher back: group=%d", group)
        replica.state, replica.again = "", None
        return True

    def _load(self, replica: Replica) -> int:
        """Calls that wait for a replica or run there, those included that nobody waits for any more."""
        if replica.left:
            done = wait(replica.left, len(replica.left), 0.0)
            replica.left = [call for call in replica.left if call not in done]
            replica.waiting -= len(done)
            for call in done:
                if isinstance(call, Channel):
                    call.pass_by()
        return replica.waiting

    def _book(self, replica: Replica) -> None:
        self._turns += 1
        replica.turn = self._turns
        replica.waiting += 1

    def _unbook(self, replica: Replica) -> None:
        with self._lock:
            replica.waiting -= 1

    def _ended(self, at: _Request, ref: Any) -> list[Any] | None:
        """Take an answer, or where its searcher died ask another one; gives the answer if it is its group's first."""
        group, replica, _, began_s = at.calls.pop(ref)
        self._unbook(replica)
        answer = _fetched(ref, "searching")
        self._note_win(at, group, replica, answer)
        if not isinstance(answer, _Lost):
            first = at.answers.setdefault(group, answer) is answer
            with self._lock:
                self.latencies[group].add(time.monotonic() - began_s)
            return answer if first else None
        self.down(replica, group, "died")
        if at.waits_for(group) and not self._call_other(at, group) and not at.is_asked(group):
            at.silent[group] = replica.state or "died"
        return None

    def _note_win(self, at: _Request, group: int, replica: Replica, answer: Any) -> None:
        """Whether the second call came before the first, which it was made for."""
        if at.hedged.get(group) is replica and at.waits_for(group) and not isinstance(answer, _Lost):
            with self._lock:
                self.hedge_wins += 1

    def _leave(self, running: Mapping[Any, _Call]) -> None:
        """Wait no longer for these: those still in a queue are passed by when their turn comes, those that run run.

        Not by `ray.cancel`: it does not reach a call that waits in an actor's concurrency group.
        """
        for ref, call in running.items():
            call.replica.actor.forget.options(concurrency_group="health").remote(call.name)
            with self._lock:
                call.replica.left.append(ref)
                self.latencies[call.group].add(time.monotonic() - call.began_s)


def _fetched(ended: Any, what: str) -> Any:
    """A finished call's answer; _Lost where its actor died: a dead actor's reference counts as ready."""
    try:
        return ended.answer() if isinstance(ended, Channel) else ray.get(ended)
    except (RayActorError, Cut) as error:
        log.warning("searcher lost: %s", str(error).partition("\n")[0])
        return _Lost()
    except RayTaskError as error:
        raise unwrapped(error, what) from error
