"""The answer rules, against a slow transcription of them that shares no code with ours."""

import json
import string
import unicodedata
import weakref

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.judging.answers import (
    AnswerMatcher,
    Match,
    empty_answers,
    exact_match_score,
    f1_score,
    has_answer,
    normalize_answer,
    refuse_empty_answers,
    tokenize,
    warn_of_runs,
)
from mvr_ray.errors import DataError
from mvr_ray.types import Question


def slow_tokens(text: str) -> list[str]:
    """Character by character, from Unicode categories instead of a pattern."""
    tokens: list[str] = []
    inside_run = False
    for character in unicodedata.normalize("NFD", text):
        category = category_of(character)
        if category[0] in "LNM":
            if inside_run:
                tokens[-1] += character
            else:
                tokens.append(character)
            inside_run = True
            continue
        inside_run = False
        if category[0] not in "ZC":
            tokens.append(character)
    return [token.lower() for token in tokens]


def category_of(character: str) -> str:
    """The general category in the Unicode version of the pattern module (the standard library's may be older)."""
    standard = unicodedata.category(character)
    if standard != "Cn":
        return standard
    newer = next((major for major in "LNMPSZ" if regex.match(rf"\p{{{major}}}", character)), "C")
    return newer


def slow_has_answer(text: str, answers: list[str]) -> bool:
    words = slow_tokens(text)
    for answer in answers:
        expected = slow_tokens(answer)
        for start in range(len(words) - len(expected) + 1):
            if words[start : start + len(expected)] == expected:
                return True
    return False


EDGES = [
    ("anything at all", [""], True),
    ("", [""], True),
    ("anything", ["   "], True),
    ("anything", ["\u200b\u200d"], True),
    ("anything", [], False),
    ("", ["x"], False),
    ("worth 1,000 pounds", ["1000"], False),
    ("worth 1,000 pounds", ["1,000"], True),
    ("worth 1,000 pounds", ["000"], True),
    ("Beyoncé sang", ["Beyonce"], False),
    ("Beyoncé sang", ["BEYONCE\u0301"], True),
    ("the ﬁne print", ["fine"], False),
    ("the fine print", ["fi"], False),
    ("the U.S. army", ["U.S"], True),
    ("the U.S. army", ["u.s."], True),
    ("the US army", ["U.S."], False),
    ("they don't go", ["don't"], True),
    ("they don't go", ["don"], True),
    ("they don't go", ["dont"], False),
    ("they don\u2019t go", ["don't"], False),
    ("state-of-the-art", ["state of the art"], False),
    ("state - of - the - art", ["state-of-the-art"], True),
    ("new  \n york", ["New York"], True),
    ("new\u200byork", ["new york"], True),
    ("newyork", ["new york"], False),
    ("Straße", ["STRASSE"], False),
    ("snake_case", ["snake"], True),
    ("ΟΔΟΣ.Α", ["οδος"], True),
    ("ΟΔΟΣ.Α", ["ΟΔΟΣ"], True),
    ("in İzmir", ["i\u0307zmir"], True),
    ("²", ["2"], False),
    ("日本語の本", ["日本"], False),
    ("a 👍 b", ["👍"], True),
    ("1 2 3", ["2 3 4", "1 2"], True),
    ("ab", ["a"], False),
]


@pytest.mark.parametrize(("text", "answers", "expected"), EDGES)
def test_each_listed_edge_case_matches_as_the_field_does(text: str, answers: list[str], expected: bool):
    assert slow_has_answer(text, answers) is expected
    assert has_answer(text, answers) is expected
    assert AnswerMatcher().has_answer(text, answers) is expected


def test_an_apostrophe_cuts_a_word_into_three_tokens():
    assert tokenize("Don't") == ["don", "'", "t"]


ODD = "aAbΣσς İıßﬁé\u0301\u200b\u00ad\u2028\u00a0\t\n.,'’-_1²٣日👍\ufeff\U000e0001"


@settings(max_examples=600)
@given(st.text(alphabet=ODD, max_size=30), st.lists(st.text(alphabet=ODD, max_size=5), max_size=3))
def test_odd_texts_match_as_the_slow_transcription_says(text: str, answers: list[str]):
    assert tokenize(text) == slow_tokens(text)
    assert has_answer(text, answers) == slow_has_answer(text, answers)


@settings(max_examples=400)
@given(st.text(max_size=40), st.data())
def test_any_unicode_text_matches_as_the_slow_transcription_says(text: str, data: st.DataObject):
    assert tokenize(text) == slow_tokens(text)
    start = data.draw(st.integers(0, len(text)))
    answer = text[start : data.draw(st.integers(start, len(text)))]
    assert has_answer(text, [answer]) == slow_has_answer(text, [answer])


