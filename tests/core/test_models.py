"""Any text encoder gives the vectors that sentence-transformers gives, however its texts are batched or stored."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_backbones import SIZES
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense, Normalize, Pooling, Transformer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoTokenizer,
    ConvBertConfig,
    DPRConfig,
    DPRQuestionEncoder,
    FNetConfig,
    NystromformerConfig,
)

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.model_folder import LENGTHS
from mvr_ray.errors import EncoderError
from mvr_ray.types import Passage

SPEC = EncoderSpec(
    strategy="pooling", num_views=3, use_title=False, max_query_tokens=None, max_passage_tokens=None, normalize=False
)
TEXTS = [
    "The river rises in the hills. It runs to the sea! Where does the river end?",
    "Salt made the town rich.",
    "The bridge was built in 1801. Boats came every day; later they did not. " * 6,
]
PROMPTS = {"query": "Where does the river: ", "document": "The old bridge of the town: "}
POOLINGS = {
    "bert": "mean",
    "roberta": "cls",
    "xlm-roberta": "mean",
    "distilbert": "max",
    "mpnet": "mean_sqrt_len_tokens",
    "electra": "cls",
    "modernbert": "cls",
    "deberta": "mean",
    "deberta-v2": "mean",
    "t5": "mean",
    "qwen3": "lasttoken",
    "mistral": "lasttoken",
    "llama": "weightedmean",
    "gemma3_text": "mean",
}
"""Of every architecture, one that its models use."""
CAUSAL = ("qwen3", "mistral", "llama")


def sentence_model(folder: str, path: Path, modes: Any = "mean", *heads: torch.nn.Module, **settings: Any) -> str:
    """Write a sentence-transformers folder around a transformer; returns its path."""
    body = with_frame(Transformer(folder, max_seq_length=settings.pop("max_seq_length", 60)))
    pooling = Pooling(16, modes, include_prompt=settings.pop("include_prompt", True))
    SentenceTransformer(modules=[body, pooling, *heads], device="cpu", **settings).save_pretrained(str(path))
    return str(path)


def with_frame(body: Transformer) -> Transformer:
    """Have the tokenizer put [CLS] and [SEP] around a text where it puts nothing."""
    tokenizer: Any = body.tokenizer
    if tokenizer.cls_token and len(tokenizer("").input_ids) == 0:
        cls, sep = tokenizer.cls_token, tokenizer.sep_token
        special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (cls, sep)]
        template = TemplateProcessing(single=f"{cls} $A {sep}", special_tokens=special)
        tokenizer.backend_tokenizer.post_processor = template
    return body


def random_dense(in_size: int, out_size: int, **options: Any) -> Dense:
    torch.manual_seed(5)
    return Dense(in_size, out_size, **options)


def check_equal(encoder: DualEncoder, oracle: SentenceTransformer, **options: Any) -> None:
    """Both sides, alone and in batches, as `encode_query` and `encode_document` give them."""
    passages = encoder.tokenize_passages([Passage(str(at), "", text) for at, text in enumerate(TEXTS)])
    views_PVD, mask_PV = encoder.embed_passages(passages)
    assert mask_PV.all() and views_PVD.shape[1] == 1
    np.testing.assert_allclose(views_PVD[:, 0], oracle.encode_document(TEXTS, **options), atol=1e-5)
    np.testing.assert_allclose(encoder.embed_queries(TEXTS), oracle.encode_query(TEXTS, **options), atol=1e-5)
    alone = [encoder.embed_passages([passage]).views_PVD for passage in passages]
    np.testing.assert_allclose(np.concatenate(alone), views_PVD, atol=1e-5)


@pytest.mark.parametrize("kind", POOLINGS)
def test_every_architecture_gives_sentence_transformers_vectors_and_so_does_what_is_stored(tiny, tmp_path, kind):
    """With prompts, the pooling, a linear layer, and texts that are cut at the model's own length."""
    heads = random_dense(16, 12, activation_function=torch.nn.Tanh()), Normalize()
    folder = sentence_model(tiny(kind), tmp_path / "model", POOLINGS[kind], *heads, prompts=PROMPTS)
    encoder, oracle = DualEncoder.from_backbone(folder, SPEC), SentenceTransformer(folder, device="cpu")
    assert encoder.dimension == 12
    assert (encoder.spec.query_prompt, encoder.spec.passage_prompt) == (PROMPTS["query"], PROMPTS["document"])
    assert encoder.spec.max_passage_tokens == encoder.spec.max_query_tokens == 60
    check_equal(encoder, oracle)
    encoder.save(tmp_path / "encoder")
    copy = DualEncoder.load(tmp_path / "encoder")
    assert copy.fingerprint == encoder.fingerprint
    check_equal(copy, oracle)
    check_equal(copy, SentenceTransformer(str(tmp_path / "encoder" / "shared"), device="cpu"))


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize(
    "modes",
    [
        *("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"),
        ("cls", "max", "weightedmean", "lasttoken"),
    ],
)
def test_every_pooling_is_that_of_sentence_transformers(tiny, tmp_path, modes, include_prompt):
    heads = [random_dense(64, 8, activation_function=torch.nn.Identity())] if isinstance(modes, tuple) else []
    folder = sentence_model(tiny("modernbert"), tmp_path, modes, *heads, prompts=PROMPTS, include_prompt=include_prompt)
    check_equal(DualEncoder.from_backbone(folder, SPEC), SentenceTransformer(folder, device="cpu"))
    if heads:
        with pytest.raises(EncoderError, match=r"joins 4 poolings .* set encoder\.strategy to pooling"):
            DualEncoder.from_backbone(folder, replace(SPEC, strategy="snippet_means"))


