"""The peers' side of `encoding.py`: runs in an environment where mvr_ray is not installed.

    python encoding_peer.py FOLDER sentence-transformers | lightning-ir | dpr

Reads FOLDER/task.json, says that it is ready, and embeds all its texts for each line that it is sent. `save NAME` also
keeps FOLDER/NAME.npy; `warm` embeds one batch; `memory N` embeds N texts instead, most of them short, and tells the
peak of its memory before and after.

Shapes: P passages, D dimension.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import forget_peak, peak_bytes

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")
Embed = Callable[[list[str]], np.ndarray]


def sentence_transformers(task: dict[str, Any]) -> Embed:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    body = Transformer(task["backbone"], max_seq_length=task["max_passage_tokens"])
    model = SentenceTransformer(modules=[body, Pooling(task["dimension"], "mean"), Normalize()], device="cpu")
    return lambda texts: model.encode(texts, batch_size=task["batch"], show_progress_bar=False)


def lightning_ir(task: dict[str, Any]) -> Embed:
    """Its own single-vector model and tokenizer, in batches in the order given, as its index callback has them."""
    from lightning_ir import BiEncoderModule
    from lightning_ir.models import DprConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = DprConfig(
        doc_length=task["max_passage_tokens"],
        query_pooling_strategy="mean",
        doc_pooling_strategy="mean",
        projection=None,
        add_marker_tokens=False,
    )
    module: Any = BiEncoderModule(model_name_or_path=task["backbone"], config=config).eval()

    def embed(texts: list[str]) -> np.ndarray:
        parts = []
        with torch.inference_mode():
            for start in range(0, len(texts), task["batch"]):
                some = texts[start : start + task["batch"]]
                encoding = module.tokenizer.tokenize_doc(some, return_tensors="pt", padding=True, truncation=True)
                vectors_PD = module.model.encode_doc(encoding).embeddings.reshape(len(some), -1)
                parts.append(torch.nn.functional.normalize(vectors_PD, dim=-1))
        return torch.cat(parts).numpy()

    return embed


def dpr(task: dict[str, Any]) -> Embed:
    """DPR's loop (generate_dense_embeddings.py): batches in the order given, every text padded to the full length."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(task["backbone"], add_pooling_layer=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(task["backbone"])

    def embed(texts: list[str]) -> np.ndarray:
        parts = []
        with torch.inference_mode():
            for start in range(0, len(texts), task["batch"]):
                encoding = tokenizer(
                    texts[start : start + task["batch"]],
                    padding="max_length",
                    max_length=task["max_passage_tokens"],
                    truncation=True,
                    return_tensors="pt",
                )
                states_PTD = model(**encoding).last_hidden_state
                real_PT1 = encoding["attention_mask"][..., None]
                parts.append(torch.nn.functional.normalize((states_PTD * real_PT1).sum(1), dim=-1))
        return torch.cat(parts).numpy()

    return embed


WAYS = {"sentence-transformers": sentence_transformers, "lightning-ir": lightning_ir, "dpr": dpr}


def memory_text(row: int) -> str:
    """Short, but every fiftieth as long as a paragraph, so that batches are of many sizes."""
    return f"{row}" if row % 50 else "river " * (40 + row // 50 * 37 % 200)


def memory(embed: Embed, num: int) -> dict[str, Any]:
    """Peak bytes before and after embedding `num` texts, all handed over at once, as its interface asks."""
    embed(["warm up"] * 64)
    forget_peak()
    before = peak_bytes()
    embed([memory_text(row) for row in range(num)])
    return {"before": before, "after": peak_bytes()}


def main(folder: Path, name: str) -> None:
    task = json.loads((folder / "task.json").read_text())
    torch.set_num_threads(task["threads"])
    embed = WAYS[name](task)
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        word, _, argument = line.strip().partition(" ")
        told: dict[str, Any] = {}
        if word == "memory":
            told = memory(embed, int(argument))
        elif word == "warm":
            embed(task["texts"][: task["batch"]])
        else:
            vectors_PD = embed(task["texts"])
            if word == "save":
                np.save(folder / f"{argument}.npy", vectors_PD, allow_pickle=False)
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
