"""Checks every strategy token by token: where a token stands, at which position, and in which view."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.encoding.views import (
    EncoderSpec,
    Layout,
    PassageText,
    TextTokens,
    TokenizedPassage,
    pack_tokens,
    shorten,
    snippet_of_token,
    unpack_tokens,
)
from mvr_ray.errors import EncoderError

C, S, VIE = 101, 102, 1000
LAYOUT = Layout((C,), (S,), (S,), first_position=0, num_positions=64, first_viewer=VIE)
SPEC = EncoderSpec(strategy="cls", num_views=3, max_query_tokens=8, max_passage_tokens=20)
TITLE = [7, 8]
TEXT = TextTokens(ids=[11, 12, 13, 14, 15], ends=[2, 5, 6, 9, 12])
SNIPPETS = [(0, 6), (7, 12)]
"""Tokens 11 12 13 are in the first, 14 15 in the second."""
T_ = -1

CASES = {
    "cls": (
        SPEC,
        [C, 7, 8, S, 11, 12, 13, 14, 15, S],
        range(10),
        [0, *[T_] * 9],
    ),
    "mean": (replace(SPEC, strategy="mean"), [C, 7, 8, S, 11, 12, 13, 14, 15, S], range(10), [0] * 10),
    "first_k": (
        replace(SPEC, strategy="first_k"),
        [C, 7, 8, S, 11, 12, 13, 14, 15, S],
        range(10),
        [0, 1, 2, *[T_] * 7],
    ),
    "snippet_means": (
        replace(SPEC, strategy="snippet_means"),
        [C, 7, 8, S, 11, 12, 13, 14, 15, S],
        range(10),
        [T_, T_, T_, T_, 0, 0, 0, 1, 1, T_],
    ),
    "viewers, all at 0": (
        replace(SPEC, strategy="viewers"),
        [VIE + 1, VIE + 2, VIE + 3, 7, 8, S, 11, 12, 13, 14, 15, S],
        [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        [0, 1, 2, *[T_] * 9],
    ),
    "viewers, each at its own": (
        replace(SPEC, strategy="viewers", viewer_position="own"),
        [VIE + 1, VIE + 2, VIE + 3, 7, 8, S, 11, 12, 13, 14, 15, S],
        [61, 62, 63, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        [0, 1, 2, *[T_] * 9],
    ),
    "snippets by viewer": (
        replace(SPEC, strategy="snippets"),
        [7, 8, S, VIE + 1, 11, 12, 13, VIE + 2, 14, 15, S],
        range(11),
        [T_, T_, T_, 0, T_, T_, T_, 1, T_, T_, T_],
    ),
    "snippets by viewer, empty ones kept": (
        replace(SPEC, strategy="snippets", empty_snippets="kept"),
        [7, 8, S, VIE + 1, 11, 12, 13, VIE + 2, 14, 15, VIE + 3, S],
        range(12),
        [T_, T_, T_, 0, T_, T_, T_, 1, T_, T_, 2, T_],
    ),
    "snippets by mean": (
        replace(SPEC, strategy="snippets", readout="snippet_mean"),
        [7, 8, S, VIE + 1, 11, 12, 13, VIE + 2, 14, 15, S],
        range(11),
        [T_, T_, T_, T_, 0, 0, 0, T_, 1, 1, T_],
    ),
    "pieces alone, by [CLS]": (
        replace(SPEC, strategy="sentences"),
        [C, 7, 8, S, 11, 12, 13, S, C, 7, 8, S, 14, 15, S],
        [*range(8), *range(7)],
        [0, *[T_] * 7, 1, *[T_] * 6],
    ),
    "pieces alone, by mean": (
        replace(SPEC, strategy="splits", readout="snippet_mean"),
        [C, 7, 8, S, 11, 12, 13, S, C, 7, 8, S, 14, 15, S],
        [*range(8), *range(7)],
        [*[0] * 8, *[1] * 7],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_passage_is_laid_out_token_by_token(case):
    spec, ids, positions, views = CASES[case]
    passage = LAYOUT.passage(spec, PassageText(TITLE, TEXT, SNIPPETS))
    assert passage.input_ids.tolist() == ids
    assert passage.position_ids.tolist() == list(positions)
    assert passage.view_T.tolist() == views
    assert passage.num_tokens == len(ids)


@pytest.mark.parametrize("case", CASES)
def test_positions_begin_after_the_rows_that_a_backbone_keeps_for_padding(case):
    spec = CASES[case][0]
    passage = replace(LAYOUT, first_position=2).passage(spec, PassageText(TITLE, TEXT, SNIPPETS))
    assert (passage.position_ids == LAYOUT.passage(spec, PassageText(TITLE, TEXT, SNIPPETS)).position_ids + 2).all()


TITLED = replace(SPEC, strategy="snippets", title_view=True, num_views=4)
TITLE_CASES = {
    "title": (
        TITLED,
        (TITLE, TEXT, SNIPPETS),
        [VIE + 1, 7, 8, VIE + 2, 11, 12, 13, VIE + 3, 14, 15, S],
        [0, T_, T_, 1, T_, T_, T_, 2, T_, T_, T_],
    ),
    "title, empty viewers kept": (
        replace(TITLED, empty_snippets="kept"),
        (TITLE, TEXT, SNIPPETS),
        [VIE + 1, 7, 8, VIE + 2, 11, 12, 13, VIE + 3, 14, 15, VIE + 4, S],
        [0, T_, T_, 1, T_, T_, T_, 2, T_, T_, 3, T_],
    ),
    "title, by mean": (
        replace(TITLED, readout="snippet_mean"),
        (TITLE, TEXT, SNIPPETS),
        [VIE + 1, 7, 8, VIE + 2, 11, 12, 13, VIE + 3, 14, 15, S],
        [T_, 0, 0, T_, 1, 1, 1, T_, 2, 2, T_],
    ),
    "no title": (
        TITLED,
        ([], TEXT, SNIPPETS),
        [VIE + 2, 11, 12, 13, VIE + 3, 14, 15, S],
        [1, T_, T_, T_, 2, T_, T_, T_],
    ),
    "no title, empty viewers kept": (
        replace(TITLED, empty_snippets="kept"),
        ([], TEXT, SNIPPETS),
        [VIE + 1, VIE + 2, 11, 12, 13, VIE + 3, 14, 15, VIE + 4, S],
        [0, 1, T_, T_, T_, 2, T_, T_, 3, T_],
    ),
    "no text": (TITLED, (TITLE, TextTokens([], []), []), [VIE + 1, 7, 8, S], [0, T_, T_, T_]),
    "no text, by mean": (
        replace(TITLED, readout="snippet_mean"),
        (TITLE, TextTokens([], []), []),
        [VIE + 1, 7, 8, S],
        [T_, 0, 0, T_],
    ),
    "no text, empty viewers kept": (
        replace(TITLED, empty_snippets="kept"),
        (TITLE, TextTokens([], []), []),
        [VIE + 1, 7, 8, VIE + 2, VIE + 3, VIE + 4, S],
        [0, T_, T_, 1, 2, 3, T_],
    ),
    "nothing": (TITLED, ([], TextTokens([], []), []), [VIE + 1, S], [0, T_]),
    "nothing, by mean": (
        replace(TITLED, readout="snippet_mean"),
        ([], TextTokens([], []), []),
        [VIE + 1, S],
        [0, T_],
    ),
}
"""CAMVR, figures 1 and 4: [VIE_1] title [VIE_2] snippet .. [VIE_V] before nothing. Viewer numbers mean one thing: the
first is the title's, with or without a title."""