def test_real_weights_with_prompts_truncation_and_normalisation(minilm, tmp_path):
    folder = str(minilm)
    oracle = SentenceTransformer(folder, device="cpu", prompts=PROMPTS)
    spec = replace(SPEC, query_prompt=PROMPTS["query"], passage_prompt=PROMPTS["document"])
    check_equal(DualEncoder.from_backbone(folder, spec), oracle)
    short = DualEncoder.from_backbone(folder, replace(spec, truncate_dim=64, normalize=True))
    check_equal(short, oracle, truncate_dim=64, normalize_embeddings=True)
    raw = DualEncoder.from_backbone(folder, replace(spec, truncate_dim=64))
    check_equal(raw, oracle, truncate_dim=64)
    raw.save(tmp_path)
    check_equal(DualEncoder.load(tmp_path), oracle, truncate_dim=64)
    check_equal(raw, SentenceTransformer(str(tmp_path / "shared"), device="cpu"))


@pytest.mark.parametrize(
    ("prompts", "default"),
    [({"query": "salt "}, "query"), ({"query": "", "document": "", "any": "salt "}, "any"), ({"any": "salt "}, "any")],
)
def test_a_default_prompt_is_that_of_neither_side(tiny, tmp_path, prompts, default):
    folder = sentence_model(tiny("bert"), tmp_path, "mean", prompts=prompts, default_prompt_name=default)
    check_equal(DualEncoder.from_backbone(folder, SPEC), SentenceTransformer(folder, device="cpu"))


def test_prompts_of_other_names_are_named_unless_both_sides_have_one(tiny, tmp_path, caplog):
    folder = sentence_model(tiny("bert"), tmp_path, "mean", prompts={"s2p_query": "salt ", "any": "river "})
    DualEncoder.from_backbone(folder, SPEC)
    assert f"backbone {folder} has prompts of names that are not read: any, s2p_query; set encoder.query" in caplog.text
    caplog.clear()
    DualEncoder.from_backbone(folder, replace(SPEC, query_prompt="salt "))
    assert not caplog.text
    settings = Path(folder) / "config_sentence_transformers.json"
    settings.write_text(json.dumps({"prompts": {"query": "salt ", "any": "river "}}))
    DualEncoder.from_backbone(folder, SPEC)
    assert not caplog.text
    settings.write_text(json.dumps({"prompts": {"query": 5}}))
    with pytest.raises(EncoderError, match=r"has a prompt 'query' that is no text; correct it"):
        DualEncoder.from_backbone(folder, SPEC)


