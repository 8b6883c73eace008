"""Sentences, Algorithm 1 by hand and by laws, equal splits, packaged parameters."""

import dataclasses
import json
import subprocess
import sys

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.encoding.snippets import (
    KNOWN_ABBREVIATIONS,
    TERMINATORS,
    PunktParams,
    Splitter,
    equal_splits,
    find_snippet,
    import_punkt,
    merge_snippets,
    packaged_params,
    sentence_spans,
    snippet_spans,
    train_punkt,
)
from mvr_ray.errors import EncoderError

SPLITTER = Splitter()
BY_HAND = [
    ("nothing to merge", [5, 3, 4], 3, [(0, 1), (1, 2), (2, 3)]),
    ("no sentence", [], 4, []),
    ("one sentence, eight views", [7], 8, [(0, 1)]),
    ("more views than sentences", [2, 9], 5, [(0, 1), (1, 2)]),
    ("the shortest, in the middle, joins its shorter neighbour", [9, 2, 4, 8], 3, [(0, 1), (1, 3), (3, 4)]),
    ("... which may be the one before", [4, 2, 9, 8], 3, [(0, 2), (2, 3), (3, 4)]),
    ("the first has one neighbour", [1, 9, 2, 9], 3, [(0, 2), (2, 3), (3, 4)]),
    ("the last has one neighbour", [9, 9, 1], 2, [(0, 1), (1, 3)]),
    ("equal neighbours: the one before", [5, 1, 5], 2, [(0, 2), (2, 3)]),
    ("equal shortest: the earliest", [3, 8, 3, 8], 3, [(0, 2), (2, 3), (3, 4)]),
    ("all equal", [1, 1, 1, 1], 2, [(0, 2), (2, 4)]),
    ("a merged piece counts with its whole length", [1, 3, 5, 3], 2, [(0, 2), (2, 4)]),
    ("a very long sentence stays alone", [3, 1000, 2, 4, 1], 3, [(0, 1), (1, 2), (2, 5)]),
    ("down to one", [4, 1, 3], 1, [(0, 3)]),
]


@pytest.mark.parametrize(("lengths", "num", "expected"), [row[1:] for row in BY_HAND], ids=[row[0] for row in BY_HAND])
def test_algorithm_1_by_hand(lengths, num, expected):
    assert merge_snippets(lengths, num) == expected


def test_fewer_than_one_snippet_is_refused():
    with pytest.raises(ValueError, match=r"^cannot cut a text into 0 snippets; ask for 1 or more$"):
        merge_snippets([1, 2], 0)


@given(lengths=st.lists(st.integers(1, 300), max_size=30), num=st.integers(1, 12))
@settings(max_examples=100)
def test_merging_keeps_every_sentence_in_order_and_makes_as_many_pieces_as_it_can(lengths, num):
    ranges = merge_snippets(lengths, num)
    assert [at for first, last in ranges for at in range(first, last)] == list(range(len(lengths)))
    assert len(ranges) == min(num, len(lengths))


def merge_slowly(lengths, num):
    """Algorithm 1 by a walk over all pieces for every merge."""
    pieces = [(at, at + 1, length) for at, length in enumerate(lengths)]
    while len(pieces) > num:
        shortest = min(range(len(pieces)), key=lambda at: pieces[at][2])
        neighbours = [at for at in (shortest - 1, shortest + 1) if 0 <= at < len(pieces)]
        first, last = sorted((shortest, min(neighbours, key=lambda at: pieces[at][2])))
        pieces[first : last + 1] = [(pieces[first][0], pieces[last][1], pieces[first][2] + pieces[last][2])]
    return [(first, last) for first, last, _ in pieces]


@given(lengths=st.lists(st.integers(0, 6) | st.integers(1, 300), max_size=40), num=st.integers(1, 12))
@settings(max_examples=500)
def test_merging_equals_a_walk_over_all_pieces(lengths, num):
    assert merge_snippets(lengths, num) == merge_slowly(lengths, num)


class CountingInt(int):
    """A length that counts its comparisons."""

    num_compared = 0

    def __lt__(self, other):
        CountingInt.num_compared += 1
        return int(self) < other

    def __eq__(self, other):
        CountingInt.num_compared += 1
        return int(self) == other

    def __add__(self, other):
        return CountingInt(int(self) + other)

    __hash__ = int.__hash__


