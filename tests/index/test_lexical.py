"""The words of shards score passages as one bm25s index over the whole corpus does, to the last bit."""

import tracemalloc
import unicodedata
from collections import Counter
from pathlib import Path
from typing import get_args

import bm25s
import numpy as np
import pytest
import regex
import Stemmer
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.config.run import Language
from mvr_ray.core.scripts import SPACELESS
from mvr_ray.errors import ShardIndexError
from mvr_ray.index import lexical
from mvr_ray.index.lexical import (
    ENGLISH,
    CorpusStatistics,
    Postings,
    WordCounts,
    WordRule,
    find_words_as_bm25s,
    find_words_as_written,
    indexed_text,
    read_rule,
    write_postings,
    write_postings_changes,
    write_statistics,
    write_statistics_changes,
)
from mvr_ray.store.corpus import shard_of
from mvr_ray.types import Passage


@pytest.fixture(scope="module")
def passages(squad_dev) -> list[Passage]:
    """2,000 paragraphs of SQuAD with their titles, and one without a word."""
    texts = [(a["title"], p["context"]) for a in squad_dev["data"] for p in a["paragraphs"]][:2000]
    return [*(Passage(f"p{number:04d}", *one) for number, one in enumerate(texts)), Passage("p9999", "", "the of")]


@pytest.fixture(scope="module")
def questions(squad_dev) -> list[str]:
    return [p["qas"][0]["question"] for a in squad_dev["data"] for p in a["paragraphs"] if p["qas"]][:200]


def make_shards(folder: Path, passages: list[Passage], num_shards: int) -> list[list[Passage]]:
    """Write postings of each shard, and the statistics of all; returns the passages of each."""
    shards = [[one for one in passages if shard_of(one.id, num_shards) == shard] for shard in range(num_shards)]
    for number, own in enumerate(shards):
        write_postings(own, folder / f"{number}.arrow")
    write_statistics([Postings(folder / f"{n}.arrow").whole for n in range(num_shards)], folder / "statistics.arrow")
    return shards


def open_words(folder: Path, name: str) -> tuple[Postings, CorpusStatistics]:
    return Postings(folder / f"{name}.arrow"), CorpusStatistics(folder / "statistics.arrow")


def whole_corpus(passages: list[Passage]) -> bm25s.BM25:
    """bm25s over the words of all passages."""
    oracle = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    oracle.index(ENGLISH.tokenize([f"{passage.title}\n{passage.text}" for passage in passages]), show_progress=False)
    return oracle


@pytest.mark.parametrize("num_shards", [1, 5])
def test_scores_of_shards_are_those_of_bm25s_over_the_whole_corpus(tmp_path, passages, questions, num_shards):
    oracle = whole_corpus(passages)
    shards = make_shards(tmp_path, passages, num_shards)
    indexes = [open_words(tmp_path, str(n)) for n in range(num_shards)]
    row_of = {passage.id: row for row, passage in enumerate(passages)}
    num_scored = 0
    for words in ENGLISH.tokenize(questions):
        known_words = [word for word in words if word in oracle.vocab_dict]
        expected_P = oracle.get_scores(known_words) if known_words else np.zeros(len(passages), np.float32)
        for own, (postings, statistics) in zip(shards, indexes):
            score_P = postings.scores(words, statistics)
            assert score_P.dtype == np.float32
            np.testing.assert_array_equal(score_P, expected_P[[row_of[passage.id] for passage in own]])
            num_scored += int((score_P > 0).sum())
    assert num_scored > 10_000


def bm25s_words(texts: list[str]) -> list[list[str]]:
    stemmer = Stemmer.Stemmer("english")
    return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)


SENTENCES = st.sampled_from(
    [
        "The rivers' RIVER ran into it",
        "Straße, naïve; _x_ 42nd a1 ΣΑΣ",
        "Đà Nẵng",
        "الطلاب שלום",
        "Ёлка ёлки",
    ]
)
WITHOUT_MARKS = st.text(st.characters(exclude_categories=["M", "C", "Lo"])).filter(
    lambda text: not regex.search(rf"[\p{{M}}\u0640\ufb00-\uffef{SPACELESS}]", text.lower(), regex.VERSION1)
)


