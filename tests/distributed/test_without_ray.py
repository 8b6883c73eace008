"""Stages over few passages run in this process, and leave what they leave through Ray."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from every_stage import run_stages
from waiting import until

from mvr_ray.checksums import with_trailer, without_trailer
from mvr_ray.config import ResourcesConfig, RunConfig
from mvr_ray.distributed import refine as refining
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.evaluate import evaluate
from mvr_ray.distributed.indexing import build_index, rewrite, shards
from mvr_ray.distributed.refinement.refiner_pool import RefinerPool
from mvr_ray.errors import PublishConflictError, ResourceError
from mvr_ray.store import manifest, paths
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect
from mvr_ray.store.update import update

DATED = ("created", "token", "took_ms")
ROOT = Path(__file__).resolve().parent.parent.parent


def stored_files(store: Path) -> list[str]:
    """Every file of the store by its path; shards, corpora and encoders stand under names of their content."""
    return sorted(str(file.relative_to(store)) for file in store.rglob("*") if file.is_file())


def without_dates(value: object, store: Path) -> object:
    """The reports without what differs from run to run: times, and where the store is."""
    if isinstance(value, dict):
        return {key: without_dates(one, store) for key, one in value.items() if key not in DATED}
    if isinstance(value, list):
        return [without_dates(one, store) for one in value]
    return re.sub(re.escape(str(store)), "STORE", value) if isinstance(value, str) else value


@pytest.fixture
def frequent_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    """For `pass_hours`, which waits for two renewals."""
    monkeypatch.setattr(shards, "RENEWALS", 40)
    monkeypatch.setattr(shards, "MIN_RENEWAL_S", 0.1)


def pass_hours(store: Path) -> None:
    """Let all files age by two hours, and the work under way renew its own twice: the second time, all of the first
    renewal is done."""
    for file in [*store.rglob("*")]:
        with suppress(FileNotFoundError):  # a file that was renamed since
            os.utime(file, (time.time() - 7200,) * 2)
    markers = [*store.rglob("running")]

    def renewals_ns() -> list[int]:
        return [marker.stat().st_mtime_ns for marker in markers]

    for _ in range(2 if markers else 0):
        before_ns = renewals_ns()
        until(lambda before_ns=before_ns: renewals_ns() != before_ns)


def run_for(store: Path, run_over) -> RunConfig:
    passages = [{"id": f"new{n}", "title": "News", "text": f"The king number {n} ruled the country."} for n in range(3)]
    deletions = [{"id": name, "delete": True} for name in ("squad-0-0", "1")]
    (store / "changes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*passages, *deletions]))
    return run_over(
        store,
        index={"compact_share": 1.0},
        refine={"questions": "dev", "rounds": 2, "depth": 20, "max_heldout_loss": 100.0},
        analyze={"questions": "dev", "attention_passages": 4},
        resources={"local_passages": 1000},
    )


@pytest.mark.ray
@pytest.mark.data
def test_every_stage_leaves_the_same_bytes_and_report_through_ray_and_without_importing_it(
    ray_session, corpus_store, run_over, tmp_path: Path
):
    stores = [Path(shutil.copytree(corpus_store, tmp_path / name)) for name in ("ray", "here")]
    runs = [run_for(store, run_over) for store in stores]
    through_ray = run_stages(runs[0])
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(runs[1].model_dump(mode="json")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    program = [sys.executable, str(Path(__file__).with_name("every_stage.py")), str(file)]
    result = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    here = json.loads(result.stdout)
    assert list(here) == list(through_ray)
    for stage, report in here.items():
        assert without_dates(report, stores[1]) == without_dates(
            json.loads(json.dumps(through_ray[stage])), stores[0]
        ), stage
    assert stored_files(stores[1]) == stored_files(stores[0])


@pytest.mark.data
def test_an_interrupted_index_is_continued_by_the_same_command_and_ends_with_the_same_bytes(
    empty_store: Path, run_over, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session, "in_ray", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    undisturbed_store = Path(shutil.copytree(empty_store, tmp_path / "undisturbed"))
    resources = {"local_passages": 1000}
    whole = build_index.index(run_over(undisturbed_store, resources=resources))
    steps: list[tuple[str, int, int]] = []

    def interrupt(*step: Any) -> None:
        steps.append(step)
        if [name for name, *_ in steps].count("encode") == 3:
            raise KeyboardInterrupt

    run = run_over(empty_store, resources=resources)
    with pytest.raises(KeyboardInterrupt):
        build_index.index(run, interrupt)
    assert manifest.list_versions(Store(str(empty_store)), "index") == []
    again: list[tuple[str, int, int]] = []
    version = build_index.index(run, lambda *step: again.append(step))
    assert next(step for step in again if step[0] == "encode") == steps[-1]
    assert version.shards == whole.shards


@pytest.mark.ray
@pytest.mark.data
def test_a_gpu_that_is_not_there_is_an_error_that_says_what_to_set(small_index, run_over, monkeypatch):
    monkeypatch.setattr(session, "in_ray", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = run_over(small_index, resources={"local_passages": 1000, "gpus_per_encoder": 0.5})
    with pytest.raises(ResourceError, match=r"rankers are to use a GPU, and torch sees none; set .*gpus_per_\* to 0"):
        evaluate(run)


@pytest.mark.data
@pytest.mark.usefixtures("frequent_renewals")
def test_a_build_keeps_its_corpus_and_shards_from_collections_that_run_meanwhile(
    empty_store: Path, run_over, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A build of hours, while newer corpora are published."""
    monkeypatch.setattr(session, "in_ray", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    store = Store(str(empty_store))
    run = run_over(empty_store, index={"grace_s": 4}, resources={"local_passages": 1000})
    build_index.index(run)

    def publish_corpus(text: str) -> str:
        changes = tmp_path / "changes.jsonl"
        changes.write_text("".join(json.dumps({"id": f"new {n}", "text": f"{text} {n}"}) + "\n" for n in range(9)))
        return update(run.prepare, store, str(changes)).digest

    digest, removals = publish_corpus("Text"), []

    def pass_hours_and_collect(step: str, count: int, _: int) -> None:
        if (step, count) != ("build shards", 1):
            return
        pass_hours(empty_store)
        publish_corpus("Newer text")
        removals.extend(collect(store, "index", keep=1, grace_s=3600))

    version = build_index.index(run, pass_hours_and_collect)
    assert version.corpus_digest == digest and version.metrics["encoded"] == 9 and removals == []
    assert manifest.verify(store, version).problems == []


@pytest.mark.data
def test_a_refinement_ends_in_the_round_in_which_another_version_is_published(
    corpus_store: Path, run_over, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its result could not be published: rounds of hours would be for nothing."""
    monkeypatch.setattr(session, "in_ray", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    root = Path(shutil.copytree(corpus_store, tmp_path / "store"))
    run, store = run_for(root, run_over), Store(str(root))
    build_index.index(run)
    steps: list[str] = []

    def publish_another(step: str, _count: int, _total: int) -> None:
        steps.append(step)
        if step.startswith("refine round 0"):
            manifest.rollback(store, "index", 1)

    with pytest.raises(PublishConflictError, match="run the same command again on version 2"):
        refining.refine(run, publish_another)
    assert not [step for step in steps if step == "refine rounds" or step.startswith("refine round 1")]
    assert refining.refine(run).base_version == 2


@pytest.mark.data
def test_a_refinement_marks_the_hits_of_each_search_once(
    corpus_store: Path, run_over, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session, "in_ray", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    root = Path(shutil.copytree(corpus_store, tmp_path / "store"))
    run = run_for(root, run_over)
    build_index.index(run)
    calls: list[str] = []
    for name in ("search", "mark"):
        call = getattr(RefinerPool, name)
        monkeypatch.setattr(RefinerPool, name, lambda *own, call=call, name=name: (calls.append(name), call(*own))[1])
    report = refining.refine(run)
    assert len(report.rounds) >= 1 and calls == ["search", "mark"] * (len(calls) // 2)


@pytest.mark.data
@pytest.mark.usefixtures("frequent_renewals")
@pytest.mark.parametrize("stage", ["index", "reshard", "compact", "feedback_views", "query"])
def test_files_that_no_version_names_yet_survive_collections_until_the_publication(
    corpus_store: Path, run_over, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
):
    """Files of words, shards and refined queries, in a stage that takes hours."""
    monkeypatch.setattr(session, "in_ray", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    root = Path(shutil.copytree(corpus_store, tmp_path / "store"))
    run, store = run_for(root, run_over), Store(str(root))
    refine_cfg = {"method": stage, "step_size": 0.05} if stage in ("feedback_views", "query") else {}
    sections = {"index": {"lexical": True, "grace_s": 4}, "refine": refine_cfg}
    run = RunConfig.model_validate(
        {**(plain := run.model_dump(mode="json")), **{name: {**plain[name], **own} for name, own in sections.items()}}
    )
    build_index.index(run if stage != "index" else run_for(root, run_over))
    if stage == "compact":
        update(run.prepare, store, str(root / "changes.jsonl"))
        build_index.index(run)
    publish, removals = manifest.publish, []

    def pass_hours_and_collect(store: Store, version: manifest.Manifest) -> manifest.Manifest:
        pass_hours(root)
        removals.extend(collect(store, "index", keep=1, grace_s=3600))
        return publish(store, version)

    monkeypatch.setattr(manifest, "publish", pass_hours_and_collect)
    match stage:
        case "index":
            build_index.index(run)
        case "reshard":
            rewrite.reshard(run, 2)
        case "compact":
            rewrite.compact(run)
        case _:
            refining.refine(run)
    version = manifest.read(store, "index")
    assert removals == [] or stage == "compact"  # of which version 1 goes
    assert version.version == 2 + (stage == "compact")
    assert manifest.verify(store, version).problems == []
    assert store.list(paths.index_dir("index", "staging")) == []


@pytest.mark.data
def test_staged_plans_and_notes_of_a_newer_program_are_made_again(
    empty_store: Path, run_over, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session, "in_ray", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = run_over(empty_store, resources={"local_passages": 1000})
    build_index.index(run)
    changes = tmp_path / "changes.jsonl"
    changes.write_text("".join(json.dumps({"id": f"new {n}", "text": f"Text {n}."}) + "\n" for n in range(9)))
    update(run.prepare, Store(str(empty_store)), str(changes))
    undisturbed_store = Path(shutil.copytree(empty_store, tmp_path / "undisturbed"))
    whole = build_index.index(run_over(undisturbed_store, resources={"local_passages": 1000}))

    def interrupt(step: str, *_: int) -> None:
        if step == "build shards":
            raise KeyboardInterrupt

    def add_field(file: Path, part: str) -> None:
        fields = json.loads(bytes(without_trailer(file.read_bytes(), file.name)))
        (fields[part] if part else fields)["of_a_newer_program"] = 1
        file.write_bytes(with_trailer(json.dumps(fields).encode()))

    with pytest.raises(KeyboardInterrupt):
        build_index.index(run, interrupt)
    [staging] = (empty_store / paths.index_dir("index", "staging")).iterdir()
    [note], plans = staging.glob("built-*"), sorted(staging.glob("plan-*"))
    copies = Path(shutil.copytree(empty_store, tmp_path / "interrupted"))
    for file, part in [(plans[1], ""), (plans[1], "base"), (note, ""), (note, "entry")]:
        shutil.rmtree(empty_store)
        shutil.copytree(copies, empty_store)
        add_field(file, part)
        steps: list[tuple[str, int, int]] = []
        version = build_index.index(run, lambda *step, steps=steps: steps.append(step))
        assert version.shards == whole.shards
        is_planned = any(what == "look for embeddings of earlier versions, shards" for what, *_ in steps)
        assert is_planned == (file != note), (file.name, part)


def test_without_an_address_the_size_decides_whether_ray_is_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "in_ray", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not session.needs_ray(ResourcesConfig(), 50_000)
    assert session.needs_ray(ResourcesConfig(), 50_001)
    assert session.needs_ray(ResourcesConfig(local_passages=0), 1)
    assert session.needs_ray(ResourcesConfig(address="127.0.0.1:6379"), 1)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert session.needs_ray(ResourcesConfig(), 1)


UPDATE = """
import sys
sys.modules["ray"] = None
from mvr_ray.config import load_run
from mvr_ray.distributed.indexing import build_index
from mvr_ray.store.files import Store
from mvr_ray.store.update import update
run = load_run(sys.argv[1])
update(run.prepare, Store(run.store.path), sys.argv[2])
print(int(build_index.index(run).metrics["encoded"]))
"""


@pytest.mark.data
@pytest.mark.slow  # a program of its own imports torch and encodes
def test_an_update_of_few_passages_needs_no_ray_in_a_corpus_of_any_size(corpus_store, run_over, tmp_path: Path):
    store = Path(shutil.copytree(corpus_store, tmp_path / "store"))
    run = run_for(store, run_over)
    passages = build_index.index(run).num_passages
    values, file = run.model_dump(mode="json"), tmp_path / "run.yaml"
    values["resources"]["local_passages"] = 3
    file.write_text(yaml.safe_dump(values))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    program = [sys.executable, "-c", UPDATE, str(file), str(store / "changes.jsonl")]
    result = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert passages > 3 and result.stdout == "3\n"