def test_the_work_of_merging_grows_hardly_faster_than_the_sentences():
    counts = []
    for num in (500, 4000):
        CountingInt.num_compared = 0
        merge_snippets([CountingInt(1 + at * at % 97) for at in range(num)], 8)
        counts.append(CountingInt.num_compared)
    assert counts[1] < 20 * counts[0]


@given(lengths=st.lists(st.integers(1, 50), min_size=2, max_size=12), num=st.integers(1, 6))
@settings(max_examples=100)
def test_one_piece_fewer_is_one_merge_of_a_shortest_piece(lengths, num):
    more, fewer = merge_snippets(lengths, num + 1), merge_snippets(lengths, num)
    if len(more) <= num:
        assert more == fewer
        return
    (new,) = set(fewer) - set(more)
    parts = [sum(lengths[first:last]) for first, last in more if new[0] <= first and last <= new[1]]
    assert len(parts) == 2
    assert min(parts) == min(sum(lengths[first:last]) for first, last in more)


@given(text=st.text(alphabet='ab .?!\n\r\t\u00a0Z"é漢。！」।؟', max_size=120), num=st.integers(1, 9))
@settings(max_examples=150)
@pytest.mark.parametrize("cut", [lambda text, num: snippet_spans(text, num, SPLITTER), equal_splits])
def test_snippets_are_ordered_disjoint_never_blank_and_hold_all_that_is_not_space(cut, text, num):
    spans = cut(text, num)
    assert len(spans) <= num
    at = 0
    for start, end in spans:
        assert start >= at and text[at:start].strip() == "" and text[start:end] == text[start:end].strip() != ""
        at = end
    assert text[at:].strip() == ""
    for view, (start, end) in enumerate(spans):
        assert find_snippet(spans, start) == find_snippet(spans, end - 1) == view
    assert find_snippet(spans, len(text)) == find_snippet(spans, -1) == -1


def test_sentences_are_distinguished_from_abbreviations():
    text = (
        "Dr. J. Smith of the U.S. Army met Mr. Brown in St. Louis at 5 p.m. The meeting was short. "
        "Prices, e.g. of oil, rose 3.5 percent. Why?"
    )
    assert [text[start:end] for start, end in sentence_spans(text, SPLITTER)] == [
        "Dr. J. Smith of the U.S. Army met Mr. Brown in St. Louis at 5 p.m.",
        "The meeting was short.",
        "Prices, e.g. of oil, rose 3.5 percent.",
        "Why?",
    ]


@pytest.mark.parametrize(
    ("between", "sentences"),
    [
        ("", ["大学成立于1413年。", "他说：“学生穿红色长袍！？”", "图书馆有一百万册书。"]),
        ("", ["東京タワーは1958年に完成した。", "「高さは333メートルである。」", "赤と白に塗られている！"]),
        (" ", ["विश्वविद्यालय की स्थापना 1413 में हुई।", "यह सेंट एंड्रयूज में है॥", "छात्र लाल वस्त्र पहनते हैं।"]),
        (" ", ["تأسست الجامعة عام 1413.", "أين تقع؟", "يرتدي الطلاب أثوابا حمراء."]),
        (" ", ["یہ ایک جملہ ہے۔", "یہ دوسرا جملہ ہے۔"]),
        (" ", ["Սա նախադասություն է։", "Սա երկրորդն է։"]),
        (" ", ["대학은 1413년에 설립되었다.", "학생은 붉은 옷을 입는다."]),
        ("\r\n \r\n", ["# Rivers", "- The Nile\n- The Rhine", "## Towers", "It rose."]),
        ("\n\n", ["มหาวิทยาลัยก่อตั้งขึ้นในปี 1413 นักศึกษาสวมเสื้อคลุมสีแดง", "แม่น้ำไหลไปที่ใด"]),
    ],
)
def test_sentences_of_other_scripts_end_at_their_marks_and_at_blank_lines(between, sentences):
    text = between.join(sentences)
    for splitter in (SPLITTER, Splitter(train_punkt(sentences * 9))):
        assert [text[start:end] for start, end in sentence_spans(text, splitter)] == sentences
    earlier = Splitter(dataclasses.replace(packaged_params(), terminators=""))
    ends = {end for _, end in earlier.spans(text)}
    assert ends <= {end for _, end in SPLITTER.spans(text)}


