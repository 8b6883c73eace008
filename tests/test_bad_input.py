"""Gives the command line wrong input, and compares its words and exit status with what is promised.

Run files and the words of a search are refused before anything is opened: `test_config.py` and `test_cli.py` hold those
texts. Here stand the sources, encoders and indexes that are not what they should be.
"""

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml
from damaged_file import flip_byte
from file_size_limit import file_size_limit
from prepared_corpus import only_corpus

from mvr_ray.cli import main
from mvr_ray.cli.stage_runs import run_stage
from mvr_ray.config import RunConfig
from mvr_ray.distributed.cluster import session
from mvr_ray.errors import ManifestError, StorageError
from mvr_ray.store import manifest, paths
from mvr_ray.store.files import Store
from mvr_ray.store.questions import write_questions
from mvr_ray.types import Question

NUM_PASSAGES = 12
pytestmark = pytest.mark.usefixtures("without_ray")
RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Runs `mvr-ray` with these words; gives (exit status, stdout, the last line of stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(words)
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err.rstrip("\n").rpartition("\n")[2]

    return run


def run_file(folder: Path, **encoder: str) -> str:
    """A run file over `folder/store` and the passages of `folder/passages.tsv`."""
    run = {
        "store": {"path": str(folder / "store")},
        "prepare": {"sources": [{"path": str(folder / "passages.tsv"), "format": "dpr_tsv"}], "num_shards": 2},
        "encoder": {"num_views": 2, "max_passage_tokens": 32, **encoder},
        "index": {"encoder": "untrained", "sort_window": 8, "precision": "fp32"},
        "resources": {"encoders_max": 1},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return str(path)


def passages(count: int = NUM_PASSAGES) -> str:
    return "id\ttext\ttitle\n" + "".join(
        f"p{i}\tRiver {i} is long. It ends in lake {i}.\tRivers\n" for i in range(count)
    )


# --- sources -----------------------------------------------------------------------------------------------------


def test_a_source_that_is_not_there_is_named(command: RunCommand, tmp_path: Path) -> None:
    path = tmp_path / "passages.tsv"
    message = f"mvr-ray: source {path} does not exist ({path}); correct its path"
    assert command("prepare", run_file(tmp_path)) == (1, "", message)


@pytest.mark.parametrize("words", [("index", "NAME"), ("init", "FOLDER", "--output", "NAME")])
def test_a_name_longer_than_the_file_system_has_is_refused(
    command: RunCommand, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "a.txt").write_text("Some words.")
    long_name = tmp_path / ("n" * 300)
    real_words = (str({"NAME": long_name, "FOLDER": tmp_path}.get(word, word)) for word in words)
    status, _, err = command(*real_words)
    assert (status, err) == (2, f"mvr-ray: the file system has no name as long as {'n' * 40}... (300 characters)")
    message = f"mvr-ray: source {long_name} does not exist ({long_name}); correct its path"
    assert command("init", str(long_name)) == (1, "", message)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plan VAULT/run.yaml", (2, "run file VAULT/run.yaml cannot be read: Permission denied")),
        ("plan FOLDER/over.yaml", (2, "run file VAULT/run.yaml cannot be read: Permission denied")),
        ("init VAULT", (1, "VAULT: permission denied; check the permissions of it and of the folders above")),
        (
            "plan FOLDER/run.yaml encoder.backbone=VAULT/x --passages 9",
            (1, "VAULT/x/modules.json: permission denied; check the permissions of it and of the folders above"),
        ),
    ],
)
def test_a_path_without_permission_is_named(
    command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, expected: tuple[int, str]
) -> None:
    run_file(tmp_path)
    vault = tmp_path / "vault"
    (tmp_path / "over.yaml").write_text("base: vault/run.yaml")
    stat = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        """For every user, as root may enter any folder."""
        if path.is_relative_to(vault):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    real_words = words.replace("VAULT", str(vault)).replace("FOLDER", str(tmp_path)).split()
    status, out, err = command(*real_words)
    assert (status, out, err) == (expected[0], "", f"mvr-ray: {expected[1].replace('VAULT', str(vault))}")


