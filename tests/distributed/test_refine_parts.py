"""Refinement without Ray: changes over a shard, labelled and held-out questions, feedback, the label cache."""

import io
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pickle_payload import Payload
from prepared_corpus import only_corpus

from mvr_ray.cli.tables import report_tables
from mvr_ray.config import PrepareConfig, RefineConfig, SourceConfig
from mvr_ray.distributed.refinement.questions import arrange, gather, read_feedback
from mvr_ray.distributed.refinement.refiner_pool import LabelCache
from mvr_ray.distributed.refinement.report import Accuracy, RefineReport, RoundReport, WeightReport
from mvr_ray.distributed.refinement.state import ShardChanges, StoredViews
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store.files import Store
from mvr_ray.store.prepare import prepare
from mvr_ray.types import EmbeddingBlock, Question

NUM_VIEWS, DIMENSION = 3, 4


def random_blocks(seed: int, num_blocks: int = 3) -> list[EmbeddingBlock]:
    """Blocks of random size; each passage has 1..3 own views, and one in three up to three feedback views."""
    rng = np.random.default_rng(seed)
    blocks, row = [], 0
    for _ in range(num_blocks):
        numbers = []
        for _ in range(int(rng.integers(1, 6))):
            own = np.sort(rng.permutation(NUM_VIEWS)[: rng.integers(1, NUM_VIEWS + 1)])
            numbers.append([*own, *(NUM_VIEWS + np.arange(rng.integers(1, 4) if rng.random() < 0.3 else 0))])
        row_ptr = np.cumsum([0, *map(len, numbers)])
        vectors_ND = rng.standard_normal((row_ptr[-1], DIMENSION)).astype(np.float16)
        ids = [f"p{row + i:04d}" for i in range(len(numbers))]
        row += len(numbers)
        blocks.append(EmbeddingBlock(ids, row_ptr, np.concatenate(numbers).astype(np.int16), vectors_ND))
    return blocks


def as_dicts(blocks: list[EmbeddingBlock]) -> list[dict[int, bytes]]:
    """Every passage as {view number: bytes}."""
    return [
        {int(block.view_numbers_N[n]): block.vectors_ND[n].tobytes() for n in range(*block.row_ptr[i : i + 2])}
        for block in blocks
        for i in range(len(block.ids))
    ]


@settings(max_examples=60)
@given(st.integers(0, 10_000))
def test_laying_changes_over_a_shard_equals_changing_each_passage_by_itself(seed):
    rng = np.random.default_rng(seed)
    blocks = random_blocks(seed)
    views = StoredViews(blocks)
    expected = as_dicts(blocks)
    moved_slots = rng.permutation(len(views.keys_N))[: rng.integers(0, len(views.keys_N))]
    vectors = rng.standard_normal((len(moved_slots), DIMENSION)).astype(np.float32)
    rows = rng.permutation(len(expected))[: rng.integers(0, len(expected))]
    rows = rng.permutation(np.repeat(rows, rng.integers(1, 4, len(rows))))
    feedback = rng.standard_normal((len(rows), DIMENSION)).astype(np.float32)
    state = ShardChanges.none(DIMENSION).with_moved(moved_slots, vectors).with_feedback(rows, feedback)

    slots = [(row, view) for row, passage in enumerate(expected) for view in passage]
    for slot, vector in zip(moved_slots, vectors):
        row, view = slots[slot]
        expected[row][view] = vector.astype(np.float16).tobytes()
    for row in set(rows.tolist()):
        expected[row] = {view: data for view, data in expected[row].items() if view < NUM_VIEWS}
        for number, vector in enumerate(feedback[rows == row]):
            expected[row][NUM_VIEWS + number] = vector.astype(np.float16).tobytes()
    current = views.current(state, NUM_VIEWS)
    assert as_dicts(current) == expected
    assert all(np.array_equal(np.sort(c.view_numbers_N[a:b]), c.view_numbers_N[a:b])
               for c in current for a, b in zip(c.row_ptr, c.row_ptr[1:]))  # fmt: skip

    changes = views.changes(state, current)
    names = [name for block in blocks for name in block.ids]
    differs = [names[row] for row, before in enumerate(as_dicts(blocks)) if before != expected[row]]
    assert list(changes) == differs
    for name, (numbers, vectors_VD) in changes.items():
        assert dict(zip(numbers.tolist(), (vector.tobytes() for vector in vectors_VD))) == expected[names.index(name)]


