"""Measure the cost of encoding a passage and of answering a query: DPR, ME-BERT, MVR, DRPQ and late interaction.

One backbone, the same passages and questions, untrained weights (time does not depend on them), one process,
interleaved runs, medians; on a GPU where `resources.gpus_per_encoder` gives one. A query is scored against all passages
exactly, without the savings of an approximate index. All vectors are float32 in the backbone's own dimension; published
ColBERT projects to 128.

Options of the step: `passages`, `questions`, `repeats`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from mvr_ray.config import RunConfig, resolve_model
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.distributed.encoders import encoder_spec
from mvr_ray.errors import MissingInputError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.questions import read_questions
from mvr_ray.studies.late_interaction import centroids, late_interaction, token_states
from mvr_ray.types import Passage, Progress, no_progress

VIEWS = 8
_BATCH = 16


class CostLine(NamedTuple):
    """Milliseconds a passage and a query; ratios to DPR."""

    system: str
    vectors_a_passage: float
    encode_ms: float
    encode_ratio: float
    search_ms: float
    search_ratio: float


class CostReport(NamedTuple):
    passages: int
    questions: int
    repeats: int
    threads: int
    lines: list[CostLine]
    device: str = "cpu"


class _System(NamedTuple):
    """A system: `encode` gives the argument of `search` and `vectors`; `search` scores all queries and passages."""

    name: str
    encode: Callable[[], Any]
    search: Callable[[Any], Any]
    vectors: Callable[[Any], float]


def cost(run: RunConfig, progress: Progress = no_progress, options: Mapping[str, Any] | None = None) -> CostReport:
    """Time every system on the first passages of the corpus and the first questions of `evaluate.questions`."""
    sizes = {"passages": 128, "questions": 64, "repeats": 5, **(options or {})}
    store = Store(run.store.path)
    corpus = Corpus.open(store, run.prepare.corpus)
    passages = list(islice(corpus, sizes["passages"]))
    questions = [q.text for q in read_questions(corpus, run.evaluate.questions[0])[: sizes["questions"]]]
    if not passages or not questions:
        raise MissingInputError("cost needs passages and questions; run `mvr-ray prepare CONFIG` with some")
    device = torch.device("cuda" if run.resources.gpus_per_encoder else "cpu")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(run.resources.torch_threads)
    try:
        systems = _systems(run, passages, questions, device)
        times: dict[str, tuple[list[float], list[float]]] = {system.name: ([], []) for system in systems}
        vectors: dict[str, float] = {}
        for repeat in range(sizes["repeats"] + 1):  # the first run warms up
            for system in systems:
                encode_s, embeddings = _time_work(system.encode, device)
                search_s, _ = _time_work(partial(system.search, embeddings), device)
                vectors[system.name] = system.vectors(embeddings)
                if repeat:
                    times[system.name][0].append(1000 * encode_s / len(passages))
                    times[system.name][1].append(1000 * search_s / len(questions))
            progress("cost runs", repeat, sizes["repeats"])
    finally:
        torch.set_num_threads(num_threads)
    medians = {name: (float(np.median(encode)), float(np.median(search))) for name, (encode, search) in times.items()}
    base = medians[systems[0].name]
    lines = [
        CostLine(name, vectors[name], encode, encode / base[0], search, search / base[1])
        for name, (encode, search) in medians.items()
    ]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return CostReport(len(passages), len(questions), sizes["repeats"], run.resources.torch_threads, lines, name)


class _Timing(NamedTuple):
    seconds: float
    result: Any


def _time_work(work: Callable[[], Any], device: torch.device) -> _Timing:
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _Timing(time.perf_counter() - start, result)


def _systems(
    run: RunConfig, passages: Sequence[Passage], questions: Sequence[str], device: torch.device
) -> list[_System]:
    folder = resolve_model(run.encoder.backbone)
    spec = replace(encoder_spec(run), empty_snippets="masked")  # no system here supports kept ones

    def views(name: str, **changes: Any) -> _System:
        encoder = DualEncoder.from_backbone(folder, replace(spec, **changes)).to(device)
        queries_QD = torch.from_numpy(encoder.embed_queries(questions)).to(device)
        return _System(
            name,
            lambda: _encode(encoder, passages),
            lambda views_PVD: torch.einsum("qd,pvd->qpv", queries_QD, views_PVD).amax(-1),
            lambda views_PVD: float(views_PVD.shape[1]),
        )

    cls_encoder = DualEncoder.from_backbone(folder, replace(spec, strategy="cls", num_views=1)).to(device)
    queries = token_states(cls_encoder, cls_encoder.tokenize_queries(questions))
    queries_QD = torch.from_numpy(cls_encoder.embed_queries(questions)).to(device)
    return [
        views("DPR", strategy="cls", num_views=1),
        views(f"ME-BERT (k={VIEWS})", strategy="first_k", num_views=VIEWS),
        views(f"MVR (k={VIEWS})", strategy="viewers", num_views=VIEWS),
        views(f"snippet means (k={VIEWS})", strategy="snippet_means", num_views=VIEWS),
        _System(
            f"DRPQ (k={VIEWS})",
            lambda: torch.cat([centroids(part, VIEWS) for part in _states(cls_encoder, passages)]),
            lambda views_PVD: torch.einsum("qd,pvd->qpv", queries_QD, views_PVD).amax(-1),
            lambda views_PVD: float(views_PVD.shape[1]),
        ),
        _System(
            "late interaction",
            lambda: _states(cls_encoder, passages),
            lambda parts: torch.cat([late_interaction(*queries, part) for part in parts], dim=1),
            lambda parts: float(np.mean([real.sum(-1).float().mean().item() for _, real in parts])),
        ),
    ]


def _encode(encoder: DualEncoder, passages: Sequence[Passage]) -> torch.Tensor:
    parts = [encoder.embed_passages(batch).views_PVD for batch in _batches(encoder, passages)]
    return torch.from_numpy(np.concatenate(parts)).to(encoder.device)


def _states(encoder: DualEncoder, passages: Sequence[Passage]) -> list[Any]:
    return [token_states(encoder, batch) for batch in _batches(encoder, passages)]


def _batches(encoder: DualEncoder, passages: Sequence[Passage]) -> list[list[TokenizedPassage]]:
    """Batch passages of similar length, the shortest first."""
    by_length = sorted(encoder.tokenize_passages(passages), key=lambda passage: passage.num_tokens)
    return [by_length[low : low + _BATCH] for low in range(0, len(by_length), _BATCH)]
