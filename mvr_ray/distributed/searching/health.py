"""Detects searchers that hang: alive for Ray, but with a request path that does not answer.

A probe is a real search for one query in the searcher's request queue. It may wait there as long as the searcher ends
calls or opens files, which its heartbeat reports outside the queue.

    hung  <=>  a probe waits, and for `hung_s` the searcher ended no call, opened no file and did not restart

A hung searcher is killed; Ray restarts it.
"""

import logging
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayTaskError

from mvr_ray.distributed.searching.dispatch import Dispatcher, Replica
from mvr_ray.distributed.searching.searcher import Heartbeat

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 2.0


class LastHeartbeat(NamedTuple):
    """The last heartbeat that showed progress, and its time."""

    heartbeat: Heartbeat | None
    at_s: float

    def after(self, heartbeat: Heartbeat | None, now_s: float) -> "LastHeartbeat":
        """Return this one, or the new heartbeat if it shows progress. None: the searcher did not answer."""
        if heartbeat is None or (heartbeat == self.heartbeat and not heartbeat.is_opening):
            return self
        return LastHeartbeat(heartbeat, now_s)


class HealthMonitor:
    """Probes the searchers of one dispatcher and kills those that hang. Not safe to use from several threads."""

    def __init__(self, dispatcher: Dispatcher, hung_s: float) -> None:
        self.dispatcher = dispatcher
        self.hung_s = hung_s
        self._probes: dict[Replica, tuple[Any, LastHeartbeat]] = {}

    def check(self, now_s: float) -> int:
        """Send probes, read heartbeats, and kill hung searchers; return their number."""
        replicas = [(group, one) for group, many in enumerate(self.dispatcher.groups) for one in many]
        self._probes = {one: self._probes[one] for _, one in replicas if one in self._probes}  # not of replaced ones
        up = [(group, one) for group, one in replicas if not one.state]
        refs = {one: one.actor.heartbeat.options(concurrency_group="health").remote() for _, one in up}
        if refs:
            ray.wait(list(refs.values()), num_returns=len(refs), timeout=HEARTBEAT_TIMEOUT_S)
        num_hung = 0
        for group, replica in up:
            try:
                hangs = self._hangs(replica, _get_heartbeat(refs[replica]), now_s)
            except RayActorError:
                self._probes.pop(replica, None)
                self.dispatcher.mark_down(replica, group, "died")
                continue
            if hangs:
                _, (last, at_s) = self._probes.pop(replica)
                log.error("searcher hangs, killed: group=%d without_progress_s=%.0f", group, now_s - at_s)
                self.dispatcher.mark_down(replica, group, "hung", last.instance_id if last else None)
                ray.kill(replica.actor, no_restart=False)
                num_hung += 1
        return num_hung

    def _hangs(self, replica: Replica, heartbeat: Heartbeat | None, now_s: float) -> bool:
        probe, last = self._probes.get(replica, (None, LastHeartbeat(heartbeat, now_s)))
        if probe is None or ray.wait([probe], timeout=0)[0]:
            probe, last = replica.actor.probe.remote(), LastHeartbeat(heartbeat, now_s)
        last = last.after(heartbeat, now_s)
        self._probes[replica] = probe, last
        return now_s - last.at_s >= self.hung_s


def _get_heartbeat(ref: Any) -> Heartbeat | None:
    """Return a heartbeat; None if it did not arrive in time. Raises RayActorError if the searcher is dead."""
    with suppress(RayTaskError):
        return ray.get(ref) if ray.wait([ref], timeout=0)[0] else None
    return None