def test_a_state_that_holds_a_pickle_is_refused_and_never_loaded(tmp_path):
    buffer = io.BytesIO()
    np.savez(buffer, **{**vars(ShardChanges.none(DIMENSION)), "moved_M": np.array([Payload(tmp_path / "trace")])})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        ShardChanges.from_bytes(buffer.getvalue())
    assert not (tmp_path / "trace").exists()


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_a_state_survives_the_disk_and_later_moves_win(seed):
    rng = np.random.default_rng(seed)
    views = StoredViews(random_blocks(seed))
    state, expected = ShardChanges.none(DIMENSION), {}
    for _ in range(3):
        slots = rng.permutation(len(views.keys_N))[: rng.integers(0, 4)]
        vectors = rng.standard_normal((len(slots), DIMENSION)).astype(np.float32)
        state = ShardChanges.from_bytes(state.with_moved(slots, vectors).to_bytes())
        expected.update(zip(slots.tolist(), vectors.tolist()))
    assert state.moved_M.tolist() == sorted(expected)
    assert state.moved_MD.tolist() == [expected[slot] for slot in sorted(expected)]
    every = np.arange(len(views.keys_N))
    vectors_ND = np.concatenate([block.vectors_ND for block in views.blocks]).astype(np.float32)
    vectors_ND[sorted(expected)] = state.moved_MD
    assert np.array_equal(views.vectors(every, state), vectors_ND)


def test_an_untouched_block_is_the_stored_one_and_not_a_copy():
    views = StoredViews(random_blocks(1))
    state = ShardChanges.none(DIMENSION).with_moved(np.array([0]), np.ones((1, DIMENSION), np.float32))
    current = views.current(state, NUM_VIEWS)
    assert current[0] is not views.blocks[0]
    assert current[1] is views.blocks[1]


def test_a_move_too_small_for_the_stored_type_makes_nothing_dirty():
    views = StoredViews(random_blocks(2))
    vectors_ND = views.vectors(np.array([0]), ShardChanges.none(DIMENSION))
    state = ShardChanges.none(DIMENSION).with_moved(np.array([0]), vectors_ND * np.float32(1 + 1e-6))
    assert views.changes(state, views.current(state, NUM_VIEWS)) == {}


def test_feedback_that_stays_the_same_has_not_changed():
    one, two = np.ones((1, DIMENSION), np.float32), 2 * np.ones((1, DIMENSION), np.float32)
    base = ShardChanges.none(DIMENSION)
    old = base.with_feedback(np.array([3, 5]), np.concatenate([one, one]))
    assert old.feedback_changes(old).tolist() == []
    assert old.feedback_changes(base.with_feedback(np.array([3, 7]), np.concatenate([two, one]))).tolist() == [3, 5, 7]


def test_passages_with_another_number_or_order_of_feedback_views_have_changed():
    one, two = np.ones((1, DIMENSION), np.float32), 2 * np.ones((1, DIMENSION), np.float32)
    base = ShardChanges.none(DIMENSION)
    old = base.with_feedback(np.array([3, 3, 5, 8, 8]), np.concatenate([one, two, one, one, two]))
    now = base.with_feedback(np.array([8, 5, 5, 3, 8]), np.concatenate([two, one, two, one, one]))
    assert now.feedback_F.tolist() == [3, 5, 5, 8, 8]
    assert old.feedback_changes(old).tolist() == []
    assert old.feedback_changes(now).tolist() == now.feedback_changes(old).tolist() == [3, 5, 8]
    assert ShardChanges.from_bytes(now.to_bytes()).feedback_changes(now).tolist() == []


def question(text: str, number: int = 0) -> Question:
    return Question(f"{text}-{number}", text, ("a",))


