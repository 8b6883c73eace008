"""The command line as a user meets it: exit status, what stands on stderr, and what on stdout."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import typer
import yaml
from file_size_limit import file_size_limit
from ray.exceptions import RayTaskError

from mvr_ray.cli import main
from mvr_ray.cli.app import exit_on_error
from mvr_ray.cli.stage_runs import run_stage
from mvr_ray.config import RunConfig, load_run
from mvr_ray.distributed.cluster import job_metrics
from mvr_ray.errors import DataError, MvrRayError
from mvr_ray.store.files import Store
from mvr_ray.store.formats.rankings import RankingFormat

INTERRUPTED_STAGE = """
import signal
from mvr_ray.cli import exit_on_interrupt
from mvr_ray.cli.app import exit_on_error
from mvr_ray.cli.stage_runs import run_stage
from mvr_ray.config import RunConfig

run = RunConfig.model_validate({{"store": {{"path": {store!r}}}}})
stage = exit_on_error(lambda: run_stage("prepare", run, lambda run, progress: signal.raise_signal({number})))
with exit_on_interrupt():
    stage()
"""


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]):
    """Runs `mvr-ray` with these words; gives (exit status, stdout, stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(words)
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(f"store: {{path: {tmp_path / 'store'}}}\nprepare: {{corpus: small}}\nindex: {{name: small}}\n")
    return str(path)


NO_QUESTION = "0 questions are given; give one, in quotes, and overrides as section.key=value before or after it"
STAGES = ("prepare", "train", "mine", "index", "refine", "evaluate", "retrieve", "read")


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_shows_its_resolved_run_and_does_nothing(
    command, run_file: str, tmp_path: Path, stage: str
) -> None:
    status, out, _ = command(stage, run_file, "train.epochs=7", "--print-config")
    resolved_file = tmp_path / "shown.yaml"
    resolved_file.write_text(out)
    assert status == 0
    assert load_run(resolved_file) == load_run(run_file, ["train.epochs=7"])
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["search", "explain"])
def test_a_command_of_a_question_shows_its_resolved_run_without_one(command, run_file: str, name: str) -> None:
    shown_runs = [
        command(name, run_file, *words, "--print-config") for words in ((), ("search.hybrid=off",), ("who?",))
    ]
    assert shown_runs == [shown_runs[0]] * 3 and shown_runs[0][0] == 0
    assert command(name, run_file) == (2, "", f"mvr-ray: {name}: {NO_QUESTION}\n")


@pytest.mark.parametrize("stage", [*STAGES, "plan", "serve"])
def test_every_stage_refuses_a_run_file_that_does_not_exist(command, stage: str) -> None:
    missing = {
        "retrieve": "retrieve: questions=... is missing; give questions=FILE (or a stored set), output=FILE, "
        f"format={'|'.join(get_args(RankingFormat))}, version=N",
        "read": "read: ranking=... is missing; give ranking=FILE as `mvr-ray retrieve` wrote it (dpr, jsonl or "
        "pyserini), and output=FILE to keep the predictions",
    }
    nowhere = "run file nowhere.yaml does not exist; `mvr-ray init DATA` writes one for your data"
    assert command(stage, "nowhere.yaml") == (2, "", f"mvr-ray: {missing.get(stage, nowhere)}\n")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=3", "train.epoch: unknown key; did you mean 'epochs'?"),
        (
            "train.epochs=many",
            "train.epochs: 'many' is not a whole number of at least 0",
        ),
        (
            "encoder.num_views=65",
            "encoder.num_views: 65 is not a whole number from 1 to 64",
        ),
        ("retrieve.k=0", "retrieve.k: 0 is not a whole number of at least 1"),
        ("store.path=", "store.path: '' is not a path or an address"),
    ],
)
def test_a_wrong_override_is_refused_by_name(command, run_file: str, override: str, message: str) -> None:
    assert command("index", run_file, override) == (2, "", f"mvr-ray: override {override!r}: {message}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a question", "-k", "0"), "search: k is 0; ask for 1 to 1000000 passages"),
        (("a question", "-k", "1000001"), "search: k is 1000001; ask for 1 to 1000000 passages"),
        (("  ",), "search: the query is empty; send a text with words in it"),
        (
            ("word " * 2_500_000,),
            "search: the query has 12500000 characters; send at most 10000000",
        ),
        (
            ("a question", "--filter", "{year: 3}"),
            "search: --filter '{year: 3}' is not JSON (Expecting property name enclosed in double quotes: line 1 column"
            ' 2 (char 1)); write it like {"year": 1958}',
        ),
        (
            ("a question", "--filter", "[]"),
            "search: --filter '[]' is not a JSON object; write it like {\"year\": 1958}",
        ),
        (
            ("a question", "--filter", '{"a": 1, "a": 2}'),
            "search: --filter has the key 'a' twice; put both under one key, or use and",
        ),
    ],
)
def test_a_search_that_cannot_be_answered_is_refused_before_any_index_is_open(
    command, run_file: str, words: tuple[str, ...], message: str
) -> None:
    assert command("search", run_file, *words) == (2, "", f"mvr-ray: {message}\n")