@given(st.lists(st.text(st.characters(max_codepoint=127)) | SENTENCES | WITHOUT_MARKS))
def test_text_without_marks_is_cut_into_the_words_of_bm25s_between_which_it_has_spaces(texts):
    texts = [unicodedata.normalize("NFC", text) for text in texts]
    assert ENGLISH.tokenize(texts) == bm25s_words(texts)


@given(st.lists(st.text()))
def test_words_of_files_of_the_first_format_are_those_of_bm25s(texts):
    assert WordRule(find=find_words_as_bm25s).tokenize(texts) == bm25s_words(texts)


@given(st.text() | st.text("aeİΣ漢がﾞ한ทีक़ा\u0301\u0307\u0327 "))
def test_words_are_the_same_in_every_normal_form_and_beside_other_text(text):
    words = ENGLISH.tokenize([text])[0]
    assert ENGLISH.tokenize([unicodedata.normalize("NFD", text)])[0] == words
    assert ENGLISH.tokenize([f"漢 {text} \u0e17"])[0] == ["漢", *words, "\u0e17"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("大学成立于1413年。", ["大学", "学成", "成立", "立于", "1413", "年"]),
        ("iPhone手机", ["iphon", "手机"]),
        ("東京タワーは高い", ["東京", "京タ", "タワ", "ワー", "ーは", "は高", "高い"]),
        ("นักศึกษา 1413", ["นัก", "กศึ", "ศึก", "กษ", "ษา", "1413"]),
        ("छात्र लाल वस्त्र पहनते हैं।", ["छात्र", "लाल", "वस्त्र", "पहनते", "हैं"]),
        ("يرتدي الطلاب أثوابًا؟", ["يرتدي", "الطلاب", "أثوابًا"]),
        ("یہ ایک جملہ ہے۔", ["یہ", "ایک", "جملہ", "ہے"]),
        ("Սա նախադասություն է։", ["սա", "նախադասություն"]),
        ("학생은 붉은 옷을 입는다. 책", ["학생", "생은", "붉은", "옷을", "입는", "는다", "책"]),
        (unicodedata.normalize("NFD", "Zürcher Gemüse é"), ["zürcher", "gemüs"]),
    ],
)
def test_words_of_other_scripts(text, words):
    assert ENGLISH.tokenize([text]) == [words]


GERMAN = "Die Häuser der Stadt (z. B. AB-1234/5) standen dem Haus näher."


def test_words_are_stems_of_the_language_without_stop_words_in_english_alone():
    words = bm25s.tokenize([GERMAN], stopwords=None, return_ids=False, show_progress=False)
    stems = [Stemmer.Stemmer("german").stemWords(own) for own in words]
    assert WordRule("none").tokenize([GERMAN]) == words
    assert WordRule("german").tokenize([GERMAN]) == stems
    assert stems[0].count("haus") == 2 and {"die", "der"} <= {*stems[0]}


@pytest.mark.parametrize("language", [one for one in get_args(Language) if one != "none"])
def test_every_language_of_the_configuration_has_a_stemmer(language):
    assert language in Stemmer.algorithms()
    rule = WordRule(language)
    assert WordRule.of_format(rule.format) == rule


def test_files_name_their_language_and_one_without_a_stemmer_is_refused(tmp_path, passages, monkeypatch):
    rule = WordRule("german")
    write_postings(passages[:5], tmp_path / "postings", rule)
    postings = Postings(tmp_path / "postings").whole
    write_statistics([postings], tmp_path / "statistics")
    assert read_rule(tmp_path / "postings") == CorpusStatistics(tmp_path / "statistics").rule == rule
    monkeypatch.setattr(WordRule, "format", b"mvr_ray.lexical/2 bm25s klingon")
    write_postings(passages[:5], tmp_path / "postings", rule)
    monkeypatch.undo()
    with pytest.raises(ShardIndexError, match=r"its format is mvr_ray.lexical/2 bm25s klingon, not .*index again"):
        Postings(tmp_path / "postings")


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Rhein\u00adschiff\u00adfahrt", "Rheinschifffahrt"),
        ("ﬁnal oﬃce", "final office"),
        ("１９５８ ＡＢＣ ｺﾝﾋﾟｭｰﾀｰ", "1958 ABC コンピューター"),
        ("ﻛﺘﺎﺏ كـــتاب", "كتاب كتاب"),
        ("葛\U000e0100城 क्\u200dष \u202bשלום\u202c", "葛城 क्ष שלום"),
        ("İstanbul", "istanbul"),
        (unicodedata.normalize("NFD", "서울"), "서울"),
    ],
)
def test_a_word_is_the_same_with_invisible_characters_ligatures_and_other_widths(text, plain):
    assert ENGLISH.tokenize([text]) == ENGLISH.tokenize([plain]) != [[]]