@pytest.mark.parametrize("count", ["-4", "9" * 400])
def test_a_number_of_passages_that_no_corpus_has_is_refused(command: RunCommand, tmp_path: Path, count: str) -> None:
    status, _, err = command("plan", run_file(tmp_path), f"--passages={count}")
    assert status == 2 and f"plan needs 1 to 1,000,000,000,000 passages, not {count[:20]};" in err


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("p3\tonly two columns", "2 tab-separated columns, not 3"),
        ("p3\t  \tA title", "text is empty"),
        ("\tA text.\tA title", "id is missing"),
        ("p1\tA second text.\tA title", "passage id 'p1' already occurs in {path}:3"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_file_and_line(
    command: RunCommand, tmp_path: Path, row: str, reason: str
) -> None:
    path = tmp_path / "passages.tsv"
    path.write_text(passages(3) + row + "\n")
    assert command("prepare", run_file(tmp_path)) == (
        1,
        "",
        f"mvr-ray: 1 bad row, more than prepare.max_bad_rows=0: {path}:5: {reason.format(path=path)}; "
        f"correct the source, or raise prepare.max_bad_rows to skip such rows",
    )
    assert not (tmp_path / "store" / "corpora").exists()


# --- an index of twelve passages ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def indexed_folder(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: Path) -> Path:
    """A folder with run.yaml and a store with version 1; no test may change it."""
    folder = tmp_path_factory.mktemp("bad-input")
    (folder / "passages.tsv").write_text(passages())
    with pytest.MonkeyPatch.context() as patch, session.staying_local():
        patch.delenv("RAY_ADDRESS", raising=False)
        for stage in ("prepare", "index"):
            with pytest.raises(SystemExit) as end:
                main([stage, run_file(folder, backbone=str(tiny_backbone))])
            assert not end.value.code
    return folder


@pytest.fixture
def config(indexed_folder: Path, tiny_backbone: Path, tmp_path: Path) -> str:
    """The run file of a copy that a test may damage."""

    shutil.copytree(indexed_folder / "store", tmp_path / "store")
    return run_file(tmp_path, backbone=str(tiny_backbone))


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (
            "/nowhere/model",
            "model folder /nowhere/model does not exist; give a folder with config.json, model.safetensors and "
            "tokenizer.json, or the name of a model on the Hugging Face hub",
        ),
        (
            "package:no_such_package/model",
            "package:no_such_package/model: the Python package 'no_such_package' is not installed; install it (pip "
            "install no-such-package) or give a folder instead",
        ),
    ],
)
def test_a_backbone_that_does_not_exist_is_named(command: RunCommand, config: str, backbone: str, message: str) -> None:
    assert command("index", config, f"encoder.backbone={backbone}") == (2, "", f"mvr-ray: {message}")


def encoder_folder(store: Path) -> Path:
    version = manifest.read(Store(str(store)), "index")
    return store / paths.encoder_dir(version.encoder_name, version.encoder_fingerprint)


def test_an_index_whose_encoder_is_gone_says_which_it_needs(command: RunCommand, config: str, tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path / "store")
    shutil.rmtree(folder.parent)
    assert command("search", config, "which river?") == (
        1,
        "",
        f"mvr-ray: encoder snapshot '{folder.name}' not found ({folder}); of 'encoder' there are: none. Train it "
        f"(mvr-ray train CONFIG), copy it there, or name another in index.encoder",
    )


@pytest.fixture
def without_cluster(command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[str, ...]], str]:
    """The last line on stderr of a command in a process that is in no cluster.

    Nothing listens where its cluster should be: a command that joins it before it looks for its inputs says that.
    """
    monkeypatch.setattr(session, "has_session", lambda: False)
    return lambda words: command(*words, "resources.address=127.0.0.1:1")[2]


def store_questions(folder: Path) -> Path:
    """Sets `dev` and `gate` of one question each in the store, and a file of one."""
    for name in ("dev", "gate"):
        question = Question(name, f"which river of {name}?", ("lake 1",), ("p1",))
        write_questions(only_corpus(Store(str(folder / "store"))), name, [question])
    file = folder / "asked.txt"
    file.write_text("which river?\n")
    return file


def test_a_missing_encoder_is_named_before_a_cluster_is_joined(
    without_cluster: Callable[[tuple[str, ...]], str], config: str, tmp_path: Path
) -> None:
    file = store_questions(tmp_path)
    folder = encoder_folder(tmp_path / "store")
    shutil.rmtree(folder.parent)
    commands = [
        ("search", config, "which river?"),
        ("explain", config, "which river?"),
        ("retrieve", config, f"questions={file}", f"output={tmp_path / 'out.json'}"),
        ("evaluate", config, "evaluate.questions=[dev]"),
        ("mine", config, "mine.questions=dev", "mine.method=index"),
        ("refine", config, "refine.questions=dev", "refine.gate=[gate]"),
        ("analyze", config, "analyze.questions=dev"),
        ("serve", config),
    ]
    message = f"mvr-ray: encoder snapshot '{folder.name}' not found ({folder}); of 'encoder' there are: none. "
    assert [without_cluster(words).partition("Train it")[0] for words in commands] == [message] * len(commands)


