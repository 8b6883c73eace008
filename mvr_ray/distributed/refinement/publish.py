"""Publish the restored round: rewrite the shards that changed, share the rest, describe the version.

Shapes: L labelled questions, D dimension.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.distributed.refinement.refiner_pool import RefinerPool
from mvr_ray.distributed.refinement.report import REPORT_DEPTHS, Accuracy
from mvr_ray.distributed.refinement.state import StateId
from mvr_ray.distributed.shards import RECALL_METRICS, BuiltShard, promised_recall, recall_metrics
from mvr_ray.store import manifest as manifests
from mvr_ray.store.embeddings import EmbeddingWriter
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import EmbeddingBlock, FloatArray, Question


def describe(
    run: RunConfig,
    base: Manifest,
    refiners: RefinerPool,
    at: StateId,
    accuracy: Sequence[Accuracy],
    settings: Mapping[str, float],
) -> tuple[Manifest, int]:
    """The manifest of the version as it stands at a state, its changed shards written, and how many changed."""
    written = refiners.write(at, run.index.recall_sample)
    dirty = sum(shard.dirty_passages for shard in written)
    is_approximate, least = base.index_params["kind"] != "flat", promised_recall(base)
    measured = recall_metrics(
        [
            BuiltShard(
                shard.entry,
                shard.recall,
                None,
                None,
                is_updated=False if is_approximate and shard.dirty_passages else None,
                least_recall=least,
            )
            for shard in written
        ]
    )
    kept = {name: value for name, value in base.metrics.items() if "/" not in name and name not in RECALL_METRICS}
    refined = dataclasses.replace(
        base,
        operation=f"refine:{run.refine.method}",
        parent=base.version,
        shards=tuple(shard.entry for shard in written),
        recall=measured.get("recall"),
        metrics={**kept, **measured, **as_metrics(accuracy)},
        config_digest=run.digest("refine"),
        dirty_share=dirty / max(base.num_passages, 1),
        refinement=dict(settings),
    )
    return refined, sum(shard.dirty_passages > 0 for shard in written)


def as_metrics(accuracy: Sequence[Accuracy]) -> dict[str, float]:
    """Accuracy after refinement, by protocol, group and kind: a transductive number can not pass for a held-out one."""
    return {
        f"{row.protocol}/{row.group}/{row.kind}/top{k}": value
        for row in accuracy
        for k, value in zip(REPORT_DEPTHS, row.after)
    }


def save_queries(store: Store, index: str, questions: Sequence[Question], queries_LD: FloatArray) -> str:
    """Keep moved query vectors as an embeddings file, a question a row, one view each; returns its digest.

    Of questions with one id the first is kept.
    """
    first = {question.id: row for row, question in reversed(list(enumerate(questions)))}
    ids = sorted(first)
    block = EmbeddingBlock(
        ids,
        np.arange(len(ids) + 1, dtype=np.int64),
        np.zeros(len(ids), np.int16),
        queries_LD[[first[question_id] for question_id in ids]].astype(np.float32),
    )
    with store.scratch() as folder:
        file = folder / "queries.arrow"
        with EmbeddingWriter(file, queries_LD.shape[1], 1, "fp32") as writer:
            writer.write(block)
        return manifests.add_refined_queries(store, index, file)
