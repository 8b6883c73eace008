"""Checks that a study's readings are those of every question, whatever its text."""

import json
from pathlib import Path

import pytest

from mvr_ray.config import PrepareConfig, RunConfig, SourceConfig
from mvr_ray.distributed.read import ReadReport
from mvr_ray.distributed.retrieve import RetrieveReport
from mvr_ray.store.files import Store
from mvr_ray.store.prepare import prepare
from mvr_ray.studies import reading


def test_answers_with_unicode_line_breaks_are_one_row_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["Where\u2028is it?", "Who\x85?"]
    rows = [{"id": "p", "title": "Town", "text": "A town."}]
    rows += [{"id": f"q{at}", "question": text, "answers": ["x"]} for at, text in enumerate(texts)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunConfig.model_validate({"store": {"path": str(tmp_path / "store")}})
    source = SourceConfig(path=str(tmp_path / "rows.jsonl"), format="jsonl", questions="dev")
    prepare(PrepareConfig(sources=[source], num_shards=1), Store(run.store.path))

    def write_answers(run: RunConfig, ranking: Path, output: Path, *_: object) -> ReadReport:
        """As `read` writes them."""
        prediction = {"passages": 1, "exact_match": True, "f1": 0.5}
        answers = [
            {"id": f"q{at}", "question": text, "answers": ["x"], "predictions": [prediction]}
            for at, text in enumerate(texts)
        ]
        output.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in answers).encode())
        return ReadReport("reader", "ab", str(ranking), len(answers), 0, str(output), [])

    ranking = RetrieveReport("dev.jsonl", "jsonl", len(texts), 1, "wiki", 1, "ab", 1, True)
    monkeypatch.setattr(reading, "retrieve", lambda *_: ranking)
    monkeypatch.setattr(reading, "read", write_answers)
    [part] = reading.reading(run, options={"questions": ["dev"]}).sets
    assert [(value.id, value.exact_match, value.f1) for value in part.values] == [("q0", 1.0, 0.5), ("q1", 1.0, 0.5)]
