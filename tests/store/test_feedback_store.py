"""Judgements of several writers at once: none is lost, whatever the store."""

import json
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from mvr_ray.store import feedback, paths
from mvr_ray.store.feedback import GROUP_BYTES, add_judgements, copy_judgements
from mvr_ray.store.files import Store


def stored_lines(store: Store, index: str = "main") -> list[str]:
    path = copy_judgements(store, index)
    return store.read_bytes(path).decode().splitlines() if path else []


def numbered_files(store: Store) -> list[str]:
    return [name for name in store.list(paths.judgement_folder("main")) if not name.startswith("copy-")]


class SlowStore(Store):
    """Does something before the first file is created."""

    def __init__(self, root: Path, before: Callable[[], object]) -> None:
        super().__init__(root)
        self.before: Callable[[], object] | None = before

    def create_once(self, path: str, data: bytes) -> None:
        before, self.before = self.before, None
        if before:
            before()
        super().create_once(path, data)


class CountingStore(Store):
    """Counts the bytes that a call reads or writes."""

    num_bytes = 0

    def create_once(self, path: str, data: bytes) -> None:
        self.num_bytes += len(data)
        super().create_once(path, data)

    def read_bytes(self, path: str) -> bytes:
        data = super().read_bytes(path)
        self.num_bytes += len(data)
        return data


class LaggingStore(Store):
    """Lists files as of the listing before."""

    names: tuple[str, ...] = ()

    def list(self, path: str) -> list[str]:
        before, self.names = self.names, tuple(super().list(path))
        return list(before)


class SlowReader(Store):
    """Does something between the first listing after it created a file and what follows."""

    def __init__(self, root: Path, after: Callable[[], object]) -> None:
        super().__init__(root)
        self.after: Callable[[], object] | None = after
        self.has_created = False

    def create_once(self, path: str, data: bytes) -> None:
        super().create_once(path, data)
        self.has_created = True

    def list(self, path: str) -> list[str]:
        names = super().list(path)
        if self.has_created and self.after:
            after, self.after = self.after, None
            after()
        return names


@pytest.fixture(params=[40, GROUP_BYTES])
def group_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(feedback, "GROUP_BYTES", request.param)
    return request.param


@pytest.mark.usefixtures("group_bytes")
def test_no_judgement_of_several_writers_is_lost_and_each_writers_order_stays(tmp_path):
    def write(writer: int) -> list[int]:
        own = Store(tmp_path)
        return [add_judgements(own, "main", [json.dumps([writer, n])]) for n in range(12)]

    with ThreadPoolExecutor(6) as pool:
        counts = list(pool.map(write, range(6)))
    lines = [tuple(json.loads(line)) for line in stored_lines(Store(tmp_path))]
    assert sorted(lines) == [(writer, n) for writer in range(6) for n in range(12)]
    assert all(first[1] < then[1] for w in range(6) for first, then in pairwise([one for one in lines if one[0] == w]))
    assert sorted(number for own in counts for number in own) == list(range(1, 73)), "each call says how many there are"
    per_group = Counter(name.rpartition("-")[0] for name in numbered_files(Store(tmp_path)))
    assert max(per_group.values()) == 2


def test_a_call_costs_as_much_whatever_is_stored(tmp_path):
    """A store of an earlier commit with one large file of all judgements is read once more."""
    lines = [f'{{"question": "number {n} of many", "passage_id": "p{n}", "label": 1}}' for n in range(6000)]
    path = paths.judgements("main", 7)
    Store(tmp_path).write_bytes(path, "".join(f"{line}\n" for line in lines[:3000]).encode())
    costs = []
    for stop in range(3001, 3100):
        store = CountingStore(tmp_path)
        assert add_judgements(store, "main", lines[stop - 1 : stop]) == stop
        costs.append(store.num_bytes)
    assert add_judgements(store, "main", lines[3099:5999]) == 5999
    store.num_bytes = 0
    assert add_judgements(store, "main", lines[5999:]) == 6000 == add_judgements(store, "main", [])
    assert max(*costs[1:], store.num_bytes) < 2 * sum(map(len, lines[3099:]))
    assert max(costs[1:]) < GROUP_BYTES and stored_lines(Store(tmp_path)) == lines
    assert Store(tmp_path).exists(path), "earlier programs read it"


