"""Job scripts as a cluster runs them: a process of their own, started in the repository's root."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mvr_ray.cli import main
from mvr_ray.config import StoreConfig
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store

ROOT = Path(__file__).resolve().parent.parent.parent


def job(stage: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"jobs/{stage}.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    rows = [{"id": f"p{i}", "title": f"T{i}", "text": f"Passage number {i}. It is short."} for i in range(40)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.yaml"
    path.write_text(f"prepare: {{sources: [{{path: {tmp_path / 'corpus.jsonl'}, format: jsonl}}]}}\n")
    return str(path)


def test_a_job_does_what_its_command_does(run_file: str, tmp_path: Path) -> None:
    process = job("prepare", run_file, f"store.path={tmp_path / 'job'}", "--json")
    assert process.returncode == 0, process.stderr
    with pytest.raises(SystemExit) as end:
        main(["prepare", run_file, f"store.path={tmp_path / 'command'}", "--json"])
    assert not end.value.code
    corpora = [Corpus.open(Store(StoreConfig(path=str(tmp_path / name)).path), "corpus") for name in ("job", "command")]
    assert corpora[0].digest == corpora[1].digest
    assert json.loads(process.stdout)["passages_written"] == 40


def test_versions_are_listed_and_verified_by_a_job(run_file: str, tmp_path: Path) -> None:
    process = job("versions", run_file, "verify", f"store.path={tmp_path / 'store'}")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.endswith("has no version; run `mvr-ray index CONFIG`\n")


def test_a_job_that_fails_ends_with_its_message_and_status(run_file: str, tmp_path: Path) -> None:
    store = f"store.path={tmp_path / 'store'}"
    refusal = job("prepare", run_file, store, "prepare.num_shard=3")
    assert refusal.returncode == 2
    assert (
        refusal.stderr
        == "mvr-ray: override 'prepare.num_shard=3': prepare.num_shard: unknown key; did you mean 'num_shards'?\n"
    )
    failure = job("prepare", run_file, store, "prepare.sources.0.path=nowhere.jsonl")
    assert failure.returncode == 1
    assert "nowhere.jsonl" in failure.stderr
    assert "Traceback" not in failure.stderr
