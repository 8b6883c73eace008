"""Laws of run records: each run has its own."""

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from threading import Barrier

import pytest

from mvr_ray.config import RunConfig
from mvr_ray.store.runs import record


def test_runs_of_the_same_second_have_a_record_each(tmp_path: Path):
    run, together = RunConfig.model_validate({"store": {"path": str(tmp_path)}}), Barrier(8)

    def run_one(number: int) -> str:
        together.wait()
        with record(run, "evaluate") as run_record:
            run_record.report = number
            together.wait()
            return run_record.folder

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(run_one, range(8)))
    reports = [json.loads((tmp_path / folder / "report.json").read_text())["report"] for folder in folders]
    assert reports == list(range(8))


def test_a_log_line_that_utf8_cannot_encode_is_recorded_with_escapes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mvr_ray"), "propagate", False)  # pytest's workers send what it captures
    with record(RunConfig.model_validate({"store": {"path": str(tmp_path)}}), "prepare") as run_record:
        logging.getLogger("mvr_ray").warning("bad row: \udcff.jsonl é")
    assert (tmp_path / run_record.folder / "log").read_text().endswith("bad row: \\udcff.jsonl é\n")


def test_a_record_has_all_times_in_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("mvr_ray"), "propagate", False)
    monkeypatch.setenv("TZ", "XYZ-5:30")
    time.tzset()
    try:
        with record(RunConfig.model_validate({"store": {"path": str(tmp_path)}}), "prepare") as run_record:
            logging.getLogger("mvr_ray").warning("now")
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
    start = datetime.fromisoformat(json.loads((tmp_path / run_record.folder / "report.json").read_text())["started"])
    line_time = (tmp_path / run_record.folder / "log").read_text()[:19]
    assert abs(datetime.fromisoformat(f"{line_time}+00:00") - start) < timedelta(minutes=5)


def test_a_record_has_addresses_without_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger("mvr_ray"), "propagate", False)
    address = "s3://KEY:secr%2Fet@bucket/changes?region=r"
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}, "follow": {"source": address}})
    with pytest.raises(OSError), record(run, "follow") as run_record:
        logging.getLogger("mvr_ray").warning("%s 12:30 who@where", address)
        raise OSError(f"{address} is gone")
    files = {file.name: file.read_text() for file in (tmp_path / run_record.folder).iterdir()}
    assert len(files) == 3
    for text in files.values():
        assert "s3://bucket/changes?region=r" in text and "KEY" not in text and "secr" not in text
    assert "12:30 who@where" in files["log"]