def test_a_zero_width_space_or_non_joiner_stands_between_words():
    assert ENGLISH.tokenize(["ភ្នំ\u200bពេញ کتاب\u200cها"]) == ENGLISH.tokenize(["ភ្នំ ពេញ کتاب ها"])


def test_words_of_files_of_the_second_format_are_those_of_their_rule():
    words = ["rhein", "fahrt", "ﬁn", "１９", "학생은", "北京", "京大", "i\u0307s"]
    assert find_words_as_written("Rhein\u00adfahrt ﬁn １９ 학생은 北京大 İs") == words


def test_a_passage_scores_alone_as_in_its_shard(tmp_path, passages, questions):
    make_shards(tmp_path, passages, 1)
    postings, statistics = open_words(tmp_path, "0")
    for words in ENGLISH.tokenize(questions[:20]):
        score_P = postings.scores(words, statistics)
        for row in [0, int(score_P.argmax()), len(passages) - 1]:
            assert statistics.score(words, next(ENGLISH.count_words([passages[row]]))) == score_P[row]


def test_a_word_is_looked_up_once_in_each_file_however_many_shards_and_questions_have_it(tmp_path, monkeypatch):
    texts = ["red river", "river bank", "a red bank", "rivers of red", "an old bank", "red old river"]
    make_shards(tmp_path, [Passage(f"p{number}", "", text) for number, text in enumerate(texts)], 4)
    lookups, find = [], lexical._find
    monkeypatch.setattr(lexical, "_find", lambda *args: (lookups.append(args), find(*args))[1])
    statistics = CorpusStatistics(tmp_path / "statistics.arrow")
    shards, words = [Postings(tmp_path / f"{number}.arrow") for number in range(4)], ["red", "river", "zzyzx"]
    first, second = ([postings.scores(words, statistics) for postings in shards] for _ in range(2))
    assert all(np.array_equal(*both) for both in zip(first, second))
    assert len(lookups) == 4 * 3 + 2  # words of each shard, and those that any has in the statistics


def test_a_word_that_stands_twice_in_a_question_counts_twice_and_an_unknown_one_not_at_all(tmp_path, passages):
    make_shards(tmp_path, passages, 1)
    postings, statistics = open_words(tmp_path, "0")
    once, twice, none, unknown = (
        postings.scores(words, statistics) for words in (["team"], ["team", "zzyzx", "team"], [], ["zzyzx"])
    )
    assert once.any() and np.array_equal(twice, once + once)
    assert not none.any() and not unknown.any()


def test_same_passages_give_the_same_bytes_and_an_empty_shard_has_none(tmp_path, passages):
    for name in ("a", "b"):
        write_postings(passages[:50], tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    write_postings([], tmp_path / "empty.arrow")
    shards = [Postings(tmp_path / name).whole for name in ("empty.arrow", "a")]
    write_statistics(shards, tmp_path / "statistics.arrow")
    postings, statistics = open_words(tmp_path, "empty")
    assert postings.scores(["team"], statistics).shape == (0,)
    lengths = [len(words) for words in ENGLISH.tokenize([indexed_text(passage) for passage in passages[:50]])]
    assert statistics.mean_length == np.mean(lengths)


def test_postings_are_those_of_all_words_at_once_whatever_number_of_passages_is_counted_at_a_time(
    tmp_path, passages, monkeypatch
):
    write_postings(iter(passages[-300:]), tmp_path / "postings")
    own = Postings(tmp_path / "postings").whole
    words = ENGLISH.tokenize([indexed_text(passage) for passage in passages[-300:]])
    expected = sorted((term, row, count) for row, own in enumerate(words) for term, count in Counter(own).items())
    terms = np.repeat(own.term_T.to_pylist(), np.diff(own.end_T, prepend=0)).tolist()
    assert [*zip(terms, own.row_N.tolist(), own.count_N.tolist())] == expected
    assert own.length_P.tolist() == list(map(len, words))
    monkeypatch.setattr(lexical, "_COUNTED_PASSAGES", 7)
    write_postings(passages[-300:], tmp_path / "pieces")
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "postings").read_bytes()


