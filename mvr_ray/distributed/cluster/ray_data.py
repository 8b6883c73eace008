"""Run batches through a pool of workers: a Ray Data pipeline in a Ray session, else threads of this process.

Rows of a pipeline are streamed, Ray Data's messages silenced, its errors translated; the wait for a row has a limit.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mvr_ray.config import ResourcesConfig
from mvr_ray.core.threads import torch_threads
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.ray_errors import translate_ray_errors
from mvr_ray.distributed.cluster.tasks import HANG_S
from mvr_ray.distributed.result_store import Compute
from mvr_ray.errors import ResourceError

if TYPE_CHECKING:
    import ray.data

_MAX_BLOCKS = 4096


def dataset(rows: Sequence[Mapping[str, Any]]) -> "ray.data.Dataset":
    """Make a dataset of these rows, one block each up to `_MAX_BLOCKS`."""
    import ray.data

    return ray.data.from_items(list(rows), override_num_blocks=min(len(rows), _MAX_BLOCKS))


def pool_options(resources: ResourcesConfig, **strategy: Any) -> dict[str, Any]:
    """Return the arguments of `map_batches` for a pool with the run's number of encoders, a row at a time."""
    from ray.data import ActorPoolStrategy

    sizes = {"min_size": resources.encoders_min, "max_size": resources.encoders_max}
    return {
        "batch_size": 1,
        "batch_format": "pyarrow",
        "num_cpus": resources.cpus_per_encoder,
        "num_gpus": resources.gpus_per_encoder,
        "compute": ActorPoolStrategy(**sizes, **strategy),
    }


def pool_need(what: str, resources: ResourcesConfig) -> session.Need:
    """Return the resources that such a pool needs."""
    return session.Need(what, resources.encoders_min, resources.cpus_per_encoder, resources.gpus_per_encoder)


def stream_rows(pipeline: "ray.data.Dataset", what: str) -> Iterator[dict[str, Any]]:
    """Yield the pipeline's rows in the order of completion. `what` names the work in errors.

    Raises ResourceError if it has no further row for `HANG_S`, in which workers also start; they are then killed.
    """
    from mvr_ray.distributed.cluster.ray_internals import end_pipeline_when

    wait = _Wait()
    pipeline.context.enable_progress_bars = False
    pipeline.context.raise_original_map_exception = True
    end_pipeline_when(pipeline, wait.is_over)
    session.enter_until_left(_errors_not_logged())

    def rows() -> Generator[dict[str, Any]]:
        with translate_ray_errors(what):
            wait.start_s = time.monotonic()
            for row in pipeline.iter_rows():
                wait.start_s = math.inf
                yield row
                wait.start_s = time.monotonic()
        if wait.is_hang:
            raise ResourceError(
                f"{what} stopped: no worker finished a batch for {HANG_S:g} s; see whether the cluster has resources "
                f"for them and what hangs on its machines (py-spy dump), then run the same command again, it continues"
            )

    return session.close_before_leaving(rows())


@dataclass
class _Wait:
    """The wait of a reader for the next row; the time until it asks for one does not count."""

    start_s: float = math.inf
    is_hang: bool = False

    def is_over(self) -> bool:
        self.is_hang = self.is_hang or time.monotonic() - self.start_s >= HANG_S
        return self.is_hang


@contextmanager
def _errors_not_logged() -> Iterator[None]:
    """Keep Ray Data from logging the errors that it raises."""
    logger = logging.getLogger("ray.data")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def map_in_pool(
    worker: Callable[..., Callable[[Any], Any]],
    arguments: Mapping[str, Any],
    batches: Sequence[Any],
    resources: ResourcesConfig,
    what: str,
    through: Callable[[Sequence[str], Compute], Iterator[str]] | None = None,
) -> Iterator[Any]:
    """Call a pool of workers, each a `worker(**arguments)`, with every batch; yields the results in order of batches.

    Batches and results are serialised as JSON. Early results are buffered. `through`: `ResultStore.map`, which
    calls the pool for those batches alone whose results are not stored.
    """
    constructor: dict[str, Any] = {"worker": worker, "arguments": arguments, "threads": resources.threads}

    def compute(texts: Sequence[str]) -> Iterator[str]:
        if not session.in_ray():
            return _map_in_threads(partial(_PoolActor, **constructor), texts, min(resources.encoders_max, len(texts)))
        return _map_in_actors(texts, constructor, resources, what)

    texts = [json.dumps(batch) for batch in batches]
    if texts:
        yield from map(json.loads, through(texts, compute) if through else compute(texts))


def _map_in_actors(
    texts: Sequence[str], constructor: dict[str, Any], resources: ResourcesConfig, what: str
) -> Iterator[str]:
    rows = [{"number": number, "batch": text} for number, text in enumerate(texts)]
    actor: Any = _PoolActor
    pipeline = dataset(rows).map_batches(actor, fn_constructor_kwargs=constructor, **pool_options(resources))
    early: dict[int, str] = {}
    expected = 0
    for row in stream_rows(pipeline, what):
        early[row["number"]] = row["result"]
        while expected in early:
            yield early.pop(expected)
            expected += 1


def _map_in_threads(make: Callable[[], "_PoolActor"], texts: Sequence[str], count: int) -> Iterator[str]:
    """Yield results in order. Each of `count` threads has its own worker, like an actor of a pool."""
    local = threading.local()

    def work(text: str) -> str:
        if not hasattr(local, "worker"):
            local.worker = make()
        return local.worker.run(text)

    pool = ThreadPoolExecutor(count)
    try:
        yield from pool.map(work, texts)
    finally:
        pool.shutdown(cancel_futures=True)


class _PoolActor:
    """Run a worker on batches."""

    def __init__(self, worker: Callable[..., Callable[[Any], Any]], arguments: Mapping[str, Any], threads: int) -> None:
        self.worker = worker(**arguments)
        self.threads = threads

    def run(self, text: str) -> str:
        with torch_threads(self.threads):
            return json.dumps(self.worker(json.loads(text)))

    def __call__(self, table: pa.Table) -> pa.Table:
        results = [self.run(text) for text in table.column("batch").to_pylist()]
        return pa.table({"number": table.column("number"), "result": pa.array(results, pa.large_string())})
