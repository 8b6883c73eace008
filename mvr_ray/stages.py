"""Names the stages, which `mvr-ray STAGE CONFIG`, the jobs, the demo and studies run.

A stage takes a run and a progress, and returns its report. Its modules are imported when it runs: some need Ray or
torch, which take seconds.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mvr_ray.config import RunConfig
    from mvr_ray.types import Progress

StageFunction = Callable[["RunConfig", "Progress"], Any]


def _prepare(run: "RunConfig", progress: "Progress") -> Any:
    """Read, check, chunk and count passages and questions."""
    from mvr_ray.store import prepare
    from mvr_ray.store.files import Store

    return prepare.prepare(run.prepare, Store(run.store.path), progress, match=run.evaluate.match)


def _train(run: "RunConfig", progress: "Progress", save: str = "") -> Any:
    """Train the encoder, or a reader or a cross-encoder (train.task).

    `train CONFIG save=best` stores the best weights so far of an interrupted training, and trains no further.
    """
    from mvr_ray.distributed import train

    return train.save_best(run) if save else train.train(run, progress)


def _mine(run: "RunConfig", progress: "Progress") -> Any:
    """Find hard negatives by BM25 or with the live index."""
    from mvr_ray.distributed import mine

    return mine.mine(run, progress)


def _index(run: "RunConfig", progress: "Progress") -> Any:
    """Encode the corpus, build an index a shard, publish a version."""
    from mvr_ray.distributed.encoders import keep_external_encoder
    from mvr_ray.distributed.indexing import build_index

    return build_index.index(keep_external_encoder(run), progress)


def _refine(run: "RunConfig", progress: "Progress") -> Any:
    """Improve the live version from labelled questions or feedback."""
    from mvr_ray.distributed import refine

    return refine.refine(run, progress)


def _evaluate(run: "RunConfig", progress: "Progress", ranking: str = "", version: str = "") -> Any:
    """Measure the live version on the question sets of the run file.

    `evaluate CONFIG version=N` measures another version; `ranking=FILE` measures another system's ranking of its
    passages instead, such as a TREC run.
    """
    from mvr_ray.distributed import evaluate

    number = int(version) if version else None
    if ranking:
        return evaluate.evaluate_ranking(run, ranking, progress, number)
    return evaluate.evaluate(run, progress, version=number)


def _analyze(run: "RunConfig", progress: "Progress") -> Any:
    """Measure the views of the live version: each alone, LV, PPL."""
    from mvr_ray.distributed import analyze

    return analyze.analyze(run, progress)


_STAGES: tuple[Any, ...] = (_prepare, _train, _mine, _index, _refine, _evaluate, _analyze)
STAGES: dict[str, StageFunction] = {stage.__name__.removeprefix("_"): stage for stage in _STAGES}
