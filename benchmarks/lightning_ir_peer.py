"""Run the peer of `lightning_ir_mvr.py`, in an environment of its own without mvr_ray.

    python lightning_ir_peer.py FOLDER        # reads FOLDER/task.json and viewers.npy, writes report.json and *.npy
    python lightning_ir_peer.py FOLDER try    # only constructs the model, to test whether it can

All measurements are on the running model: position ids are recorded at the input of the position table.

Shapes: Q questions, P passages, V views per passage, D dimension, N question-passage pairs.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")
BATCH = 32


def make_model(task: dict[str, Any], projection: str | None) -> Any:
    """Make lightning-ir's own MVR over the task's backbone; a projection is a random linear layer on top."""
    from lightning_ir import BiEncoderModule
    from lightning_ir.models import MvrConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(task["seed"])
    config = MvrConfig(
        query_length=task["max_query_tokens"],
        doc_length=task["max_passage_tokens"],
        num_viewer_tokens=task["num_views"],
        projection=projection,
    )
    return BiEncoderModule(model_name_or_path=task["backbone"], config=config).eval()


def passage_views(module: Any, passages: list[str]) -> Tensor:
    """views_PVD, without gradient."""
    parts = []
    with torch.no_grad():
        for start in range(0, len(passages), BATCH):
            some = passages[start : start + BATCH]
            encoding = module.tokenizer.tokenize_doc(some, return_tensors="pt", padding=True, truncation=True)
            parts.append(module.model.encode_doc(encoding).embeddings)
    return torch.cat(parts)


def question_vectors(module: Any, questions: list[str]) -> Tensor:
    """queries_QD, without gradient."""
    with torch.no_grad():
        encoding = module.tokenizer.tokenize_query(questions, return_tensors="pt", padding=True, truncation=True)
        return module.model.encode_query(encoding).embeddings[:, 0]


def layout(module: Any, passage: str) -> dict[str, list[Any]]:
    """Return the tokens of one passage and the positions that the transformer looks up for them."""
    positions: list[Tensor] = []
    table = module.model.embeddings.position_embeddings
    hook = table.register_forward_pre_hook(lambda _, inputs: positions.append(inputs[0]))
    encoding = module.tokenizer.tokenize_doc([passage], return_tensors="pt", padding=True, truncation=True)
    with torch.no_grad():
        module.model.encode_doc(encoding)
    hook.remove()
    real = encoding["attention_mask"][0].bool()
    tokens = module.tokenizer.convert_ids_to_tokens(encoding["input_ids"][0][real].tolist())
    return {"tokens": tokens, "positions": positions[0].expand(1, len(real))[0][real].tolist()}


def losses(module: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Compute its losses on questions with one positive and one negative each, at several temperatures.

    The local loss fails on its own model's output, [N, 1, V]; for a measurement it also gets [N, V].
    """
    from lightning_ir import ContrastiveLocalLoss, InBatchCrossEntropy
    from lightning_ir.bi_encoder import BiEncoderOutput
    from lightning_ir.data import TrainBatch

    questions, pairs = task["loss_questions"], task["loss_passages"]
    batch = TrainBatch(
        queries=questions,
        docs=pairs,
        query_ids=[f"q{i}" for i in range(len(questions))],
        doc_ids=[[f"d{i}+", f"d{i}-"] for i in range(len(questions))],
        targets=torch.tensor([1, 0] * len(questions)),
    )
    with torch.no_grad():
        output = module.forward(batch)
        module.loss_functions = [(InBatchCrossEntropy(), 1.0)]
        figures: dict[str, Any] = {"similarity_shape": list(output.similarity.shape)}
        try:
            ContrastiveLocalLoss().compute_loss(output)
            figures["as_released"] = "no error"
        except RuntimeError as error:
            figures["as_released"] = f"{type(error).__name__}: {error}"
        figures["global"] = float(module._compute_losses(batch, output)[0])
    queries_ND = output.query_embeddings.embeddings[:, 0].repeat_interleave(2, dim=0)
    views_NVD = output.doc_embeddings.embeddings.clone().requires_grad_()
    similarity_NV = torch.einsum("nd,nvd->nv", queries_ND, views_NVD)
    apart = (similarity_NV - output.similarity[:, 0]).abs().max()
    assert apart < 1e-3, f"the similarity is not the inner product of question and view: {float(apart)}"

    def local(rows_NV: Tensor, temperature: float) -> Tensor:
        return ContrastiveLocalLoss(temperature=temperature).compute_loss(BiEncoderOutput(similarity=rows_NV))

    figures["local"] = {str(t): float(local(similarity_NV, t)) for t in task["temperatures"]}
    figures["local_positives_only"] = float(local(similarity_NV[0::2], 1.0))
    local(similarity_NV, 1.0).backward()
    share_N = views_NVD.grad.flatten(1).norm(dim=1)
    figures["gradient_on_negatives"] = float(share_N[1::2].sum() / share_N.sum())
    figures["rows"] = len(similarity_NV)
    return figures


def main(folder: Path, only_try: bool) -> None:
    task = json.loads((folder / "task.json").read_text())
    if only_try:
        make_model(task, task["projection"])
        return
    module = make_model(task, None)
    queries_QD = question_vectors(module, task["questions"])
    own_PVD = passage_views(module, task["passages"])
    report: dict[str, Any] = {"layout": layout(module, task["passages"][0])}
    viewers_VD = torch.from_numpy(np.load(folder / "viewers.npy", allow_pickle=False))
    ids = module.tokenizer.convert_tokens_to_ids([f"[VIE{view}]" for view in range(task["num_views"])])
    with torch.no_grad():
        module.model.get_input_embeddings().weight[ids] = viewers_VD
    shared_PVD = passage_views(module, task["passages"])
    report["losses"] = losses(module, task)
    projection = make_model(task, "linear").model.projection
    report["projection_parameters"] = sum(parameter.numel() for parameter in projection.parameters())
    for name, vectors in (("queries", queries_QD), ("own", own_PVD), ("shared", shared_PVD)):
        np.save(folder / f"{name}.npy", vectors.numpy(), allow_pickle=False)
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["try"])
