"""Measure a round of refinement at SQuAD's size: its stages, the update against autograd loops, the re-index.

    python benchmarks/refinement.py        (MVR_RAY_DATA names the folder that holds squad/)

Passages, questions and answers are SQuAD's; vectors are synthetic (8 views a passage, 384 dimensions, fp16; a question
is near a view of its gold passage), as encoding both would take longer than all these measurements. AOpt's
passage-centric step (eqs. 13 and 14) on the first 100 hits of each question, all answer-bearing hits positive.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import made_up
import numpy as np
import torch
from measure import Bar, Part, interleave, record_time, speedup, write
from squad_files import DEV, TRAIN

from mvr_ray.checksums import with_trailer
from mvr_ray.config import RunConfig
from mvr_ray.core.refining import aopt
from mvr_ray.core.refining.pseudo_labels import LabelMatrices, Labels, label_matrices
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.indexing import build_index
from mvr_ray.distributed.indexing.shards import version_blocks
from mvr_ray.distributed.refinement.journal import Journal
from mvr_ray.distributed.refinement.loop import RefinementLoop
from mvr_ray.distributed.refinement.publish import describe
from mvr_ray.distributed.refinement.questions import RefineQuestions, arrange
from mvr_ray.distributed.refinement.refiner_pool import RefinerPool
from mvr_ray.distributed.refinement.shard_refiner import RefinerTask
from mvr_ray.distributed.refinement.state import PUBLISHED, ShardChanges, StateId, StoredViews
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import open_index
from mvr_ray.store import corpus, manifest, paths, prepare
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.questions import read_questions
from mvr_ray.types import EmbeddingBlock, FloatArray, ShardHits, no_progress

QUESTIONS, GATE, DEPTH = 78_000, 512, 100
SHARDS, REFINERS = 4, 2
STEP, GUARD = 0.01, 1e-3
LOOP_PASSAGES = 300
RATE_QUESTIONS = 4096
DIRTY_SHARE = 0.05
SMALL = (
    "without encoding, so few passages are built anew in a quarter of a second; what is left of the other is fixed: "
    "files opened, written and hashed, a manifest, two calls to each refiner."
)
SHARES = (
    "each of two refiners scores its share of 100 hits and as many more as chance may give it exactly, 70 passages, so "
    "140 in place of 100; what comes back is merged in one process. Over all 78,000 questions the rate is given below, "
    "as questions/s of the round's retrieval."
)
BYTES = (
    "closed form and loop read the same questions, one for each label of what moves, the closed form in 16 bits a "
    "number and at the rate given below; an optimiser adds a tenth of a millisecond to the half that a passage's graph "
    "takes, so 200 times would need those bytes at several times what memory gives. Blocks of questions that stay in "
    "the third cache were tried: the sums that leave and come back cost more than is spared."
)


def config(store: Path, name: str = "squad") -> RunConfig:
    return RunConfig.model_validate(
        {
            "store": {"path": str(store)},
            "prepare": {
                "corpus": "squad",
                "num_shards": SHARDS,
                "sources": [
                    {"path": str(TRAIN), "format": "squad", "questions": "train"},
                    {"path": str(DEV), "format": "squad", "questions": "dev"},
                ],
            },
            "index": {"name": name, "encoder": "untrained"},
            "refine": {
                "questions": "train",
                "gate": ["dev"],
                "method": "passage",
                "positives": "all",
                "depth": DEPTH,
                "step_size": STEP,
                "keep_length": True,
            },
            "resources": {"refiners": REFINERS, "searchers": REFINERS},
        }
    )


class StoredVersion(NamedTuple):
    """A version, all its blocks in order of passage number, and the ids."""

    manifest: Manifest
    blocks: list[EmbeddingBlock]
    ids: list[str]


def read_version(store: Store, version: Manifest) -> StoredVersion:
    blocks = [*version_blocks(store, version)]
    return StoredVersion(version, blocks, [name for block in blocks for name in block.ids])


def make_questions(store: Store, of: StoredVersion) -> tuple[RefineQuestions, FloatArray]:
    """Return the questions, and a vector for each: equal parts of a view of its gold passage and noise."""
    passages = corpus.Corpus.open(store, of.manifest.corpus)
    train, dev = (read_questions(passages, name) for name in ("train", "dev"))
    questions = arrange("train", train[:QUESTIONS], [("dev", dev[:GATE])], [])
    row = {name: at for at, name in enumerate(of.ids)}
    gold_T = np.array([row[question.positive_ids[0]] for question in questions.table])
    rng = np.random.default_rng(3)
    every_ND = np.concatenate([block.vectors_ND for block in of.blocks])
    near_TD = every_ND[gold_T * made_up.V + rng.integers(0, made_up.V, len(gold_T))].astype(np.float32)
    near_TD += 0.05 * rng.standard_normal(near_TD.shape, dtype=np.float32)
    return questions, near_TD / np.linalg.norm(near_TD, axis=1, keepdims=True)


def one_round(loop: RefinementLoop, seconds: dict[str, float]) -> Labels:
    """Run one round from the version's hits to the moved views, as the loop does, which ends where `rebuilds` has
    published other versions; return the labels."""
    queries_LD = loop.queries_at(0)
    with record_time(seconds, "retrieve"):
        hits: ShardHits = loop.refiners.search(PUBLISHED, queries_LD, loop.depth, "retrieve", no_progress)
    with record_time(seconds, "judge"):
        loop.evaluator.rank(None, loop.labelled_rows, hits)
    with record_time(seconds, "label"):
        labels = loop.evaluator.label(PUBLISHED, queries_LD, hits)
    with record_time(seconds, "update"):
        _, step = loop.step(0, labels, queries_LD)
    print(step.summary(loop.refiners.num_passages, len(loop.labelled_rows)), flush=True)
    return labels


class Sample(NamedTuple):
    """Some passages for a loop: each one's moving views, and per view its partners and their signs."""

    views: list[torch.Tensor]
    partners: list[list[torch.Tensor]]
    positive: list[list[torch.Tensor]]
    slots: np.ndarray