@pytest.mark.parametrize("case", TITLE_CASES)
def test_the_title_is_the_first_viewers_snippet_and_the_text_has_the_others(case):
    spec, parts, ids, views = TITLE_CASES[case]
    passage = LAYOUT.passage(spec, PassageText(*parts))
    assert passage.input_ids.tolist() == ids
    assert passage.position_ids.tolist() == list(range(len(ids)))
    assert passage.view_T.tolist() == views


@given(
    with_empty=st.booleans(),
    title=st.integers(0, 40),
    lengths=st.lists(st.integers(1, 30), max_size=3),
)
@settings(max_examples=200)
def test_with_a_title_view_viewers_stand_in_order_and_each_snippet_after_its_own(with_empty, title, lengths):
    spec = replace(TITLED, empty_snippets="kept" if with_empty else "masked")
    bounds = np.cumsum([0, *lengths]).tolist()
    text = TextTokens(ids=list(range(200, 200 + bounds[-1])), ends=list(range(1, bounds[-1] + 1)))
    passage = LAYOUT.passage(spec, PassageText(list(range(500, 500 + title)), text, list(pairwise(bounds))))
    ids = passage.input_ids.tolist()
    assert ids[-1] == S and len(ids) <= spec.max_passage_tokens
    there = [0] if title else []
    there += range(1, 1 + len(lengths))
    order = list(range(4)) if with_empty else there or [0]
    assert [token - VIE - 1 for token in ids if token > VIE] == order
    assert [view for view in passage.view_T.tolist() if view >= 0] == order
    pieces: dict[int, list[int]] = {}
    for token in ids[:-1]:
        if token > VIE:
            pieces[token - VIE - 1] = []
        else:
            pieces[next(reversed(pieces))].append(token)
    quarter = spec.max_passage_tokens // 4
    assert pieces.pop(0, []) == list(range(500, 500 + min(title, quarter)))
    for view, (start, end) in enumerate(pairwise(bounds), 1):
        own = pieces.pop(view)
        assert own == list(range(200 + start, 200 + start + len(own))) and 1 <= len(own) <= end - start
    assert not any(pieces.values())
    whole = 1 + len(order) + min(title, quarter) + bounds[-1]
    assert len(ids) == min(whole, spec.max_passage_tokens)


