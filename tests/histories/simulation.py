"""Runs several threads over one store, one call of the store at a time, in an order and with faults drawn from a seed.

Every method of `Store` that reads or changes files is a place where the schedule decides who goes on and what befalls
the call. So a history is repeated by its seed alone.

    killed      the actor ends there, before the call has its effect or after it
    refused     the call fails without an effect, as by a full disk or a service that is down
    unanswered  the call has its effect, and fails all the same, as where an acknowledgement is lost
    cut off     every call of one actor fails for some turns, as behind a network that is partitioned
    stale       a list of names is the one that was read before
    leap        the clock goes on by days: every file is old

An actor that is not drawn stands still, for as long as it is not: a pause.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from mvr_ray.errors import StorageError
from mvr_ray.store.files import Store

READS = ("read_bytes", "local_path", "exists", "list", "size_bytes", "age_s", "sha256")
WRITES = ("write_bytes", "create_once", "put_file", "upload_dir", "touch", "delete", "delete_dir", "move_dir")
LEAP_S = 10 * 86_400.0
CUT_OFF_TURNS = 40
FAULTS = {"killed": 0.004, "refused": 0.006, "unanswered": 0.02, "cut off": 0.002, "stale": 0.01, "leap": 0.001}
"""How likely each fault is at a call, where a history has it at all."""


class ActorKill(BaseException):
    """Ends an actor as a kill does: it is not to be caught, and the actor's later calls have no effect."""


class Turn(NamedTuple):
    """One call of the store, as it is told when a history fails."""

    actor: str
    call: str
    fate: str


class Actor:
    """A thread that goes on when it is its turn. `cannot_be_stale` keeps what it lists as it is."""

    def __init__(self, name: str, work: Callable[[], None], cannot_be_stale: bool = False) -> None:
        self.name = name
        self.work = work
        self.cannot_be_stale = cannot_be_stale
        self.turn = threading.Semaphore(0)
        self.ended = False
        self.is_killed = False
        self.cut_off_until = 0
        self.error: BaseException | None = None


class Schedule:
    """Draws whose turn it is, and which fault befalls the call."""

    def __init__(self, seed: int, faults: frozenset[str]) -> None:
        self.draw = random.Random(seed)
        self.faults = faults
        self.turns: list[Turn] = []
        self.clock_s = 0.0
        """How far the clock has leapt."""
        self._waiting = threading.Semaphore(0)
        self._own = threading.local()
        self._lists: dict[str, list[str]] = {}

    def run(self, actors: list[Actor]) -> None:
        """Run all to their ends. What an actor raised stands in its `error`."""
        threads = [threading.Thread(target=self._act, args=(actor,), daemon=True) for actor in actors]
        for thread in threads:
            thread.start()
        while remaining := [actor for actor in actors if not actor.ended]:
            self.draw.choice(remaining).turn.release()
            self._waiting.acquire()
        for thread in threads:
            thread.join()

    def _act(self, actor: Actor) -> None:
        self._own.actor = actor
        actor.turn.acquire()
        try:
            actor.work()
        except BaseException as error:  # noqa: BLE001  the model says which of them may be
            actor.error = error
        actor.ended = True
        self._waiting.release()

    def call(self, name: str, effect: Callable[[], Any], path: str) -> Any:
        """Do a call of the store in its turn; outside of a schedule's threads, at once."""
        actor = getattr(self._own, "actor", None)
        if actor is None:
            return effect()
        if actor.is_killed:
            raise ActorKill
        self._waiting.release()
        actor.turn.acquire()
        fate = self._fate(actor, name)
        self.turns.append(Turn(actor.name, f"{name} {path}", fate))
        match fate:
            case "leap":
                self.clock_s += LEAP_S
            case "killed":
                if self.draw.random() < 0.5 and name in WRITES:
                    effect()
                actor.is_killed = True
                raise ActorKill
            case "unanswered":
                effect()
                raise StorageError(f"{name} {path}: the answer is lost")
            case "refused" | "cut off":
                raise StorageError(f"{name} {path}: refused")
            case "stale" if path in self._lists:
                return self._lists[path]
        result = effect()
        if name == "age_s":
            return result + self.clock_s if result else result
        if name == "list":
            self._lists[path] = result
        return result

    def _fate(self, actor: Actor, name: str) -> str:
        if len(self.turns) < actor.cut_off_until:
            return "cut off"
        [fault] = self.draw.choices([*FAULTS, ""], [*FAULTS.values(), 1 - sum(FAULTS.values())])
        if fault not in self.faults or (fault == "unanswered" and name not in WRITES):
            return ""
        if fault == "stale" and (name != "list" or actor.cannot_be_stale):
            return ""
        if fault == "cut off":
            actor.cut_off_until = len(self.turns) + CUT_OFF_TURNS
        return fault


@contextmanager
def run_in_turn(schedule: Schedule) -> Iterator[None]:
    """Let every store of this process make its calls in turn, those too that the package opens by an address."""
    plain: Mapping[str, Any] = {name: getattr(Store, name) for name in (*READS, *WRITES)}

    def in_turn(name: str) -> Callable[..., Any]:
        def call(store: Store, *args: Any, **options: Any) -> Any:
            path = str(args[-1] if name == "put_file" else args[1] if name == "upload_dir" else args[0])
            return schedule.call(name, lambda: plain[name](store, *args, **options), path)

        return call

    for name in plain:
        setattr(Store, name, in_turn(name))
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(Store, name, method)