@pytest.mark.parametrize("name", ["search", "explain"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("what is e.g. x=y?", "-k", "0"), "k is 0; ask for 1 to 1000000 passages"),
        (("a.b=c is what?", "-k", "0"), "k is 0; ask for 1 to 1000000 passages"),
        (("serve.max_k=1",), NO_QUESTION),
        (
            ("who", "wrote=it"),
            "2 questions are given: 'who', 'wrote=it'; give one, in quotes, and overrides as section.key=value before "
            "or after it",
        ),
    ],
)
def test_a_question_beside_overrides_is_one_text(
    command, run_file: str, name: str, words: tuple[str, ...], message: str
) -> None:
    assert command(name, run_file, *words) == (2, "", f"mvr-ray: {name}: {message}\n")


@pytest.mark.parametrize("name", ["search", "explain"])
@pytest.mark.parametrize(
    "words", [("index.name=a", "who?"), ("who?", "index.name=a"), ("index.name=b", "who?", "index.name=a")]
)
def test_overrides_stand_before_or_after_the_one_question(command, run_file: str, name: str, words) -> None:
    status, out, message = command(name, run_file, *words)
    assert (status, out) == (1, "") and message.startswith("mvr-ray: index 'a' has no version in ")


@pytest.mark.parametrize("name", ["search", "explain"])
def test_limits_of_the_server_do_not_apply_to_a_search_on_the_command_line(command, run_file: str, name: str) -> None:
    limits = ("serve.max_k=1", "serve.max_batch=1", "serve.max_query_chars=1")
    status, out, message = command(name, run_file, "who?", *limits, "-k", "1500")
    assert (status, out) == (1, "") and message.startswith("mvr-ray: index ")


@pytest.mark.parametrize("name", ["search", "explain"])
def test_a_wrong_override_before_a_question_is_refused_by_name(command, run_file: str, name: str) -> None:
    message = "override 'indx.kind=flat': indx: unknown key; did you mean 'index'?"
    assert command(name, run_file, "indx.kind=flat", "who?") == (2, "", f"mvr-ray: {message}\n")
    wrong = "serve.maxk={a: 1, b: 2}"
    assert command(name, run_file, wrong, "who?")[2].startswith(f"mvr-ray: override {wrong!r}: serve.maxk: unknown key")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((" ",), "explain: the question is empty; send a text with words in it"),
        (("who?", "--question", ""), "explain: the question is empty; send a text with words in it"),
        (("who?", "-k", "0"), "explain: k is 0; ask for 1 to 1000000 passages"),
        (
            ("who?", *256 * ("--question", "when?")),
            "explain: 257 questions in one request; send at most 256",
        ),
        (
            ("who?", "--html", "nowhere/page.html"),
            "explain: --html nowhere/page.html cannot be written; name a file in a folder that exists",
        ),
    ],
)
def test_an_explanation_that_cannot_be_given_is_refused_before_any_index_is_open(
    command, run_file: str, words: tuple[str, ...], message: str
) -> None:
    assert command("explain", run_file, *words) == (2, "", f"mvr-ray: {message}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("questions=q.jsonl",), "retrieve: output=... is missing"),
        (("questions=q", "output=o", "format=xml"), "retrieve: format=xml is not one of dpr, trec, msmarco, pyserini"),
        (("question=q", "output=o"), "retrieve: question=... is not known"),
    ],
)
def test_retrieve_says_what_it_lacks(command, run_file: str, words: tuple[str, ...], message: str) -> None:
    status, out, err = command("retrieve", run_file, *words)
    assert (status, out) == (2, "")
    assert err.startswith(f"mvr-ray: {message}")


