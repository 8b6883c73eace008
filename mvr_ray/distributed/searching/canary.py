"""Finds searchers that hang: alive for Ray, but with a request path that answers nobody.

A canary, a real search for one query, goes through the same queue as everybody's. It may wait there for its turn, as
long as the searcher ends calls or opens files, which its pulse tells from beside the queue.

    hung  <=>  a canary waits, and for `hung_s` the searcher ended no call, opened no file and did not start anew

Who hangs is killed, and Ray starts it again.
"""

import logging
import time
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayTaskError

from mvr_ray.distributed.repeated import repeated
from mvr_ray.distributed.searching.scatter import Replica, Scatter
from mvr_ray.distributed.searching.searchers import Pulse

log = logging.getLogger(__name__)

PULSE_TIMEOUT_S = 2.0


class Sign(NamedTuple):
    """The last sign of work that a searcher gave, and when."""

    pulse: Pulse | None
    at_s: float

    def after(self, pulse: Pulse | None, now_s: float) -> "Sign":
        """With what was heard now (None: nothing): a new sign where work went on, else the old one."""
        if pulse is None or (pulse == self.pulse and not pulse.opening):
            return self
        return Sign(pulse, now_s)


class Watch:
    """Looks after the searchers of one scatter, one look after the other."""

    def __init__(self, scatter: Scatter, hung_s: float) -> None:
        self.scatter = scatter
        self.hung_s = hung_s
        self._canaries: dict[Replica, Any] = {}
        self._signs: dict[Replica, Sign] = {}

    def look(self, now_s: float) -> int:
        """Send canaries, hear pulses, and replace who hangs; gives how many did."""
        there = [(group, one) for group, many in enumerate(self.scatter.groups) for one in many if not one.state]
        pulses = {one: one.actor.pulse.options(concurrency_group="health").remote() for _, one in there}
        if pulses:
            ray.wait(list(pulses.values()), num_returns=len(pulses), timeout=PULSE_TIMEOUT_S)
        hung = 0
        for group, one in there:
            pulse, lost = _heard(pulses[one])
            if lost:
                self._forget(one)
                self.scatter.down(one, group, "died")
            elif self._hangs(one, pulse, now_s):
                last = self._signs[one].pulse
                log.error("searcher hangs, killed: group=%d without_sign_s=%.0f", group, now_s - self._signs[one].at_s)
                self._forget(one)
                self.scatter.down(one, group, "hung", last.born if last else None)
                ray.kill(one.actor, no_restart=False)
                hung += 1
        return hung

    def running(self, every_s: float) -> AbstractContextManager[None]:
        """Looks every so many seconds, in a thread, until the block ends."""

        def look() -> float:
            try:
                self.look(time.monotonic())
            except ray.exceptions.RayError as error:
                log.warning("canary not sent: %s", str(error).partition("\n")[0])
            return every_s

        return repeated(look, every_s, "mvr-canary", join_s=None)

    def _hangs(self, one: Replica, pulse: Pulse | None, now_s: float) -> bool:
        waiting = self._canaries.get(one)
        if waiting is None or ray.wait([waiting], timeout=0)[0]:
            self._canaries[one] = one.actor.canary.remote()
            self._signs[one] = Sign(pulse, now_s)
            return False
        self._signs[one] = self._signs[one].after(pulse, now_s)
        return now_s - self._signs[one].at_s >= self.hung_s

    def _forget(self, one: Replica) -> None:
        self._canaries.pop(one, None)
        self._signs = {other: sign for other, sign in self._signs.items() if other is not one}


def _heard(ref: Any) -> tuple[Pulse | None, bool]:
    """A pulse, None where none came in time; and whether its searcher is gone."""
    if not ray.wait([ref], timeout=0)[0]:
        return None, False
    try:
        return ray.get(ref), False
    except RayActorError:
        return None, True
    except RayTaskError:
        return None, False
