"""Commands that start Ray print none of its noise: neither when a worker dies nor on Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml
from waiting import until

from mvr_ray.cli import main

pytestmark = [pytest.mark.ray, pytest.mark.slow]
COMMAND = str(Path(sys.executable).with_name("mvr-ray"))
OWN_LINES = re.compile(
    r"starting Ray on this machine, which takes seconds|"
    r"(encode|build shards|passages read = embedded = indexed = in the manifest|"
    r"look for equal passages, shards|"
    r"look for embeddings of earlier versions, shards|carried over from earlier versions, passages): [\d,]+ of .*|"
    r"(report|next): .*|"
    r"WARNING mvr_ray.distributed.indexing.build_index: views collapsed into one vector: .*|"  # of the random backbone
    r"mvr-ray: interrupted; the same command continues where it stopped"
)
WORKER_DIED = "WARNING mvr_ray.distributed.cluster.ray_internals: a Ray worker died; its work is retried"


@pytest.fixture
def run_file(tmp_path: Path, tiny_backbone: Path) -> str:
    rows = [{"id": str(i), "text": f"Sentence {i} is here. " * 8} for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = {
        "store": {"path": str(tmp_path / "store")},
        "prepare": {"sources": [str(tmp_path / "rows.jsonl")], "num_shards": 2},
        "encoder": {"backbone": str(tiny_backbone)},
        "index": {"sort_window": 4, "tokens_per_batch": 64},
        "resources": {"encoders_max": 1, "local_cpus": 2, "local_passages": 0},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    with pytest.raises(SystemExit) as end:
        main(["prepare", str(tmp_path / "run.yaml")])
    assert not end.value.code
    return str(tmp_path / "run.yaml")


def start(run_file: str) -> subprocess.Popen[str]:
    """`mvr-ray index` with a cluster of its own, in a session of its own; standard error comes with the output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [COMMAND, "index", run_file, "--json"],
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until_encoding(command: subprocess.Popen[str]) -> Iterator[str]:
    """Lines of standard error up to the first one of encoding."""
    assert command.stderr
    for line in command.stderr:
        yield line.rstrip("\n")
        if line.startswith("encode: "):
            return
    pytest.fail("the command ended before it encoded")


def encoding_workers(command: int) -> list[int]:
    """Processes of encoding actors below a command."""
    listing = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()[1:]]
    family = {command}
    for _ in range(4):
        family |= {int(pid) for pid, parent, _ in rows if int(parent) in family}
    return [int(pid) for pid, _, words in rows if int(pid) in family and words.startswith("ray::MapWorker")]


def index_files(run_file: str) -> list[Path]:
    """Files below the index of a run, also those of its unfinished chunks."""
    return [*Path(run_file).parent.glob("store/indexes/**/*")]


def others_than_own(lines: Iterable[str]) -> set[str]:
    return {line for line in lines if not OWN_LINES.fullmatch(line)}


def test_ctrl_c_is_one_line_and_so_is_a_worker_that_dies_when_the_same_command_goes_on(run_file: str) -> None:
    with start(run_file) as command:
        lines = list(until_encoding(command))
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=300)
    assert command.returncode == 130, err
    assert lines[0].startswith("starting Ray on this machine")
    assert err.splitlines()[-1] == "mvr-ray: interrupted; the same command continues where it stopped"
    assert others_than_own([*lines, *err.splitlines()]) == set()

    with start(run_file) as command:
        lines = list(until_encoding(command))  # counts what is there
        num_files = len(index_files(run_file))
        until(lambda: len(index_files(run_file)) > num_files, 300, every_s=0.05)
        os.kill(encoding_workers(command.pid)[0], signal.SIGKILL)
        _, err = command.communicate(timeout=1200)
    assert command.returncode == 0, err
    assert others_than_own([*lines, *err.splitlines()]) <= {WORKER_DIED}
