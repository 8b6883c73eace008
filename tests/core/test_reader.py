"""Reading: spans against all spans, windows against the tokenizer's own, the loss against slow arithmetic."""

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer

from mvr_ray.core.encoding.tower import KINDS
from mvr_ray.core.reading.reader import Reader, ReaderSpec, ReadRequest, Span, choose
from mvr_ray.core.reading.spans import best_spans, log_shares, span_losses, tokens_of
from mvr_ray.core.reading.windows import Windower
from mvr_ray.errors import FingerprintError, ReaderError

SMALL = ReaderSpec(max_tokens=40, overlap_tokens=9, max_question_tokens=12, max_answer_tokens=5)
LEVELS = st.integers(-2, 2)  # few values, so that spans tie


@st.composite
def windows_of_logits(draw):
    length = draw(st.integers(2, 9))
    first = draw(st.integers(0, length - 1))
    count = draw(st.integers(0, length - first))
    rows = st.lists(LEVELS, min_size=length, max_size=length)
    return draw(rows), draw(rows), first, count


@given(st.lists(windows_of_logits(), min_size=1, max_size=4), st.integers(1, 6))
@settings(max_examples=300)
def test_the_best_span_is_the_best_of_all_spans(examples, most):
    width = max(len(start) for start, *_ in examples)
    start_FT, end_FT = np.full((2, len(examples), width), 9.0)  # what is not text would win
    text_FT = np.zeros((len(examples), width), bool)
    for row, (start, end, first, count) in enumerate(examples):
        start_FT[row, : len(start)], end_FT[row, : len(end)] = start, end
        text_FT[row, first : first + count] = True
    actual = best_spans(start_FT, end_FT, text_FT, most)
    for row, (start, end, first, count) in enumerate(examples):
        spans = [
            (-(start[i] + end[j]), i, j - i)
            for i in range(first, first + count)
            for j in range(i, min(i + most, first + count))
        ]
        cost, at, more = min(spans, default=(math.inf, -1, 0))
        assert (actual.score_F[row], actual.start_F[row], actual.end_F[row]) == (-cost, at, at + more)


