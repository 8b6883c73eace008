"""Run the peers of `encoding.py`, in an environment without mvr_ray.

    python encoding_peer.py FOLDER sentence-transformers | lightning-ir | dpr
    python encoding_peer.py FOLDER onnx | openvino | openvino-fp32 | openvino-int8    # sentence-transformers on these

The program reads FOLDER/task.json, prints that it is ready, and embeds all texts for each input line. `save NAME` also
writes FOLDER/NAME.npy; `warm` embeds one batch; `memory N` embeds N texts instead, most of them short, and prints the
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


def sentence_transformers(
    task: dict[str, Any], backend: str = "torch", change: Callable[[Any], None] = lambda model: None
) -> Embed:
    """Embed by sentence-transformers; `change` first gets the model of the back end's own class."""
    from sentence_transformers import SentenceTransformer

    try:
        from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    except ImportError:  # release 5, the last one that can be installed with ONNX Runtime
        from sentence_transformers.models import Normalize, Pooling, Transformer
    body: Any = Transformer(task["backbone"], max_seq_length=task["max_passage_tokens"], backend=backend)
    change(body.auto_model)
    model = SentenceTransformer(modules=[body, Pooling(task["dimension"], "mean"), Normalize()], device="cpu")
    return lambda texts: model.encode(texts, batch_size=task["batch"], show_progress_bar=False)


def openvino(task: dict[str, Any], precision: str = "") -> Embed:
    """Embed by OpenVINO; `precision` of products, if not OpenVINO's default on this processor."""

    def change(model: Any) -> None:
        model.ov_config |= {"INFERENCE_NUM_THREADS": task["threads"]}
        if precision == "f32":
            model.ov_config |= {"INFERENCE_PRECISION_HINT": "f32"}
        if precision == "int8":
            model.model = quantize(task, model.model)
        model.request = None
        model.compile()

    return sentence_transformers(task, "openvino", change)


def quantize(task: dict[str, Any], model: Any) -> Any:
    """Quantise the model to int8 by NNCF's static quantisation of transformers, calibrated as ours."""
    import nncf
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task["backbone"])
    names = {name for one in model.inputs for name in one.get_names()}
    cut = {"truncation": True, "max_length": task["max_passage_tokens"], "return_tensors": "np"}
    encodings = [tokenizer([text], **cut) for text in task["calibration"]]
    data = nncf.Dataset([{name: array for name, array in one.items() if name in names} for one in encodings])
    return nncf.quantize(model, data, subset_size=len(encodings), model_type=nncf.ModelType.TRANSFORMER)


def lightning_ir(task: dict[str, Any]) -> Embed:
    """Embed by its own single-vector model and tokenizer, in batches in the given order, as its index callback does."""
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
    """Embed by DPR's loop (generate_dense_embeddings.py): batches in the given order, every text padded to full
    length."""
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


WAYS: dict[str, Callable[[dict[str, Any]], Embed]] = {
    "sentence-transformers": sentence_transformers,
    "lightning-ir": lightning_ir,
    "dpr": dpr,
    "onnx": lambda task: sentence_transformers(task, "onnx"),
    "openvino": openvino,
    "openvino-fp32": lambda task: openvino(task, "f32"),
    "openvino-int8": lambda task: openvino(task, "int8"),
}


def memory_text(row: int) -> str:
    """Return a short text; every fiftieth is as long as a paragraph, so that batches differ in size."""
    return f"{row}" if row % 50 else "river " * (40 + row // 50 * 37 % 200)


def memory(embed: Embed, num: int) -> dict[str, Any]:
    """Measure peak bytes before and after embedding `num` texts, passed in one call, as its interface requires."""
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
        answer: dict[str, Any] = {}
        if word == "memory":
            answer = memory(embed, int(argument))
        elif word == "warm":
            embed(task["texts"][: task["batch"]])
        else:
            vectors_PD = embed(task["texts"])
            if word == "save":
                np.save(folder / f"{argument}.npy", vectors_PD, allow_pickle=False)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
