"""Builds tiny backbones with random weights, one of each supported kind, with tokenizers of their kind."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
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


def _wordpiece() -> tuple[Tokenizer, list[str]]:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
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
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer, special


def _model(kind: str, vocab: int) -> torch.nn.Module:
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
    made: dict[str, str] = {}

    def folder(kind: str) -> str:
        if kind not in made:
            path: Path = tmp_path_factory.mktemp(kind)
            build = {"roberta": _byte_level, "mpnet": _byte_level, "xlm-roberta": _metaspace}.get(kind, _wordpiece)
            tokenizer, special = build()
            cls, pad, sep = (special[2], special[0], special[3]) if special[0] == "[PAD]" else special[:3]
            PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, cls_token=cls, sep_token=sep, pad_token=pad
            ).save_pretrained(path)
            torch.manual_seed(7)
            _model(kind, tokenizer.get_vocab_size()).save_pretrained(path)
            made[kind] = str(path)
        return made[kind]

    return folder
