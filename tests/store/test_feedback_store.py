"""Judgements of several writers at once: none is lost, whatever the store."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from mvr_ray.store import paths
from mvr_ray.store.feedback import add_judgements, feedback_file
from mvr_ray.store.files import Store


def stored_lines(store: Store) -> list[str]:
    path = feedback_file(store, "main")
    return store.read_bytes(path).decode().splitlines() if path else []


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
    assert len(Store(tmp_path).list(paths.feedback_folder("main"))) == 2


def test_judgements_of_a_store_that_numbers_no_files_are_kept(tmp_path):
    store = Store(tmp_path)
    assert feedback_file(store, "main") is None and add_judgements(store, "main", []) == 0
    store.write_bytes("feedback/main.jsonl", b"one\ntwo\n")
    assert stored_lines(store) == ["one", "two"]
    assert add_judgements(store, "main", ["three"]) == 3 and add_judgements(store, "main", []) == 3
    assert stored_lines(store) == ["one", "two", "three"]