def test_a_missing_model_or_version_is_named_before_a_cluster_is_joined(
    without_cluster: Callable[[tuple[str, ...]], str], config: str, tmp_path: Path
) -> None:
    store_questions(tmp_path)
    mine = ("mine", config, "mine.questions=dev", "mine.method=index")
    messages = {
        ("index", config, "index.encoder=abc"): "encoder snapshot 'abc' not found ",
        ("train", config, "train.init_from=abc"): "encoder snapshot 'abc' not found ",
        ("search", config, "which river?", "--version", "9"): "index 'index' has no version 9 in ",
        ("serve", config, "--version", "9"): "index 'index' has no version 9 in ",
        (*mine, "mine.cross_encoder=abc"): "cross-encoder 'abc' is neither stored in ",
        (*mine, "index.name=other"): "index 'other' has no version in ",
        ("read", config, f"ranking={config}", "read.reader=abc"): "reader 'abc' is neither stored in ",
    }
    for words, message in messages.items():
        assert without_cluster(words).startswith(f"mvr-ray: {message}")
    listens = "no Ray cluster listens at '127.0.0.1:1'"
    assert without_cluster(("search", config, "which river?")).startswith(f"mvr-ray: {listens}")


def test_another_encoder_in_the_place_of_the_index_s_own_is_refused(
    command: RunCommand, config: str, tmp_path: Path
) -> None:
    folder = encoder_folder(tmp_path / "store")
    file = folder / paths.ENCODER_JSON
    description = {**json.loads(file.read_text()), "fingerprint": "0" * 16}
    file.write_text(json.dumps(description))
    status, _, message = command("search", config, "which river?")
    assert status == 1 and "encoder.json is damaged (its checksum is not" in message
    del description["checksum"]  # as programs before checksums wrote it
    file.write_text(json.dumps(description))
    assert command("search", config, "which river?") == (
        1,
        "",
        f"mvr-ray: {folder} holds encoder {'0' * 16}, but {folder.name} was asked for, which made the embeddings; "
        f"restore that snapshot, or index again",
    )


def test_an_encoder_with_other_weights_than_it_was_saved_with_is_refused(
    command: RunCommand, config: str, tmp_path: Path
) -> None:
    folder = encoder_folder(tmp_path / "store")
    [weights] = folder.rglob("model.safetensors")
    flip_byte(weights, -1)
    status, out, message = command("search", config, "which river?")
    assert (status, out) == (1, "")
    assert message.startswith(f"mvr-ray: encoder snapshot {folder} was saved as {folder.name} but loads as ")


def test_embeddings_of_another_dimension_than_their_manifest_are_refused(
    command: RunCommand, config: str, tmp_path: Path
) -> None:
    store = Store(str(tmp_path / "store"))
    first = manifest.read(store, "index")
    manifest.publish(store, dataclasses.replace(first, parent=1, dimension=128))
    num = first.shards[0].num_passages
    assert command("search", config, "which river?") == (
        1,
        "",
        f"mvr-ray: shard 0 of index 'index' holds {num} passages in dimension 64; its manifest says {num} in 128. "
        f"Roll back, or index again",
    )
    assert command("versions", config, "rollback", "1")[0] == 0
    assert command("search", config, "which river?")[0] == 0


