"""Servers over one store while versions of several formats take over: every answer is right and of one version.

Version 1 and 2 lie in the store as commit baa77f8 wrote them, with its answers (tests/fixtures); this program publishes
others over them, and a newer program one that this program does not read.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from server import listening

from mvr_ray import versions
from mvr_ray.client import Client
from mvr_ray.config import RunConfig
from mvr_ray.distributed.hot_swap import HotSwapRouter, open_hot_swap_router
from mvr_ray.errors import ManifestError
from mvr_ray.serving.app import create_app
from mvr_ray.serving.catalog import VersionCatalog
from mvr_ray.serving.schemas import SearchResponse
from mvr_ray.serving.service import SearchService
from mvr_ray.store import manifest, paths
from mvr_ray.store.files import Store

FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "store-baa77f8"
ANSWERS = json.loads((FIXTURE / "answers.json").read_text(encoding="utf-8"))
ROUNDING = 1e-5
INDEX, K = "flat", 5


@contextmanager
def server(run: RunConfig, version: int | None = None) -> Iterator[tuple[str, HotSwapRouter]]:
    """A replica in this process that follows the store, over HTTP; gives its address and its router."""
    with open_hot_swap_router(run, version, local=True, follow_s=0.05) as router:
        catalog = VersionCatalog(Store(run.store.path), INDEX)
        with listening(create_app(SearchService(router, run.serve, catalog))) as address:
            yield address, router


def require_right(number: int, answer: SearchResponse, content: int) -> None:
    """The answer to question `number` is that of version `content` by the commit that wrote it."""
    [old] = [one["hits"][number] for one in ANSWERS["answers"] if (one["index"], one["version"]) == (INDEX, content)]
    hits = answer.results[0]
    assert [hit.id for hit in hits] == [passage_id for passage_id, _, _ in old]
    assert [hit.score for hit in hits] == pytest.approx([score for _, score, _ in old], abs=ROUNDING)
    assert answer.coverage.share == 1.0 and answer.exact.certified


@pytest.mark.chaos(
    "two servers under load while an older, this and a newer program's versions take over",
    "every answer is right and of one version; a version of a newer format is never moved to; roll back works",
)
def test_every_answer_is_right_while_versions_of_older_and_newer_formats_take_over(tmp_path: Path, record_property):
    store = Store(shutil.copytree(FIXTURE / "store", tmp_path / "store"))
    run = RunConfig.model_validate({"store": {"path": store.root}, "index": {"name": INDEX}, "retrieve": {"k": K}})
    answers: list[tuple[int, SearchResponse]] = []
    has_ended = threading.Event()

    def ask(client: Client, first: int) -> None:
        for number in count(first):
            if has_ended.is_set():
                return
            question = number % len(ANSWERS["questions"])
            answers.append((question, client.search([ANSWERS["questions"][question]], K)))

    def wait_until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline

    def wait_for(version: int) -> None:
        """Until both servers answer from it, and so did one of those who ask all the time."""
        for client in clients:
            wait_until(lambda client=client: client.search(["When?"], 1).version == version)
        wait_until(lambda: any(answer.version == version for _, answer in answers))

    with server(run) as (one, first), server(run) as (other, second), ThreadPoolExecutor(2) as threads:
        clients = [Client(one), Client(other)]
        asking = [threads.submit(ask, Client(address), 7 * n) for n, address in enumerate((one, other))]
        try:
            wait_for(2)
            content_of = {1: 1, 2: 2}
            for to in (1, 2):
                version = versions.rollback(store, INDEX, to).version
                content_of[version] = to
                wait_for(version)
            live = manifest.read(store, INDEX)
            newer = json.loads(live.to_json()) | {"parent": live.version, "version": 5, "format_version": 4}
            store.create_once(paths.manifest(INDEX, 5), json.dumps(newer).encode())
            for router in (first, second):
                wait_until(lambda router=router: "5.json has format version 4" in router.state.failure)
            assert [client.search(["When?"], 1).version for client in clients] == [4, 4]
            with pytest.raises(ManifestError, match=r"5\.json has format version 4, this program reads 1 to 3"):
                server(run).__enter__()
            with server(run, version=4) as (address, _):
                assert Client(address).search(["When?"], 1).version == 4
            content_of[6] = versions.rollback(store, INDEX, 1).to
            wait_for(6)
        finally:
            has_ended.set()
        for thread in asking:
            thread.result()
    for number, answer in answers:
        require_right(number, answer, content_of[answer.version])
    by_version = {version: sum(answer.version == version for _, answer in answers) for version in content_of}
    assert all(by_version[version] for version in (2, 3, 4, 6)) and not by_version[1]
    record_property("figures", f"{len(answers)} answers of 2 servers, by version {by_version}, none wrong")