def test_settings_without_a_title_view_are_those_that_fingerprints_on_file_were_made_of():
    old = {"strategy": "snippets", "num_views": 3, "use_title": True, "max_query_tokens": 8, "max_passage_tokens": 20,
           "normalize": True, "readout": "viewer"}  # fmt: skip
    assert replace(SPEC, strategy="snippets").settings() == old
    assert replace(SPEC, strategy="snippets", title_view=True).settings() == {**old, "title_view": True}
    means = replace(SPEC, strategy="snippet_means")
    assert replace(means, whole_view=True).settings() == {**means.settings(), "whole_view": True}
    assert "whole_view" not in means.settings()


QUERIES = {
    "cls": (SPEC, C, [0, T_, T_, T_]),
    "mean": (replace(SPEC, strategy="mean"), C, [0, 0, 0, 0]),
    "first_k": (replace(SPEC, strategy="first_k"), C, [0, T_, T_, T_]),
    "snippet_means": (replace(SPEC, strategy="snippet_means"), C, [0, 0, 0, 0]),
    "viewers": (replace(SPEC, strategy="viewers"), VIE, [0, T_, T_, T_]),
    "snippets by viewer": (replace(SPEC, strategy="snippets"), VIE, [0, T_, T_, T_]),
    "snippets by mean": (replace(SPEC, strategy="snippets", readout="snippet_mean"), VIE, [T_, 0, 0, 0]),
    "pieces by [CLS]": (replace(SPEC, strategy="splits"), C, [0, T_, T_, T_]),
    "pieces by mean": (replace(SPEC, strategy="sentences", readout="snippet_mean"), C, [0, 0, 0, 0]),
}


