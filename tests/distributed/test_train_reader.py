"""Training a reader on real questions: it learns, resuming gives the same bits, several ranks equal one."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from prepared_corpus import only_corpus
from ranks import train_on_ranks

from mvr_ray.cli import main
from mvr_ray.config import RunConfig, parse_run
from mvr_ray.core.judging.answers import AnswerMatcher
from mvr_ray.core.learning.batches import Example, negatives_for
from mvr_ray.core.reading.reader import Reader, ReaderSpec, ReadRequest
from mvr_ray.distributed.train import train
from mvr_ray.distributed.training.reader import ReaderLoop, targets_of
from mvr_ray.errors import ConfigError, DataError, MissingInputError, ReaderError, ResourceError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import read_questions, write_questions
from mvr_ray.types import Passage, Question

pytestmark = pytest.mark.data

SHORT = {"max_tokens": 64, "overlap_tokens": 16, "max_question_tokens": 24}


@pytest.fixture(scope="module")
def store_path(squad_dev, tiny_backbone, tmp_path_factory) -> Path:
    """The shortest paragraphs of three articles: 16 questions, and 6 of them again as a set of their own."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "backbone").symlink_to(tiny_backbone)
    data = []
    for article in squad_dev["data"][:3]:
        short = sorted(article["paragraphs"], key=lambda paragraph: len(paragraph["context"]))[:6]
        paragraphs = [{"context": p["context"], "qas": p["qas"][:1]} for p in short]
        data.append({"title": article["title"], "paragraphs": paragraphs})
    (folder / "squad.json").write_text(json.dumps({"version": "1.1", "data": data}))
    run = run_of(folder / "store", prepare={"sources": [{"path": str(folder / "squad.json"), "questions": "all"}]})
    store = Store(run.store.path)
    prepare(run.prepare, store)
    questions = read_questions(only_corpus(store), "all")
    write_questions(only_corpus(store), "some", questions[:16])
    write_questions(only_corpus(store), "tiny", questions[:6])
    return folder / "store"


def run_of(path: Path, train: dict | None = None, read: dict | None = None, **sections) -> RunConfig:
    sections.setdefault("resources", {"train_workers": 0})
    settings = {"task": "reader", "questions": "tiny", "batch_questions": 3, "dropout": 0.1, **(train or {})}
    sections = {"encoder": {"backbone": str(path.parent / "backbone")}, "read": read or SHORT, **sections}
    return parse_run({"store": {"path": str(path)}, "train": settings, **sections}, "test")


@pytest.mark.slow
def test_a_reader_learns_to_answer_the_questions_that_it_is_taught(store_path, short_minilm):
    """Exact match rises from almost zero to most questions in 10 steps of 8 windows."""
    settings = {"questions": "some", "dev_questions": "some", "batch_questions": 8, "num_hard_negatives": 0}
    steps = {"lr": 1e-3, "epochs": 5, "max_steps": 10, "reader": "learner"}
    lengths = {"max_tokens": 128, "overlap_tokens": 32, "max_question_tokens": 32}
    run = run_of(store_path, {**settings, **steps}, lengths, encoder={"backbone": str(short_minilm)})
    model = train(run)
    assert model.metrics["dev_f1_before"] < 0.3
    assert model.metrics["dev_f1"] > 0.7
    assert model.epochs[-1].loss < model.epochs[0].loss / 3
    assert [epoch.step for epoch in model.epochs] == list(range(2, 11, 2))

    store = Store(str(store_path))
    reader = Reader.load(store_path / model.folder, ReaderSpec(128, 32, 32))
    passages = Corpus.open(store, "corpus")
    right = 0
    for question in read_questions(only_corpus(store), "some"):
        text = passages.get(question.positive_ids)[question.positive_ids[0]].text
        [[span]] = reader.read([ReadRequest(question.text, [text])])
        right += text[span.start : span.stop] in question.answers
    assert right >= 8


class ReaderStop(Exception):
    pass


def stop_at(step: int):
    def progress(what: str, count: int, total: int) -> None:
        if count == step:
            raise ReaderStop

    return progress