def test_a_folder_of_older_versions_is_read_with_its_subfolder_and_lower_case(tiny, tmp_path):
    """Transformer in 0_Transformer, modes by their old names, and a default prompt, which neither side has."""
    with_frame(Transformer(tiny("roberta"), max_seq_length=40)).save(str(tmp_path / "0_Transformer"))
    files = {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": 16, "pooling_mode_cls_token": True},
        "0_Transformer/sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": {"any": "Salt: "}, "default_prompt_name": "any"},
    }
    (tmp_path / "1_Pooling").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    encoder, oracle = DualEncoder.from_backbone(str(tmp_path), SPEC), SentenceTransformer(str(tmp_path), device="cpu")
    np.testing.assert_allclose(encoder.embed_queries(TEXTS), oracle.encode_query(TEXTS), atol=1e-5)


@pytest.mark.parametrize("kind", POOLINGS)
def test_snippet_means_are_means_of_the_states_of_one_pass_through_the_heads(tiny, tmp_path, kind):
    heads = random_dense(16, 12, activation_function=torch.nn.Tanh()), Normalize()
    folder = sentence_model(tiny(kind), tmp_path, POOLINGS[kind], *heads, prompts=PROMPTS, max_seq_length=90)
    encoder = DualEncoder.from_backbone(folder, replace(SPEC, strategy="snippet_means", normalize=True))
    oracle = SentenceTransformer(folder, device="cpu")
    passage = Passage("1", "", TEXTS[0])
    views_PVD, mask_PV = encoder.embed_passages(encoder.tokenize_passages([passage, Passage("2", "", TEXTS[2])]))
    states_TD = torch.as_tensor(oracle.encode_document(TEXTS[0], output_value="token_embeddings"))
    text = PROMPTS["document"] + TEXTS[0]
    tokens = oracle.tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    ends = [end - len(PROMPTS["document"]) for _, end in tokens["offset_mapping"]]
    for view, (start, end) in enumerate(encoder.snippets(passage)):
        first = encoder.snippets(passage)[view - 1][1] if view else 0
        own = [
            at
            for at, (stop, special) in enumerate(zip(ends, tokens["special_tokens_mask"]))
            if not special and first < stop <= end
        ]
        features = {"sentence_embedding": states_TD[own].mean(0)[None]}
        for head in list(oracle)[2:]:
            features = head(features)
        np.testing.assert_allclose(views_PVD[0, view], features["sentence_embedding"][0].detach(), atol=1e-5)
        assert start < end
    assert mask_PV[0].sum() == 3
    assert (views_PVD[~mask_PV] == 0).all()


@pytest.mark.parametrize("kind", ["bert", "modernbert", "t5", "qwen3"])
def test_windows_are_read_alone_and_share_their_tokens_out(tiny, kind):
    """Against a passage that is cut by hand into windows of the same tokens."""
    spec = replace(SPEC, strategy="snippet_means", num_views=3, max_passage_tokens=40, overlap_tokens=8)
    encoder = DualEncoder.from_backbone(tiny(kind), spec)
    passage = Passage("1", "The river", TEXTS[2])
    [tokens] = encoder.tokenize_passages([passage])
    rows = encoder.layout.rows(tokens)
    assert len(rows) > 3 and all(row.num_tokens == 40 for row in rows)
    tower = encoder.passage_tower
    states, views = [], []
    for row in rows:
        with torch.no_grad():
            ids_1T = torch.from_numpy(row.input_ids).long()[None]
            states.append(tower.backbone(ids_1T).last_hidden_state[0])
        views.append(torch.from_numpy(row.view_T))
    states_ND, view_N = torch.cat(states), torch.cat(views)
    whole = encoder.passage_tower.tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"]
    assert torch.cat([torch.from_numpy(row.input_ids) for row in rows])[view_N >= 0].tolist() == whole
    embedding = encoder.embed_passages([tokens, *encoder.tokenize_passages([Passage("2", "", TEXTS[1])])])
    for view in range(3):
        np.testing.assert_allclose(embedding.views_PVD[0, view], states_ND[view_N == view].mean(0), atol=1e-5)
    cut = DualEncoder.from_backbone(tiny(kind), replace(spec, overlap_tokens=0))
    short = Passage("3", "", TEXTS[1])
    same = [one.embed_passages(one.tokenize_passages([short])).views_PVD for one in (encoder, cut)]
    np.testing.assert_array_equal(*same)
    assert cut.fingerprint != encoder.fingerprint


