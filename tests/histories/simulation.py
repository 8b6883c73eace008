"""Runs several threads over one store, one call of the store at a time, in an order and with faults drawn from a seed.

The schedule decides at every call who goes on and what befalls the call, so a history is repeated by its seed alone.
Over a folder, or a service that is really there, a call is a method of `Store` that reads or changes files. Over
objects in memory (`memory://`) it is a request of the object store's client, of which one method may make several.

    killed      the actor ends there, before the call has its effect or after it
    refused     the call fails without an effect: a 5xx or SlowDown that outlasted the client's retries, an I/O error
    unanswered  the call has its effect, and fails all the same, as where an acknowledgement is lost
    late        a put fails, and has its effect some turns after that, as where a request is stalled (objects alone)
    full        no actor can write anything for some turns: a full disk
    expired     every request of one actor is refused for some turns, for its credentials (objects alone)
    cut off     every call of one actor fails for some turns: a partition
    one way     every call of one actor has its effect and is not answered, for some turns
    lossy       of one actor's calls one in three is refused or unanswered, for some turns
    slow        one actor is seldom drawn for some turns
    paused      one actor stands still for some turns while another one goes on
    truncated   a file or object that is read lacks its end
    flipped     it has another bit
    stale       a list of names is the one that was read before
    leap        the clock goes on by days: every file is old
"""

import functools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import obstore
from obstore.exceptions import BaseError, GenericError, PermissionDeniedError, UnauthenticatedError
from obstore.store import MemoryStore

from mvr_ray.errors import StorageError
from mvr_ray.store import files, objects
from mvr_ray.store.files import Store

STORE_READS = ("read_bytes", "local_path", "exists", "list", "stored_files", "size_bytes", "age_s", "sha256")
STORE_WRITES = ("write_bytes", "create_once", "put_file", "upload_dir", "touch", "delete", "delete_dir", "move_dir")
REQUESTS = ("get", "head", "list", "list_with_delimiter")
CHANGES = ("put", "copy", "delete")
WRITES = {*STORE_WRITES, *CHANGES}
LISTS = {"list", "stored_files", "list_with_delimiter"}
FREES = {"delete", "delete_dir"}
OBJECTS = "memory://"
LEAP_S = 10 * 86_400.0
FAULT_TURNS = 40
"""How long a fault lasts that is not over with one call."""
FAULTS = {
    "killed": 0.004,
    "refused": 0.006,
    "unanswered": 0.02,
    "late": 0.02,
    "full": 0.001,
    "expired": 0.002,
    "cut off": 0.002,
    "one way": 0.002,
    "lossy": 0.002,
    "slow": 0.002,
    "paused": 0.002,
    "truncated": 0.02,
    "flipped": 0.02,
    "stale": 0.01,
    "leap": 0.001,
}
"""How likely each fault is at a call, where a history has it at all."""
LASTING = {"full", "expired", "cut off", "one way", "lossy", "slow", "paused"}


class ActorKill(BaseException):
    """Ends an actor as a kill does: it is not to be caught, and the actor's later calls have no effect."""


class Turn(NamedTuple):
    """One call of the store, as it is printed when a history fails."""

    actor: str
    call: str
    fate: str


class Actor:
    """A thread that goes on when it is its turn. `pace` says how often it is drawn beside others that have 1."""

    def __init__(self, name: str, work: Callable[[], None], pace: float = 1.0) -> None:
        self.name = name
        self.work = work
        self.pace = pace
        self.turn = threading.Semaphore(0)
        self.has_ended = False
        self.is_killed = False
        self.until: dict[str, int] = {}
        """Turn up to which a fault lasts, by its name."""
        self.error: BaseException | None = None


