"""Measure the cost of encoding a passage and of answering a query: DPR, ME-BERT, MVR, DRPQ and late interaction.

One backbone, the same passages and questions, untrained weights (time does not depend on them), one process,
interleaved runs, medians; on a GPU where `resources.gpus_per_encoder` gives one. A query is scored against all passages
exactly, without the savings of an approximate index. All vectors are float32 in the backbone's own dimension; published
ColBERT projects to 128. Two systems are no index here, and only compared with views (MVR, table 4):

    late interaction   f(q, p) = sum_i max_j <q_i, p_j>       over all tokens of question and passage (ColBERT)
    centroids          views = k-means centroids of the passage's token states; f as for any views
                       (DRPQ: Tang et al. 2021, improving document representations by pseudo query embeddings)

Options of the step: `passages`, `questions`, `repeats`.

Shapes: Q queries, P passages, T tokens, I query tokens, V views or centroids, D dimension.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mvr_ray.config import RunConfig, resolve_model
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.core.threads import torch_threads
from mvr_ray.distributed.encoders import encoder_spec
from mvr_ray.errors import MissingInputError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.questions import read_questions
from mvr_ray.studies.definition import NO_OPTIONS, Options
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


class TokenStates(NamedTuple):
    """Unit states_PTD of each text's tokens, zero on padding, and which tokens are real."""

    states_PTD: Tensor
    real_PT: Tensor


class _System(NamedTuple):
    """`encode` gives the views or the batches of token states that `search` scores with all queries."""

    encode: Callable[[], Any]
    search: Callable[[Any], Tensor]


def cost(run: RunConfig, progress: Progress = no_progress, options: Options = NO_OPTIONS) -> CostReport:
    """Time every system on the first passages of the corpus and the first questions of `evaluate.questions`."""
    sizes = {"passages": 128, "questions": 64, "repeats": 5, **options}
    corpus = Corpus.open(Store(run.store.path), run.prepare.corpus)
    passages = list(islice(corpus, sizes["passages"]))
    questions = [q.text for q in read_questions(corpus, run.evaluate.questions[0])[: sizes["questions"]]]
    if not passages or not questions:
        raise MissingInputError("cost needs passages and questions; run `mvr-ray prepare CONFIG` with some")
    device = torch.device("cuda" if run.resources.gpus_per_encoder else "cpu")
    with torch_threads(run.resources.threads):
        systems = _systems(run, passages, questions, device)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
        vectors: dict[str, float] = {}
        for repeat in range(sizes["repeats"] + 1):  # the first run warms up
            for name, system in systems.items():
                encode_s, embeddings = _time_work(system.encode, device)
                search_s, _ = _time_work(partial(system.search, embeddings), device)
                vectors[name] = _vectors_a_passage(embeddings)
                times[name].append((1000 * encode_s / len(passages), 1000 * search_s / len(questions)))
            progress("cost runs", repeat, sizes["repeats"])
    medians = {name: np.median(pairs[1:], axis=0).tolist() for name, pairs in times.items()}
    base_encode, base_search = medians["DPR"]
    lines = [
        CostLine(name, vectors[name], encode, encode / base_encode, search, search / base_search)
        for name, (encode, search) in medians.items()
    ]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return CostReport(len(passages), len(questions), sizes["repeats"], run.resources.threads, lines, name)


