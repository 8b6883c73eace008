"""Detects searchers that hang: alive for Ray, but with a request path that does not answer.

A probe, a real search for one query, goes through the same queue as everybody's. It may wait there for its turn, as
long as the searcher ends calls or opens files, which its heartbeat tells from beside the queue.

    hung  <=>  a probe waits, and for `hung_s` the searcher ended no call, opened no file and did not start anew

Who hangs is killed, and Ray starts it again.
"""

import logging
import time
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayTaskError

from mvr_ray.distributed.periodic import run_periodically
from mvr_ray.distributed.searching.dispatch import Dispatcher, Replica
from mvr_ray.distributed.searching.searcher import Heartbeat

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 2.0


class LastHeartbeat(NamedTuple):
    """The last sign of work that a searcher gave, and when."""

    heartbeat: Heartbeat | None
    at_s: float

    def after(self, heartbeat: Heartbeat | None, now_s: float) -> "LastHeartbeat":
        """With what was heard now (None: nothing): a new sign where work went on, else the old one."""
        if heartbeat is None or (heartbeat == self.heartbeat and not heartbeat.opening):
            return self
        return LastHeartbeat(heartbeat, now_s)


class HealthMonitor:
    """Looks after the searchers of one dispatcher, one look after the other."""

    def __init__(self, dispatcher: Dispatcher, hung_s: float) -> None:
        self.dispatcher = dispatcher
        self.hung_s = hung_s
        self._probes: dict[Replica, Any] = {}
        self._signs: dict[Replica, LastHeartbeat] = {}

    def look(self, now_s: float) -> int:
        """Send probes, on_partial heartbeats, and replace who hangs; gives how many did."""
        there = [(group, one) for group, many in enumerate(self.dispatcher.groups) for one in many if not one.state]
        heartbeats = {one: one.actor.heartbeat.options(concurrency_group="health").remote() for _, one in there}
        if heartbeats:
            ray.wait(list(heartbeats.values()), num_returns=len(heartbeats), timeout=HEARTBEAT_TIMEOUT_S)
        hung = 0
        for group, one in there:
            heartbeat, lost = _heartbeat_of(heartbeats[one])
            if lost:
                self._forget(one)
                self.dispatcher.down(one, group, "died")
            elif self._hangs(one, heartbeat, now_s):
                last = self._signs[one].heartbeat
                log.error("searcher hangs, killed: group=%d without_sign_s=%.0f", group, now_s - self._signs[one].at_s)
                self._forget(one)
                self.dispatcher.down(one, group, "hung", last.born if last else None)
                ray.kill(one.actor, no_restart=False)
                hung += 1
        return hung

    def running(self, every_s: float) -> AbstractContextManager[None]:
        """Looks every so many seconds, in a thread, until the block ends."""

        def look() -> float:
            try:
                self.look(time.monotonic())
            except ray.exceptions.RayError as error:
                log.warning("probe not sent: %s", str(error).partition("\n")[0])
            return every_s

        return run_periodically(look, every_s, "mvr-health", join_s=None)

    def _hangs(self, one: Replica, heartbeat: Heartbeat | None, now_s: float) -> bool:
        waiting = self._probes.get(one)
        if waiting is None or ray.wait([waiting], timeout=0)[0]:
            self._probes[one] = one.actor.probe.remote()
            self._signs[one] = LastHeartbeat(heartbeat, now_s)
            return False
        self._signs[one] = self._signs[one].after(heartbeat, now_s)
        return now_s - self._signs[one].at_s >= self.hung_s

    def _forget(self, one: Replica) -> None:
        self._probes.pop(one, None)
        self._signs = {other: sign for other, sign in self._signs.items() if other is not one}


def _heartbeat_of(ref: Any) -> tuple[Heartbeat | None, bool]:
    """A heartbeat, None where none came in time; and whether its searcher is gone."""
    if not ray.wait([ref], timeout=0)[0]:
        return None, False
    try:
        return ray.get(ref), False
    except RayActorError:
        return None, True
    except RayTaskError:
        return None, False