@pytest.mark.data
def test_squad_passages_match_as_the_slow_transcription_says(squad_dev: dict):
    paragraphs = [p for article in squad_dev["data"] for p in article["paragraphs"]]
    texts = [paragraph["context"] for paragraph in paragraphs[::9]]
    words = [slow_tokens(text) for text in texts]
    assert [tokenize(text) for text in texts] == words
    answers = [[a["text"] for a in qa["answers"]] for p in paragraphs[::9] for qa in p["qas"]][::16]
    matcher = AnswerMatcher(max_cached_bytes=50_000)
    hits = 0
    for each in answers:
        expected = [slow_tokens(answer) for answer in each]
        slow = [
            any(w == word[i : i + len(w)] for w in expected for i in range(len(word) - len(w) + 1)) for word in words
        ]
        assert [matcher.has_answer(text, each) for text in texts] == slow
        hits += sum(slow)
    assert hits > len(answers)
    assert matcher.cached_bytes <= 50_000


@pytest.mark.data
def test_an_index_of_all_questions_marks_a_passage_as_the_slow_transcription_does(squad_dev: dict):
    paragraphs = [p for article in squad_dev["data"] for p in article["paragraphs"]][::40]
    answers = [[a["text"] for a in qa["answers"]] for p in paragraphs for qa in p["qas"]]
    answers += [[], [""], ["the"], ["\u200b", "no such words"], ["Who", "Normans"], ["."]]
    index = AnswerMatcher().index(answers)
    numbers = np.random.default_rng(0).permutation(len(answers))
    hits = 0
    texts = [p["context"] for p in paragraphs]
    for text in [*texts, "", "?"]:
        marks = index.marks(text, numbers)
        assert marks.tolist() == [has_answer(text, answers[question]) for question in numbers]
        hits += int(marks.sum())
    for text in map(str.upper, texts[::20]):  # a twentieth, for time
        assert index.marks(text, numbers).tolist() == [slow_has_answer(text, answers[number]) for number in numbers]
    assert hits > 3 * len(paragraphs)
    assert index.marks("", np.empty(0, np.int64)).tolist() == []


@pytest.mark.parametrize(
    ("match", "hits"), [("string", [3, 4]), ("regex", [0, 1, 2, 3, 4, 6]), ("kilt", [0, 1, 3, 4, 6])]
)
def test_an_index_follows_its_rule(match: Match, hits: list[int]):
    answers = [["nor"], ["norman"], ["n.rm"], ["the Normans"], ["(unclosed", "people"], ["xyz"], ["a"]]
    index, numbers = AnswerMatcher(match).index(answers), np.arange(7)
    assert np.flatnonzero(index.marks("The Normans were the people", numbers)).tolist() == hits
    for text in ("The Normans were the people", "a norman", "Normans", ""):
        assert index.marks(text, numbers).tolist() == [has_answer(text, one, match) for one in answers]