def test_a_training_killed_anywhere_ends_with_the_same_reader_to_the_bit(store_path):
    """Passages of several windows, negatives from the batch, dropout, several passes a step."""
    settings = {"epochs": 3, "max_steps": 5, "checkpoint_steps": 2, "cache_chunk": 5, "dev_questions": "tiny"}
    whole = train(run_of(store_path, {**settings, "reader": "whole"}))
    run = run_of(store_path, {**settings, "reader": "broken"})
    for step in (1, 5):
        with pytest.raises(ReaderStop):
            train(run, stop_at(step))
    counts: list[int] = []
    again = train(run, lambda what, count, total: counts.append(count))
    assert counts[0] == 5, "the training continues from the checkpoint of step 4"
    assert again.fingerprint == whole.fingerprint
    assert (again.metrics, again.epochs) == (whole.metrics, whole.epochs)
    assert not Store(str(store_path)).exists("encoders")


def test_a_finished_training_is_not_run_again_and_a_changed_one_is(store_path):
    run = run_of(store_path, {"max_steps": 1, "reader": "once"})
    first = train(run)
    calls: list[int] = []
    assert train(run, lambda what, count, total: calls.append(count)) == first
    assert not calls
    longer = run_of(store_path, {"max_steps": 1, "reader": "once"}, {**SHORT, "overlap_tokens": 8})
    assert train(longer, lambda what, count, total: calls.append(count)).fingerprint != first.fingerprint
    assert calls == [1]
    latest = json.loads((store_path / "readers" / "once" / "latest.json").read_text())
    assert (store_path / "readers" / "once" / latest["fingerprint"] / "config.json").is_file()


@pytest.mark.parametrize("lengths", [SHORT, {"max_tokens": 34, "overlap_tokens": 2, "max_question_tokens": 20}])
def test_targets_are_the_answers_words_and_the_null_token_everywhere_else(store_path, lengths):
    """Compare the words between each window's ends with the answer; other passages have none."""
    job = ReaderLoop.open_job(run_of(store_path, {"questions": "some"}, lengths))
    reader, examples = job.model, job.examples.get(range(16), 0)
    cls_id = reader.tokenizer.cls_token_id
    targets = targets_of(reader, examples, 1, AnswerMatcher())
    hits = nulls = 0
    position = 0
    for at, example in enumerate(examples):
        answer = example.passage.text[example.answer_start : example.answer_stop]
        [other] = negatives_for(at, examples, 1, AnswerMatcher())
        num_spans = 0
        for text in (example.passage.text, other.text):
            tokens = reader.windower.tokenize([text])[text]
            count = len(reader.windower.windows(reader.windower.frame(example.text), tokens))
            for window, start, end in targets[position : position + count]:
                if start == end == window.null:
                    assert window.input_ids[start] == cls_id
                    nulls += 1
                    continue
                assert text is example.passage.text
                assert window.first <= start <= end < window.first + window.num_text
                first, last = start + window.offset - window.first, end + window.offset - window.first
                assert text[tokens.starts[first] : tokens.stops[last]] == answer
                num_spans += 1
            position += count
        assert num_spans or len(reader.windower.tokenize([answer])[answer].ids) > lengths["overlap_tokens"]
        hits += num_spans
    assert position == len(targets)
    assert hits >= 8 and nulls >= 16


def test_random_negatives_neither_answer_nor_repeat_nor_contain_the_question_itself():
    def passage(name: str, text: str) -> Passage:
        return Passage(name, "", text)

    rich, same, salt, else_ = passage("a", "Trade made it rich."), passage("b", "RICH."), passage("c", "Salt."), "x"
    other = passage("d", "Another one.")
    examples = [
        Example("q0", rich, 14, known_ids=("d",), answers=("rich",)),
        Example("q1", same, 0, answers=("RICH",)),
        Example("q2", other, 0, answers=("Another",)),
        Example("q3", salt, 0, answers=("Salt",)),
        Example("q4", salt, 0, answers=("Salt",)),
        Example("q5", rich, 0, negatives=(passage(else_, "Hard."),), answers=("Trade",)),
    ]
    assert [[negative.id for negative in negatives_for(at, examples, 2, AnswerMatcher())] for at in range(6)] == [
        ["c"],
        ["d", "c"],
        ["c", "a"],
        ["a", "b"],
        ["a", "b"],
        ["x"],
    ]
    assert [negatives_for(at, examples, 0, AnswerMatcher()) for at in range(6)] == [[]] * 6


