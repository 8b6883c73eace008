"""Select the labelled, gate and reporting questions of a refinement.

Labelled questions give the labels (transductive: measurements on them use their own answers). Gate questions stop the
rounds and prevent a bad publish. The rest is held out. Leakage is judged by text: a question with the exact text of a
labelled one counts as labelled in every other set.

Letters: T all questions in one table (labelled first), L labelled ones.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar

from mvr_ray.config import RefineConfig, RunConfig, SourceConfig, resolve_path
from mvr_ray.errors import ConfigError, DataError, count_noun
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.feedback import copy_judgements
from mvr_ray.store.files import Store
from mvr_ray.store.formats.records import BadRow, is_id
from mvr_ray.store.formats.text_files import Row, json_lines
from mvr_ray.store.questions import own_passages, read_questions
from mvr_ray.types import Question

logger = logging.getLogger(__name__)

Protocol = Literal["transductive", "gate", "held-out"]
GATE_FOLDS = 5
FEEDBACK_LINE = "{question, passage_id, label: 1|-1}"
P = TypeVar("P", str, int)


class Judgement(NamedTuple, Generic[P]):
    """One external judgement: a passage, by its id or its number, does (or does not) answer a labelled question."""

    question: int
    passage: P
    positive: bool


class QuestionGroup(NamedTuple):
    """Questions measured together: `members` are table rows."""

    name: str
    protocol: Protocol
    members: tuple[int, ...]


@dataclass(frozen=True)
class RefineQuestions:
    """The table of all questions, the first `num_labelled` of them labelled; groups to measure; external labels.

    The first group is the labelled questions, the next `num_gates` are gates, the rest only report. `own_ids` maps rows
    of questions that are passages themselves to those (`own_passages`), which are left out of their hits.
    """

    table: tuple[Question, ...]
    num_labelled: int
    groups: tuple[QuestionGroup, ...]
    num_gates: int
    feedback: tuple[Judgement[str], ...] | None = None
    own_ids: Mapping[int, Collection[str]] = field(default_factory=dict)

    @property
    def gates(self) -> tuple[QuestionGroup, ...]:
        return self.groups[1 : 1 + self.num_gates]

    def gate_rows(self) -> list[int]:
        """Return the table rows of every gate question, each once, ascending."""
        return sorted({row for group in self.gates for row in group.members})

    def other_rows(self) -> list[int]:
        """Return the table rows of the questions that are only reported."""
        return sorted(set(range(self.num_labelled, len(self.table))).difference(self.gate_rows()))

    def digest(self) -> str:
        """Digest over all questions, groups, feedback, and which questions are passages."""
        content = self.table, self.groups, self.feedback, *sorted(self.own_ids)
        return hashlib.sha256(repr(content).encode()).hexdigest()


def with_feedback(run: RunConfig, store: Store) -> RunConfig:
    """Return a run that names nothing to learn from with the feedback of `Index.add_feedback`, if there is any."""
    if (
        run.refine.questions is None
        and run.refine.feedback is None
        and (path := copy_judgements(store, run.index.name))
    ):
        own = run.refine.model_copy(update={"feedback": str(store.local_path(path).absolute())})
        return run.model_copy(update={"refine": own})
    return run


def gather(corpus: Corpus, refine: RefineConfig, sources: Sequence[SourceConfig] = ()) -> RefineQuestions:
    """Read every question set of the refine section, and separate labelled, gate and held-out ones. `sources` are the
    corpus's.

    Raises ConfigError without labelled or without held-out questions, and where none has what `refine.labels` names;
    DataError for a bad feedback file.
    """
    if refine.questions is None and refine.feedback is None:
        raise ConfigError(
            "refine.questions names no question set and refine.feedback no file, and no feedback was added "
            "(Index.add_feedback); give one of them to learn from"
        )
    labelled_questions = read_questions(corpus, refine.questions) if refine.questions else []
    name = "feedback" if refine.feedback else str(refine.questions)
    judgements: list[tuple[Question, str, bool]] = []
    if refine.feedback:
        judgements = read_feedback(resolve_path(refine.feedback), labelled_questions, corpus.get)
        labelled_questions = list(dict.fromkeys(question for question, _, _ in judgements))
    elif labelled_questions and not any(_label_source(one, refine.labels) for one in labelled_questions):
        kinds = {"answers": "an answer", "gold": "a gold passage"}
        kind, [(other, other_kind)] = kinds.pop(refine.labels), kinds.items()
        raise ConfigError(
            f"refine.labels is {refine.labels}, and no question of {name!r} has {kind}; set refine.labels={other} if "
            f"they have {other_kind}"
        )
    gates = [(gate, read_questions(corpus, gate)) for gate in refine.gate]
    if not gates:
        gate_questions = [question for question in labelled_questions if _fold(question.text, refine.seed) == 0]
        if not gate_questions or len(gate_questions) == len(labelled_questions):
            raise ConfigError(
                f"refine.gate is empty, and {name!r} with {count_noun(len(labelled_questions), 'question')} is too "
                f"small to hold a fifth of it back; name a held-out question set in refine.gate"
            )
        labelled_questions = [question for question in labelled_questions if _fold(question.text, refine.seed) != 0]
        gates = [(f"{name}/gate", gate_questions)]
    reports = [(report, read_questions(corpus, report)) for report in refine.report]
    questions = arrange(name, labelled_questions, gates, reports)
    own_ids: dict[int, Collection[str]] = {}
    for group in questions.groups:
        row_of_id = {questions.table[row].id: row for row in group.members}
        own = own_passages((questions.table[row] for row in group.members), corpus, sources)
        own_ids |= {row_of_id[question_id]: ids for question_id, ids in own.items()}
    questions = replace(questions, own_ids=own_ids)
    if refine.feedback is None:
        return questions
    row_of = {question: row for row, question in enumerate(labelled_questions)}
    feedback = tuple(Judgement(row_of[one], passage, good) for one, passage, good in judgements if one in row_of)
    return replace(questions, feedback=feedback)


def _label_source(question: Question, labels: str) -> Sequence[str]:
    """Return the answers or the gold passages of a question, whichever `refine.labels` names."""
    return question.answers if labels == "answers" else question.positive_ids


def arrange(
    name: str,
    label_questions: Sequence[Question],
    gates: Sequence[tuple[str, Sequence[Question]]],
    reports: Sequence[tuple[str, Sequence[Question]]],
) -> RefineQuestions:
    """Build the table and its groups. A gate question with the exact text of a labelled one is dropped from the gate;
    a reported set is split by protocol, and its labelled or gate members refer to the existing rows."""
    if not label_questions:
        raise ConfigError(f"refinement has no labelled question: {name!r} is empty")
    table = list(label_questions)
    row_of = {question: row for row, question in enumerate(table)}
    labelled_rows = {question.text: row for row, question in reversed(list(enumerate(table)))}
    gate_rows: dict[str, int] = {}
    groups = [QuestionGroup(name, "transductive", tuple(range(len(table))))]

    def add(question: Question) -> int:
        """Return the question's row, a new one if it has none."""
        if question not in row_of:
            row_of[question] = len(table)
            table.append(question)
        return row_of[question]

    for gate, questions in gates:
        own_questions = [question for question in questions if question.text not in labelled_rows]
        members = [add(question) for question in own_questions]
        for question, row in zip(own_questions, members):
            gate_rows.setdefault(question.text, row)
        if len(members) < len(questions):
            logger.warning("refine gate set=%s dropped_labelled=%d", gate, len(questions) - len(members))
        if members:
            groups.append(QuestionGroup(gate, "gate", tuple(members)))
    if not gate_rows:
        raise ConfigError(
            f"every question of refine.gate ({', '.join(gate for gate, _ in gates)}) is also a labelled question; "
            f"name a held-out set"
        )
    num_gates = len(groups) - 1
    for report, questions in reports:
        rows_of: dict[Protocol, list[int]] = {"transductive": [], "gate": [], "held-out": []}
        for question in questions:
            if question.text in labelled_rows:
                rows_of["transductive"].append(row_of.get(question, labelled_rows[question.text]))
            elif question.text in gate_rows:
                rows_of["gate"].append(row_of.get(question, gate_rows[question.text]))
            else:
                rows_of["held-out"].append(add(question))
        existing = {(group.name, group.protocol) for group in groups}
        groups += [
            QuestionGroup(report, protocol, tuple(members))
            for protocol, members in rows_of.items()
            if members and (report, protocol) not in existing
        ]
    return RefineQuestions(tuple(table), len(label_questions), tuple(groups), num_gates)