@pytest.mark.data
def test_nearly_every_squad_paragraph_holds_its_own_answer_and_the_rest_are_cut_inside_a_token(squad_dev: dict):
    matcher = AnswerMatcher()
    misses = []
    total = 0
    for article in squad_dev["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                total += 1
                answers = [a["text"] for a in qa["answers"]]
                if not matcher.has_answer(paragraph["context"], answers):
                    misses.append((paragraph["context"], answers))
    assert len(misses) < 0.005 * total
    for text, answers in misses:
        assert all(answer in text for answer in answers)


@pytest.mark.data
def test_an_open_question_matches_the_same_through_cache_and_without(data_dir, squad_dev: dict):
    lines = (data_dir / "nq_open" / "NQ-open.efficientqa.dev.1.1.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines[:60]]
    texts = [p["context"] for article in squad_dev["data"] for p in article["paragraphs"]][:60]
    matcher = AnswerMatcher()
    for each in answers:
        assert [matcher.has_answer(text, each) == has_answer(text, each) for text in texts] == [True] * len(texts)


def test_the_cache_stays_within_its_bytes_and_forgets_the_least_recently_used():
    matcher = AnswerMatcher(max_cached_bytes=3000)
    texts = [f"{n} " + "word " * 40 for n in range(20)]
    for text in texts:
        assert matcher.has_answer(text, ["word"])
        assert matcher.has_answer(texts[0], ["0"])
        assert 0 < matcher.cached_bytes <= 3000
    assert texts[0] in matcher._haystacks
    assert texts[1] not in matcher._haystacks


def test_a_text_larger_than_the_whole_cache_is_still_searched():
    matcher = AnswerMatcher(max_cached_bytes=10)
    assert matcher.has_answer("a needle in a long text", ["needle"])
    assert matcher.cached_bytes == 0


def test_an_unused_matcher_frees_its_passages_at_once():
    matcher = AnswerMatcher()
    assert matcher.has_answer("a needle in a long text", ["needle"])
    reference = weakref.ref(matcher)
    del matcher
    assert reference() is None, "its cache, up to 256 MB, waits for the garbage collector"


@pytest.mark.parametrize(
    ("text", "pattern", "expected"),
    [
        ("born in 1987.", r"\b19\d\d\b", True),
        ("BORN in May", r"born", True),
        ("a\nb", r"^b$", True),
        ("Beyoncé", "beyonc\u00e9", True),
        ("(unclosed", r"(unclosed", False),
        ("x", r"[", False),
        ("x", r"", True),
        ("ab", r"a(?P<n>b", False),
        ("x", "(?<=", False),
        ("aaa", r"a{2,1}", False),
        ("x", r"\p{Nonsense}", False),
    ],
)
def test_pattern_answers_search_the_raw_text_and_broken_ones_never_match(text: str, pattern: str, expected: bool):
    assert has_answer(text, [pattern], match="regex") is expected
    assert AnswerMatcher("regex").has_answer(text, [pattern]) is expected


@settings(max_examples=500)
@given(st.text(alphabet="a()[]{}*+?|\\^$.-,:<>=!P1x2&~#\u0301pL", max_size=10))
def test_no_pattern_however_broken_raises(pattern: str):
    assert has_answer("", [pattern], match="regex") in (True, False)


def test_kilt_answers_are_sought_as_normalised_substrings():
    assert has_answer("The Beatles, in 1964", ["a BEATLES!"], match="kilt")
    assert has_answer("finest", ["fine"], match="kilt")
    assert not has_answer("fine", ["finest"], match="kilt")


@pytest.mark.parametrize("answer", ["北京", "กรุงเทพ", "서울"])
def test_a_set_whose_answers_stand_within_runs_of_letters_is_warned_of_under_the_string_rule(answer: str, caplog):
    assert not has_answer(f"{answer}大หมา은", [answer]) and has_answer(f"{answer}大หมา은", [answer], "regex")
    warn_of_runs("mine", [["1898"], [], ["x", answer]], "string")
    assert f"1 of 2 questions of set mine have answers in scripts without spaces or in Korean, such as {answer}; " in (
        caplog.text
    )
    caplog.clear()
    warn_of_runs("mine", [[answer]], "regex")
    warn_of_runs("mine", [["Köln", "القاهرة"], ["विश्वविद्यालय"], []], "string")
    warn_of_runs("mine", [["Köln"]] * 10 + [[answer]], "string")
    assert not caplog.text


def test_an_answer_that_would_match_everything_is_refused_with_its_question():
    refuse_empty_answers([Question("a", "What?", ("cat",)), Question("b", "What?")])
    with pytest.raises(DataError, match=r"^question 'c': answer ' ' .*would match every passage; remove it"):
        refuse_empty_answers([Question("a", "What?", ("cat",)), Question("c", "What?", ("dog", " "))])
    assert empty_answers(["x", "", "\u200b", "!"]) == ["", "\u200b"]


@pytest.mark.parametrize(("match", "answer", "other"), [("kilt", "The!", "Thebes"), ("regex", "(19)?x*", "(19)+x*")])
def test_what_matches_everything_is_known_by_each_rule(match, answer, other):
    assert has_answer("Egypt", [answer], match) and not has_answer("Egypt", [other], match)
    assert empty_answers([answer, other], match) == [answer]
    with pytest.raises(DataError, match="would match every passage"):
        refuse_empty_answers([Question("a", "Where?", (other, answer))], match)


def test_one_string_in_place_of_a_list_of_answers_is_refused():
    with pytest.raises(AssertionError):
        has_answer("a cat", "cat")
    with pytest.raises(AssertionError):
        AnswerMatcher().index(["cat"])


def slow_normalize(text: str) -> str:
    letters = "".join(character for character in text.lower() if character not in string.punctuation)
    spaced_text = "".join(
        character if character.isalnum() or character == "_" else f" {character} " for character in letters
    )
    assert "_" not in spaced_text
    return " ".join(word for word in spaced_text.split() if word not in ("a", "an", "the"))


@pytest.mark.parametrize(
    ("prediction", "answer", "equal"),
    [
        ("The Beatles!", "beatles", True),
        ("a cat", "the  cat", True),
        ("an apple", "apple", True),
        ("theory", "ory", False),
        ("U.S.", "us", True),
        ("1,000", "1000", True),
        ("Beyoncé", "Beyonce", False),
        ("", "the", True),
        ("don't", "dont", True),
        ("co-op", "coop", True),
        ("don\u2019t", "dont", False),
    ],
)
def test_exact_match_ignores_case_punctuation_articles_and_blanks_only(prediction: str, answer: str, equal: bool):
    others = ["something else"] if normalize_answer(answer) else []  # an answer of nothing counts alone
    assert exact_match_score(prediction, [*others, answer]) is equal
    assert (normalize_answer(prediction) == normalize_answer(answer)) is equal


@settings(max_examples=300)
@given(st.lists(st.sampled_from(["a", "An", "THE", "cat", "'s", ",", "the-a", "U.S.", "theme", "\t"]), max_size=8))
def test_normalising_word_by_word_gives_the_same_words(words: list[str]):
    text = " ".join(words)
    assert normalize_answer(text) == slow_normalize(text)
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)


SQUAD_SCORES = [
    # prediction, answers, exact, F1: worked by hand
    ("the Eiffel Tower!", ["Eiffel tower"], True, 1.0),
    ("Eiffel Tower in Paris", ["Eiffel Tower"], False, 2 * (2 / 4) * 1 / (2 / 4 + 1)),
    ("Tower", ["Eiffel Tower", "a tower"], True, 1.0),
    ("no no yes", ["no yes yes"], False, 2 / 3),
    ("no no no", ["no"], False, 2 * (1 / 3) / (1 / 3 + 1)),
    ("1,000", ["1000"], True, 1.0),
    ("U.S.", ["US"], True, 1.0),
    ("another", ["other"], False, 0.0),
    ("an other", ["other"], True, 1.0),
    ("Saint-Denis", ["Saint Denis"], False, 0.0),
    ("Beyoncé", ["Beyonce"], False, 0.0),
    ("“quoted”", ["quoted"], False, 0.0),
    ("", ["something"], False, 0.0),
    ("the", ["a"], True, 1.0),
    ("", ["A", "Alabama"], False, 0.0),
    ("Alabama", ["A", "Alabama"], True, 1.0),
    ("something", ["the"], False, 0.0),
    ("something", [], False, 0.0),
]


@pytest.mark.parametrize(("prediction", "answers", "exact", "f1"), SQUAD_SCORES)
def test_squad_scores_worked_by_hand(prediction, answers, exact, f1):
    assert exact_match_score(prediction, answers) is exact
    assert f1_score(prediction, answers) == pytest.approx(f1)


def slow_words(text: str) -> list[str]:
    """SQuAD's normal form, character by character and word by word."""
    letters = "".join(character for character in text.lower() if character not in string.punctuation)
    words, word = [], ""
    for character in letters + " ":
        inside = character.isalnum() or character == "_"
        if not inside and word in ("a", "an", "the"):
            word = ""
        word += character
        if not inside:
            words.append(word)
            word = ""
    return "".join(words).split()


def slow_f1(prediction: str, answers: list[str]) -> float:
    best = 0.0
    for answer in [answer for answer in answers if slow_words(answer)] or answers:
        words, expected = slow_words(prediction), slow_words(answer)
        rest, same = list(expected), 0
        for word in words:
            if word in rest:
                rest.remove(word)
                same += 1
        if not words and not expected:
            best = 1.0
        elif same:
            precision, recall = same / len(words), same / len(expected)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


WORDS = st.lists(st.sampled_from(["a", "An", "the", "red", "Red,", "red-hot", "1,5", "!", "Ω", "other"]), max_size=6)


@given(WORDS, st.lists(WORDS, max_size=3))
@settings(max_examples=300)
def test_f1_is_the_slow_transcription_and_never_below_exact_match(prediction, answers):
    text, expected = " ".join(prediction), [" ".join(answer) for answer in answers]
    assert f1_score(text, expected) == pytest.approx(slow_f1(text, expected))
    assert f1_score(text, expected) >= exact_match_score(text, expected)
    targets = [answer for answer in expected if slow_words(answer)] or expected
    assert all(f1_score(answer, expected) == 1.0 for answer in targets)


@pytest.mark.data
def test_squad_answers_of_one_question_score_alike_under_both_transcriptions(squad_dev):
    """The answers of three people to a question, each against the other two."""
    num_answers = 0
    for article in squad_dev["data"][::4]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                first, *others = [answer["text"] for answer in qa["answers"]]
                assert f1_score(first, others) == pytest.approx(slow_f1(first, others)), (first, others)
                exact = any(slow_words(first) == slow_words(other) for other in others)
                assert exact_match_score(first, others) == exact
                num_answers += 1
    assert num_answers > 1000
