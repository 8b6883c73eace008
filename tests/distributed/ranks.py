"""Trains a model on several ranks without Ray: forks of one process, which imports for all of them.

python ranks.py COUNT     with the run as JSON on stdin
"""

import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from mvr_ray.config import RunConfig
from mvr_ray.distributed.train import LOOPS, TrainedModel, train
from mvr_ray.types import no_progress


def train_on_ranks(run: RunConfig, count: int) -> TrainedModel:
    """The model that `count` processes train."""

    def train_again(*_: object) -> None:
        raise AssertionError("the ranks have not finished the training")

    command = [sys.executable, __file__, str(count)]
    subprocess.run(command, input=run.model_dump_json(), text=True, check=True, timeout=240)
    return train(run, train_again)


def _train_one(run: RunConfig, rank: int, count: int, meeting: Path) -> None:
    torch.set_num_threads(run.resources.threads)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    if rank == 0:
        train(run)
    else:
        loop = LOOPS[run.train.task]
        loop(loop.open_job(run), no_progress, torch.device("cpu")).run()
    torch.distributed.destroy_process_group()


def main(run: RunConfig, count: int) -> int:
    """The exit status says whether all ranks ended well."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meet"
        ranks = [context.Process(target=_train_one, args=(run, rank, count, meeting)) for rank in range(count)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(RunConfig.model_validate_json(sys.stdin.read()), int(sys.argv[1])))