def test_the_fingerprint_changes_with_prompts_pooling_heads_and_truncation(tiny, tmp_path):
    def name(at: str, spec: EncoderSpec, *model: Any, **settings: Any) -> str:
        folder = sentence_model(tiny("modernbert"), tmp_path / at, *model, **settings)
        return DualEncoder.from_backbone(folder, spec).fingerprint

    tanh, plain = (random_dense(16, 16, activation_function=one) for one in (torch.nn.Tanh(), torch.nn.Identity()))
    prompt_spec = replace(SPEC, query_prompt="query: ")
    different = [
        name("a", SPEC),
        name("b", SPEC, "cls"),
        name("c", SPEC, "mean", tanh),
        name("d", SPEC, "mean", plain),
        name("e", SPEC, "mean", Normalize()),
        name("f", prompt_spec),
        name("g", prompt_spec, include_prompt=False),
        name("h", replace(SPEC, passage_prompt="query: ")),
        name("i", replace(SPEC, truncate_dim=8)),
        name("j", replace(SPEC, truncate_dim=9)),
        name("k", SPEC, max_seq_length=50),
    ]
    assert len(set(different)) == len(different)
    means = replace(SPEC, strategy="snippet_means")
    assert name("l", means) == name("m", means, "cls") == name("n", means, "mean", Normalize())
    assert name("o", means, "mean", tanh) != name("l", means)


@pytest.mark.parametrize("kind", ["modernbert", "gemma3_text", "electra"])
def test_viewers_have_positions_of_their_own_where_a_model_takes_them(tiny, tmp_path, kind):
    """Viewers at one position have no order among themselves, but where attention is local by place; padding and
    storing change nothing."""
    spec = replace(SPEC, strategy="viewers", max_passage_tokens=60, max_query_tokens=40)
    encoder = DualEncoder.from_backbone(tiny(kind), spec)
    tower = encoder.passage_tower
    passages = encoder.tokenize_passages([Passage(str(at), "", text) for at, text in enumerate(TEXTS)])
    views_PVD, _ = encoder.embed_passages(passages)
    np.testing.assert_allclose(encoder.embed_passages(passages[:1]).views_PVD, views_PVD[:1], atol=1e-5)
    assert np.abs(views_PVD[0, 0] - views_PVD[0, 1]).max() > 1e-3
    assert passages[0].position_ids[:4].tolist() == [tower.first_position + at for at in (0, 0, 0, 1)]
    reverse = passages[1]._replace(input_ids=passages[1].input_ids.copy())
    reverse.input_ids[:3] = reverse.input_ids[2::-1]
    if kind == "electra":
        np.testing.assert_allclose(encoder.embed_passages([reverse]).views_PVD[0], views_PVD[1, ::-1], atol=1e-4)
    encoder.save(tmp_path)
    np.testing.assert_array_equal(DualEncoder.load(tmp_path).embed_passages(passages).views_PVD, views_PVD)


@pytest.mark.parametrize("kind", ["t5", "deberta", "deberta-v2", *CAUSAL])
def test_viewers_are_refused_where_position_ids_do_not_order_the_tokens(tiny, kind):
    with pytest.raises(EncoderError) as error:
        DualEncoder.from_backbone(tiny(kind), replace(SPEC, strategy="viewers"))
    assert f"in a backbone of model type {kind!r} position ids alone do not order the tokens; use a" in str(error.value)


@pytest.mark.parametrize("kind", ["t5", "deberta-v2", "modernbert"])
def test_snippets_by_viewer_are_read_by_every_model_that_reads_both_ways(tiny, kind):
    encoder = DualEncoder.from_backbone(tiny(kind), replace(SPEC, strategy="snippets"))
    passages = encoder.tokenize_passages([Passage(str(at), "", text) for at, text in enumerate(TEXTS)])
    views_PVD, mask_PV = encoder.embed_passages(passages)
    np.testing.assert_allclose(encoder.embed_passages(passages[1:2]).views_PVD, views_PVD[1:2], atol=1e-5)
    assert mask_PV[0].all() and np.abs(views_PVD[0, 0] - views_PVD[0, 1]).max() > 1e-3


@pytest.mark.parametrize("kind", CAUSAL)
def test_snippets_by_viewer_are_refused_where_a_model_reads_from_left_to_right(tiny, kind):
    with pytest.raises(EncoderError, match=f"model type {kind!r} reads from left to right, so no viewer would see"):
        DualEncoder.from_backbone(tiny(kind), replace(SPEC, strategy="snippets"))
    DualEncoder.from_backbone(tiny(kind), replace(SPEC, strategy="snippets", readout="snippet_mean"))