def _time_work(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Run some work; returns its seconds and its result."""
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def _vectors_a_passage(embeddings: Tensor | list[TokenStates]) -> float:
    if isinstance(embeddings, Tensor):
        return float(embeddings.shape[1])
    return float(np.mean([real_PT.sum(-1).float().mean().item() for _, real_PT in embeddings]))


def _systems(
    run: RunConfig, passages: Sequence[Passage], questions: Sequence[str], device: torch.device
) -> dict[str, _System]:
    folder = resolve_model(run.encoder.backbone)
    # settings of one strategy, which the others refuse
    spec = replace(encoder_spec(run), empty_snippets="masked", title_view=False, whole_view=False, overlap_tokens=0)
    readouts: dict[str, dict[str, Any]] = {
        "DPR": {"strategy": "cls", "num_views": 1},
        f"ME-BERT (k={VIEWS})": {"strategy": "first_k", "num_views": VIEWS},
        f"MVR (k={VIEWS})": {"strategy": "viewers", "num_views": VIEWS},
        f"snippet means (k={VIEWS})": {"strategy": "snippet_means", "num_views": VIEWS},
    }

    def batches(encoder: DualEncoder) -> list[list[TokenizedPassage]]:
        """Batch passages of similar length, the shortest first."""
        by_length = sorted(encoder.tokenize_passages(passages), key=lambda passage: passage.num_tokens)
        return [by_length[low : low + _BATCH] for low in range(0, len(by_length), _BATCH)]

    def views(encoder: DualEncoder) -> Tensor:
        parts = [encoder.embed_passages(batch).views_PVD for batch in batches(encoder)]
        return torch.from_numpy(np.concatenate(parts)).to(encoder.device)

    def best_view(queries_QD: Tensor, views_PVD: Tensor) -> Tensor:
        return torch.einsum("qd,pvd->qpv", queries_QD, views_PVD).amax(-1)

    encoders = {
        name: DualEncoder.from_backbone(folder, replace(spec, **readout)).to(device)
        for name, readout in readouts.items()
    }
    searches = {
        name: partial(best_view, torch.from_numpy(encoder.embed_queries(questions)).to(device))
        for name, encoder in encoders.items()
    }
    systems = {name: _System(partial(views, encoder), searches[name]) for name, encoder in encoders.items()}
    base = encoders["DPR"]
    tokens = token_states(base, base.tokenize_queries(questions))
    systems[f"DRPQ (k={VIEWS})"] = _System(
        lambda: torch.cat([centroids(token_states(base, batch), VIEWS) for batch in batches(base)]), searches["DPR"]
    )
    systems["late interaction"] = _System(
        lambda: [token_states(base, batch) for batch in batches(base)],
        lambda parts: torch.cat([late_interaction(*tokens, part) for part in parts], dim=1),
    )
    return systems


def token_states(encoder: DualEncoder, texts: Sequence[TokenizedPassage]) -> TokenStates:
    """Compute the last layer's states of every token of the texts, by the passage tower."""
    with torch.no_grad():
        states_PTD, real_PT = encoder.states(texts)
    return TokenStates(F.normalize(states_PTD.float(), dim=-1) * real_PT[..., None], real_PT)


def late_interaction(queries_QID: Tensor, real_QI: Tensor, passages: TokenStates) -> Tensor:
    """Compute scores_QP: the sum over query tokens of the best passage token's score (Khattab and Zaharia 2020, eq.
    3)."""
    scores_QPIT = torch.einsum("qid,ptd->qpit", queries_QID, passages.states_PTD)
    best_QPI = scores_QPIT.masked_fill(~passages.real_PT[None, :, None], -torch.inf).amax(-1)
    return (best_QPI * real_QI[:, None]).sum(-1)


def centroids(passages: TokenStates, num: int, rounds: int = 5) -> Tensor:
    """Compute views_PVD: k-means of each passage's token states from evenly spaced tokens; a centroid may repeat."""
    views = []
    for states_TD, real_T in zip(*passages):
        own_TD = states_TD[real_T]
        start = torch.linspace(0, len(own_TD) - 1, num).long()
        centre_VD = own_TD[start].clone()
        for _ in range(rounds):
            nearest_T = (own_TD @ centre_VD.T - centre_VD.square().sum(-1) / 2).argmax(-1)
            sums_VD = torch.zeros_like(centre_VD).index_add_(0, nearest_T, own_TD)
            count_V = torch.bincount(nearest_T, minlength=num)
            used_V = count_V > 0
            centre_VD[used_V] = sums_VD[used_V] / count_V[used_V, None]
        views.append(centre_VD)
    return torch.stack(views)