def sample_passages(
    matrices: LabelMatrices, views_ND: FloatArray, moved_M: np.ndarray, passage_N: np.ndarray
) -> Sample:
    """Sample `LOOP_PASSAGES` of the moving passages, evenly over all."""
    owners = np.unique(passage_N[moved_M])
    selection = owners[np.linspace(0, len(owners) - 1, LOOP_PASSAGES).astype(int)]
    sample = Sample(
        [], [], [], np.flatnonzero(np.isin(passage_N, selection) & np.isin(np.arange(len(passage_N)), moved_M))
    )
    for owner in selection:
        slots = sample.slots[passage_N[sample.slots] == owner]
        sample.views.append(torch.from_numpy(views_ND[slots].astype(np.float32)))
        own = [(_row(matrices.positive_NQ, slot), _row(matrices.negative_NQ, slot)) for slot in slots]
        sample.partners.append([torch.from_numpy(np.concatenate(both).astype(np.int64)) for both in own])
        sample.positive.append([torch.arange(len(good) + len(bad)) < len(good) for good, bad in own])
    return sample


def _row(matrix: Any, slot: int) -> np.ndarray:
    return matrix.indices[matrix.indptr[slot] : matrix.indptr[slot + 1]]


def passage_loss(x_VD: torch.Tensor, queries: torch.Tensor, partners: list, positive: list) -> torch.Tensor:
    """Compute eq. 13, summed over the passage's views."""
    losses = []
    for x_D, rows, good in zip(x_VD, partners, positive):
        scores = queries[rows] @ x_D
        losses.append(torch.log(scores.sum()) - torch.log(scores[good].sum()))
    return torch.stack(losses).sum()


def by_autograd(sample: Sample, queries: torch.Tensor) -> list[torch.Tensor]:
    """Step each passage by its own graph, without an optimiser."""
    new_views = []
    for views, partners, positive in zip(sample.views, sample.partners, sample.positive):
        x_VD = views.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(passage_loss(x_VD, queries, partners, positive), x_VD)
        new_views.append(x_VD.detach() - STEP * gradient)
    return new_views


def by_optimiser(sample: Sample, queries: torch.Tensor) -> list[torch.Tensor]:
    """Step each passage by a parameter and an optimiser of its own, as the paper's batches of one do."""
    new_views = []
    for views, partners, positive in zip(sample.views, sample.partners, sample.positive):
        x_VD = torch.nn.Parameter(views.clone())
        optimiser = torch.optim.SGD([x_VD], lr=STEP)
        optimiser.zero_grad()
        passage_loss(x_VD, queries, partners, positive).backward()
        optimiser.step()
        new_views.append(x_VD.detach())
    return new_views