@pytest.mark.parametrize("case", QUERIES)
def test_a_query_is_laid_out_token_by_token(case):
    spec, first, views = QUERIES[case]
    query = LAYOUT.query(spec, [11, 12])
    assert query.input_ids.tolist() == [first, 11, 12, S]
    assert query.position_ids.tolist() == [0, 1, 2, 3]
    assert query.view_T.tolist() == views


def test_a_long_query_ends_in_a_separator_at_its_limit():
    assert LAYOUT.query(SPEC, list(range(11, 61))).input_ids.tolist() == [C, 11, 12, 13, 14, 15, 16, S]


def test_a_backbone_with_two_separators_puts_both_after_the_title():
    passage = replace(LAYOUT, separator=(S, S)).passage(SPEC, PassageText(TITLE, TEXT))
    assert passage.input_ids.tolist() == [C, 7, 8, S, S, 11, 12, 13, 14, 15, S]


@given(
    case=st.sampled_from(sorted(CASES)),
    title=st.integers(0, 40),
    lengths=st.lists(st.integers(1, 30), max_size=3),
)
@settings(max_examples=200)
def test_truncation_takes_text_only_and_leaves_a_view(case, title, lengths):
    spec = CASES[case][0]
    bounds = np.cumsum([0, *lengths]).tolist()
    snippets = list(pairwise(bounds))
    text = TextTokens(ids=list(range(200, 200 + bounds[-1])), ends=list(range(1, bounds[-1] + 1)))
    passage = LAYOUT.passage(spec, PassageText(list(range(500, 500 + title)), text, snippets))
    ids = passage.input_ids.tolist()
    rows = LAYOUT.rows(passage) if spec.has_pieces else [passage]
    assert all(row.num_tokens <= spec.max_passage_tokens for row in rows)
    assert ids[-1] == S
    views = set(passage.view_T.tolist()) - {-1}
    assert 0 in views and max(views) < spec.effective_views
    text_ids = [token for token in ids if 200 <= token < 500]
    whole = len(text_ids) == len(text.ids)
    again = (len(rows) - 1) * (len(ids) - len(text_ids)) // len(rows)  # special tokens and title of the further rows
    assert whole or len(ids) - again == spec.max_passage_tokens
    if spec.strategy == "viewers":
        assert ids[:3] == [VIE + 1, VIE + 2, VIE + 3]
    if spec.strategy == "snippets":
        assert views == set(range(3 if spec.empty_snippets == "kept" else max(1, len(lengths))))
        assert [token - VIE - 1 for token in ids if token > VIE] == sorted(views)
    else:
        assert text_ids == text.ids[: len(text_ids)]


def test_a_snippet_lost_to_truncation_has_no_view():
    text = TextTokens(ids=list(range(200, 230)), ends=list(range(1, 31)))
    spec = replace(SPEC, strategy="snippet_means")
    passage = LAYOUT.passage(spec, PassageText([], text, [(0, 10), (10, 18), (18, 30)]))
    assert set(passage.view_T.tolist()) == {-1, 0, 1}


@pytest.mark.parametrize("case", CASES)
def test_a_passage_without_text_has_one_view_unless_each_token_or_viewer_is_one(case):
    spec = CASES[case][0]
    views = LAYOUT.passage(spec, PassageText(TITLE, TextTokens([], []))).view_T
    every = spec.strategy in ("first_k", "viewers") or spec.empty_snippets == "kept"
    assert set(views.tolist()) - {-1} == ({0, 1, 2} if every else {0})


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=10), data=st.data())
@settings(max_examples=200)
def test_shortening_fills_the_budget_and_cuts_only_the_longest(lengths, data):
    budget = data.draw(st.integers(len(lengths), 200))
    text_ids = shorten(lengths, budget)
    assert sum(text_ids) == min(budget, sum(lengths))
    assert all(1 <= new <= old for new, old in zip(text_ids, lengths))
    cut = [new for new, old in zip(text_ids, lengths) if new < old]
    assert not cut or max(text_ids) <= min(cut) + 1