def test_memory_of_the_words_of_many_passages_is_that_of_their_postings(tmp_path):
    draws = np.random.default_rng(0).integers(0, 3000, (8_000, 20)).tolist()
    texts = (Passage(f"{row:05d}", "", " ".join(f"w{word}" for word in own)) for row, own in enumerate(draws))
    write_postings([], tmp_path / "none")
    tracemalloc.start()
    write_postings(texts, tmp_path / "postings")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    num_postings = len(Postings(tmp_path / "postings").whole.row_N)
    assert num_postings > 155_000
    assert peak_bytes < 36 * num_postings


def test_a_file_of_another_kind_is_refused_by_name(tmp_path, passages):
    write_postings(passages[:5], tmp_path / "postings")
    (tmp_path / "text").write_text("no arrow")
    for wrong in (lambda: CorpusStatistics(tmp_path / "postings"), lambda: Postings(tmp_path / "text")):
        with pytest.raises(ShardIndexError, match=r"holds no words of a shard that this program reads .*index again"):
            wrong()


WORDS = ["ship", "harbour", "river", "music"]


@settings(max_examples=40)
@given(
    st.lists(
        st.dictionaries(st.integers(0, 9), st.none() | st.lists(st.sampled_from(WORDS), max_size=4)),
        min_size=2,
        max_size=5,
    )
)
def test_files_of_changes_score_and_count_as_files_of_the_passages_now(tmp_path_factory, generations):
    """None deletes a passage, words replace it or are those of a new one."""
    folder, now = tmp_path_factory.mktemp("words"), {}
    for number, texts in enumerate(generations):
        before = now
        upserts = {f"p{key}": Passage(f"p{key}", "", " ".join(own)) for key, own in texts.items() if own is not None}
        stays = {name: own for name, own in now.items() if int(name[1:]) not in texts}
        now = dict(sorted((stays | upserts).items()))
        write_postings([*now.values()], folder / f"postings-now{number}")
        write_statistics([Postings(folder / f"postings-now{number}").whole], folder / f"statistics-now{number}")
        changes = range(1, number)
        names = [[f"{kind}-now0", *(f"{kind}{one}" for one in changes)] for kind in ("postings", "statistics")]
        postings_files, statistics_files = ([folder / name for name in own] for own in names)
        if number:
            hidden_rows = [row for row, name in enumerate(before) if now.get(name) is not before[name]]
            places = [row for row, name in enumerate(now) if now[name] is not before.get(name)]
            new_passages = [[*now.values()][row] for row in places]
            change = WordCounts.difference(new_passages, [[*before.values()][row] for row in hidden_rows])
            statistics = CorpusStatistics(*statistics_files)
            write_statistics_changes(statistics, 0, change, folder / f"whole{number}")
            assert (folder / f"whole{number}").read_bytes() == (folder / f"statistics-now{number}").read_bytes()
            postings_files.append(folder / f"postings{number}")
            statistics_files.append(folder / f"statistics{number}")
            rows = np.array(places, np.int64), np.array(hidden_rows, np.int64)
            write_postings_changes(new_passages, *rows, postings_files[-1])
            write_statistics_changes(statistics, number, change, statistics_files[-1])
        postings, statistics = Postings(*postings_files), CorpusStatistics(*statistics_files)
        whole = Postings(folder / f"postings-now{number}")
        whole_statistics = CorpusStatistics(folder / f"statistics-now{number}")
        words = ENGLISH.tokenize([" ".join(WORDS)])[0]
        for own in (words, *([word] for word in words)):
            np.testing.assert_array_equal(postings.scores(own, statistics), whole.scores(own, whole_statistics))
