"""Work on a worker with its progress here: the worker writes on a board, a thread of the driver reads it aloud."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from mvr_ray.config import RunConfig, StoreConfig
from mvr_ray.store.files import Store
from mvr_ray.store.runs import to_plain
from mvr_ray.types import Progress

_POLL_S = 0.5
_LAST_WORD_S = 15


class Board:
    """Where a worker writes how far it is."""

    def __init__(self) -> None:
        self._said: tuple[str, int, int] | None = None

    def tell(self, what: str, done: int, total: int) -> None:
        self._said = (what, done, total)

    def read(self) -> tuple[str, int, int] | None:
        return self._said


def telling(actor: Any) -> Progress:
    """The worker's side: a progress that writes on the board, and waits for nothing."""

    def tell(what: str, done: int, total: int) -> None:
        actor.tell.remote(what, done, total)

    return tell


@contextmanager
def relayed(progress: Progress) -> Iterator[Any]:
    """The driver's side: a board, to be sent to the worker, whose last word is passed on twice a second to the end."""
    board: Any = ray.remote(Board).options(num_cpus=0).remote()
    ended = threading.Event()

    def relay() -> None:
        last = None
        while True:
            finished = ended.wait(_POLL_S)
            try:
                said = ray.get(board.read.remote(), timeout=10)
            except (ray.exceptions.RayError, TimeoutError):
                said = None
            if said and said != last:
                progress(*said)
                last = said
            if finished:
                return

    thread = threading.Thread(target=relay, name="progress-relay", daemon=True)
    thread.start()
    try:
        yield board
    finally:
        ended.set()
        thread.join(timeout=_LAST_WORD_S)
        ray.kill(board)


@contextmanager
def started(
    work: Callable[[RunConfig, Progress], Any], run: RunConfig, progress: Progress, gpus: float = 0
) -> Iterator[Any]:
    """A stage in a Ray task of its own, with so many GPUs: the reference of its report, as plain values. Left early, it
    is cancelled.

    A task whose worker dies starts again.
    """
    placed = run.model_copy(update={"store": StoreConfig(path=Store(run.store.path).address)})
    call: Any = ray.remote(_call).options(num_cpus=0, num_gpus=gpus)
    with relayed(progress) as board:
        answer = call.remote(work, placed.model_dump(mode="json"), board)
        try:
            yield answer
        except BaseException:
            ray.cancel(answer)
            raise


def _call(work: Callable[[RunConfig, Progress], Any], plain: dict[str, Any], board: Any) -> Any:
    return to_plain(work(RunConfig.model_validate(plain), telling(board)))
