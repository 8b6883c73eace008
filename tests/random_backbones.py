"""Builds tiny backbones with random weights, of many architectures, with tokenizers of their kind."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    DebertaConfig,
    DebertaV2Config,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    MPNetModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

TEXT = [
    "The river rises in the hills. It runs to the sea! Where does the river end?",
    "Dr. Smith of the city wrote of the old bridge. The bridge was built in 1801.",
    "Salt and trade made the town rich. Boats came every day; later they did not.",
]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
POSITIONS = 96


def _pieces(pattern: str, texts: list[str]) -> tuple[list[str], list[str]]:
    """The characters and the short words. A trained vocabulary would differ from process to process."""
    words = re.findall(pattern, " ".join(texts))
    return sorted(set("".join(words))), sorted({word for word in words if 1 < len(word) <= 5})


def _wordpiece() -> tuple[Tokenizer, list[str]]:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    characters, words = _pieces(r"[a-z]+|[0-9]+|[^\sa-z0-9]", [text.lower() for text in TEXT])
    pieces = [*special, *characters, *(f"##{one}" for one in characters if one.isalnum()), *words]
    tokenizer = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer, special


def _byte_level() -> tuple[Tokenizer, list[str]]:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer, special


def _metaspace() -> tuple[Tokenizer, list[str]]:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    characters, words = _pieces(r"\S+", TEXT)
    scores = {**dict.fromkeys(special, 0.0), "▁": -2.0, **{f"▁{word}": -3.0 for word in words}}
    scores |= {one: -2.0 - at / 100 for at, one in enumerate(characters)}
    tokenizer = Tokenizer(models.Unigram(list(scores.items()), unk_id=special.index("<unk>")))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer, special


@dataclass(frozen=True)
class TokenizerKind:
    """What a tokenizer puts around a text, its special tokens, and where it pads."""

    template: str
    build: Callable[[], tuple[Tokenizer, list[str]]]
    tokens: dict[str, str]
    padding_side: str = "right"


BERT_TOKENS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
TOKENIZERS = {
    "modernbert": TokenizerKind("[CLS] $A [SEP]", _wordpiece, BERT_TOKENS),
    "electra": TokenizerKind("[CLS] $A [SEP]", _wordpiece, BERT_TOKENS),
    "deberta": TokenizerKind("[CLS] $A [SEP]", _wordpiece, BERT_TOKENS),
    "deberta-v2": TokenizerKind("[CLS] $A [SEP]", _wordpiece, BERT_TOKENS),
    "t5": TokenizerKind("$A </s>", _metaspace, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}),
    "qwen3": TokenizerKind("$A </s>", _byte_level, {"eos_token": "</s>", "pad_token": "<pad>"}, "left"),
    "mistral": TokenizerKind("<s> $A </s>", _byte_level, {"bos_token": "<s>", "pad_token": "<pad>"}, "left"),
    "llama": TokenizerKind("<s> $A", _byte_level, {"bos_token": "<s>", "pad_token": "<pad>"}),
    "gemma3_text": TokenizerKind("<s> $A </s>", _metaspace, {"bos_token": "<s>", "pad_token": "<pad>"}),
}
"""Of architectures whose tokenizers put their own tokens around a text."""


def _config(kind: str, vocab: int) -> Any:
    own = {"vocab_size": vocab, "max_position_embeddings": POSITIONS, "pad_token_id": 1, **SIZES}
    rotary = {**own, "num_key_value_heads": 1, "head_dim": 8}
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
    configs: dict[str, Callable[[], Any]] = {
        "modernbert": lambda: ModernBertConfig(
            **own,
            global_attn_every_n_layers=2,
            local_attention=8,
            cls_token_id=2,
            sep_token_id=3,
            bos_token_id=None,
            eos_token_id=None,
        ),
        "electra": lambda: ElectraConfig(**own, embedding_size=12),
        "deberta": lambda: DebertaConfig(**own, **relative),
        "deberta-v2": lambda: DebertaV2Config(**own, **relative, position_biased_input=False, position_buckets=8),
        "t5": lambda: T5Config(vocab_size=vocab, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
        "qwen3": lambda: Qwen3Config(**rotary),
        "mistral": lambda: MistralConfig(**rotary, sliding_window=None),
        "llama": lambda: LlamaConfig(**rotary),
        "gemma3_text": lambda: Gemma3TextConfig(
            **rotary,
            use_bidirectional_attention=True,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"],
        ),
    }
    return configs[kind]()


def enlarge_weights(model: torch.nn.Module) -> None:
    """Initial weights are so small that every token's state is nearly its own embedding, and so that of the first token
    nearly the same in all texts."""
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 10 if weight.ndim > 1 and weight.std() < 0.1 else 1


def relative_error(actual_PVD: np.ndarray, expected_PVD: np.ndarray, mask_PV: np.ndarray) -> float:
    """The error of views, relative to how far passages lie from their mean: about 1 for those of other passages."""
    is_view_PV1 = mask_PV[..., None]
    mean_VD = (expected_PVD * is_view_PV1).sum(0) / np.maximum(is_view_PV1.sum(0), 1)
    error, spread = (np.linalg.norm((other - expected_PVD) * is_view_PV1) for other in (actual_PVD, mean_VD))
    return float(error / spread)


def _model(kind: str, vocab: int) -> torch.nn.Module:
    if kind in TOKENIZERS:
        config = _config(kind, vocab)
        model = T5EncoderModel(config) if kind == "t5" else AutoModel.from_config(config)
        enlarge_weights(model)
        return model
    offset = {"vocab_size": vocab, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1, **SIZES}
    if kind == "bert":
        return BertModel(BertConfig(vocab_size=vocab, max_position_embeddings=POSITIONS, **SIZES))
    if kind == "distilbert":
        return DistilBertModel(
            DistilBertConfig(
                vocab_size=vocab, max_position_embeddings=POSITIONS, dim=16, n_layers=2, n_heads=2, hidden_dim=24
            )
        )
    if kind == "roberta":
        return RobertaModel(RobertaConfig(type_vocab_size=1, **offset))
    if kind == "xlm-roberta":
        return XLMRobertaModel(XLMRobertaConfig(type_vocab_size=1, **offset))
    return MPNetModel(MPNetConfig(**offset))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """tiny(kind) is the folder of a random backbone of that kind."""
    folders: dict[str, str] = {}

    def folder(kind: str) -> str:
        if kind not in folders:
            path: Path = tmp_path_factory.mktemp(kind)
            if own := TOKENIZERS.get(kind):
                tokenizer, special = own.build()
                ids = [(token, tokenizer.token_to_id(token)) for token in special]
                tokenizer.post_processor = processors.TemplateProcessing(single=own.template, special_tokens=ids)
                fast = PreTrainedTokenizerFast(
                    tokenizer_object=tokenizer, padding_side=own.padding_side, model_max_length=POSITIONS, **own.tokens
                )
                fast.save_pretrained(path)
                torch.manual_seed(7)
                _model(kind, tokenizer.get_vocab_size()).save_pretrained(path)
                folders[kind] = str(path)
                return folders[kind]
            build = {"roberta": _byte_level, "mpnet": _byte_level, "xlm-roberta": _metaspace}.get(kind, _wordpiece)
            tokenizer, special = build()
            cls, pad, sep = (special[2], special[0], special[3]) if special[0] == "[PAD]" else special[:3]
            PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, cls_token=cls, sep_token=sep, pad_token=pad
            ).save_pretrained(path)
            torch.manual_seed(7)
            _model(kind, tokenizer.get_vocab_size()).save_pretrained(path)
            folders[kind] = str(path)
        return folders[kind]

    return folder