def updates(part: Part, of: StoredVersion, labels: Labels, queries_LD: FloatArray) -> None:
    """Compare all passages in closed form with loops over some of them, on the threads of the round."""
    views = StoredViews(of.blocks)
    slot_L = views.slots(labels.passage_L, labels.view_L)
    views_ND = np.concatenate([block.vectors_ND for block in of.blocks])
    passage_N = np.repeat(np.arange(len(of.ids)), made_up.V)
    matrices = label_matrices(slot_L, labels.question_L, labels.positive_L, len(views_ND), len(queries_LD))
    torch.set_num_threads(REFINERS)
    queries = torch.from_numpy(queries_LD)
    single = aopt.passage_step(views_ND, queries_LD, matrices, step_size=STEP, guard=GUARD, single=True)
    sample = sample_passages(matrices, views_ND, single.moved_M, passage_N)
    num_moved = len(np.unique(passage_N[single.moved_M]))
    print(f"{len(slot_L):,} labels; {single.num_moved:,} views of {num_moved:,} passages move", flush=True)
    ours = single.vectors_MD[np.searchsorted(single.moved_M, sample.slots)]
    for loop in (by_autograd, by_optimiser):
        np.testing.assert_allclose(torch.cat(loop(sample, queries)).numpy(), ours, rtol=0, atol=1e-5)
    cases: dict[str, Callable[[], Any]] = {
        "update, closed form": lambda: aopt.passage_step(
            views_ND, queries_LD, matrices, step_size=STEP, guard=GUARD, single=True
        ),
        "update, autograd a passage": lambda: by_autograd(sample, queries),
        "update, an optimiser a passage": lambda: by_optimiser(sample, queries),
    }
    samples = interleave(cases)
    names = list(cases)
    part.add({names[0]: samples[names[0]]}, num_moved)
    part.add({name: samples[name] for name in names[1:]}, LOOP_PASSAGES)
    each = {name: [s / part.work[name] for s in seconds] for name, seconds in samples.items()}
    part.bars.append(Bar("update over a loop of autograd a passage", speedup(each, names[0], names[1]), 25, note=BYTES))
    part.bars.append(
        Bar("update over a loop with an optimiser a passage", speedup(each, names[0], names[2]), 200, note=BYTES)
    )
    read = sum(matrix[single.moved_M].nnz for matrix in (matrices.positive_NQ, matrices.negative_NQ))
    rate = 2 * made_up.D * read / statistics.median(samples[names[0]])
    part.facts["update reads"] = f"{read:,} vectors of questions in 16 bits, {rate / 1e9:.1f} GB/s"
    part.facts["update"] = (
        f"{len(slot_L):,} labels, {single.num_moved:,} views of {num_moved:,} passages move; loops over "
        f"{LOOP_PASSAGES} of these; all with {REFINERS} threads"
    )


def rates(part: Part, loop: RefinementLoop, of: StoredVersion) -> None:
    """Compare a round's retrieval with exact search of the same views in this process, on as many threads."""
    queries_QD = loop.queries_TD[:RATE_QUESTIONS]
    exact = open_index(IndexParams(), of.blocks, Path(), threads=REFINERS)
    torch.set_num_threads(REFINERS)
    names = ("retrieval of a round", "exact search")
    samples = interleave(
        {
            names[0]: lambda: loop.refiners.search(PUBLISHED, queries_QD, DEPTH, "", no_progress),
            names[1]: lambda: [exact.search(queries_QD[at : at + 256], DEPTH) for at in range(0, RATE_QUESTIONS, 256)],
        }
    )
    part.add(samples, RATE_QUESTIONS)
    part.bars.append(Bar("retrieval's rate over that of exact search", speedup(samples, *names), 0.95, note=SHARES))


