"""Run the peer of `training.py`: sentence-transformers' trainer, in an environment without mvr_ray.

    python training_peer.py FOLDER

The program reads FOLDER/task.json, prints that it is ready, and trains for each line `STEPS BATCH DROPOUT PRECISION`,
on the pairs in order. It answers with the seconds between the ends of its steps, the loss of the first, and the peak of
its memory.
"""

import json
import os
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from machine import peak_bytes

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")


def make_model(task: dict[str, Any], dropout: float) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    body = Transformer(task["backbone"], max_seq_length=task["max_passage_tokens"])
    for module in body.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    return SentenceTransformer(modules=[body, Pooling(task["dimension"], "mean"), Normalize()], device="cpu")


def train(task: dict[str, Any], steps: int, batch: int, dropout: float, precision: str) -> dict[str, Any]:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from torch.utils.data import BatchSampler, SequentialSampler
    from transformers import TrainerCallback

    step_ends: list[float] = []
    losses: list[float] = []

    class StepClock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            step_ends.append(time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    class InOrder(SentenceTransformerTrainer):
        def get_batch_sampler(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return BatchSampler(SequentialSampler(dataset), batch, drop_last=True)

    pairs = task["pairs"][: steps * batch]
    model = make_model(task, dropout)
    with tempfile.TemporaryDirectory() as folder:
        settings = SentenceTransformerTrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=2e-5,
            warmup_ratio=0.1,
            max_grad_norm=2.0,
            save_strategy="no",
            logging_strategy="steps",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=precision == "bf16",
        )
        trainer = InOrder(
            model=model,
            args=settings,
            train_dataset=Dataset.from_dict({"anchor": [a for a, _ in pairs], "positive": [b for _, b in pairs]}),
            loss=MultipleNegativesRankingLoss(model, scale=20.0),
            callbacks=[StepClock()],
        )
        trainer.train()
    peak = peak_bytes()
    return {"seconds": [b - a for a, b in pairwise(step_ends)], "loss": losses[0], "peak": peak}


def main(folder: Path) -> None:
    task = json.loads((folder / "task.json").read_text())
    torch.set_num_threads(task["threads"])
    print(json.dumps({"ready": "sentence-transformers"}), flush=True)
    for line in sys.stdin:
        steps, batch, dropout, precision = line.split()
        print("\n" + json.dumps(train(task, int(steps), int(batch), float(dropout), precision)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