class Call(NamedTuple):
    """A call that waits for its turn. `is_request`: of the object store's client, else of `Store`."""

    name: str
    path: str
    effect: Callable[[], Any]
    is_request: bool

    def error(self, fate: str) -> Exception:
        """What the caller sees of a call that failed."""
        if self.is_request:
            return GenericError(f"{self.name} {self.path}: {fate}")
        return StorageError(f"{self.name} {self.path}: {fate}")


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
        self._lists: dict[tuple[str, str], Any] = {}
        self._full_until = 0
        self._late: list[tuple[int, Callable[[], Any]]] = []

    def run(self, actors: list[Actor]) -> None:
        """Run all to their ends. What an actor raised stands in its `error`."""
        threads = [threading.Thread(target=self._act, args=(actor,), daemon=True) for actor in actors]
        for thread in threads:
            thread.start()
        while remaining := [actor for actor in actors if not actor.has_ended]:
            weights = [self._weight(actor) for actor in remaining]
            [next_actor] = self.draw.choices(remaining, weights if any(weights) else None)
            next_actor.turn.release()
            self._waiting.acquire()
        for thread in threads:
            thread.join()
        self._do_late(len(self.turns) + FAULT_TURNS)

    def _weight(self, actor: Actor) -> float:
        lasts = {fault for fault, until in actor.until.items() if len(self.turns) < until}
        return 0.0 if "paused" in lasts else actor.pace * (0.05 if "slow" in lasts else 1.0)

    def _act(self, actor: Actor) -> None:
        self._own.actor = actor
        actor.turn.acquire()
        try:
            actor.work()
        except BaseException as error:  # noqa: BLE001  the model says which of them may be
            actor.error = error
        actor.has_ended = True
        self._waiting.release()

    def call(self, call: Call) -> Any:
        """Do a call of the store in its turn; outside of a schedule's threads, at once."""
        actor = getattr(self._own, "actor", None)
        if actor is None:
            return call.effect()
        if actor.is_killed:
            raise ActorKill
        self._waiting.release()
        actor.turn.acquire()
        self._do_late(len(self.turns))
        fate = self._fate(actor, call)
        self.turns.append(Turn(actor.name, f"{call.name} {call.path}", fate))
        match fate:
            case "leap":
                self.clock_s += LEAP_S
            case "killed":
                if self.draw.random() < 0.5 and call.name in WRITES:
                    call.effect()
                actor.is_killed = True
                raise ActorKill
            case "unanswered" | "one way":
                call.effect()
                raise call.error("the answer is lost")
            case "refused" | "cut off" | "full":
                raise call.error(fate)
            case "late":
                self._late.append((len(self.turns) + self.draw.randint(1, FAULT_TURNS), call.effect))
                raise call.error("no answer in time")
            case "expired":
                raise self.draw.choice([PermissionDeniedError, UnauthenticatedError])("the token has expired")
            case "stale" if (call.name, call.path) in self._lists:
                return self._lists[call.name, call.path]
        result = call.effect()
        if fate in ("truncated", "flipped"):
            return self._damage(result, fate)
        if call.name == "age_s":
            return result + self.clock_s if result else result
        if call.name in LISTS:
            self._lists[call.name, call.path] = result
        return result

    def _do_late(self, turn: int) -> None:
        due = [effect for when, effect in self._late if when <= turn]
        self._late = [(when, effect) for when, effect in self._late if when > turn]
        for effect in due:
            with suppress(BaseError):  # no call waits for the answer
                effect()

    def _damage(self, data: bytes, fate: str) -> bytes:
        place = int(self.draw.random() * len(data))
        if fate == "truncated" or not data:
            return data[:place]
        return data[:place] + bytes([data[place] ^ 1 << self.draw.randrange(8)]) + data[place + 1 :]

    def _fate(self, actor: Actor, call: Call) -> str:
        turn = len(self.turns)
        for fault, until in actor.until.items():
            if turn >= until or fault in ("slow", "paused"):
                continue
            if fault == "lossy":
                if self.draw.random() < 1 / 3:
                    return self.draw.choice(["refused", "unanswered"])
                continue
            return fault
        if turn < self._full_until and call.name in WRITES - FREES:
            return "full"
        [fault] = self.draw.choices([*FAULTS, ""], [*FAULTS.values(), 1 - sum(FAULTS.values())])
        if fault not in self.faults or not self._can_be(fault, call):
            return ""
        if fault == "full":
            self._full_until = turn + FAULT_TURNS
        elif fault in LASTING:
            actor.until[fault] = turn + FAULT_TURNS
        return "" if fault in ("full", "lossy", "slow", "paused") else fault

    @staticmethod
    def _can_be(fault: str, call: Call) -> bool:
        match fault:
            case "unanswered":
                return call.name in WRITES
            case "late":
                return call.name == "put"
            case "expired":
                return call.is_request
            case "truncated":
                return call.name in ("get", "read_bytes")
            case "flipped":  # a source says no digest of its change files: TLS alone can detect it
                return call.name in ("get", "read_bytes") and not call.path.endswith(".jsonl")
            case "stale":
                return call.name in LISTS
        return True

    def scratch_is_full(self) -> bool:
        """Whether an actor finds no room for unfinished work now."""
        return getattr(self._own, "actor", None) is not None and len(self.turns) < self._full_until


