"""Checks that `follow` makes versions of arriving change files, and ends, fails and resumes cleanly."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import yaml
from waiting import lines_of

from mvr_ray import Index
from mvr_ray.config import ResourcesConfig, RunConfig
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.session import ClusterInfo
from mvr_ray.distributed.hot_swap import open_hot_swap_router
from mvr_ray.distributed.indexing import build_index, rewrite
from mvr_ray.distributed.indexing.follow import Follower, FollowReport, follow, with_encoders
from mvr_ray.errors import ConfigError, MissingInputError, NoTokensError, PublishConflictError
from mvr_ray.store import manifest
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare
from mvr_ray.store.update import update
from mvr_ray.versions import verify

pytestmark = pytest.mark.data
INDEX = "index"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def run(own_index: Path, source: Path, run_over, monkeypatch) -> RunConfig:
    """A run whose files are never old enough for a batch. `once` must not wait for that: it may sleep 99 times."""
    pauses = iter(range(99))
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(next(pauses) and seconds))
    monkeypatch.setattr("mvr_ray.distributed.indexing.follow.time", clock)
    return run_over(own_index, follow={"source": str(source), "max_age_s": 86_400, "poll_s": 0.01})


def live(run: RunConfig) -> Manifest:
    return manifest.read(Store(run.store.path), run.index.name)


def write_changes(folder: Path, name: str, *rows: dict) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def ids(run: RunConfig) -> list[str]:
    return sorted(passage.id for passage in Corpus.open(Store(run.store.path), "corpus"))


@pytest.mark.usefixtures("without_ray")
@pytest.mark.ray
def test_each_batch_is_a_version_that_equals_one_built_from_nothing_and_only_new_contents_are_encoded(
    run: RunConfig, source: Path, run_over, tmp_path: Path
):
    first, *others = ids(run)
    write_changes(source, "1.jsonl", {"id": "new", "title": "T", "text": "A new text."}, {"id": first, "delete": True})
    change = {"id": others[0], "title": "T", "text": "Another text."}
    write_changes(source, "2.jsonl", change, {"id": "new", "delete": True})
    (source / "3.jsonl").write_text('{"id": "cut", "te')
    report, lines = FollowReport(), []
    follow(run, report, lines.append, once=True)
    assert (report.batches, report.files_applied, list(report.left_out), report.version) == (1, 2, ["3.jsonl"], 2)
    assert [line.partition(":")[0] for line in lines] == ["left out, nothing of it was applied", "version 2"]
    assert live(run).metrics["encoded"] == 1 and ids(run) == sorted(others)
    assert verify(Store(run.store.path), live(run)).problems == []
    rows = [passage._asdict() for passage in Corpus.open(Store(run.store.path), "corpus")]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({**row, "fields": None}) + "\n" for row in rows))
    fresh = run_over(tmp_path / "fresh", prepare={"sources": [{"path": str(tmp_path / "all.jsonl")}]})
    prepare(fresh.prepare, Store(fresh.store.path))
    assert answers(run) == answers(fresh, build_index.index(fresh))
    follow(run, again := FollowReport(), lines.append, once=True)
    assert again == FollowReport(version=2) and live(run).version == 2


def answers(run: RunConfig, version: Manifest | None = None) -> list[list[tuple[str, float]]]:
    number = version.version if version else None
    with open_hot_swap_router(run, number, local=True) as live, live.pin() as router:
        answer = router.search_text(["What was the oil crisis?", "Another text."], 10)
    return [[(hit.passage_id, hit.score) for hit in hits] for hits in answer.hits]


@pytest.mark.usefixtures("without_ray")
@pytest.mark.ray
def test_another_precision_in_the_run_file_waits_for_the_next_index(run: RunConfig, source: Path):
    before = live(run)
    write_changes(source, "1.jsonl", {"id": "new", "title": "T", "text": "A new text."})
    other = run.model_copy(update={"index": run.index.model_copy(update={"precision": "openvino"})})
    follow(other, FollowReport(), print, once=True)
    assert live(run).encoder_fingerprint == before.encoder_fingerprint and live(run).metrics["encoded"] == 1


@pytest.mark.usefixtures("without_ray")
@pytest.mark.ray
def test_a_roll_back_is_not_undone_until_the_last_corpus_is_published_again(run: RunConfig, source: Path):
    store, lines = Store(run.store.path), []
    write_changes(source, "1.jsonl", {"id": ids(run)[0], "delete": True})
    follow(run, FollowReport(), lines.append, once=True)
    manifest.rollback(store, INDEX, 1)
    write_changes(source, "2.jsonl", {"id": ids(run)[1], "delete": True})
    follower = Follower(run, FollowReport(), lines.append)
    del lines[:]
    assert [follower.make_versions() for _ in range(3)] == [1, 1, 1]
    assert live(run).operation == "rollback" and len(lines) == 1 and "changes wait: version 3" in lines[0]
    build_index.index(run)
    follow(run, FollowReport(), lines.append, once=True)
    assert live(run).version == 5 and live(run).num_passages == len(ids(run)) == 58


@pytest.mark.usefixtures("without_ray")
@pytest.mark.ray
def test_a_roll_back_while_ray_starts_is_not_undone(run: RunConfig, source: Path, monkeypatch: pytest.MonkeyPatch):
    store, lines, connect = Store(run.store.path), [], session.connect
    write_changes(source, "1.jsonl", {"id": ids(run)[0], "delete": True})
    follow(run, FollowReport(), print, once=True)
    write_changes(source, "2.jsonl", {"id": ids(run)[0], "delete": True})
    with monkeypatch.context() as patch, pytest.raises(PublishConflictError, match="version 3, a roll back, replaced"):
        patch.setattr(session, "connect", lambda *own: (manifest.rollback(store, INDEX, 1), connect(*own))[1])
        follow(run, FollowReport(), print, once=True)
    follow(run, FollowReport(), lines.append, once=True)
    assert (live(run).version, live(run).operation) == (3, "rollback") and "changes wait: version 3" in lines[0]


@pytest.mark.usefixtures("without_ray")
@pytest.mark.ray
def test_a_roll_back_holds_over_later_versions_and_its_files_are_not_applied_again(run: RunConfig, source: Path):
    run = run.model_copy(update={"resources": run.resources.model_copy(update={"local_passages": 10_000})})
    store, first = Store(run.store.path), ids(run)[0]
    write_changes(source, "1.jsonl", {"id": first, "title": "T", "text": "A wrong text."})
    follow(run, FollowReport(), print, once=True)
    manifest.rollback(store, INDEX, 1)
    rewrite.reshard(run, len(live(run).shards) + 1)
    write_changes(source, "2.jsonl", {"id": "new", "title": "T", "text": "A new text."})
    follow(run, FollowReport(), print, once=True)
    assert (live(run).version, live(run).operation) == (4, "reshard")
    write_changes(source.parent, "fix.jsonl", {"id": first, "title": "T", "text": "A right text."})
    update(run.prepare, store, str(source.parent / "fix.jsonl"), index=INDEX)
    follow(run, report := FollowReport(), print, once=True)
    texts = {name: passage.text for name, passage in Corpus.open(store, "corpus").get([first, "new"]).items()}
    assert texts == {first: "A right text.", "new": "A new text."} and report.files_applied == 1


@pytest.mark.usefixtures("without_ray")
@pytest.mark.ray
def test_a_follower_that_ended_between_corpus_and_version_publishes_the_version(run: RunConfig, source: Path):
    """The index keeps its encoder, whatever was trained since."""
    write_changes(source, "1.jsonl", {"id": ids(run)[0], "delete": True})
    follow(run, FollowReport(), print, once=True)
    store = Store(run.store.path)
    before = live(run)
    store.delete(f"indexes/{INDEX}/versions/2.json")
    index = run.index.model_copy(update={"encoder": "auto"})
    follow(run.model_copy(update={"index": index}), FollowReport(), print, once=True)
    assert live(run).content_digest() == before.content_digest()


@pytest.fixture
def bare_backbone(tiny, tmp_path: Path) -> Path:
    """A model without special tokens around a text, whose tokenizer drops a letter."""
    backbone = Path(shutil.copytree(tiny("llama"), tmp_path / "bare"))
    no_stars = {"type": "Replace", "pattern": {"String": "*"}, "content": ""}
    tokenizer = json.loads((backbone / "tokenizer.json").read_text())
    (backbone / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None, "normalizer": no_stars}))
    return backbone


@pytest.mark.usefixtures("without_ray")
@pytest.mark.ray
def test_a_build_or_change_with_a_passage_that_the_encoder_refuses_leaves_the_corpus_that_changes_start_from(
    bare_backbone: Path, tmp_path: Path
):
    settings = {"encoder": {"max_passage_tokens": 16, "num_views": 2}}
    index = Index.build([("a", "One text.")], model=bare_backbone, path=tmp_path / "own", settings=settings)
    with pytest.raises(NoTokensError, match="passage 'odd' has no token"):
        Index.build([("odd", "***")], model=bare_backbone, path=tmp_path / "own", settings=settings)
    index.upsert([("b", "Another text.")])
    assert sorted(passage.id for passage in index) == ["a", "b"]
    with pytest.raises(NoTokensError, match=r"passage 'odd' has no token .*; nothing was changed$"):
        index.upsert([("c", "A third text."), ("odd", "***")])
    index.delete(["a"])
    assert [passage.id for passage in index] == ["b"]


@pytest.mark.usefixtures("without_ray")
@pytest.mark.ray
def test_a_passage_that_the_encoder_refuses_is_named_by_its_row_until_a_later_file_corrects_it(
    corpus_store: Path, bare_backbone: Path, source: Path, run_over, tmp_path: Path
):
    store = Path(shutil.copytree(corpus_store, tmp_path / "store"))
    sections = {
        "encoder": {"backbone": str(bare_backbone), "max_passage_tokens": 16, "num_views": 2},
        "follow": {"source": str(source), "max_age_s": 0, "poll_s": 0.01},
    }
    run = run_over(store, **sections)
    build_index.index(run)
    first = ids(run)[0]
    write_changes(source, "1.jsonl", {"id": first, "delete": True}, {"id": "odd", "text": "***"})
    refusal = r"passage 'odd' has no token .*; it is the row 1\.jsonl:2: add a later change file with a text of it"
    for _ in range(2):
        with pytest.raises(NoTokensError, match=refusal):
            follow(run, FollowReport(), print, once=True)
    assert live(run).version == 1
    write_changes(source, "2.jsonl", {"id": "other", "text": "Of another one."})
    with pytest.raises(NoTokensError, match=refusal):
        follow(run, FollowReport(), print, once=True)
    write_changes(source, "3.jsonl", {"id": "odd", "text": "A text."})
    follow(run, report := FollowReport(), print, once=True)
    assert (report.files_applied, live(run).version) == (1, 2)
    assert {"odd", "other"} <= {*ids(run)} and first not in ids(run) and live(run).num_passages == len(ids(run))


def test_what_cannot_be_followed_is_refused_before_anything_is_done(run_over, source: Path, tmp_path: Path):
    for sections, error, message in (
        ({}, ConfigError, "follow.source is not set"),
        ({"follow": {"source": str(source)}}, MissingInputError, "mvr-ray prepare CONFIG"),
    ):
        with pytest.raises(error, match=message):
            follow(run_over(tmp_path / "none", **sections), FollowReport(), print)
        assert not (tmp_path / "none").exists()


ENCODERS = {
    "a small batch": (1, 4, 8, 1, False, 1),
    "a large batch": (99, 4, 8, 1, False, 4),
    "a small cluster": (99, 4, 3, 1, False, 2),
    "a cluster that grows": (99, 4, 3, 1, True, 4),
    "no place": (99, 4, 1, 1, False, 1),
    "parts of a CPU": (99, 24, 5, 0.2, False, 20),
}


@pytest.mark.parametrize("case", ENCODERS)
def test_there_are_as_many_encoders_as_chunks_within_what_is_allowed_and_there(case: str):
    chunks, most, cpus, cpus_each, can_grow, expected = ENCODERS[case]
    limits = ResourcesConfig(encoders_max=most, cpus_per_encoder=cpus_each)
    resources = with_encoders(limits, chunks, ClusterInfo(cpus, 0, (), can_grow))
    assert (resources.encoders_min, resources.encoders_max) == (expected, expected)


COMMAND = """
import sys
from mvr_ray.cli import main
main(sys.argv[1:])
"""


def start(run: RunConfig, folder: Path, *words: str) -> subprocess.Popen[str]:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    command = [sys.executable, "-c", COMMAND, "follow", str(file), "follow.max_age_s=0", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_until(process: subprocess.Popen[str], moment: str, lines: list[str]) -> None:
    for line in lines_of(process, process.stderr):
        lines.append(line)
        if moment in line:
            return
    raise AssertionError("".join(lines))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(("number", "in_ray"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_the_command_follows_until_a_signal_ends_it_and_says_so(
    run: RunConfig, source: Path, tmp_path: Path, monkeypatch, number, in_ray
):
    """Ray sets a handler of SIGTERM, not of SIGINT."""
    if in_ray:
        monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    else:
        run = run.model_copy(update={"resources": ResourcesConfig(local_passages=1000)})
    write_changes(source, "1.jsonl", {"id": ids(run)[0], "delete": True})
    lines: list[str] = []
    with start(run, tmp_path) as process:
        read_until(process, "version 2: 1.jsonl", lines)
        write_changes(source, "2.jsonl", {"id": ids(run)[0], "delete": True})
        read_until(process, "version 3: 2.jsonl", lines)
        process.send_signal(number)
        output, errors = process.communicate()
    assert process.returncode == 0 and "files applied" in output
    assert "follow ended" in errors and "Traceback" not in errors
    assert live(run).num_passages == 58
