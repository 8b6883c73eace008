"""Histories of publishers, updaters, collectors and readers over one store, under faults, judged by a model.

`MVR_RAY_HISTORIES=FIRST:LAST` runs those seeds (`make chaos-soak SEEDS=FIRST:LAST`), each over a folder and over
objects in memory. A seed alone repeats a history.
"""

import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import sweep
from model import History
from simulation import FAULTS, objects_in_memory

FEW, MORE = range(8), range(8, 48)
FIRST, _, LAST = os.environ.get("MVR_RAY_HISTORIES", "").partition(":")
SLOW_SEEDS = range(int(FIRST), int(LAST)) if LAST else sweep.take(MORE)


def run_history(root: Path, address: str, seed: int, record_property) -> None:
    draw = random.Random(seed)
    faults = frozenset(draw.sample(sorted(FAULTS), draw.randint(0, len(FAULTS))))
    history = History(root, address, seed, faults)
    try:
        history.run()
    except BaseException:
        sys.stderr.write("".join(f"{turn.actor}: {turn.call} {turn.fate}\n" for turn in history.schedule.turns))
        raise
    counts = Counter(turn.fate for turn in history.schedule.turns if turn.fate)
    summary = ", ".join(f"{count} {fate}" for fate, count in sorted(counts.items())) or "no fault"
    record_property("figures", f"seed {seed}: {len(history.answers)} answers, {summary}")


@pytest.fixture(params=["folder", "objects"])
def address(request, tmp_path, monkeypatch) -> Iterator[str]:
    """Of an empty store, whose copies are the history's own."""
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    if request.param == "folder":
        yield str(tmp_path / "store")
        return
    with objects_in_memory() as memory:
        yield memory


@pytest.mark.parametrize("seed", FEW)
def test_every_answer_of_a_history_could_have_been_given(tmp_path, address, seed, record_property):
    run_history(tmp_path, address, seed, record_property)


@pytest.mark.slow
@pytest.mark.chaos(
    "updaters, followers, publishers, collectors, readers and servers killed, refused, unanswered, answered late, cut "
    "off in four ways, stopped, without room or credentials, given damaged reads and old lists, misled by a clock",
    "no wrong answer, no acknowledged version or update lost; the next update and version are right",
)
@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_every_answer_of_many_histories_could_have_been_given(tmp_path, address, seed, record_property):
    run_history(tmp_path, address, seed, record_property)


@pytest.mark.slow
@pytest.mark.chaos("the same over an object store that is not ours", "as over a folder and over objects in memory")
@pytest.mark.parametrize("seed", sweep.take(range(1, 13)))  # the last has every fault
def test_histories_over_an_object_store_are_right_too(tmp_path, s3_service, monkeypatch, seed, record_property):
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    options = f"region=us-east-1&scheme=http&endpoint_override={s3_service}"
    run_history(tmp_path, f"s3://key:secret@bucket/history-{seed}?{options}", seed, record_property)


def test_the_same_seed_gives_the_same_history(tmp_path, address):
    """Another order of turns would be another history, and a failure could not be looked into."""
    turns = []
    for number in range(2):
        with objects_in_memory():
            own = address if "://" in address else f"{address}-{number}"
            history = History(tmp_path / str(number), own, 5, frozenset(FAULTS))
            history.run()
        turns.append([(turn.actor, turn.call.split()[0], turn.fate) for turn in history.schedule.turns])
    assert turns[0] == turns[1]