def test_what_a_reader_cannot_be_taught_is_refused_by_name(store_path):
    store = Store(str(store_path))
    [question, *_] = read_questions(only_corpus(store), "tiny")
    write_questions(only_corpus(store), "unplaced", [question._replace(answer_starts=())])
    wrong_starts = tuple(start + 1 for start in question.answer_starts)
    write_questions(
        only_corpus(store), "misplaced", [question._replace(answer_starts=wrong_starts), Question("q", "Who?", ("x",))]
    )

    def check(error, message, settings=None, read=None, **sections):
        with pytest.raises(error) as exc_info:
            train(run_of(store_path, settings, read, **sections))
        assert str(exc_info.value).startswith(message)

    offsets = "a reader learns from answer offsets, as SQuAD's files have them"
    check(
        ConfigError,
        "train.task is reader, which learns from answers; name a stored set in train.questions",
        {"questions": None},
    )
    for name, count in (("unplaced", 1), ("misplaced", 2)):
        prefix = f"none of the {count} questions of {name!r} has an answer at a known place in a passage of corpus "
        check(DataError, f"{prefix}'corpus'; {offsets}", {"questions": name})
    check(
        ConfigError,
        "train.batch_questions is 7, but there are only 6 questions of 'tiny' with an answer at a known place",
        {"batch_questions": 7},
    )
    check(MissingInputError, "question set 'nobody' not found", {"questions": "nobody"})
    check(ConfigError, "model folder /nowhere does not exist", encoder={"backbone": "/nowhere"})
    check(ReaderError, "max_tokens is 600, but reader ", read={**SHORT, "max_tokens": 600})
    check(ResourceError, "resources.gpus_per_trainer is 1", resources={"train_workers": 0, "gpus_per_trainer": 1})


def test_the_command_trains_a_reader_where_the_run_says_so(store_path, tmp_path, capsys):
    """The retriever's training does not replace it: without questions that one would use cloze."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_of(store_path).model_dump(mode="json")))
    with pytest.raises(SystemExit) as error:
        main(["train", str(path), "train.questions=null"])
    assert error.value.code == 2
    assert capsys.readouterr().err == (
        "mvr-ray: train.task is reader, which learns from answers; name a stored set in train.questions\n"
    )


@pytest.mark.slow
def test_two_ranks_train_the_reader_of_one_process(store_path, tiny_backbone):
    """Without dropout, distributing the windows of a batch keeps loss and weights up to rounding."""
    settings = {"max_steps": 3, "epochs": 2, "dropout": 0.0}
    alone = train(run_of(store_path, {**settings, "reader": "alone"}))
    two = run_of(store_path, {**settings, "reader": "two"})
    parallel = train_on_ranks(two, 2)
    assert [epoch.loss for epoch in parallel.epochs] == pytest.approx([epoch.loss for epoch in alone.epochs], rel=1e-4)
    spec = ReaderSpec(64, 16, 24)
    weights = [Reader.load(store_path / model.folder, spec).state_dict() for model in (alone, parallel)]
    start = Reader.from_backbone(str(tiny_backbone), spec, seed=two.train.seed).state_dict()
    # These add a constant to every input of a softmax: their gradient is rounding, which AdamW scales to full steps.
    names = [name for name in start if not name.endswith(("key.bias", "qa_outputs.bias"))]
    far, apart = (
        torch.cat([(weights[0][name] - other[name]).flatten() for name in names]).norm()
        for other in (start, weights[1])
    )
    assert float(far) > 0.01
    assert float(apart / far) < 0.01