def made_windows(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of five windows in float64, candidates, and targets among them."""
    rng = np.random.default_rng(seed)
    candidate_FT = rng.random((5, 7)) < 0.6
    candidate_FT[:, 0] = True
    targets = [[rng.choice(np.flatnonzero(row)) for row in candidate_FT] for _ in range(2)]
    logits = (torch.tensor(rng.normal(size=(5, 7)) * 3) for _ in range(2))
    return *logits, torch.tensor(candidate_FT), *(torch.tensor(np.array(target)) for target in targets)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_half_the_negative_log_probability_of_the_true_ends(seed):
    start_FT, end_FT, candidate_FT, start_F, end_F = made_windows(seed)
    losses_F = span_losses(start_FT, end_FT, candidate_FT, start_F, end_F)
    for row in range(5):
        expected = 0.0
        for logits_FT, target_F in ((start_FT, start_F), (end_FT, end_F)):
            shares = [math.exp(logits_FT[row, t]) for t in range(7) if candidate_FT[row, t]]
            expected -= math.log(math.exp(logits_FT[row, target_F[row]]) / sum(shares)) / 2
        assert float(losses_F[row]) == pytest.approx(expected, abs=1e-12)
        shares = [log_shares(part.numpy(), candidate_FT.numpy())[row] for part in (start_FT, end_FT)]
        assert -(shares[0][start_F[row]] + shares[1][end_F[row]]) / 2 == pytest.approx(expected, abs=1e-12)
        assert np.exp(shares[0]).sum() == pytest.approx(1.0)


def test_the_gradient_of_the_loss_is_its_slope():
    """Against central differences; what is no candidate, such as padding, gets none."""
    start_FT, end_FT, candidate_FT, start_F, end_F = made_windows(7)
    leaves = [start_FT.clone().requires_grad_(), end_FT.clone().requires_grad_()]
    span_losses(leaves[0], leaves[1], candidate_FT, start_F, end_F).mean().backward()
    step = 1e-5
    for side, (row, at) in itertools.product(range(2), itertools.product(range(5), range(7))):
        values = []
        for sign in (1, -1):
            logits = [start_FT.clone(), end_FT.clone()]
            logits[side][row, at] += sign * step
            values.append(float(span_losses(logits[0], logits[1], candidate_FT, start_F, end_F).mean()))
        slope = (values[0] - values[1]) / (2 * step)
        assert float(leaves[side].grad[row, at]) == pytest.approx(slope, abs=1e-9)
        assert candidate_FT[row, at] or slope == 0.0


@pytest.fixture(scope="module")
def paragraphs(squad_dev) -> list[dict]:
    """A paragraph of each of several articles, some of them long."""
    return [p for article in squad_dev["data"][:12] for p in article["paragraphs"][:3]]


@pytest.mark.data
@pytest.mark.parametrize("spec", [SMALL, ReaderSpec(100, 0, 20), ReaderSpec(64, 30, 20)])
def test_windows_are_the_tokenizers_own_and_cover_every_token(minilm, paragraphs, spec):
    windower = Windower(AutoTokenizer.from_pretrained(minilm), spec)
    theirs = AutoTokenizer.from_pretrained(minilm)
    several = 0
    for paragraph in paragraphs:
        text = paragraph["context"]
        tokens = windower.tokenize([text])[text]
        question = " ".join(paragraph["qas"][0]["question"].split()[:5])
        result = windower.windows(windower.frame(question), tokens)
        expected = theirs(
            question,
            text,
            truncation="only_second",
            max_length=spec.max_tokens,
            stride=spec.overlap_tokens,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        assert [window.input_ids.tolist() for window in result] == expected["input_ids"]
        assert [window.type_ids.tolist() for window in result] == expected["token_type_ids"]
        coverage = set()
        for number, window in enumerate(result):
            assert window.input_ids[window.null] == theirs.cls_token_id
            sequence = expected.sequence_ids(number)
            for token in range(window.offset, window.offset + window.num_text):
                place = window.place(token)
                assert sequence[place] == 1
                assert expected["offset_mapping"][number][place] == (tokens.starts[token], tokens.stops[token])
                coverage.add(token)
            assert sequence.count(1) == window.num_text
        assert coverage == set(range(len(tokens.ids)))
        several += len(result) > 1
    assert several > len(paragraphs) // 2


@pytest.mark.data
def test_an_answers_tokens_are_its_characters_and_nothing_less(minilm, paragraphs):
    """The tokens of each answer give it back; those around it do not belong; a window has all of them or none."""
    windower = Windower(AutoTokenizer.from_pretrained(minilm), SMALL)
    exact = total = 0
    for paragraph in paragraphs:
        text = paragraph["context"]
        tokens = windower.tokenize([text])[text]
        for qa in paragraph["qas"][:4]:
            frame = windower.frame(qa["question"])
            for answer in qa["answers"]:
                start, stop = answer["answer_start"], answer["answer_start"] + len(answer["text"])
                first, last = tokens_of(tokens.starts, tokens.stops, start, stop)
                touching = [i for i in range(len(tokens.ids)) if tokens.starts[i] < stop and tokens.stops[i] > start]
                assert list(range(first, last + 1)) == touching
                total += 1
                exact += text[tokens.starts[first] : tokens.stops[last]] == answer["text"]
                contents = [window for window in windower.windows(frame, tokens) if window.holds(first, last)]
                for window in contents:
                    piece = window.input_ids[window.place(first) : window.place(last) + 1]
                    assert piece.tolist() == tokens.ids[first : last + 1].tolist()
                assert contents or last - first >= SMALL.overlap_tokens
    assert exact / total > 0.97  # a few answers of SQuAD end inside a word


def test_characters_between_tokens_have_no_token():
    starts, stops = np.array([0, 4, 9]), np.array([3, 8, 12])
    assert tokens_of(starts, stops, 3, 4) == (-1, -1)
    assert tokens_of(starts, stops, 2, 5) == (0, 1)
    assert tokens_of(starts, stops, 8, 30) == (2, 2)
    assert tokens_of(starts[:0], stops[:0], 0, 5) == (-1, -1)


@pytest.fixture(scope="module")
def pair_backbone(tiny, tmp_path_factory):
    """paired(kind): a random backbone of that kind, whose tokenizer puts special tokens around a pair."""
    result: dict[str, str] = {}

    def folder(kind: str) -> str:
        if kind not in result:
            path = tmp_path_factory.mktemp("paired") / kind
            shutil.copytree(tiny(kind), path)
            tokenizer = AutoTokenizer.from_pretrained(path)
            cls, sep = tokenizer.cls_token, tokenizer.sep_token
            middle = sep if kind == "bert" or kind == "distilbert" else f"{sep} {sep}"
            template = processors.TemplateProcessing(
                single=f"{cls} $A {sep}",
                pair=f"{cls} $A {middle} $B:1 {sep}:1",
                special_tokens=[(cls, tokenizer.cls_token_id), (sep, tokenizer.sep_token_id)],
            )
            backend = tokenizer.backend_tokenizer
            own = [backend.post_processor] if backend.post_processor is not None else []
            backend.post_processor = processors.Sequence([*own, template])
            tokenizer.save_pretrained(path)
            result[kind] = str(path)
        return result[kind]

    return folder


PASSAGES = [
    "Salt and trade made the town rich. Boats came every day; later they did not. " * 3,
    "The bridge was built in 1801.",
    "   ",
    "",
    "Dr. Smith of the city wrote of the old bridge \ud800 in Žatec. The river rises in the hills. " * 2,
]


def slow_read(reader: Reader, question: str, text: str) -> tuple[Span, float] | None:
    """One window at a time, without padding, every span in turn; and the margin over the second best."""
    windower, ranking = reader.windower, []
    tokens = windower.tokenize([text])[text]
    for window in windower.windows(windower.frame(question), tokens):
        with torch.no_grad():
            start_T, end_T, candidate_T = (part[0].numpy() for part in reader([window]))
        inside = range(window.first, window.first + window.num_text)
        places = [window.null, *(place for place in inside if place != window.null)]
        assert np.flatnonzero(candidate_T).tolist() == sorted(places)
        totals = [math.log(sum(math.exp(float(part[place])) for place in places)) for part in (start_T, end_T)]
        null = float(start_T[window.null]) + float(end_T[window.null]) if reader.spec.minus_null else 0.0
        for s in inside:
            for e in range(s, min(s + reader.spec.max_answer_tokens, inside.stop)):
                token = window.offset - window.first
                start, stop = int(tokens.starts[s + token]), int(tokens.stops[e + token])
                score = float(start_T[s]) + float(end_T[e]) - null
                ends = float(start_T[s]) - totals[0], float(end_T[e]) - totals[1]
                ranking.append((score, Span(start, stop, score, *ends)))
    ranking.sort(key=lambda pair: -pair[0])
    others = [score for score, span in ranking if span[:2] != ranking[0][1][:2]]
    return (ranking[0][1], ranking[0][0] - max(others, default=-math.inf)) if ranking else None


@pytest.mark.parametrize("minus_null", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_reading_a_batch_is_reading_every_span_of_every_window_alone(pair_backbone, kind, minus_null):
    """For each kind of backbone; padding and company change nothing but rounding."""
    reader = Reader.from_backbone(pair_backbone(kind), replace(SMALL, minus_null=minus_null), seed=3)
    with torch.no_grad():
        reader.model.qa_outputs.weight.mul_(40)  # so that spans differ by more than rounding
    questions = ["Where does the river end?", "Who wrote of the old bridge, and when was it built in the hills?", ""]
    actual = reader.read([ReadRequest(question, PASSAGES) for question in questions], tokens_per_batch=130)
    num_answers = 0
    for question, row in zip(questions, actual):
        for text, span in zip(PASSAGES, row, strict=True):
            expected = slow_read(reader, question, text)
            if expected is None:
                assert span is None and not text.strip()  # to some tokenizers blanks are no tokens
                continue
            best, margin = expected
            assert span.score == pytest.approx(best.score, abs=2e-4)
            if margin > 1e-3:
                num_answers += 1
                assert span[3:] == pytest.approx(best[3:], abs=2e-4)
                piece = text[best.start : best.stop]
                start = best.start + len(piece) - len(piece.lstrip())
                assert (span.start, span.stop) == (start, start + len(piece.strip()))
    assert num_answers >= 6
    assert actual == reader.read([ReadRequest(question, PASSAGES) for question in questions], tokens_per_batch=130)


SCORES = st.lists(st.tuples(st.none() | LEVELS, LEVELS), max_size=6)


@given(SCORES, st.sampled_from([0.0, 0.5, 1.0]))
def test_the_passage_of_the_best_span_answers_and_the_higher_ranked_of_equals(examples, weight):
    spans = [None if score is None else Span(0, 1, score, 0.0, 0.0) for score, _ in examples]
    retrieval = [float(score) for _, score in examples]
    best, best_worth = -1, -math.inf
    for row, span in enumerate(spans):
        if span is not None and span.score + weight * retrieval[row] > best_worth:
            best, best_worth = row, span.score + weight * retrieval[row]
    assert choose(spans, retrieval, weight) == best


def test_scores_are_not_looked_at_where_they_have_no_weight():
    spans = [Span(0, 1, 1.0, 0.0, 0.0), Span(0, 1, 2.0, 0.0, 0.0)]
    assert choose(spans, [math.nan, math.nan]) == 1


def test_a_stored_reader_is_the_one_that_was_saved(pair_backbone, tmp_path):
    reader = Reader.from_backbone(pair_backbone("bert"), SMALL, seed=5)
    reader.save(tmp_path / "stored")
    again = Reader.load(tmp_path / "stored", SMALL)
    requests = [ReadRequest("Where does the river end?", PASSAGES)]
    assert again.fingerprint == reader.fingerprint
    assert again.read(requests) == reader.read(requests)
    assert Reader.from_backbone(pair_backbone("bert"), SMALL, seed=6).fingerprint != reader.fingerprint
    assert Reader.from_backbone(str(tmp_path / "stored"), SMALL, seed=6).fingerprint == reader.fingerprint

    weights = load_file(tmp_path / "stored" / "model.safetensors")
    weights["qa_outputs.bias"] += 1
    save_file(weights, tmp_path / "stored" / "model.safetensors", {"format": "pt"})
    with pytest.raises(FingerprintError, match=f"was saved as {reader.fingerprint} but loads as"):
        Reader.load(tmp_path / "stored", SMALL)
    (tmp_path / "stored" / "reader.json").write_text(json.dumps({"format_version": 9, "fingerprint": "x"}))
    with pytest.raises(ReaderError, match=r"reader\.json has format version 9, this program reads 1"):
        Reader.load(tmp_path / "stored", SMALL)
    (tmp_path / "stored" / "reader.json").unlink()
    with pytest.raises(ReaderError, match=r"holds no reader: reader\.json cannot be read"):
        Reader.load(tmp_path / "stored", SMALL)


def refusal(folder: str | Path, spec: ReaderSpec | None = None, opening=Reader.open) -> str:
    with pytest.raises(ReaderError) as error:
        opening(str(folder), spec)
    return str(error.value)


def test_an_encoder_without_the_decoder_that_its_reader_has_is_refused(tiny):
    assert "lacks 28 weights of a t5 model (first: decoder.block.0." in refusal(tiny("t5"), SMALL, Reader.from_backbone)


def test_what_cannot_serve_as_a_reader_is_refused_by_name(pair_backbone, tmp_path):
    folder = pair_backbone("bert")
    assert refusal(folder) == (
        f"reader {folder} has no head for extractive question answering (missing: qa_outputs.bias, qa_outputs.weight); "
        f"take a model that was trained for that, or train one from it (mvr-ray train CONFIG train.task=reader "
        f"encoder.backbone={folder})"
    )
    assert refusal("/nowhere/at/all") == (
        "reader folder /nowhere/at/all does not exist; give a folder with config.json, model.safetensors and "
        "tokenizer.json, or the name of a model on the Hugging Face hub"
    )
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    weights = load_file(copy / "model.safetensors")
    lost_name = sorted(weights)[5]
    save_file({name: weight for name, weight in weights.items() if name != lost_name}, copy / "model.safetensors")
    assert refusal(copy, SMALL, Reader.from_backbone) == (
        f"reader {copy} lacks 1 weight of a bert model (first: bert.{lost_name}); they would be random, so take a "
        f"complete checkpoint"
    )
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "vit"}))
    assert refusal(copy).startswith(f"reader {copy} cannot be loaded: ")


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_new_head_has_a_start_and_an_end_whatever_the_labels_of_its_backbone(
    pair_backbone, tmp_path, kind, num_labels
):
    folder = Path(shutil.copytree(pair_backbone(kind), tmp_path / "labels"))
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=num_labels).save_pretrained(folder)
    request = ReadRequest("Where does the river end?", PASSAGES)
    spans = [Reader.from_backbone(path, SMALL, 3).read([request]) for path in (str(folder), pair_backbone(kind))]
    assert spans[0] == spans[1]


def test_a_head_of_other_outputs_than_start_and_end_is_refused(pair_backbone, tmp_path):
    folder = Path(shutil.copytree(pair_backbone("bert"), tmp_path / "three"))
    AutoModelForQuestionAnswering.from_pretrained(folder, num_labels=3).save_pretrained(folder)
    assert refusal(folder, SMALL) == (
        f"reader {folder} has 3 labels; take a model for extractive question answering with 2"
    )


@pytest.mark.parametrize("kind", ["bert", "roberta", "mpnet"])
def test_lengths_that_a_model_cannot_take_are_refused(pair_backbone, kind):
    folder = pair_backbone(kind)
    assert refusal(folder, None, Reader.from_backbone) == (
        f"max_tokens is 384, but reader {folder} has 96 positions; lower read.max_tokens to 96 or less"
    )
    assert Reader.from_backbone(folder, ReaderSpec(96, 20, 20)).spec.max_tokens == 96
    room = 30 - 20 - (3 if kind == "bert" else 4)
    assert refusal(folder, ReaderSpec(30, 8, 20), Reader.from_backbone) == (
        f"max_tokens is 30, which leaves {room} for the passage beside a question of 20, no more than the 8 that "
        f"windows share; raise read.max_tokens, or lower read.overlap_tokens or read.max_question_tokens"
    )


def test_logits_that_are_no_numbers_are_an_error_not_an_answer(pair_backbone):
    reader = Reader.from_backbone(pair_backbone("bert"), SMALL)
    with torch.no_grad():
        reader.model.qa_outputs.bias.fill_(math.nan)
    with pytest.raises(ReaderError, match="logits are not finite"):
        reader.read([ReadRequest("Who?", ["The bridge was built in 1801."])])