def read_feedback(
    path: Path, questions: Sequence[Question], existing_ids: Callable[[set[str]], Collection[str]]
) -> list[tuple[Question, str, bool]]:
    """Read judgements (question, passage id, positive) from a JSONL file of {question, passage_id, label: 1|-1}.

    `question` is the id of a stored question, else a text; a text that is not stored becomes a question whose
    positive passages are those judged 1. Of repeated judgements of a pair the majority counts; a draw gives no label,
    nor does a passage that `existing_ids` leaves out, such as one that was deleted. Raises DataError if no
    label is left.
    """
    if not path.is_file():
        raise ConfigError(f"refine.feedback: file {path} does not exist")
    by_key = {question.text: question for question in reversed(questions)}
    by_key.update({question.id: question for question in reversed(questions)})
    votes: dict[tuple[Question | str, str], int] = {}
    for row in json_lines(path):
        key, passage_id, label = _judgement(row)
        text = key.strip()  # as texts of stored questions are
        pair = by_key.get(key) or by_key.get(text, text), passage_id
        votes[pair] = votes.get(pair, 0) + label
    labels = {pair: total > 0 for pair, total in votes.items() if total}
    if len(labels) < len(votes):
        logger.info("feedback drawn_pairs=%d pairs=%d file=%s", len(votes) - len(labels), len(votes), path)
    if not labels:
        raise DataError(
            f"{path}: no feedback; each line is {FEEDBACK_LINE}, and a pair judged 1 as often as -1 gives no label"
        )
    existing = existing_ids({passage_id for _, passage_id in labels})
    unknown_ids = sorted(passage_id for _, passage_id in labels if passage_id not in existing)
    if len(unknown_ids) == len(labels):
        raise DataError(
            f"refine.feedback judges no passage that the index holds (first: {unknown_ids[0]!r}); use passage ids of "
            f"its corpus"
        )
    if unknown_ids:
        message = "feedback pairs_of_unknown_passages=%d pairs=%d first=%s file=%s"
        logger.warning(message, len(unknown_ids), len(votes), unknown_ids[0], path)
    labels = {pair: positive for pair, positive in labels.items() if pair[1] in existing}
    positives: dict[str, list[str]] = {}
    for (question, passage_id), positive in labels.items():
        if isinstance(question, str):
            positives.setdefault(question, []).extend([passage_id] if positive else [])
    new = {
        text: Question(f"feedback-{_hash(text, 0):016x}", text, (), tuple(sorted(ids)))
        for text, ids in positives.items()
    }
    return [
        (new[question] if isinstance(question, str) else question, passage_id, positive)
        for (question, passage_id), positive in labels.items()
    ]