def test_a_token_belongs_to_the_snippet_of_its_last_character():
    assert snippet_of_token([0, 4, 5, 6, 9, 12], [(0, 4), (5, 9)]) == [0, 0, 1, 1, 1, 1]
    assert snippet_of_token([1, 2], []) == [0, 0]


BAD = [
    (
        replace(SPEC, max_passage_tokens=65),
        LAYOUT,
        "max_passage_tokens is 65, but backbone tiny has 64 positions; lower max_passage_tokens to 64 or less",
    ),
    (
        replace(SPEC, max_query_tokens=80),
        LAYOUT,
        "max_query_tokens is 80, but backbone tiny has 64 positions; lower max_query_tokens to 64 or less",
    ),
    (
        replace(SPEC, strategy="viewers", viewer_position="own", max_passage_tokens=62),
        LAYOUT,
        "max_passage_tokens is 62, but backbone tiny has 64 positions, 3 of them kept for viewers; "
        "lower max_passage_tokens to 61 or less",
    ),
    (
        replace(SPEC, strategy="snippets", num_views=8),
        LAYOUT,
        "max_passage_tokens is 20, too few for 8 views under strategy 'snippets'; give at least 23 or lower num_views",
    ),
    (
        replace(SPEC, strategy="pooling", num_views=8, max_passage_tokens=3),
        LAYOUT,
        "max_passage_tokens is 3, too few for 1 view under strategy 'pooling'; give at least 4",
    ),
]


@pytest.mark.parametrize(("spec", "layout", "message"), BAD)
def test_what_a_backbone_cannot_express_is_refused(spec, layout, message):
    with pytest.raises(EncoderError) as error:
        layout.check(spec, "tiny")
    assert str(error.value) == message


def test_a_snippet_of_which_only_the_space_before_it_is_read_has_the_span_of_that_space():
    spec, ends = replace(SPEC, strategy="snippet_means"), [*range(1, 19), *range(20, 40)]
    text = TextTokens(ids=list(range(200, 238)), ends=ends)
    spans = LAYOUT.spans_read(spec, PassageText([], text, [(0, 17), (18, 30), (30, 39)]))
    assert spans == [(0, 17), (17, 18), None]


@settings(max_examples=200)
@given(
    case=st.sampled_from(sorted(CASES)),
    limit=st.integers(3, 61),  # of 64 positions viewers at their own keep 3
    title=st.integers(0, 40),
    prompt=st.integers(0, 30),
)
def test_a_limit_that_is_accepted_holds_a_prompt_a_title_every_viewer_and_some_of_the_text(case, limit, title, prompt):
    spec = replace(CASES[case][0], max_passage_tokens=limit)
    layout = replace(LAYOUT, passage_prompt_tokens=prompt)
    try:
        layout.check(spec, "tiny")
    except EncoderError as error:
        assert "give at least" in str(error)
        return
    text = TextTokens(ids=list(range(200, 290)), ends=list(range(1, 91)))
    spans = [(0, 30), (30, 60), (60, 90)]
    passage = layout.passage(
        spec, PassageText(list(range(500, 500 + title)), text, spans, list(range(600, 600 + prompt)))
    )
    for row in layout.rows(passage) if spec.has_rows else [passage]:
        ids = row.input_ids.tolist()
        assert len(ids) <= limit
        assert sum(600 <= token < 600 + prompt for token in ids) == prompt
        assert any(200 <= token < 290 for token in ids)