def test_read_says_what_it_lacks(command, run_file: str) -> None:
    status, out, err = command("read", run_file, "rankings=dev.json")
    assert (status, out) == (2, "")
    assert err.startswith("mvr-ray: read: rankings=... is not known; give ranking=FILE as `mvr-ray retrieve` wrote it")
    status, out, err = command("read", run_file, "ranking=nowhere.json", "output=out.jsonl")
    assert (status, out) == (1, "")
    assert "ranking nowhere.json does not exist or is not a file; `mvr-ray retrieve` writes one" in err
    _, _, err = command("read", run_file, f"ranking={run_file}")
    assert "reader 'reader' is neither stored in " in err


@pytest.mark.parametrize("action", ["list", "show", "verify", "repair", "rollback", "collect"])
def test_versions_of_an_index_that_is_not_there_name_the_command_that_makes_it(command, run_file: str, action) -> None:
    status, _, err = command("versions", run_file, action)
    assert status == 1
    assert "index 'small'" in err
    assert err.endswith("has no version; run `mvr-ray index CONFIG`\n")


def test_versions_refuse_an_unknown_action(command, run_file: str) -> None:
    message = "mvr-ray: versions: 'purge' is not one of list, show, verify, repair, rollback, collect\n"
    assert command("versions", run_file, "purge") == (2, "", message)


def test_a_power_is_no_version(command, run_file: str) -> None:
    assert command("versions", run_file, "show", "²")[0] == 2


def test_versions_list_by_default_also_with_an_override(command, run_file: str) -> None:
    assert command("versions", run_file, "index.name=other") == command(
        "versions", run_file, "list", "index.name=other"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("list", "3"), "list is of all versions, but 3 is given; leave it out"),
        (
            ("collect", "3"),
            "collect is of all versions, but 3 is given; leave it out; index.keep_versions=N says how many stay",
        ),
        (("verify", "--unchecked"), "--unchecked has no effect on verify; leave it out"),
    ],
)
def test_versions_refuse_what_an_action_would_ignore(command, run_file: str, words: tuple[str, ...], message) -> None:
    assert command("versions", run_file, *words) == (2, "", f"mvr-ray: versions: {message}\n")


def test_versions_name_a_word_that_is_no_version(command, run_file: str) -> None:
    message = f"mvr-ray: versions rollback: 'x' is no version; give its number, as `versions {run_file}` shows\n"
    assert command("versions", run_file, "rollback", "x") == (2, "", message)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_an_output_without_a_character_prints_its_escape_and_valid_json(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "run.yaml").write_text("train: {questions: run}\nencoder: {query_prompt: äü中}\n", encoding="utf-8")
    words = [sys.executable, "-m", "mvr_ray.cli", "prepare", "run.yaml", "--print-config"]
    for extra in ((), ("--json",)):
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        out = subprocess.run([*words, *extra], cwd=tmp_path, env=env, check=True, capture_output=True).stdout
        assert extra or (b"\\xe4\\xfc\\u4e2d" if encoding == "ascii" else "äü中".encode()) in out
    assert json.loads(out)["encoder"]["query_prompt"] == "äü中"


def test_versions_refuse_two_numbers(command, run_file: str) -> None:
    message = "mvr-ray: versions rollback: 2 versions are named (3, 1); name one\n"
    assert command("versions", run_file, "rollback", "3", "1") == (2, "", message)


def test_plan_without_a_corpus_says_what_to_run(command, run_file: str) -> None:
    status, _, err = command("plan", run_file)
    assert status == 1
    assert "run `mvr-ray prepare CONFIG` first, or say how many with --passages N" in err