def _judgement(row: Row | BadRow) -> tuple[str, str, int]:
    if isinstance(row, BadRow):
        raise DataError(f"{row}; a line is {FEEDBACK_LINE}")
    if {"question", "passage_id", "label"} - row.values.keys():
        raise DataError(f"{row.where}: a line is {FEEDBACK_LINE}, this one is {row.values!r:.120}")
    question, passage_id, label = row.values["question"], row.values["passage_id"], row.values["label"]
    if not isinstance(question, str) or not question.strip() or not is_id(passage_id):
        rule = "question is a text with words, and passage_id a text or a whole number"
        raise DataError(f"{row.where}: {rule}, given {row.values!r:.120}")
    passage_id = str(passage_id)
    for name, text in (("question", question), ("passage_id", passage_id)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(f"{row.where}: {name} is not valid UTF-8: {text!r:.60}") from None
    if label not in (1, -1) or isinstance(label, bool):
        raise DataError(f"{row.where}: label is 1 (answers the question) or -1 (does not), given {label!r}")
    return question, passage_id, int(label)


def _hash(text: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest(), "big")


def _fold(text: str, seed: int) -> int:
    """Return the fold of a question, by a hash of its text: equal texts always share a fold."""
    return _hash(text, seed) % GATE_FOLDS