def test_a_plain_model_that_generates_text_is_pooled_by_its_last_token(tiny, tmp_path):
    from transformers import AutoModel, AutoTokenizer, MistralForCausalLM

    config = AutoModel.from_pretrained(tiny("mistral")).config
    torch.manual_seed(3)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny("mistral")).save_pretrained(tmp_path)
    check_equal(DualEncoder.from_backbone(str(tmp_path), SPEC), SentenceTransformer(str(tmp_path), device="cpu"))


@pytest.mark.parametrize(("strategy", "num_towers"), [("snippet_means", 1), ("mean", 2), ("sentences", 1)])
def test_an_exported_folder_gives_the_vectors_of_questions_and_says_what_it_cannot_carry(
    tiny, tmp_path, strategy, num_towers
):
    spec = replace(
        SPEC, strategy=strategy, tied=num_towers == 1, normalize=True, query_prompt="Where ", max_query_tokens=40
    )
    encoder = DualEncoder.from_backbone(tiny("modernbert"), spec)
    losses = encoder.export(tmp_path)
    assert [loss.partition(":")[0] for loss in losses] == {
        "snippet_means": ["views", "two lengths"],
        "mean": [],
        "sentences": ["views", "two lengths"],
    }[strategy]
    oracle = SentenceTransformer(str(tmp_path if num_towers == 1 else tmp_path / "question"), device="cpu")
    np.testing.assert_allclose(encoder.embed_queries(TEXTS[:2]), oracle.encode_query(TEXTS[:2]), atol=1e-5)
    other = DualEncoder.from_backbone(tiny("modernbert"), replace(spec, use_title=True))
    assert "titles: here a title is read before its text and a separator, there a text is one string" in other.export(
        tmp_path / "titled"
    )