def test_terminators_are_of_unicode_and_none_is_one_of_punkt():
    assert len(set(TERMINATORS)) == len(TERMINATORS) and not {*TERMINATORS} & {*".?!"}
    assert regex.fullmatch(r"\p{Sentence_Terminal}+", TERMINATORS)
    assert packaged_params().terminators == TERMINATORS


def test_text_without_a_sentence_end_is_one_sentence():
    assert sentence_spans("  no end in sight \n", SPLITTER) == [(2, 17)]


def test_equal_splits_differ_by_one_word_at_most_and_give_the_first_pieces_the_rest():
    text = "a b c d e f g"
    assert [text[start:end] for start, end in equal_splits(text, 3)] == ["a b c", "d e", "f g"]


def test_packaged_parameters_hold_the_known_abbreviations_and_survive_json():
    params = packaged_params()
    assert set(params.abbreviations) >= KNOWN_ABBREVIATIONS
    assert "the" in params.sentence_starters
    assert PunktParams.from_json(params.to_json()) == params


def test_parameters_of_earlier_programs_stay_as_they_are_and_split_as_they_did():
    earlier = dataclasses.replace(packaged_params(), terminators="")
    text = earlier.to_json()
    assert "terminators" not in json.loads(text) and PunktParams.from_json(text) == earlier
    assert Splitter(earlier).spans("大学。它位\n\nThe end. So.") == [(0, 15), (16, 19)]


def test_training_depends_on_the_texts_alone_and_learns_an_abbreviation():
    texts = [f"The xq. value of item {n} is large. It was seen by xq. experts in the city." for n in range(60)]
    params = train_punkt(texts)
    assert params == train_punkt(iter(texts))
    assert "xq" in params.abbreviations
    assert "value" in params.lowercase_words
    text = "The xq. value is here. It is new."
    assert len(sentence_spans(text, Splitter(params))) == 2


WRONG_TERMINATORS = {**dataclasses.asdict(SPLITTER.params), "terminators": 5}


@pytest.mark.parametrize(
    "text", ["not json", "[]", json.dumps({"abbreviations": []}), json.dumps(WRONG_TERMINATORS)], ids=range(4)
)
def test_unreadable_parameters_are_refused(text):
    with pytest.raises(EncoderError, match=r"^Punkt parameters cannot be read \(.*\); they are a JSON object with"):
        PunktParams.from_json(text)


def test_a_long_text_is_cut_whatever_time_it_takes_and_other_programs_keep_the_limit_of_nltk():
    """nltk limits the processor time of all threads while it looks for the sentences of one text."""
    redos = pytest.importorskip("nltk.redos")
    assert Splitter().spans("Up. Down.") and import_punkt().redos.DEFAULT_TIMEOUT is None
    assert redos.DEFAULT_TIMEOUT is not None


def test_sentences_are_cut_without_the_rest_of_nltk_which_a_program_then_gets_whole():
    program = (
        "import pickle, sys\n"
        "from mvr_ray.core.encoding.snippets import Splitter\n"
        "splitter = Splitter()\n"
        "spans = splitter.spans('Dr. Smith came. He left.')\n"
        "copied = pickle.loads(pickle.dumps(splitter))\n"
        "assert spans == copied.spans('Dr. Smith came. He left.') == [(0, 15), (16, 24)]\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in ('nltk', 'scipy', 'sklearn')))\n"
        "import nltk.tokenize.punkt\n"
        "print(nltk.word_tokenize.__module__, nltk.tokenize.punkt.PunktSentenceTokenizer().tokenize('One. Two.'))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.splitlines() == ["[]", "nltk.tokenize ['One.', 'Two.']"]


def test_a_thread_that_imports_nltk_meanwhile_gets_it_whole():
    program = (
        "import sys, threading\n"
        "from mvr_ray.core.encoding.snippets import Splitter\n"
        "sys.setswitchinterval(1e-4)\n"
        "spans = []\n"
        "threads = [threading.Thread(target=lambda: spans.append(Splitter().spans('Up. Down.'))) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "import nltk\n"
        "for thread in threads: thread.join()\n"
        "print(hasattr(nltk, 'word_tokenize'), spans == [[(0, 3), (4, 9)]] * 3)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout == "True True\n"
