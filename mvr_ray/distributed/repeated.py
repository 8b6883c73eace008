"""Something that is looked after again and again, in a thread, until a block ends."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

JOIN_S = 1.0


@contextmanager
def repeated(look: Callable[[], float], wait_s: float, name: str, join_s: float | None = JOIN_S) -> Iterator[None]:
    """`look` runs after `wait_s`, and then each time after as many seconds as it last gave.

    The block's end waits for a look under way, at most `join_s` (None: as long as it takes).
    """
    ended = threading.Event()

    def look_until_ended() -> None:
        next_s = wait_s
        while not ended.wait(next_s):
            next_s = look()

    thread = threading.Thread(target=look_until_ended, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(join_s)