def test_an_encoder_with_viewers_is_not_exported(tiny, tmp_path):
    encoder = DualEncoder.from_backbone(tiny("bert"), replace(SPEC, strategy="viewers", max_passage_tokens=60))
    with pytest.raises(EncoderError, match="strategy 'viewers' reads viewers, and a folder of sentence-transformers"):
        encoder.export(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def _modules(folder: Path, change: Any) -> None:
    content = json.loads((folder / "modules.json").read_text())
    change(content)
    (folder / "modules.json").write_text(json.dumps(content))


def _pickle_dense(folder: Path) -> None:
    torch.save(load_file(folder / "2_Dense" / "model.safetensors"), folder / "2_Dense" / "pytorch_model.bin")
    (folder / "2_Dense" / "model.safetensors").unlink()


def _edit(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


REFUSALS = [
    (
        lambda folder: _modules(folder, lambda content: content[2].update(type="sentence_transformers.models.LSTM")),
        "modules.json of backbone {0} has a module LSTM; mvr_ray computes a Transformer followed by Pooling, Dense, "
        "Normalize and Dropout",
    ),
    (
        lambda folder: _modules(folder, lambda content: content[2].update(type="modeling_own.Pooling")),
        "modules.json of backbone {0} has a module modeling_own.Pooling, which is code of the model's own; mvr_ray "
        "computes a Transformer followed by Pooling, Dense, Normalize and Dropout",
    ),
    (
        lambda folder: _modules(folder, lambda content: content[2].update(path="../other")),
        "modules.json of backbone {0} has the path '../other', which leaves the model's folder",
    ),
    (
        _pickle_dense,
        "2_Dense of backbone {0} has no model.safetensors; mvr_ray opens no pickled weights: save the model again with "
        "sentence-transformers (model.save_pretrained), which writes one",
    ),
    (
        lambda folder: _edit(folder / "2_Dense" / "config.json", activation_function="os.system"),
        "2_Dense of backbone {0} has the activation 'os.system', which is no layer of torch.nn",
    ),
    (
        lambda folder: _edit(folder / "2_Dense" / "config.json", module_output_name="token_embeddings"),
        "modules.json of backbone {0} has a module Dense; mvr_ray computes a Transformer followed by Pooling, Dense, "
        "Normalize and Dropout",
    ),
    (
        lambda folder: _edit(folder / LENGTHS[0], query_length=8, modality_config={"message": {"method": "forward"}}),
        "sentence_bert_config.json of backbone {0} sets query_length, modality_config.message (each text goes through "
        "a chat template), which mvr_ray does not compute; its vectors would differ from those of "
        "sentence-transformers",
    ),
    (
        lambda folder: _edit(folder / LENGTHS[0], max_seq_length=-1),
        "sentence_bert_config.json of backbone {0} sets max_seq_length to -1; set the most tokens of a text, or null "
        "for as many as the model takes",
    ),
]


@pytest.mark.parametrize(("damage", "message"), REFUSALS)
def test_modules_that_mvr_ray_does_not_compute_are_refused(tiny, tmp_path, damage, message):
    folder = sentence_model(tiny("bert"), tmp_path / "model", "mean", random_dense(16, 12))
    damage(Path(folder))
    with pytest.raises(EncoderError) as error:
        DualEncoder.from_backbone(folder, SPEC)
    assert str(error.value) == message.format(folder)


@pytest.mark.parametrize(
    ("modes", "strategy", "warns"), [("cls", "mean", True), ("mean", "mean", False), ("cls", "pooling", False)]
)
def test_a_warning_names_a_model_that_is_not_read_as_it_was_trained(tiny, tmp_path, caplog, modes, strategy, warns):
    folder = sentence_model(tiny("bert"), tmp_path / "model", modes)
    DualEncoder.from_backbone(folder, replace(SPEC, strategy=strategy))
    assert ("was trained to be read by cls: compare it with encoder.strategy pooling" in caplog.text) == warns


@pytest.mark.parametrize("size", [8, 99])
def test_a_folder_that_truncates_vectors_gives_those_of_sentence_transformers(tiny, tmp_path, size):
    folder = sentence_model(tiny("bert"), tmp_path / "model", "mean", truncate_dim=size)
    encoder = DualEncoder.from_backbone(folder, SPEC)
    assert encoder.dimension == min(size, 16)
    check_equal(encoder, SentenceTransformer(folder, device="cpu"))
    assert encoder.export(tmp_path / "own") == []
    check_equal(encoder, SentenceTransformer(str(tmp_path / "own"), device="cpu"))


def test_a_model_without_token_states_is_refused(tiny, tmp_path):
    AutoTokenizer.from_pretrained(tiny("bert")).save_pretrained(tmp_path)
    DPRQuestionEncoder(DPRConfig(vocab_size=30_000, **SIZES)).save_pretrained(tmp_path)
    with pytest.raises(EncoderError, match=r"gives no state of each token; of DPR's encoders save the transformer"):
        DualEncoder.from_backbone(str(tmp_path), SPEC)


@pytest.mark.parametrize("config", [FNetConfig, ConvBertConfig, NystromformerConfig])
def test_a_model_that_does_not_mask_padding_is_refused(tiny, tmp_path, config):
    tokenizer = AutoTokenizer.from_pretrained(tiny("bert"))
    tokenizer.save_pretrained(tmp_path)
    AutoModel.from_config(config(vocab_size=len(tokenizer), **SIZES)).save_pretrained(tmp_path)
    with pytest.raises(EncoderError, match=r"does not mask padding, so a text's vector would depend"):
        DualEncoder.from_backbone(str(tmp_path), SPEC)


def test_settings_that_do_not_fit_the_model_are_refused(tiny):
    def refusal(**settings: Any) -> str:
        with pytest.raises(EncoderError) as error:
            DualEncoder.from_backbone(tiny("bert"), replace(SPEC, **settings))
        return str(error.value)

    assert refusal(truncate_dim=17) == (
        "encoder truncate_dim is 17, but the model's vectors have 16 dimensions; give 1 to 16"
    )
    assert refusal(query_prompt="the river " * 30, max_query_tokens=64).startswith(
        "max_query_tokens is 64, too few beside a prompt of "
    )
    assert refusal(strategy="snippet_means", max_passage_tokens=40, overlap_tokens=20).startswith(
        "overlap_tokens is 20, more than half of what a window of 40 tokens has for text; lower it to "
    )
    assert refusal(overlap_tokens=8).endswith("reads a long passage in windows, not 'pooling'; leave it at 0")