def test_no_question_stands_under_two_protocols():
    known_questions, gate, unseen = (
        [question("k1"), question("k2")],
        [question("g1"), question("k2", 9)],
        [question("u1")],
    )
    everything = [*known_questions, question("g1"), *unseen, question("k1", 7)]
    questions = arrange("known", known_questions, [("gate", gate)], [("all", everything), ("known", known_questions)])
    by_text = {}
    for group in questions.groups:
        for row in group.members:
            by_text.setdefault(questions.table[row].text, set()).add(group.protocol)
    assert by_text == {"k1": {"transductive"}, "k2": {"transductive"}, "g1": {"gate"}, "u1": {"held-out"}}
    assert [(group.name, group.protocol, len(group.members)) for group in questions.groups] == [
        ("known", "transductive", 2),
        ("gate", "gate", 1),
        ("all", "transductive", 3),
        ("all", "gate", 1),
        ("all", "held-out", 1),
    ]
    assert len(questions.table) == 4  # a repeated question has one row
    assert [questions.table[row].text for row in questions.gate_rows()] == ["g1"]
    assert [questions.table[row].text for row in questions.other_rows()] == ["u1"]


def test_a_gate_of_labelled_questions_only_is_refused():
    with pytest.raises(ConfigError, match=r"every question of refine.gate .gate. is also a labelled question"):
        arrange("known", [question("k")], [("gate", [question("k", 1)])], [])


def test_feedback_names_stored_questions_by_id_or_text_and_makes_the_others(tmp_path):
    questions = [Question("q1", "who is it?", ("x",)), Question("q2", "and where?", ())]
    rows = [("q1", "p1", 1), (" and where?\n", "p2", -1), ("a new one", "p9", 1), (" a new one", 3, 1), ("q1", "p1", 1)]
    file = tmp_path / "clicks.jsonl"
    file.write_text("\n".join(json.dumps({"question": q, "passage_id": p, "label": v}) for q, p, v in rows) + "\n\n")
    labels = read_feedback(file, questions, set)
    assert [(q.text, p, good) for q, p, good in labels] == [
        ("who is it?", "p1", True),
        ("and where?", "p2", False),
        ("a new one", "p9", True),
        ("a new one", "3", True),
    ]
    assert labels[0][0] is questions[0]
    assert labels[2][0].positive_ids == ("3", "p9")


def test_judged_questions_are_called_feedback_whatever_set_stands_beside_them(tmp_path):
    passages = tmp_path / "passages.jsonl"
    rows = [{"id": f"p{i}", "text": f"Text {i}."} for i in range(40)]
    rows += [{"id": f"q{i}", "question": f"which is {i}?", "positive_ids": [f"p{i}"]} for i in range(40)]
    passages.write_text("\n".join(map(json.dumps, rows)))
    store, source = Store(tmp_path / "store"), SourceConfig(path=str(passages), questions="known")
    prepare(PrepareConfig(corpus="c", sources=[source]), store)
    clicks = tmp_path / "clicks.jsonl"
    judgements = [{"question": f"q{i}", "passage_id": f"p{i}", "label": 1} for i in range(30)]
    clicks.write_text("\n".join(map(json.dumps, judgements)))
    refine = RefineConfig(questions="known", feedback=str(clicks), report=["known"])
    questions = gather(only_corpus(store), refine)
    names = {(group.name, group.protocol) for group in questions.groups}
    assert {("feedback", "transductive"), ("feedback/gate", "gate"), ("known", "held-out")} <= names
    by_gold = gather(only_corpus(store), RefineConfig(questions="known", labels="gold"))
    assert next(iter(by_gold.groups)).name == "known"
    with pytest.raises(ConfigError, match=r"labels is answers, and no question of 'known' has an answer; .*=gold if"):
        gather(only_corpus(store), RefineConfig(questions="known"))


KEYS = {"q1": "who is it?", "who is it?": "who is it?", "q2": "and where?", "a new one": "a new one"}


@given(st.lists(st.tuples(st.sampled_from(sorted(KEYS)), st.sampled_from("pr"), st.sampled_from([1, -1])), min_size=1))
def test_the_majority_of_a_pairs_judgements_counts_and_a_draw_gives_no_label(rows):
    questions = [Question("q1", "who is it?", ("x",)), Question("q2", "and where?", ())]
    totals = Counter()
    for key, passage_id, label in rows:
        totals[KEYS[key], passage_id] += label
    expected = {pair: total > 0 for pair, total in totals.items() if total}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "clicks.jsonl"
        lines = [json.dumps({"question": key, "passage_id": p, "label": label}) for key, p, label in rows]
        file.write_text("\n".join(lines))
        if not expected:
            with pytest.raises(DataError, match="no feedback"):
                read_feedback(file, questions, set)
            return
        labels = read_feedback(file, questions, set)
    assert [((q.text, p), good) for q, p, good in labels] == list(expected.items())
    positives = {p for (text, p), good in expected.items() if good and text == "a new one"}
    assert all(set(q.positive_ids) == positives for q, _, _ in labels if q.text == "a new one")


