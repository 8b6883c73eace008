"""Checks that answers of other engines are checked, and that our own side of the comparison is exact."""

import json
from pathlib import Path

import engine_peer
import engines
import numpy as np
import pytest
from engine_peer import Worker
from engines import EVERY, Case, Oracle

PASSAGES = 150
SMALL = (Case(3), Case(40), Case(3, 10), Case(40, 50), Case(5, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up passages, questions and changes, as the benchmark writes them."""
    path = tmp_path_factory.mktemp("engines")
    no_views = np.zeros((0, engines.VIEWS, engines.DIMENSION), np.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "real_views", lambda: no_views)
        assert engines.make_data(path, PASSAGES) == 0
    return path


def best(oracle: Oracle, question: int, case: Case) -> list[tuple[int, float]]:
    scores_P = np.where(oracle.fields < case.share, oracle.scores_QP[question], -np.inf)
    rows = np.argsort(-scores_P, kind="stable")[: min(case.k, int(np.isfinite(scores_P).sum()))]
    return [(int(row), float(scores_P[row])) for row in rows]


def test_the_check_of_answers_passes_the_true_best_and_nothing_else(folder: Path):
    oracle, case = Oracle(folder, 3), Case(4, 50)
    answer = best(oracle, 1, case)
    oracle.check(1, case, answer, 1e-6)
    outside = next((row, float(oracle.scores_QP[1, row])) for row in range(PASSAGES) if oracle.fields[row] >= 50)
    worse = best(oracle, 1, Case(30, 50))[-1]
    for wrong in (
        [*answer[:3], worse],
        [*answer[:3], outside],
        [*answer[:3], answer[0]],
        answer[:3],
        [*answer[:3], (answer[3][0], answer[3][1] + 1e-3)],
    ):
        with pytest.raises(AssertionError):
            oracle.check(1, case, wrong, 1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp32 with codes", "fp16 with codes"])
def test_our_side_answers_as_brute_force_before_and_after_an_update(folder: Path, precision: str):
    worker, oracle = Worker(folder, "mvr_ray", precision, 2), Oracle(folder, 4)
    worker.build()
    for _ in range(2):
        for case in SMALL:
            for question, answer in enumerate(worker.search(case.k, case.share, 0, 4)["answers"]):
                oracle.check(question, case, answer, 1e-5)
        for question, answer in enumerate(worker.batch(10, 0, 4)["answers"]):
            oracle.check(question, Case(10), answer, 1e-5)
        report = worker.update(EVERY)
        oracle.change(folder)
        assert report["grown_bytes"] > 0
    assert worker.size()["disk"] > PASSAGES * engines.VIEWS * engines.DIMENSION
    worker.close()
    worker.open()
    oracle.check(0, Case(10), worker.search(10, 100, 0, 1)["answers"][0], 1e-5)


def test_a_file_with_two_names_counts_once(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"x" * 8192)
    once = engine_peer.disk_bytes(tmp_path)
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert engine_peer.disk_bytes(tmp_path) == once >= 8192
    (tmp_path / "b").unlink()
    (tmp_path / "b").write_bytes(b"x" * 8192)
    assert engine_peer.disk_bytes(tmp_path) == 2 * once


def test_changes_are_of_every_hundredth_passage_alone(folder: Path):
    oracle, before = Oracle(folder, 2), Oracle(folder, 2)
    oracle.change(folder)
    differs_P = (oracle.scores_QP != before.scores_QP).any(axis=0)
    assert np.flatnonzero(differs_P).tolist() == list(range(0, PASSAGES, EVERY))
    assert json.loads((folder / "task.json").read_text())["passages"] == PASSAGES