def test_a_flipped_byte_is_found_by_search_and_verify_and_named(
    command: RunCommand, config: str, tmp_path: Path
) -> None:
    store = Store(str(tmp_path / "store"))
    entry = manifest.read(store, "index").shards[1]
    name = f"{paths.shard_dir('index', entry.digest)}/{paths.EMBEDDINGS}"
    file, sha256 = tmp_path / "store" / name, entry.files[paths.EMBEDDINGS].sha256
    flip_byte(file, file.stat().st_size // 2)
    assert command("search", config, "which river?") == (
        1,
        "",
        f"mvr-ray: {file} of shard 1 is missing or damaged (its sha256 is not {sha256}); repair it: "
        f"mvr-ray versions CONFIG repair [VERSION]",
    )
    status, _, message = command("versions", config, "verify")
    assert (status, message) == (
        1,
        f"mvr-ray: 1 problem in 4 files; first: {name} of shard 1 has another sha256 than {sha256}; next: "
        f"mvr-ray versions CONFIG repair 1",
    )


def test_verify_ends_with_a_verdict(command: RunCommand, config: str, tmp_path: Path) -> None:
    status, out, _ = command("versions", config, "verify")
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "store").rglob("*.arrow"))
    last = f"whole: 4 files, {num_bytes / 1000:.3g} kB, each equal to its digest"
    assert (status, out.rstrip().rpartition("\n")[2]) == (0, last)
    [part, *_] = (tmp_path / "store" / "corpora").rglob("part-*.arrow")
    flip_byte(part, -1)
    shutil.rmtree(encoder_folder(tmp_path / "store"))
    status, _, message = command("versions", config, "verify")
    assert status == 1
    assert message.startswith("mvr-ray: 2 problems in 4 files; first: encoders/encoder/")
    assert message.endswith("/encoder.json is missing; next: copy the encoder's folder there")


def test_a_changed_word_of_a_question_is_found_by_evaluate_and_verify(
    command: RunCommand, config: str, tmp_path: Path
) -> None:
    corpus = only_corpus(Store(str(tmp_path / "store")))
    write_questions(corpus, "asked", [Question("q", "which river ends in lake 3?", positive_ids=("p3",))])
    assert command("evaluate", config, "evaluate.questions=[asked]")[0] == 0
    [file] = (tmp_path / "store" / "corpora").rglob("asked-*.arrow")
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"which river", b"which fiver"))
    status, _, message = command("evaluate", config, "evaluate.questions=[asked]")
    assert (status, message.partition(" (")[0]) == (1, "mvr-ray: question set 'asked' of corpus 'corpus' is damaged")
    status, _, message = command("versions", config, "verify")
    assert status == 1
    assert re.fullmatch(
        rf"mvr-ray: 1 problem in 5 files; first: {file.relative_to(tmp_path / 'store')} has another sha256 than "
        r"[0-9a-f]{64}; next: mvr-ray prepare CONFIG",
        message,
    )


def test_a_flipped_byte_in_a_manifest_is_found(command: RunCommand, config: str, tmp_path: Path) -> None:
    file = tmp_path / "store" / paths.manifest("index", 1)
    digest = json.loads(file.read_text())["digest"]
    file.write_text(file.read_text().replace('"num_views": 2', '"num_views": 3'))
    cure = "copy the file back, or roll back: mvr-ray versions CONFIG rollback N"
    message = f"{file} is damaged: its digest is not {digest}; {cure}"
    status, out, _ = command("versions", config, "verify", "--json")
    [problem] = json.loads(out)["problems"]
    assert (status, problem["path"], problem["reason"]) == (
        1,
        paths.manifest("index", 1),
        f"cannot be read ({message})",
    )
    assert command("search", config, "which river?") == (1, "", f"mvr-ray: {message}")
    assert command("index", config) == (1, "", f"mvr-ray: {message}")  # which publishes nothing beside it


def test_a_question_of_ten_thousand_words_is_answered(command: RunCommand, config: str) -> None:
    status, out, _ = command(
        "search", config, "which river ends " + "there " * 10_000, "-k", str(NUM_PASSAGES), "--json"
    )
    assert status == 0
    assert len({hit["id"] for hit in json.loads(out)["results"][0]}) == NUM_PASSAGES


def test_questions_of_any_length_and_k_beyond_the_corpus_rank_every_passage_once(
    command: RunCommand, config: str, tmp_path: Path
) -> None:
    questions_file = tmp_path / "asked.txt"
    questions_file.write_text("a\n" + "river " * 10_000 + "\n")
    words = (f"questions={questions_file}", f"output={tmp_path / 'out.json'}", "format=dpr", "retrieve.k=1000000000")
    assert command("retrieve", config, *words)[0] == 0
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [len({hit["id"] for hit in row["ctxs"]}) for row in rows] == [NUM_PASSAGES, NUM_PASSAGES]