def test_drawn_pairs_are_counted_in_the_log(tmp_path, caplog):
    rows = [("who?", "p", 1), ("who?", "p", -1), ("who?", "r", 1), ("where?", "p", -1), ("where?", "p", 1)]
    file = tmp_path / "clicks.jsonl"
    file.write_text("\n".join(json.dumps({"question": q, "passage_id": p, "label": v}) for q, p, v in rows))
    with caplog.at_level("INFO", "mvr_ray"):
        read_feedback(file, [], set)
    assert f"feedback drawn_pairs=2 pairs=3 file={file}" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"clicks.jsonl:2: not valid JSON"),
        ("[1]", r"clicks.jsonl:2: not a JSON object"),
        ('{"question": "q", "label": 1}', r"clicks.jsonl:2: a line is"),
        ('{"question": "q", "passage_id": "p", "label": 0}', r"clicks.jsonl:2: label is 1 .* given 0"),
        ('{"question": " ", "passage_id": "p", "label": 1}', r"clicks.jsonl:2: question is a text with words, and"),
        ('{"question": "q", "passage_id": 1.5, "label": 1}', r"clicks.jsonl:2: .* passage_id a text or a whole number"),
        ('{"question": "\\ud800", "passage_id": "p", "label": 1}', r"clicks.jsonl:2: question is not valid UTF-8"),
        ('{"question": "q", "passage_id": "\\ud800", "label": 1}', r"clicks.jsonl:2: passage_id is not valid UTF-8"),
        ('{"question": "good", "passage_id": "p", "label": -1}', r"no feedback.*judged 1 as often as -1"),
        ('{"question": "good", "passage_id": "p", "label": true}', r"clicks.jsonl:2: label is 1 .* given True"),
    ],
)
def test_a_bad_feedback_line_is_named(tmp_path, line, message):
    file = tmp_path / "clicks.jsonl"
    file.write_text('{"question": "good", "passage_id": "p", "label": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read_feedback(file, [], set)


@settings(max_examples=40)
@given(st.lists(st.dictionaries(st.integers(0, 60), st.booleans(), max_size=20), max_size=5))
def test_the_label_cache_equals_a_dictionary(batches):
    cache, labels = LabelCache(), {}
    for batch in batches:
        keys = np.array(sorted(batch), np.int64)
        missing = cache.missing(keys)
        assert missing.tolist() == [key for key in keys.tolist() if key not in labels]
        cache.add(missing, np.array([batch[key] for key in missing.tolist()], bool))
        labels.update({key: batch[key] for key in missing.tolist()})
        assert cache.get(keys).tolist() == [labels[key] for key in keys.tolist()]


def test_a_report_survives_the_disk():
    report = RefineReport(
        index="i",
        base_version=3,
        method="linear",
        rounds=(RoundReport(1, 0.0, 5, 6, 0.1, 0.2, 0.3, 1, 2, 3, 0.5, 0.5, 0.5, 0.5),),
        best_round=1,
        accuracy=(Accuracy("known", "transductive", "gold", 7, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.5),),
        dirty_share=0.25,
        rewritten_shards=2,
        published=None,
        reason="1 of 1 rounds done",
        settings={"feedback_weight": 0.7, "feedback_clusters": 2},
        weights=(WeightReport(0.7, 0.9, 0.8, 0.7, 0.6, -0.5), WeightReport(0.8, 0.95, 0.85, 0.6, 0.5, 10.0)),
    )
    tables = report_tables("refine", json.loads(report.to_json()))
    columns = {str(table.title): [str(column.header) for column in table.columns] for table in tables}
    assert columns["weights"] == sorted(name.replace("_", " ") for name in WeightReport._fields)
    assert RefineReport.from_json(report.to_json()) == report
