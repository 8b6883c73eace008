"""Run the GPU suite: encoding without padding, exact search at Wikipedia's size on one card, training steps.

    python benchmarks/gpu.py                            # under ten minutes on one GPU; results/bench/gpu.json
    python benchmarks/gpu.py --model FOLDER             # your own BERT instead of random weights
    python benchmarks/gpu.py --device cpu --size tiny   # checks the script; stores nothing

Needs torch, transformers and numpy, beside this repository; sentence-transformers is measured if it is installed.
Speeds do not depend on weights, so bert-base's sizes with random ones are enough. The floors come from the same card in
the same run: bytes read a second by a sum over 8 GiB, operations a second of a product of 8192 x 8192 bfloat16.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from gpu_encoding import EncodingLoad, made_texts, measure_encoding, measure_training, random_model
from gpu_search import PASSAGES, D, Machine, measure_search
from measure import Part, bar_row, interleave, write

SIZES = {
    "full": {
        "words": 30_517,
        "model": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
        "texts": 20_000,
        "passages": PASSAGES,
        "dimension": D,
        "rounds": 7,
        "questions": 64,
        "read": 1 << 31,
        "product": 8192,
    },
    "tiny": {
        "words": 500,
        "model": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
        "texts": 40,
        "passages": 100,
        "dimension": 48,
        "rounds": 1,
        "questions": 4,
        "read": 1 << 20,
        "product": 128,
    },
}


def machine(device: str, read: int, product: int) -> Machine:
    """Measure the device's own rates: the best of seven tries each."""
    sync: Callable[[], None] = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    data = torch.ones(read, device=device)
    read_s = min(interleave({"sum": lambda: (data.sum(), sync())}, rounds=7)["sum"])
    a = torch.ones(product, product, device=device, dtype=torch.bfloat16)
    product_s = min(interleave({"product": lambda: (a @ a, sync())}, rounds=7)["product"])
    return Machine(device, 4.0 * read / read_s, 2.0 * product**3 / product_s, sync)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Encoding, exact search and training on one GPU.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to check the script")
    parser.add_argument("--size", choices=tuple(SIZES), default="full", help="tiny stores no result")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder of a BERT; random weights by default")
    parser.add_argument("--helpers", type=int, default=8, help="processes that tokenise")
    args = parser.parse_args(words)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU here, so nothing was measured; --device cpu --size tiny checks the script", file=sys.stderr)
        return 2
    sizes, began = SIZES[args.size], time.perf_counter()
    part = Part("gpu", "On one GPU", "items")
    card = machine(args.device, sizes["read"], sizes["product"])
    part.facts["device"] = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    part.facts["bytes read a second"], part.facts["bf16 operations a second"] = card.read_bytes, card.matrix_flops
    part.facts["torch"] = torch.__version__
    with tempfile.TemporaryDirectory(prefix="mvr-gpu-") as scratch:
        folder = args.model
        if folder is None:
            folder = Path(scratch) / "model"
            random_model(folder, sizes["words"], **sizes["model"])
        part.facts["model"] = str(args.model.name) if args.model else f"random weights, {sizes['model']}"
        texts = made_texts(sizes["texts"], sizes["words"], 300)
        tiny = args.size == "tiny"
        load = EncodingLoad(texts, 2048 if tiny else 65_536, 0 if tiny else args.helpers)
        measure_encoding(part, card, str(folder), load, sizes["rounds"])
        print(f"encoding measured, {time.perf_counter() - began:.0f} s", flush=True)
        measure_training(part, card, str(folder), sizes["questions"], sizes["rounds"])
        print(f"training measured, {time.perf_counter() - began:.0f} s", flush=True)
    for kind in ("int8", "fp16"):
        measure_search(part, card, sizes["passages"], sizes["dimension"], kind, sizes["rounds"])
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
        print(f"search of {kind} measured, {time.perf_counter() - began:.0f} s", flush=True)
    part.facts["triton"] = "there" if importlib.util.find_spec("triton") else "not there"
    if tiny or not args.device.startswith("cuda"):
        for bar in (bar for bar in part.bars if " over " not in bar.what):
            print(f"| {bar_row({**asdict(bar), 'met': bar.is_met})} |")
        print("the script runs; times of this size are meaningless and not stored")
        return 0
    write(part)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