def test_the_ending_of_a_ranking_names_its_format_unless_another_is_asked_for(
    command: RunCommand, config: str, tmp_path: Path
) -> None:
    (questions_file := tmp_path / "asked.txt").write_text("which river?\n")
    for name, words in (("out.trec", []), ("out.jsonl", []), ("out.txt", []), ("other.trec", ["format=dpr"])):
        assert command("retrieve", config, f"questions={questions_file}", f"output={tmp_path / name}", *words)[0] == 0
    assert len((tmp_path / "out.trec").read_text().splitlines()[0].split()) == 6
    assert "hits" in json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    for name in ("out.txt", "other.trec"):
        assert "ctxs" in json.loads((tmp_path / name).read_text())[0]


def test_an_empty_question_in_a_file_is_named_with_its_line(command: RunCommand, config: str, tmp_path: Path) -> None:
    questions_file = tmp_path / "asked.jsonl"
    questions_file.write_text('{"id": "q1", "question": "which river?"}\n{"id": "q2", "question": "  "}\n')
    words = (f"questions={questions_file}", f"output={tmp_path / 'out.json'}")
    message = f"mvr-ray: 1 bad row, first: {questions_file}:2: question is empty"
    assert command("retrieve", config, *words) == (1, "", message)


# --- no space ----------------------------------------------------------------------------------------------------


@contextmanager
def full(folder: Path) -> Iterator[str]:
    """`folder` on a disk without a free byte, or, where mounting is not allowed, files that may not grow.

    Gives what the operating system says then.
    """
    moved_folder = folder.rename(folder.with_name("held"))
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True).returncode == 0:
        try:
            shutil.copytree(moved_folder, folder, dirs_exist_ok=True)
            (folder / "filler").write_bytes(b"x" * (Store(str(folder)).free_bytes() or 0))
            yield os.strerror(errno.ENOSPC)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)
        return
    shutil.copytree(moved_folder, folder, dirs_exist_ok=True)
    with file_size_limit(100):
        yield os.strerror(errno.EFBIG)


def test_a_version_without_space_on_the_disk_is_not_published(
    command: RunCommand, indexed_folder: Path, tmp_path: Path
) -> None:
    for folder in ("indexes", "corpora", "encoders"):
        weights = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(indexed_folder / "store" / folder, tmp_path / "store" / folder, ignore=weights)
    config = run_file(tmp_path)
    with full(tmp_path / "store") as reason:
        status, out, message = command("versions", config, "rollback", "1", "--unchecked")
        assert manifest.list_versions(Store(str(tmp_path / "store")), "index") == [1]
    assert (status, out) == (1, "")
    assert message.startswith("mvr-ray: index 'index' version 2 not published, 1 stays live: ")
    assert reason in message


def test_a_full_disk_does_not_hide_what_stopped_a_stage(tmp_path: Path) -> None:
    """The record of the run cannot be written either, and is not the error that the user needs."""
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}})

    with pytest.raises(ManifestError, match=r"^version 2 not published, 1 stays live$"), ExitStack() as limit:

        def work(_run, _progress) -> None:
            limit.enter_context(file_size_limit(10))
            raise ManifestError("version 2 not published, 1 stays live")

        run_stage("index", run, work, as_json=True)


def test_a_full_disk_when_the_work_is_done_does_not_ask_for_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A second `refine` would learn once more from the same questions."""
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}})

    with ExitStack() as limit:

        def work(_run, _progress) -> dict[str, int]:
            limit.enter_context(file_size_limit(10))
            return {"version": 2}

        run_stage("refine", run, work, as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out) == {"version": 2} and "report:" not in err
    [message] = [one for one in caplog.messages if one.startswith("no record of a run that is done: cannot write")]
    assert "again" not in message


@pytest.mark.parametrize("stage", ["retrieve", "evaluate", "analyze", "read", "tune"])
def test_a_stage_that_only_reads_does_its_work_without_a_record_where_the_store_cannot_be_written(
    tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "runs").write_text("where the folder of records would be")
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}})
    run_stage(stage, run, lambda _run, _progress: {"value": 1}, as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out) == {"value": 1}
    assert "report:" not in err
    assert caplog.messages[0].startswith(f"no record of this run: cannot create {tmp_path}/runs/")


def test_a_stage_that_writes_needs_a_store_that_can_be_written_before_it_works(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("where the folder of records would be")
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}})
    with pytest.raises(StorageError, match=r"cannot create .*/runs/"):
        run_stage("index", run, lambda _run, _progress: pytest.fail("it works"), as_json=True)