@contextmanager
def run_in_turn(schedule: Schedule, address: str) -> Iterator[None]:
    """Let every store of this process make its calls in turn, those too that the package opens by an address."""
    with ExitStack() as stack:
        for module in (files, objects):
            stack.enter_context(patch.object(module, "FIRST_PAUSE_S", 0.0))
        if address.startswith(OBJECTS):
            _make_requests_in_turn(schedule, stack)
            yield
            return
        for name in (*STORE_READS, *STORE_WRITES):
            stack.enter_context(patch.object(Store, name, _method_in_turn(schedule, name)))
        plain = Store.scratch

        @contextmanager
        def scratch(store: Store) -> Iterator[Any]:
            if schedule.scratch_is_full():
                raise StorageError("scratch: full")
            with plain(store) as folder:
                yield folder

        stack.enter_context(patch.object(Store, "scratch", scratch))
        yield


def _method_in_turn(schedule: Schedule, name: str) -> Callable[..., Any]:
    plain = getattr(Store, name)

    def method(store: Store, *args: Any, **options: Any) -> Any:
        path = str(args[-1] if name == "put_file" else args[1] if name == "upload_dir" else args[0] if args else "")
        return schedule.call(Call(name, path, lambda: plain(store, *args, **options), False))

    return method


def _make_requests_in_turn(schedule: Schedule, stack: ExitStack) -> None:
    names = (*REQUESTS, *CHANGES)
    client = SimpleNamespace(**{name: functools.partial(_request, schedule, name) for name in names})
    stack.enter_context(patch.object(objects, "obstore", client))
    plain = Store.age_s

    def age_s(store: Store, path: str) -> float:
        age = plain(store, path)
        return age + schedule.clock_s if age else age

    stack.enter_context(patch.object(Store, "age_s", age_s))


def _request(schedule: Schedule, name: str, service: MemoryStore, *args: Any, **options: Any) -> Any:
    """A request to a service in memory. What it gets is read whole in its turn."""
    if name == "put":
        path, data = args
        args = path, data if isinstance(data, bytes) else data.read_bytes()
    plain = getattr(obstore, name)

    def effect() -> Any:
        result = plain(service, *args, **options)
        if name == "get":
            return bytes(result.bytes())
        return [meta for page in result for meta in page] if name == "list" else result

    path = args[0] if args else ""
    result = schedule.call(Call(name, f"{len(path)} objects" if isinstance(path, list) else path or "", effect, True))
    if name == "get":
        return SimpleNamespace(bytes=lambda: result, stream=lambda _: [result])
    return [result] if name == "list" else result


@contextmanager
def objects_in_memory() -> Iterator[str]:
    """Address of an empty object store in this process."""
    service = MemoryStore()
    with patch.object(files, "open_address", lambda _: service):
        yield OBJECTS
