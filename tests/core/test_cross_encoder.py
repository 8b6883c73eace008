"""A cross-encoder scores what its tokenizer and model say of a pair alone; its loss and its share are the formulas'."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

from mvr_ray.core.reading.cross_encoder import CrossEncoder, Pair, PairSpec, listwise_loss, share_beside
from mvr_ray.errors import CrossEncoderError, FingerprintError
from mvr_ray.types import Passage

pytestmark = pytest.mark.data
SPEC = PairSpec(64, 12)
KINDS = ["bert", "roberta", "distilbert"]


@pytest.fixture(scope="module")
def pairs(squad_dev) -> list[Pair]:
    result = []
    for article in squad_dev["data"][:3]:
        for paragraph in article["paragraphs"][:4]:
            passage = Passage(str(len(result)), article["title"].replace("_", " "), paragraph["context"])
            result.append(Pair(paragraph["qas"][0]["question"], passage))
    return [*result, Pair("who " * 40, result[0].passage), Pair(result[0].question, Passage("x", "", "Short."))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_is_the_models_logit_for_the_pair_alone(tiny, pairs, kind, tmp_path):
    """Whatever is read beside it. The long question is cut to its first tokens, the passage to what room is left."""
    CrossEncoder.from_backbone(tiny(kind), SPEC, seed=3).save(tmp_path)
    scorer = CrossEncoder.load(tmp_path, SPEC)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    expected = []
    for question, passage in pairs:
        offsets = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        cut = question[: offsets[: SPEC.max_question_tokens][-1][1]]
        inputs = tokenizer(cut, f"{passage.title} {passage.text}".strip(), truncation="only_second", max_length=64)
        tensors = {name: torch.tensor([inputs[name]]) for name in inputs}
        with torch.no_grad():
            expected.append(float(model(**tensors).logits[0, 0]))
    for budget in (64, 100_000):
        np.testing.assert_allclose(scorer.score(pairs, budget), expected, atol=2e-6)
    assert scorer.score([]).shape == (0,)
    assert np.std(expected) > 1e-4


def test_half_a_surrogate_pair_is_read_as_a_question_mark(tiny):
    scorer = CrossEncoder.from_backbone(tiny("bert"), SPEC)
    half, plain = (Pair(f"who{mark}", Passage("x", mark, f"A river{mark}")) for mark in ("\ud83d", "?"))
    assert scorer.tokenize([half]) == scorer.tokenize([plain])


def test_two_labels_score_by_their_difference(tiny, pairs, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny("bert"))
    model = AutoModelForSequenceClassification.from_pretrained(tiny("bert"), num_labels=2).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    scorer = CrossEncoder.open(str(tmp_path), SPEC)
    [inputs] = scorer.tokenize(pairs[:1])
    with torch.no_grad():
        logits = model(**{name: torch.tensor([ids]) for name, ids in inputs.items()}).logits[0]
    assert float(scorer.score(pairs[:1])[0]) == pytest.approx(float(logits[1] - logits[0]), abs=1e-6)


def test_a_tokenizer_that_pads_on_the_left_changes_no_score(tiny, pairs, tmp_path):
    """GPT-2 counts positions from the first token of the row, padding too. The padding token may be the tokenizer's
    alone; without one the model is refused."""
    tokenizer = AutoTokenizer.from_pretrained(tiny("qwen3"))
    sizes = {"n_positions": 96, "n_embd": 16, "n_layer": 2, "n_head": 2, "num_labels": 1}
    config = GPT2Config(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer.padding_side == "left"
    scorer = CrossEncoder.open(str(tmp_path), SPEC)
    alone = [float(scorer.score([pair])[0]) for pair in pairs]
    np.testing.assert_allclose(scorer.score(pairs), alone, atol=1e-6)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "pad_token_id": None}))
    np.testing.assert_array_equal(CrossEncoder.open(str(tmp_path), SPEC).score(pairs), scorer.score(pairs))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(CrossEncoderError, match=r"the tokenizer of cross-encoder .* has no padding token"):
        CrossEncoder.open(str(tmp_path), SPEC)


@given(st.lists(st.lists(st.floats(-8, 8), min_size=1, max_size=5), min_size=1, max_size=4))
def test_the_loss_is_the_negative_log_probability_of_the_first(groups):
    flat = torch.tensor([score for group in groups for score in group], dtype=torch.float64)
    losses = listwise_loss(flat, [len(group) for group in groups])
    for loss, group in zip(losses.tolist(), groups):
        assert loss == pytest.approx(-math.log(math.exp(group[0]) / sum(map(math.exp, group))), abs=1e-9)


@given(st.floats(-20, 20), st.lists(st.floats(-20, 20), min_size=1, max_size=6), st.floats(-50, 50))
def test_a_share_is_a_softmax_of_two_and_does_not_know_the_level(positive, scores, shift):
    shares = share_beside(positive, np.array(scores))
    for share, score in zip(shares, scores):
        own, other = math.exp(score), math.exp(positive)
        assert share == pytest.approx(own / (own + other), rel=1e-9)
    np.testing.assert_allclose(share_beside(positive + shift, np.array(scores) + shift), shares, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_question_leaves_a_token_for_the_passage(tiny, kind):
    pair = Pair("salt " * 40, Passage("1", "", "The river rises in the hills."))
    num_special = AutoTokenizer.from_pretrained(tiny(kind)).num_special_tokens_to_add(pair=True)
    [inputs] = CrossEncoder.from_backbone(tiny(kind), PairSpec(13 + num_special, 12)).tokenize([pair])
    assert len(inputs["input_ids"]) == 13 + num_special
    with pytest.raises(CrossEncoderError, match=r"leaves 0 for the passage beside a question of 12; raise mine"):
        CrossEncoder.from_backbone(tiny(kind), PairSpec(12 + num_special, 12)).tokenize([pair])


def test_what_cannot_score_pairs_is_refused_by_name(tiny, tmp_path):
    with pytest.raises(CrossEncoderError, match=r"has no head for scoring pairs .*train\.task=cross_encoder"):
        CrossEncoder.open(tiny("bert"))
    with pytest.raises(CrossEncoderError, match="cross-encoder folder /nowhere does not exist"):
        CrossEncoder.open("/nowhere")
    AutoModelForSequenceClassification.from_pretrained(tiny("bert"), num_labels=3).save_pretrained(tmp_path / "three")
    AutoTokenizer.from_pretrained(tiny("bert")).save_pretrained(tmp_path / "three")
    with pytest.raises(CrossEncoderError, match="has 3 labels"):
        CrossEncoder.open(str(tmp_path / "three"))
    with pytest.raises(CrossEncoderError, match=r"max_tokens is 100000, but .* lower mine\.max_pair_tokens"):
        CrossEncoder.from_backbone(tiny("bert"), PairSpec(100_000))
    with pytest.raises(CrossEncoderError, match=r"holds no cross-encoder: cross_encoder\.json cannot be read"):
        CrossEncoder.load(tiny("bert"))
    encoder = CrossEncoder.from_backbone(tiny("bert"), SPEC, seed=1)
    encoder.save(tmp_path / "saved")
    assert CrossEncoder.load(tmp_path / "saved", SPEC).fingerprint == encoder.fingerprint
    CrossEncoder.from_backbone(tiny("bert"), SPEC, seed=2).model.save_pretrained(tmp_path / "saved")
    with pytest.raises(FingerprintError, match="its files have changed"):
        CrossEncoder.load(tmp_path / "saved", SPEC)


def test_scores_that_are_no_numbers_are_an_error(tiny, pairs):
    scorer = CrossEncoder.from_backbone(tiny("bert"), SPEC)
    with torch.no_grad():
        next(iter(scorer.model.classifier.parameters())).fill_(math.nan)
    with pytest.raises(CrossEncoderError, match="not finite"):
        scorer.score(pairs[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_and_its_copy_score_by_their_weights_of_the_moment(tiny, pairs, kind):
    """The weights that are prepared for inference are kept between calls, and no longer than they are the model's."""
    scorer = CrossEncoder.from_backbone(tiny(kind), SPEC, seed=3)
    before = scorer.score(pairs)
    twin = copy.deepcopy(scorer)
    layer = scorer.model.base_model.get_submodule("transformer" if kind == "distilbert" else "encoder").layer[1]
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(2.0)
    after = scorer.score(pairs)
    assert (after != before).any()
    np.testing.assert_array_equal(twin.score(pairs), before)
    twin.load_state_dict(scorer.state_dict())
    np.testing.assert_array_equal(twin.score(pairs), after)