def test_no_output_shows_the_keys_of_a_stores_address(command, bucket: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "source.jsonl").write_text('{"id": "a", "text": "A passage."}')
    run = {"store": {"path": bucket}, "prepare": {"sources": [{"path": str(tmp_path / "source.jsonl")}]}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    for words in (["plan"], ["prepare"], ["retrieve", "output=r.json", "questions=absent"]):
        name, *overrides = words
        _, out, err = command(name, str(tmp_path / "run.yaml"), *overrides)
        assert "bucket" in err and "secret" not in out + err


def test_plan_totals_are_the_sums_of_their_lines(command, run_file: str) -> None:
    _, out, _ = command("plan", run_file, "--passages", "1000", "--json")
    plan = json.loads(out)
    for kind, total in plan["totals"].items():
        assert total == sum(line["bytes_each"] * line["count"] for line in plan["lines"] if line["kind"] == kind)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_stage_says_so_in_one_line_and_is_recorded(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "stage.py"
    script.write_text(INTERRUPTED_STAGE.format(store=str(tmp_path / "store"), number=int(number)))
    result = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "mvr-ray: interrupted; the same command continues where it stopped\n"
    [report] = (tmp_path / "store").glob("runs/*/report.json")
    assert json.loads(report.read_text())["outcome"] == "interrupted"


INTERRUPTED = """
import signal, sys

def interrupt(event, details):
    if event == "import" and details[0] == sys.argv[1]:
        sys.argv[1] = ""
        signal.raise_signal(signal.SIGINT)

sys.addaudithook(interrupt)
from mvr_ray.cli import main
main(["plan", "run.yaml", "--passages", "10"])
"""


@pytest.mark.parametrize("module", ["typer", "rich.table", "pydantic.types", "mvr_ray.capacity"])
def test_an_interrupt_at_any_import_is_one_line_and_status_130(module: str, run_file: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module]
    process = subprocess.run(command, cwd=Path(run_file).parent, capture_output=True, text=True)
    message = "mvr-ray: interrupted; the same command continues where it stopped\n"
    assert (process.returncode, process.stdout, process.stderr) == (130, "", message)


INTERRUPTED_IN_TEXT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from mvr_ray.cli import exit_on_interrupt
with exit_on_interrupt():
    exec("signal.raise_signal(signal.SIGINT)")
"""


def test_an_interrupt_while_code_is_run_from_a_text_has_status_130_also_by_python_m(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_TEXT)
    command = [sys.executable, "-m", "interrupted"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    message = "mvr-ray: interrupted; the same command continues where it stopped\n"
    assert (process.returncode, process.stderr) == (130, message)


def test_an_error_that_crossed_a_ray_task_is_reported_without_its_ray_traceback(capsys) -> None:
    def command() -> None:
        raise RayTaskError(
            "read_rows", "a long traceback", DataError("file.tsv:3: row has 2 columns")
        ).as_instanceof_cause()

    with pytest.raises(Exception) as end:
        exit_on_error(command)()
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == "mvr-ray: file.tsv:3: row has 2 columns\n"


def only_record(store: Path) -> Path:
    [folder] = (store / "runs").iterdir()
    return folder


def test_a_stage_leaves_the_run_as_it_was_and_its_report(tmp_path: Path, capsys) -> None:
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}, "train": {"lr": 1e-5}})
    run_stage("index", run, lambda _run, _progress: {"passages": 3}, as_json=True)
    folder = only_record(tmp_path)
    report = json.loads((folder / "report.json").read_text())
    assert folder.name.endswith("-index")
    assert RunConfig.model_validate(yaml.safe_load((folder / "config.yaml").read_text())) == run
    assert (report["outcome"], report["report"]) == ("done", {"passages": 3})
    assert json.loads(capsys.readouterr().out) == {"passages": 3}


@pytest.mark.parametrize(
    ("error", "outcome", "message"),
    [(MvrRayError("no space"), "failed", "MvrRayError: no space"), (KeyboardInterrupt(), "interrupted", None)],
)
def test_a_stage_that_fails_leaves_its_record_too(tmp_path: Path, error: BaseException, outcome: str, message) -> None:
    def work(_run, _progress) -> None:
        raise error

    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}})
    with pytest.raises(type(error)):
        run_stage("train", run, work)
    report = json.loads((only_record(tmp_path) / "report.json").read_text())
    assert (report["outcome"], report["error"]) == (outcome, message)


@pytest.mark.parametrize("content", ["{", None])
def test_a_command_that_fails_where_no_store_is_makes_none(command, tmp_path: Path, content: str | None) -> None:
    source, run_file = tmp_path / "passages.jsonl", tmp_path / "run.yaml"
    if content is not None:
        source.write_text(content)
    run_file.write_text(f"store: {{path: {tmp_path}/new/store}}\nprepare: {{sources: [{{path: {source}}}]}}\n")
    before = set(tmp_path.rglob("*"))
    for words in (["prepare"], ["index"], ["evaluate"]):
        assert command(words[0], str(run_file))[0] in (1, 2)
        assert set(tmp_path.rglob("*")) == before


def test_a_failed_command_keeps_its_record_beside_what_it_stored(tmp_path: Path) -> None:
    def work(run: RunConfig, _progress) -> None:
        Store(run.store.path).write_bytes("studies/x.json", b"{}")
        raise DataError("late")

    run = RunConfig.model_validate({"store": {"path": str(tmp_path / "store")}})
    with pytest.raises(DataError, match="late"):
        run_stage("train", run, work)
    assert json.loads((only_record(tmp_path / "store") / "report.json").read_text())["error"] == "DataError: late"


def test_two_runs_in_one_second_keep_both_records(tmp_path: Path) -> None:
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}})
    for _ in range(3):
        run_stage("mine", run, lambda _run, _progress: {}, as_json=True)
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_a_run_keeps_its_info_lines_and_the_terminal_shows_none(tmp_path: Path) -> None:
    """In a process of its own, where the root logger stands at WARNING as `main` sets it."""
    (tmp_path / "passages.jsonl").write_text('{"id": "a", "text": "One sentence."}\n')
    (tmp_path / "run.yaml").write_text("prepare: {sources: [{path: passages.jsonl, format: jsonl}], num_shards: 1}\n")
    command = [sys.executable, "-c", "from mvr_ray.cli import main; main()", "prepare", "run.yaml", "--json"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    [line] = [text for text in (only_record(tmp_path / "store") / "log").read_text().splitlines() if " INFO " in text]
    assert "mvr_ray.store.prepare" in line and "passages=1" in line
    assert "INFO" not in process.stderr


def test_every_stage_reports_metrics_in_a_session_and_its_progress_as_before(tmp_path, monkeypatch, capsys) -> None:
    values = {}

    def gauge(name: str, *_: str) -> SimpleNamespace:
        return SimpleNamespace(set=lambda value, tags: values.update({(name, *tags.values()): value}))

    monkeypatch.setattr(job_metrics.session, "in_ray", lambda: True)
    monkeypatch.setattr(job_metrics, "_gauge", gauge)
    run = RunConfig.model_validate({"store": {"path": str(tmp_path / "store")}, "index": {"name": "small"}})
    run_stage("evaluate", run, lambda run, progress: progress("search 1 of 2 sets", 3, 4), as_json=True)
    assert values["job_done", "evaluate", "small", "search of sets"] == 3
    assert values["job_total", "evaluate", "small", "search of sets"] == 4
    assert "search 1 of 2 sets: 3 of 4" in capsys.readouterr().err


def test_doctor_tries_the_cluster_that_the_run_file_names(command, run_file: str) -> None:
    status, out, _ = command("doctor", run_file, "resources.address=http://127.0.0.1:8265", "--json")
    [cluster] = [check for check in json.loads(out) if check["name"] == "cluster"]
    assert status == 1 and not cluster["ok"] and "http://127.0.0.1:8265" in cluster["detail"]


def test_doctor_says_at_once_that_nothing_listens_at_the_cluster_s_address(command, run_file: str) -> None:
    with socket.socket() as bound_socket:  # bound and not listening: no other process gets the port meanwhile
        bound_socket.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound_socket.getsockname()[1]}"
        status, out, _ = command("doctor", run_file, f"resources.address={address}", "--json")
    [cluster] = [check for check in json.loads(out) if check["name"] == "cluster"]
    assert status == 1 and not cluster["ok"] and address in cluster["detail"] and "listens" in cluster["detail"]


WITHOUT_HEAVY = """
import contextlib, io, json, sys
from mvr_ray.cli import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(words)
    if heavy := {"ray", "torch", "transformers", "faiss"} & set(sys.modules):
        sys.exit(f"{words} imports {heavy}")
"""


def test_what_is_missing_is_said_before_ray_or_torch_is_imported(run_file: str, tmp_path: Path) -> None:
    commands = [
        ["index", run_file],
        ["train", run_file, "train.batch=3"],
        ["train", run_file],
        ["mine", run_file],
        ["refine", run_file, "refine.feedback=nowhere.jsonl"],
        ["refine", run_file],
        ["evaluate", run_file],
        ["analyze", run_file],
        ["compact", run_file],
        ["reshard", run_file, "shards=2"],
        ["retrieve", run_file, "questions=dev", f"output={tmp_path}/nowhere/dev.json"],
        ["retrieve", run_file, "questions=dev", f"output={tmp_path}/dev.json"],
        ["read", run_file, "ranking=nowhere.json"],
        ["update", run_file, "changes=nowhere.jsonl"],
        ["versions", run_file, "list"],
        ["search", run_file, "who?"],
        ["explain", run_file, "who?"],
        ["serve", run_file],
        ["--help"],
        ["index", run_file, "--print-config"],
    ]
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_HEAVY, json.dumps(commands)], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    messages = process.stderr.splitlines()
    assert len(messages) == len(commands) - 2, process.stderr
    assert all(line.startswith("mvr-ray: ") for line in messages)


def test_a_missing_model_or_setting_is_said_before_ray_or_torch_is_imported(
    command, run_file: str, tmp_path: Path
) -> None:
    passages = tmp_path / "passages.jsonl"
    passages.write_text('{"id": "p1", "text": "A text."}\n{"id": "q1", "question": "which?", "positive_ids": ["p1"]}\n')
    sources = f"prepare.sources=[{{path: {passages}, questions: dev}}]"
    assert command("prepare", run_file, sources)[0] == 0
    mine, train = ["mine", run_file, "mine.questions=dev"], ["train", run_file, "train.questions=dev"]
    messages = {
        ("train", run_file, "train.task=reader"): "train.task is reader, which learns from answers",
        ("train", run_file, "train.task=cross_encoder"): "train.task is cross_encoder, which learns from questions",
        ("train", run_file, "train.patience=2"): "train.dev_steps and train.patience need train.dev_questions; name a",
        ("train", run_file, "save=last"): "train: save=last is not known; save=best stores the best weights so far of",
        ("train", run_file, "lr=3"): "train: lr=... is not known; save=best stores the best weights so far of an",
        ("train", run_file, "train.distil_weight=1"): "train.distil_weight is 1.0, but training on questions of",
        ("train", run_file, "encoder.backbone=./nowhere"): "model folder ./nowhere does not exist",
        ("train", run_file, "train.init_from=nowhere"): "encoder snapshot 'nowhere' not found",
        (*mine, "mine.cross_encoder=nowhere"): "cross-encoder 'nowhere' is neither stored in",
        ("mine", run_file): "mine.questions: question set 'train' not found with corpus",
        (*train, "train.hard_negatives=x", "train.num_hard_negatives=1"): "train.hard_negatives: question set 'x' not",
        ("read", run_file, f"ranking={passages}", "read.reader=nowhere"): "reader 'nowhere' is neither stored in",
    }
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_HEAVY, json.dumps([*messages])], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    for line, message in zip(process.stderr.splitlines(), messages.values(), strict=True):
        assert line.startswith(f"mvr-ray: {message}")


@pytest.mark.parametrize(
    ("target", "python_buffer"),
    [("/dev/full", ""), ("/dev/full", "1"), ("&-", "")],  # Python buffers no closed stdout
)
@pytest.mark.parametrize(
    "words",
    [
        ["version"],
        ["--help"],
        ["plan", "--help"],
        ["plan", "--passages", "100"],
        ["plan", "--passages", "100", "--json"],
    ],
)
def test_a_full_or_closed_stdout_is_one_line_and_status_1(
    run_file: str, words: list[str], target: str, python_buffer: str
) -> None:
    command = [sys.executable, "-m", "mvr_ray.cli", words[0], *([run_file] * (len(words) > 2)), *words[1:]]
    variables = {**os.environ, "PYTHONUNBUFFERED": python_buffer}
    messages = {
        "/dev/full": "standard output cannot be written: No space left on device; free space or redirect it",
        "&-": "standard output is closed; redirect it to a file, or to /dev/null",
    }
    shell = ["sh", "-c", f'exec "$@" >{target}', "sh", *command]
    process = subprocess.run(shell, env=variables, stderr=subprocess.PIPE, text=True)
    assert (process.returncode, process.stderr) == (1, f"mvr-ray: {messages[target]}\n")


def test_a_deleted_working_folder_is_one_line_and_status_1(tmp_path: Path) -> None:
    shell = ["sh", "-c", 'rmdir "$0" && exec "$@"', str(tmp_path), sys.executable, "-m", "mvr_ray.cli"]
    process = subprocess.run([*shell, "versions", "run.yaml"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    message = "mvr-ray: the working folder was deleted; change to one that exists\n"
    assert (process.returncode, process.stderr) == (1, message)


def test_a_reader_of_stdout_that_ended_is_no_error_and_a_connection_that_broke_is_one() -> None:
    head = "from mvr_ray.cli import app, commands, tables\n@app.exit_on_error\ndef work():\n    "
    for work, message in (
        ("tables.write('x' * 2**20)", ""),
        ("raise BrokenPipeError(32, 'Broken pipe')", "closed its connection"),
    ):
        program = f"{head}{work}\ncommands.app.command('work')(work)\ncommands.run_words(['work'])"
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        error = process.stderr.read().decode()
        assert process.wait() == 1
        assert message in error
        assert bool(message) == bool(error)


def test_a_full_disk_is_not_a_problem_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "corpus.arrow")

    with pytest.raises(typer.Exit):
        exit_on_error(work)()
    message = "mvr-ray: [Errno 28] No space left on device: 'corpus.arrow'; free space and run the same command again\n"
    assert capsys.readouterr().err == message


def test_a_corpus_that_the_disk_does_not_take_is_one_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "passages.jsonl").write_text(json.dumps({"id": "a", "text": "One word. " * 10_000}))
    settings = {"store": {"path": str(tmp_path / "store")}, "prepare": {"sources": [str(tmp_path / "passages.jsonl")]}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    with file_size_limit(50_000), pytest.raises(SystemExit, match="1"):
        main(["prepare", str(tmp_path / "run.yaml")])
    message = rf"^mvr-ray: cannot write in {tmp_path}/store/\.scratch: File too large \(\d+ bytes free\); free space "
    assert re.search(message, capsys.readouterr().err, re.MULTILINE)


def test_a_command_does_its_work_with_stderr_closed(tmp_path: Path) -> None:
    (tmp_path / "passages.jsonl").write_text('{"id": "a", "text": "One sentence."}\n')
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "mvr_ray.cli", "init", "passages.jsonl"]
    process = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.returncode == 0 and process.stdout.endswith("written: passages.yaml\n")
    missing = subprocess.run([*command[:-1], "nowhere.jsonl"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert (missing.returncode, missing.stdout) == (1, "")


def test_a_file_that_a_full_disk_does_not_take_is_one_line_and_status_1(tmp_path: Path) -> None:
    (tmp_path / "passages.jsonl").write_text('{"id": "a", "text": "One sentence."}\n')
    program = """
from file_size_limit import file_size_limit
from mvr_ray.cli import main
with file_size_limit(100):
    main(["init", "passages.jsonl"])
"""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    message = "mvr-ray: cannot write passages.yaml: File too large; free space and run the same command again\n"
    assert (process.returncode, process.stderr) == (1, message)
    assert [path.name for path in tmp_path.iterdir()] == ["passages.jsonl"]


def test_help_says_every_command_in_a_line_of_80_columns(command) -> None:
    status, out, _ = command("--help")
    assert status == 0
    _, _, commands = out.partition("Commands:\n")
    lines = commands.splitlines()
    assert len(lines) > 20
    for line in lines:
        status, out, _ = command(line.split()[0], "--help")
        assert status == 0
        assert not [part for part in out.splitlines() if len(part) > 80]
    assert not [line for line in lines if line.endswith("...") or len(line) > 80 or not line.endswith(".")]
    names = [line.split()[0] for line in lines]
    assert names[:3] == ["init", "prepare", "train"]
    assert names.index("study") < names.index("search") < names.index("plan")
