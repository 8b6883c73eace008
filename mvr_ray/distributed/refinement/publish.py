"""Describe the version of the restored round: rewrite changed shards, share the rest, save moved queries.

Shapes: L labelled questions, D dimension.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.distributed.indexing.shards import RECALL_METRICS, recall_metrics
from mvr_ray.distributed.refinement.refiner_pool import RefinerPool
from mvr_ray.distributed.refinement.report import REPORT_DEPTHS, Accuracy
from mvr_ray.distributed.refinement.state import StateId
from mvr_ray.store import manifest as manifests
from mvr_ray.store.embeddings import EmbeddingWriter
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.questions import query_key
from mvr_ray.types import EmbeddingBlock, FloatArray, Question


def describe(
    run: RunConfig,
    base: Manifest,
    refiners: RefinerPool,
    at: StateId,
    accuracy: Sequence[Accuracy],
    settings: Mapping[str, float],
) -> tuple[Manifest, int]:
    """Write the changed shards at a state; returns the manifest of the version and the number of changed shards."""
    results = refiners.write(at, run.index.recall_sample)
    num_dirty = sum(one.dirty_passages for one in results)
    recalls = recall_metrics([one.shard for one in results])
    metrics = {name: value for name, value in base.metrics.items() if "/" not in name and name not in RECALL_METRICS}
    accuracies = {  # their names keep transductive and held-out accuracy apart
        f"{row.protocol}/{row.group}/{row.kind}/top{k}": value
        for row in accuracy
        for k, value in zip(REPORT_DEPTHS, row.after)
    }
    manifest = dataclasses.replace(
        base,
        operation=f"refine:{run.refine.method}",
        parent=base.version,
        shards=tuple(one.shard.entry for one in results),
        recall=recalls.get("recall"),
        metrics={**metrics, **recalls, **accuracies, "refined": 1.0},
        config_digest=run.digest("refine"),
        dirty_share=num_dirty / max(base.num_passages, 1),
        refinement=dict(settings),
    )
    return manifest, sum(one.dirty_passages > 0 for one in results)


def save_queries(store: Store, index: str, questions: Sequence[Question], queries_LD: FloatArray) -> str:
    """Save moved query vectors as an embeddings file, a question a row by its `query_key`, one view each; returns its
    digest.

    Of questions with the same key the first one is saved.
    """
    first = {query_key(question): row for row, question in reversed(list(enumerate(questions)))}
    ids = sorted(first)
    block = EmbeddingBlock(
        ids,
        np.arange(len(ids) + 1, dtype=np.int64),
        np.zeros(len(ids), np.int16),
        queries_LD[[first[key] for key in ids]].astype(np.float32),
    )
    with store.scratch() as folder:
        file = folder / "queries.arrow"
        with EmbeddingWriter(file, queries_LD.shape[1], 1, "fp32") as writer:
            writer.write(block)
        return manifests.add_refined_queries(store, index, file)