@pytest.mark.parametrize("spec", [case[0] for case in CASES.values()])
def test_what_a_backbone_can_express_is_accepted(spec):
    LAYOUT.check(spec, "tiny")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"strategy": "colbert"},
            "encoder strategy is 'colbert'; known are pooling, cls, mean, first_k, viewers, snippets, snippet_means, "
            "sentences, splits",
        ),
        ({"readout": "max"}, "encoder readout is 'max'; known are viewer, snippet_mean"),
        ({"viewer_position": "one"}, "encoder viewer_position is 'one'; known are zero, own"),
        ({"viewer_init": "zeros"}, "encoder viewer_init is 'zeros'; known are random, cls"),
        ({"num_views": 0}, "encoder num_views is 0; a passage has 1 view or more"),
        (
            {"strategy": "snippet_means", "empty_snippets": "kept"},
            "encoder empty_snippets is 'kept', but only viewers can stand before nothing, and strategy 'snippet_means' "
            "with readout 'viewer' has none; leave it at 'masked'",
        ),
        ({"empty_snippets": "zero"}, "encoder empty_snippets is 'zero'; known are masked, kept"),
        (
            {"strategy": "snippets", "whole_view": True},
            "encoder whole_view needs strategy 'snippet_means' and 2 views or more; here they are 'snippets' and 8; "
            "correct these, or leave it out",
        ),
        (
            {"strategy": "viewers", "title_view": True},
            "encoder title_view needs strategy 'snippets', use_title and 2 views or more; here they are 'viewers', "
            "use_title True and 8; correct these, or leave it out",
        ),
        (
            {"strategy": "snippets", "title_view": True, "use_title": False, "num_views": 1},
            "encoder title_view needs strategy 'snippets', use_title and 2 views or more; here they are 'snippets', "
            "use_title False and 1; correct these, or leave it out",
        ),
    ],
)
def test_unknown_settings_are_refused(setting, message):
    with pytest.raises(EncoderError) as error:
        EncoderSpec(**setting)
    assert str(error.value) == message


@given(st.data())
@settings(max_examples=20)
def test_packing_keeps_every_token(data):
    ids = data.draw(st.lists(st.lists(st.integers(0, 40_000), min_size=1, max_size=9), max_size=5))
    passages = [
        TokenizedPassage(
            np.array(row, np.int32), np.arange(len(row), dtype=np.int32), np.array([i % 3 - 1 for i in row], np.int16)
        )
        for row in ids
    ]
    again = unpack_tokens(pack_tokens(passages))
    assert len(again) == len(passages)
    for before, after in zip(passages, again):
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(before, after))


@given(num=st.integers(18, 90), overlap=st.integers(1, 6), title=st.sampled_from([[], TITLE]))
@settings(max_examples=60)
def test_windows_are_full_and_a_token_counts_where_it_is_further_from_the_end_of_the_shared_part(num, overlap, title):
    spec = replace(SPEC, strategy="snippet_means", overlap_tokens=overlap)
    text = TextTokens(ids=list(range(200, 200 + num)), ends=list(range(1, num + 1)))
    rows = LAYOUT.rows(LAYOUT.passage(spec, PassageText(title, text, [(0, 9), (9, num)])))
    starts = [int(row.input_ids[row.input_ids >= 200][0]) - 200 for row in rows]
    capacity = 18 - 3 * bool(title)
    assert starts[0] == 0 and starts[-1] == max(0, num - capacity) and len(set(starts)) == len(starts)
    assert all(later - earlier == capacity - overlap for earlier, later in pairwise(starts[:-1]))
    assert all(later - earlier <= capacity - overlap for earlier, later in pairwise(starts))
    own_window = {}
    for at in range(num):
        depths = []
        for number, start in enumerate(starts):
            before = at - start + 1 if number else num
            after = start + capacity - at if start != starts[-1] else num
            depths.append((min(before, after), number) if 0 <= at - start < capacity else (0, number))
        own_window[200 + at] = max(depths)[1]
    for number, row in enumerate(rows):
        assert all(row.num_tokens == 20 or len(rows) == 1 for row in rows)
        for token, view in zip(row.input_ids.tolist(), row.view_T.tolist()):
            assert view == (int(token >= 209) if own_window.get(token) == number else -1)