@pytest.mark.usefixtures("group_bytes")
def test_a_slow_writer_whose_number_is_free_again_adds_to_the_newest(tmp_path):
    """Others create three files meanwhile, and delete the first of them."""
    store = Store(tmp_path)
    for n in range(3):
        add_judgements(store, "main", [f"start {n}"])
    slow = SlowStore(tmp_path, lambda: [add_judgements(store, "main", [f"other {n}"]) for n in range(3)])
    assert add_judgements(slow, "main", ["slow"]) == 7
    assert stored_lines(store) == [*(f"start {n}" for n in range(3)), *(f"other {n}" for n in range(3)), "slow"]


def test_a_writer_that_reads_a_slow_writers_file_under_its_own_number_adds_no_second_time(tmp_path):
    """Others create three files once it has listed its own as the newest; then a slow writer creates its number."""
    store = Store(tmp_path)
    add_judgements(store, "main", ["start"])
    own_file = paths.judgements("main", 2, 0)

    def add_others() -> None:
        for n in range(3):
            add_judgements(store, "main", [f"other {n}"])
        store.create_once(own_file, b"start\nslow\n")

    assert add_judgements(SlowReader(tmp_path, add_others), "main", ["own"]) == 2
    store.delete(own_file)
    assert stored_lines(store) == ["start", "own", "other 0", "other 1", "other 2"]


@pytest.mark.usefixtures("group_bytes")
def test_no_judgement_is_lost_or_doubled_where_a_listing_lags(tmp_path):
    store = LaggingStore(tmp_path)
    counts = [add_judgements(store, "main", [f"judgement {n}"]) for n in range(9)]
    assert counts == list(range(1, 10))
    assert stored_lines(Store(tmp_path)) == [f"judgement {n}" for n in range(9)]


@pytest.mark.usefixtures("group_bytes")
def test_equal_judgements_of_two_writers_at_once_are_one_and_later_ones_another(tmp_path):
    slow = SlowStore(tmp_path, lambda: add_judgements(Store(tmp_path), "main", ["equal"]))
    assert add_judgements(slow, "main", ["equal"]) == 1
    assert add_judgements(slow, "main", ["equal"]) == 2
    assert stored_lines(Store(tmp_path)) == ["equal", "equal"]


@pytest.mark.parametrize("kind", ["500", "lost"])
def test_judgements_whose_creation_is_answered_by_an_error_are_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: ModuleType, kind: str
):
    """The client repeats a put that was answered by 500, and meets its own object."""
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path))
    script = s3_server.Script([], [])
    with s3_server.serve(script) as root:
        store = Store(root)
        assert add_judgements(store, "main", ["one"]) == 1
        script.faults.append(s3_server.Fault(paths.judgements("main", 2, 0), kind))
        assert add_judgements(store, "main", ["two"]) == 2 and not script.faults
        assert stored_lines(store) == ["one", "two"]


@pytest.mark.usefixtures("group_bytes")
def test_a_copy_stays_as_it_is_while_judgements_arrive_and_is_replaced_by_one_an_hour_later(tmp_path):
    """Until then another refinement may be about to read it."""
    store = Store(tmp_path)
    add_judgements(store, "main", ["one"])
    path = copy_judgements(store, "main")
    assert path and path == copy_judgements(store, "main")
    for n in range(4):
        add_judgements(store, "main", [f"more {n}"])
    assert len(stored_lines(store)) == 5 and store.read_bytes(path) == b"one\n"
    os.utime(tmp_path / path, (0, 0))
    assert len(stored_lines(store)) == 5 and not store.exists(path)


@pytest.mark.usefixtures("group_bytes")
def test_judgements_of_a_store_that_numbers_no_files_are_kept(tmp_path):
    store = Store(tmp_path)
    assert copy_judgements(store, "main") is None and add_judgements(store, "main", []) == 0
    store.write_bytes("feedback/main.jsonl", b"one\ntwo \xff\n")
    assert add_judgements(store, "main", ["three"]) == 3 and add_judgements(store, "main", []) == 3
    path = copy_judgements(store, "main")
    assert path and store.read_bytes(path) == b"one\ntwo \xff\nthree\n"
    assert stored_lines(store, "main.jsonl") == [], "an index of the name of that file has none"