def rebuilds(
    part: Part, run: RunConfig, chunk_folder: Path, of: StoredVersion, refiners: RefinerPool, staging: str
) -> None:
    """Compare a version with 5 % changed passages and a whole build from embedded passages; publish both.

    A build's time starts with its first task: before, `index` only opens the encoder.
    """
    store, rng = Store(run.store.path), np.random.default_rng(5)
    numbers = iter(range(100))
    began = [0.0]
    run_tasks = build_index.run_tasks

    def run_tasks_from_now(*args: Any, **settings: Any) -> Any:
        began[0] = time.perf_counter()
        return run_tasks(*args, **settings)

    def whole() -> None:
        name = f"whole{next(numbers)}"
        own = run.model_copy(update={"index": run.index.model_copy(update={"name": name})})
        shutil.copytree(chunk_folder, store.local_path(paths.index_dir(name, "staging")), copy_function=os.link)
        build_index.run_tasks = run_tasks_from_now
        build_index.index(own)
        seconds["whole build"].append(time.perf_counter() - began[0])
        build_index.run_tasks = run_tasks
        shutil.rmtree(store.local_path(f"indexes/{name}"))

    def load_state(at: StateId) -> None:
        """Make the refiners load the state, as after a round's step: any request about one passage does."""
        first_passages, query_1D = refiners.shard_start[:-1], np.zeros((1, made_up.D), np.float32)
        zeros = np.zeros(len(first_passages), np.int64)
        labels = Labels(zeros, first_passages, zeros.astype(np.int16), np.ones(len(zeros), bool))
        refiners.winners(at, labels, query_1D)

    def build_changes() -> None:
        at = StateId("round", 1 + next(numbers))
        base = manifest.read(store, run.index.name)
        for entry in of.manifest.shards:
            rows = np.sort(rng.permutation(entry.num_passages)[: round(DIRTY_SHARE * entry.num_passages)])
            vectors = rng.standard_normal((len(rows), made_up.D), dtype=np.float32) / made_up.D**0.5
            state = ShardChanges.none(made_up.D).with_feedback(rows, vectors)
            store.write_bytes(at.shard_path(staging, entry.shard), with_trailer(state.to_bytes()))
        load_state(at)
        began[0] = time.perf_counter()
        version, _ = describe(run, of.manifest, refiners, at, [], {})
        manifest.publish(store, version.__class__(**{**version.__dict__, "parent": base.version}))
        seconds["changed alone"].append(time.perf_counter() - began[0])
        assert abs((version.dirty_share or 0) - DIRTY_SHARE) < 1e-3

    seconds: dict[str, list[float]] = {"whole build": [], "changed alone": []}
    for _ in range(6):
        whole()
        build_changes()
    samples = {name: times[1:] for name, times in seconds.items()}
    part.add({f"re-index, {name}": times for name, times in samples.items()}, len(of.ids))
    share = statistics.median(a / b for a, b in zip(samples["changed alone"], samples["whole build"]))
    part.bars.append(
        Bar("re-indexing 5 % dirty passages, of a whole build without encoding", 100 * share, 15, False, "%", SMALL)
    )


def main() -> None:
    part, seconds = Part("refinement", "Refinement", "passages"), dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="mvr-refine-") as folder:
        run = config(Path(folder))
        store = Store(folder)
        with record_time(seconds, "prepare"):
            prepare.prepare(run.prepare, store)
        with record_time(seconds, "make views"):
            made_up.stage(run, corpus.Corpus.open(store, "squad"))
        chunk_folder = Path(folder) / "staged"
        shutil.copytree(store.local_path(paths.index_dir("squad", "staging")), chunk_folder, copy_function=os.link)
        with session.connect(run.resources) as info:
            session.require(info, [session.Need("refiners", REFINERS, run.resources.cpus_per_searcher)])
            with record_time(seconds, "index"):
                version = build_index.index(run)
            of = read_version(store, version)
            questions, queries_TD = make_questions(store, of)
            journal = Journal(store, version, run, questions)
            task = RefinerTask(store.address, version, journal.folder, run.refine, match=run.evaluate.match)
            with RefinerPool(task, REFINERS, run.resources.cpus_per_searcher) as refiners:
                with record_time(seconds, "open"):
                    loop = RefinementLoop(questions, queries_TD, refiners, journal, no_progress)
                rebuilds(part, run, chunk_folder, of, refiners, journal.folder)
                rates(part, loop, of)
                labels = one_round(loop, seconds)
            updates(part, of, labels, loop.queries_at(0))
    stages = {name: seconds[name] for name in ("retrieve", "judge", "label", "update")}
    whole = sum(stages.values())
    part.bars.append(Bar("retrieval's share of the round", 100 * stages["retrieve"] / whole, 50, unit="%"))
    part.facts["passages, views a passage, questions"] = f"{len(of.ids):,}, {made_up.V}, {QUESTIONS:,}"
    part.facts["questions/s of the round's retrieval"] = loop.questions.num_labelled / stages["retrieve"]
    part.facts["one round, seconds"] = {**stages, "in all": whole}
    part.facts["vectors"] = "made up: questions lie near a view of their gold passage; texts and answers are SQuAD's"
    write(part)


if __name__ == "__main__":
    main()
