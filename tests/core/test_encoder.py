"""The encoder against plain transformers calls, and what padding, titles, missing views and towers may do."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.snippets import TITLE, find_snippet, snippet_spans, snippet_text, train_punkt
from mvr_ray.errors import EncoderError
from mvr_ray.types import Passage

KINDS = ["bert", "roberta", "xlm-roberta", "distilbert", "mpnet"]
SPEC = EncoderSpec(num_views=3, max_query_tokens=24, max_passage_tokens=64)
PASSAGES = [
    Passage("1", "The river", "The river rises in the hills. It runs to the sea! Where does the river end?"),
    Passage("2", "", "Salt made the town rich."),
    Passage(
        "3",
        "Old bridge",
        "The bridge was built in 1801. Boats came every day; later they did not. The city wrote of it. So?",
    ),
    Passage("4", "The sea", ""),
    Passage("5", "Trade", "Salt and trade " * 60),
]
QUERIES = ["where does the river rise", "who built the old bridge in the city?", "salt " * 50]
STRATEGIES = {
    "cls": replace(SPEC, strategy="cls"),
    "mean": replace(SPEC, strategy="mean"),
    "first_k": replace(SPEC, strategy="first_k"),
    "snippet_means": SPEC,
    "snippet_means whole": replace(SPEC, whole_view=True),
    "viewers": replace(SPEC, strategy="viewers"),
    "viewers own": replace(SPEC, strategy="viewers", viewer_position="own"),
    "snippets": replace(SPEC, strategy="snippets"),
    "snippets mean": replace(SPEC, strategy="snippets", readout="snippet_mean"),
    "snippets title": replace(SPEC, strategy="snippets", title_view=True, empty_snippets="kept"),
    "sentences": replace(SPEC, strategy="sentences"),
    "splits mean": replace(SPEC, strategy="splits", readout="snippet_mean"),
}
CASES = [(kind, name) for kind in KINDS for name in STRATEGIES]


def view_of_offset(encoder: DualEncoder, passage: Passage, offset: int) -> int:
    """The view whose snippet holds the character at `offset`, or -1."""
    return find_snippet([span or (0, 0) for span in encoder.view_spans(passage)], offset)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_padding_never_reaches_a_view(tiny, kind, name):
    encoder = DualEncoder.from_backbone(tiny(kind), STRATEGIES[name])
    passages = encoder.tokenize_passages(PASSAGES)
    together, mask = encoder.embed_passages(passages)
    for row, passage in enumerate(passages):
        alone, alone_mask = encoder.embed_passages([passage])
        assert (alone_mask[0] == mask[row]).all()
        np.testing.assert_allclose(alone[0], together[row], atol=1e-5)
    assert mask.any(axis=1).all()
    assert (together[~mask] == 0).all()
    queries = encoder.embed_queries(QUERIES)
    np.testing.assert_allclose(np.concatenate([encoder.embed_queries([text]) for text in QUERIES]), queries, atol=1e-5)
    np.testing.assert_allclose(encoder.embed_queries(QUERIES, batch_size=2), queries, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(together[mask], axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["cls", "mean", "first_k", "snippet_means"])
def test_without_viewers_the_vectors_are_those_of_a_plain_transformers_call(tiny, kind, strategy):
    encoder = DualEncoder.from_backbone(tiny(kind), replace(STRATEGIES[strategy], normalize=False))
    tokenizer, model = AutoTokenizer.from_pretrained(tiny(kind)), AutoModel.from_pretrained(tiny(kind)).eval()
    two = "</s></s>" if encoder.passage_tower.kind.separators == 2 else "[SEP]"
    begin, end = tokenizer.cls_token, tokenizer.sep_token
    passage = PASSAGES[0]
    cuts = [passage.text.index(" It runs"), passage.text.index(" Where")]
    offsets = tokenizer(passage.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    piece = [sum(last > cut for cut in cuts) for _, last in offsets]

    def states(text: str) -> torch.Tensor:
        encoding = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            return model(input_ids=encoding.input_ids).last_hidden_state[0]

    title = tokenizer(passage.title, add_special_tokens=False).input_ids
    states_TD = states(f"{begin}{passage.title}{two}{passage.text}{end}")
    head = 1 + len(title) + encoder.passage_tower.kind.separators
    text_TD = states_TD[head:-1]
    expected = {
        "cls": [states_TD[0]],
        "mean": [states_TD.mean(0)],
        "first_k": list(states_TD[:3]),
        "snippet_means": [text_TD[[p == view for p in piece]].mean(0) for view in range(3)],
    }[strategy]
    views, mask = encoder.embed_passages(encoder.tokenize_passages([passage]))
    assert mask.all()
    np.testing.assert_allclose(views[0], torch.stack(expected).numpy(), atol=1e-5)
    query_TD = states(f"{begin}{QUERIES[0]}{end}")
    expected_D = query_TD.mean(0) if strategy in ("mean", "snippet_means") else query_TD[0]
    np.testing.assert_allclose(encoder.embed_queries([QUERIES[0]])[0], expected_D.numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "distilbert"])  # others see the space before a piece
@pytest.mark.parametrize("name", ["sentences", "splits mean"])
def test_pieces_that_are_read_alone_have_the_vectors_of_the_piece_as_a_passage(tiny, kind, name):
    spec = STRATEGIES[name]
    encoder = DualEncoder.from_backbone(tiny(kind), spec)
    whole = DualEncoder.from_backbone(tiny(kind), replace(spec, strategy="mean" if "mean" in name else "cls"))
    views, mask = encoder.embed_passages(encoder.tokenize_passages(PASSAGES[:3]))
    for passage, views_VD, mask_V in zip(PASSAGES, views, mask):
        spans = encoder.snippets(passage)
        pieces = [passage._replace(text=passage.text[start:end]) for start, end in spans]
        assert mask_V.tolist() == [view < len(spans) for view in range(3)]
        expected = whole.embed_passages(whole.tokenize_passages(pieces)).views_PVD[:, 0]
        np.testing.assert_allclose(views_VD[mask_V], expected, atol=1e-5)


def test_pieces_read_alone_see_no_more_of_the_text_than_one_pass_does(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), STRATEGIES["splits mean"])
    one_pass = DualEncoder.from_backbone(tiny("bert"), STRATEGIES["mean"])
    [pieces], [whole] = encoder.tokenize_passages(PASSAGES[4:]), one_pass.tokenize_passages(PASSAGES[4:])
    special = {encoder.layout.prefix[0], encoder.layout.suffix[0]}
    texts = [[i for i in passage.input_ids.tolist() if i not in special] for passage in (pieces, whole)]
    title = len(one_pass.passage_tower.tokenizer(PASSAGES[4].title, add_special_tokens=False).input_ids)
    assert texts[0][title:] == texts[1][title:]
    with pytest.raises(EncoderError, match="strategy 'splits' reads a passage in several sequences"):
        encoder.mean_pool_passages([pieces])


@pytest.mark.parametrize(
    ("kind", "name"), [case for case in CASES if case[1] in ("viewers", "viewers own", "snippets", "snippets mean")]
)
@pytest.mark.parametrize("one_tower", [True, False])
def test_viewers_are_extra_rows_of_the_embedding_table_at_the_configured_positions(tiny, kind, name, one_tower):
    """The same model with a table that has a row for each token of the passage, word or viewer and position summed, and
    nothing in its own table of positions, gives the same vectors. Where attention has a bias by distance, it is the one
    that two tokens of a plain row have that are as far apart as the positions."""
    encoder = DualEncoder.from_backbone(tiny(kind), replace(STRATEGIES[name], normalize=False, tied=one_tower))
    (passage,) = encoder.tokenize_passages(PASSAGES[:1])
    tower, plain = encoder.passage_tower, AutoModel.from_pretrained(tiny(kind)).eval()
    words = torch.cat([plain.get_input_embeddings().weight, tower.viewers.weight])[torch.from_numpy(passage.input_ids)]
    positions = plain.embeddings.position_embeddings.weight
    summed_TD = words + positions[torch.from_numpy(passage.position_ids).long()]
    first = 5  # rows before it may mean padding
    rows_ND = torch.cat([summed_TD[:1].expand(first, -1), summed_TD])
    plain.set_input_embeddings(torch.nn.Embedding.from_pretrained(rows_ND))
    with torch.no_grad():
        if kind == "mpnet":
            position_T = passage.position_ids.tolist()
            plain_HTT = plain.encoder.compute_position_bias(torch.zeros(1, max(position_T) + 1, 1))[0]
            apart_TTH = [[plain_HTT[:, max(0, i - j), max(0, j - i)] for j in position_T] for i in position_T]
            bias_HTT = torch.stack([torch.stack(row) for row in apart_TTH]).permute(2, 0, 1)
            plain.encoder.compute_position_bias = lambda states: bias_HTT
        positions.zero_()
        states_TD = plain(input_ids=first + torch.arange(passage.num_tokens)[None]).last_hidden_state[0]
    expected = [states_TD[torch.from_numpy(passage.view_T == view)].mean(0) for view in range(3)]
    np.testing.assert_allclose(encoder.embed_passages([passage]).views_PVD[0], torch.stack(expected).numpy(), atol=1e-5)


def test_the_query_viewer_begins_as_cls_so_an_untrained_viewers_query_is_a_cls_query(tiny):
    viewers, cls = (DualEncoder.from_backbone(tiny("bert"), STRATEGIES[name]) for name in ("viewers", "cls"))
    np.testing.assert_allclose(viewers.embed_queries(QUERIES), cls.embed_queries(QUERIES), atol=1e-6)


@pytest.mark.parametrize("init", ["random", "cls"])
def test_viewers_differ_from_each_other_and_depend_on_the_seed_alone(tiny, init):
    spec = replace(STRATEGIES["viewers"], viewer_init=init)
    first, again, other = (
        DualEncoder.from_backbone(tiny("bert"), replace(spec, seed=seed)).passage_tower.viewers.weight
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.isclose(first[1:], other[1:]).any(dim=1).all()
    assert len(torch.unique(first, dim=0)) == 4
    start = DualEncoder.from_backbone(tiny("bert"), replace(spec, seed=1, viewer_init="random"))
    cls = start.passage_tower.backbone.get_input_embeddings().weight[2]
    torch.testing.assert_close(first[0], cls)
    torch.testing.assert_close(first[1:], start.passage_tower.viewers.weight[1:] + (cls if init == "cls" else 0))


@pytest.mark.parametrize("name", ["viewers", "snippets", "snippets mean", "snippet_means", "mean"])
def test_mean_pooling_for_the_warm_start_is_what_the_mean_strategy_reads(tiny, name):
    """Viewers are taken out, and the text of `snippets` is put back as it was."""
    encoder = DualEncoder.from_backbone(tiny("roberta"), STRATEGIES[name]).train()
    mean = DualEncoder.from_backbone(tiny("roberta"), replace(STRATEGIES["mean"], normalize=False))
    actual = encoder.mean_pool_passages(encoder.tokenize_passages(PASSAGES[:4]))
    expected = mean.embed_passages(mean.tokenize_passages(PASSAGES[:4])).views_PVD[:, 0]
    np.testing.assert_allclose(actual.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(encoder.mean_pool_queries(QUERIES).numpy(), mean.embed_queries(QUERIES), atol=1e-5)
    assert encoder.training and not actual.requires_grad


def test_a_passage_in_windows_has_no_mean_to_warm_up_towards(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), replace(SPEC, max_passage_tokens=40, overlap_tokens=8))
    with pytest.raises(EncoderError, match=r"cannot be warmed up .*; set train\.warm_start_steps to 0"):
        encoder.mean_pool_passages(encoder.tokenize_passages([PASSAGES[4]]))


@pytest.mark.parametrize("one_tower", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
def test_both_sides_train_every_tower_and_gradients_stay_finite(tiny, name, one_tower):
    encoder = DualEncoder.from_backbone(tiny("bert"), replace(STRATEGIES[name], tied=one_tower)).train()
    queries, views = encoder.encode_queries(QUERIES[:2]), encoder.encode_passages(encoder.tokenize_passages(PASSAGES))
    weights = torch.randn(views.views_PVD.shape, generator=torch.Generator().manual_seed(0))
    (queries[:, 0].sum() + (views.views_PVD * weights).sum()).backward()
    for parameter_name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name
    assert (encoder.question_tower is encoder.passage_tower) == one_tower


def test_checkpointing_gives_the_same_gradient_in_two_passes(tiny):
    gradients, num_passes = [], []
    for on in (False, True):
        encoder = DualEncoder.from_backbone(tiny("bert"), STRATEGIES["snippets"]).train()
        encoder.set_dropout(0.0)
        encoder.set_gradient_checkpointing(on)
        passes: list[torch.nn.Module] = []
        attention = encoder.passage_tower.backbone.encoder.layer[0].attention
        attention.register_forward_pre_hook(lambda module, _, passes=passes: passes.append(module))
        encoder.encode_passages(encoder.tokenize_passages(PASSAGES)).views_PVD[..., 0].sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in encoder.parameters()]))
        num_passes.append(len(passes))
    torch.testing.assert_close(gradients[0], gradients[1])
    assert num_passes == [1, 2]


@pytest.mark.parametrize("kind", ["bert", "modernbert", "t5", "qwen3", "llama", "mistral", "gemma3_text"])
def test_dropout_is_set_everywhere_and_off_when_embedding(tiny, kind):
    """Also where attention alone has one."""
    encoder = DualEncoder.from_backbone(tiny(kind), SPEC).train()
    encoder.set_dropout(0.5)
    passages = encoder.tokenize_passages(PASSAGES)
    noisy = [encoder.encode_passages(passages).views_PVD for _ in range(2)]
    assert not torch.equal(noisy[0], noisy[1])
    still = [encoder.embed_passages(passages).views_PVD for _ in range(2)]
    assert (still[0] == still[1]).all() and encoder.training
    encoder.set_dropout(0.0)
    torch.testing.assert_close(encoder.encode_passages(passages).views_PVD.detach().numpy(), still[0])


def test_every_parameter_is_in_one_group_and_viewers_learn_faster(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), replace(STRATEGIES["viewers"], tied=False))
    groups = {group["name"]: group for group in encoder.parameter_groups(1e-3, 10.0, 0.01)}
    everything = [parameter for group in groups.values() for parameter in group["params"]]
    assert sorted(map(id, everything)) == sorted(map(id, encoder.parameters()))
    assert {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()} == {
        "matrices": (1e-3, 0.01),
        "vectors": (1e-3, 0.0),
        "viewers": (1e-2, 0.0),
    }
    assert {id(p) for p in groups["viewers"]["params"]} == {id(t.viewers.weight) for t in encoder.towers.values()}
    torch.optim.AdamW(groups.values())
    plain = DualEncoder.from_backbone(tiny("bert"), STRATEGIES["mean"])
    assert [group["name"] for group in plain.parameter_groups(1e-3, 10.0, 0.0)] == ["matrices", "vectors"]


@pytest.mark.parametrize("name", ["snippets", "snippet_means"])
def test_the_answers_view_is_that_of_the_snippet_around_its_first_character(tiny, name):
    encoder = DualEncoder.from_backbone(tiny("bert"), STRATEGIES[name])
    passage = PASSAGES[0]
    spans = encoder.view_spans(passage)
    assert [passage.text[start:end] for start, end in spans] == [
        "The river rises in the hills.",
        "It runs to the sea!",
        "Where does the river end?",
    ]
    offsets = [passage.text.index(word) for word in ("hills", "sea", "end")]
    assert [view_of_offset(encoder, passage, offset) for offset in offsets] == [0, 1, 2]
    assert [view_of_offset(encoder, passage, offset) for offset in (-1, 29, 10_000)] == [-1, -1, -1]


def test_a_missing_view_has_no_span_and_is_no_answers_view(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), replace(SPEC, max_passage_tokens=16))
    long = Passage("9", "", " ".join(["The river rises and runs to the sea and it rises there."] * 3))
    spans = encoder.view_spans(long)
    assert spans[0] is not None and spans[2] is None
    assert view_of_offset(encoder, long, len(long.text) - 3) == -1
    assert encoder.embed_passages(encoder.tokenize_passages([long])).mask_PV[0].tolist() == [
        s is not None for s in spans
    ]
    assert encoder.view_spans(PASSAGES[3]) == [None, None, None]


@pytest.mark.parametrize("name", ["snippet_means", "snippet_means whole", "snippets", "sentences", "splits mean"])
@pytest.mark.parametrize("title", ["", "The river"])
def test_the_spans_of_a_cut_passage_are_the_text_that_is_read(tiny, name, title):
    encoder = DualEncoder.from_backbone(tiny("bert"), replace(STRATEGIES[name], max_passage_tokens=32))
    passage = Passage("9", title, "The river rises in the hills. It runs to the sea! " * 6)
    [tokens] = encoder.tokenize_passages([passage])
    layout, tokenizer = encoder.layout, encoder.passage_tower.tokenizer
    frame = {*layout.prefix, *layout.suffix, *range(layout.first_viewer, layout.first_viewer + 9)}
    num_title = len(tokenizer(title, add_special_tokens=False).input_ids)
    ids = []
    for row in encoder.rows(tokens):
        ids += [token for token in row.input_ids.tolist() if token not in frame][num_title:]
    spans = encoder.view_spans(passage)
    texts = [snippet_text(passage, span) for span in spans if span]
    assert tokenizer(" ".join(texts), add_special_tokens=False).input_ids == ids
    assert sum(map(len, texts)) < len(passage.text) / 2
    views = encoder.embed_passages([tokens]).mask_PV[0].tolist()
    assert encoder.tokenize_chunk([passage, Passage("1", title, "It runs.")]).unread_counts.num_cut == 1
    assert [span is not None for span in spans[encoder.spec.first_text_view :]] == views[encoder.spec.first_text_view :]


@pytest.mark.parametrize("kind", ["bert", "mpnet", "qwen3"])
@pytest.mark.parametrize("settings", [{}, {"passage_prompt": "passage: "}, {"use_title": False}])
def test_a_whole_view_is_that_of_mean_and_the_others_are_of_one_snippet_fewer(tiny, kind, settings):
    spec = replace(SPEC, **settings)
    whole = DualEncoder.from_backbone(tiny(kind), replace(spec, whole_view=True))
    mean = DualEncoder.from_backbone(tiny(kind), replace(spec, strategy="mean"))
    snippets = DualEncoder.from_backbone(tiny(kind), replace(spec, num_views=spec.num_views - 1))
    views, one, others = (own.embed_passages(own.tokenize_passages(PASSAGES)) for own in (whole, mean, snippets))
    np.testing.assert_allclose(views.views_PVD[:, :1], one.views_PVD, atol=1e-5)
    assert views.mask_PV[:, 0].all()
    is_text_P = [bool(passage.text.strip()) for passage in PASSAGES]
    np.testing.assert_allclose(views.views_PVD[is_text_P, 1:], others.views_PVD[is_text_P], atol=1e-5)
    assert (views.mask_PV[is_text_P, 1:] == others.mask_PV[is_text_P]).all()
    assert whole.view_spans(PASSAGES[0]) == [None, *snippets.view_spans(PASSAGES[0])]
    np.testing.assert_allclose(whole.embed_queries(QUERIES), mean.embed_queries(QUERIES), atol=1e-5)


def test_a_whole_view_of_windows_is_the_mean_over_all_their_own_tokens(tiny):
    """A passage that one window holds is read as without windows; a longer one has each of its tokens once."""
    spec = replace(SPEC, whole_view=True, max_passage_tokens=40, overlap_tokens=8)
    encoder = DualEncoder.from_backbone(tiny("bert"), spec)
    plain = DualEncoder.from_backbone(tiny("bert"), replace(SPEC, max_passage_tokens=40))
    [short, passage] = encoder.tokenize_passages([PASSAGES[1], PASSAGES[4]])
    rows = encoder.layout.rows(passage)
    assert len(rows) > 2 and len(encoder.layout.rows(short)) == 1
    states = [plain.states([row])[0][0].detach().numpy()[row.view_T >= 0] for row in rows]
    tokenize = plain.passage_tower.tokenizer.backend_tokenizer.encode
    title, text = (len(tokenize(one, add_special_tokens=False).ids) for one in PASSAGES[4][1:3])
    frame = plain.layout.prefix, plain.layout.separator, plain.layout.suffix
    assert sum(map(len, states)) == sum(map(len, frame)) + title + text
    mean_D = np.concatenate(states).mean(0)
    views = encoder.embed_passages([passage]).views_PVD[0]
    np.testing.assert_allclose(views[0], mean_D / np.linalg.norm(mean_D), atol=1e-5)


def test_a_title_view_is_the_first_and_the_texts_snippets_are_one_fewer_by_algorithm_1(tiny):
    spec = replace(STRATEGIES["snippets"], title_view=True)
    encoder = DualEncoder.from_backbone(tiny("bert"), spec)
    passage = PASSAGES[0]
    spans = encoder.view_spans(passage)
    assert spans[0] == TITLE
    assert [snippet_text(passage, span) for span in spans] == [
        "The river",
        "The river rises in the hills.",
        "It runs to the sea! Where does the river end?",
    ]
    assert spans[1:] == snippet_spans(passage.text, 2, encoder.splitter) == encoder.snippets(passage)
    offsets = [0, *(passage.text.index(word) for word in ("hills", "sea", "end"))]
    assert [view_of_offset(encoder, passage, offset) for offset in offsets] == [1, 1, 2, 2]
    assert view_of_offset(encoder, passage, -1) == -1


@pytest.mark.parametrize("empty_snippets", ["masked", "kept"])
def test_without_a_title_the_texts_snippets_keep_their_views(tiny, empty_snippets):
    spec = replace(STRATEGIES["snippets"], title_view=True, empty_snippets=empty_snippets)
    encoder = DualEncoder.from_backbone(tiny("bert"), spec)
    passage, bare = PASSAGES[1]._replace(title="Trade"), PASSAGES[1]
    span = (0, len(bare.text))
    assert encoder.view_spans(passage) == [TITLE, span, None]
    first = TITLE if empty_snippets == "kept" else None  # the view of an empty title, or none
    assert encoder.view_spans(bare) == encoder.view_spans(bare._replace(title=" ")) == [first, span, None]
    assert view_of_offset(encoder, bare, 3) == view_of_offset(encoder, passage, 3) == 1
    mask = encoder.embed_passages(encoder.tokenize_passages([passage, bare])).mask_PV.tolist()
    assert mask == ([[True] * 3] * 2 if empty_snippets == "kept" else [[True, True, False], [False, True, False]])


@pytest.mark.parametrize("name", ["cls", "mean", "first_k", "viewers"])
def test_views_of_the_whole_passage_have_no_span(tiny, name):
    encoder = DualEncoder.from_backbone(tiny("bert"), STRATEGIES[name])
    assert encoder.num_views == (1 if name in ("cls", "mean") else 3)
    assert encoder.view_spans(PASSAGES[0]) == [None] * encoder.num_views
    assert view_of_offset(encoder, PASSAGES[0], 3) == -1


def test_titles_are_context_only_where_they_are_wanted(tiny):
    other = PASSAGES[0]._replace(title="Trade")
    for use_title in (True, False):
        encoder = DualEncoder.from_backbone(tiny("bert"), replace(SPEC, use_title=use_title))
        a, b = (encoder.embed_passages(encoder.tokenize_passages([p])).views_PVD for p in (PASSAGES[0], other))
        assert (a == b).all() != use_title


def test_nothing_gives_nothing(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC)
    assert encoder.embed_queries([]).shape == (0, 16)
    assert encoder.tokenize_passages([]) == []
    views, mask = encoder.embed_passages([])
    assert views.shape == (0, 3, 16) and mask.shape == (0, 3) and mask.dtype == bool


def test_a_query_of_ten_thousand_words_is_cut(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC)
    (query,) = encoder.tokenize_queries(["river " * 10_000])
    assert query.num_tokens == SPEC.max_query_tokens


def test_half_a_surrogate_pair_is_read_as_a_question_mark(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC)
    assert (encoder.embed_queries(["the \ud800 river"]) == encoder.embed_queries(["the ? river"])).all()
    passage = Passage("1", "", "The river \udfff rises. It runs to the sea!")
    assert encoder.view_spans(passage)[1] == (19, 38)


def test_training_may_shorten_passages_but_not_lengthen_them(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), STRATEGIES["snippets"])
    lengths = [encoder.tokenize_passages(PASSAGES[4:], limit)[0].num_tokens for limit in (0, 20, 64, 90)]
    assert lengths == [64, 20, 64, 64]
    with pytest.raises(EncoderError) as error:
        encoder.tokenize_passages(PASSAGES, 8)
    assert str(error.value) == (
        "max_passage_tokens is 8, too few for 3 views under strategy 'snippets'; give at least 10 or lower num_views"
    )


def test_low_precision_changes_vectors_little_and_they_come_out_in_float32(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC)
    passages = encoder.tokenize_passages(PASSAGES)
    with torch.autocast("cpu", torch.bfloat16):
        views = encoder.embed_passages(passages).views_PVD
    assert views.dtype == np.float32
    np.testing.assert_allclose(views, encoder.embed_passages(passages).views_PVD, atol=0.03)


@pytest.mark.parametrize("prompt", ["", "query: "])
@pytest.mark.parametrize("text", ["", " \n\t", "\x00"])
def test_an_empty_query_is_refused_by_number(tiny, text, prompt):
    encoder = DualEncoder.from_backbone(tiny("bert"), replace(SPEC, query_prompt=prompt))
    with pytest.raises(EncoderError) as error:
        encoder.encode_queries(["the river", text])
    assert str(error.value) == f"query 1 of 2 is empty ({text!r}); give every query some text"


def test_a_query_of_letters_that_the_tokenizer_drops_is_no_empty_one(tiny, tmp_path):
    folder = shutil.copytree(tiny("llama"), tmp_path / "bare")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    no_stars = {"type": "Replace", "pattern": {"String": "*"}, "content": ""}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": no_stars}))
    encoder = DualEncoder.from_backbone(str(folder), SPEC)
    with pytest.raises(EncoderError, match=r"^query 1 of 2 has no token of the backbone's tokenizer \('\*'\); ask in"):
        encoder.encode_queries(["the river", "*"])


def test_sentences_of_the_corpus_need_parameters_and_enter_the_fingerprint(tiny):
    spec = replace(SPEC, sentences="corpus")
    with pytest.raises(EncoderError) as error:
        DualEncoder.from_backbone(tiny("bert"), spec)
    assert str(error.value) == (
        "encoder.sentences is corpus, but no Punkt parameters were given; "
        "pass punkt=train_punkt(texts of the corpus), or set encoder.sentences=packaged"
    )
    own = DualEncoder.from_backbone(tiny("bert"), spec, train_punkt([passage.text for passage in PASSAGES]))
    assert own.fingerprint != DualEncoder.from_backbone(tiny("bert"), SPEC).fingerprint


def test_the_encoder_and_the_losses_need_neither_ray_nor_pydantic():
    code = (
        "import sys; sys.modules.update({'ray': None, 'pydantic': None, 'pyarrow': None, 'faiss': None})\n"
        "import mvr_ray.core.encoding.encoder, mvr_ray.core.learning.losses\n"
        "assert 'mvr_ray.config' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.data
def test_untrained_snippet_means_find_more_gold_passages_than_one_vector_does(minilm, squad_dev):
    paragraphs = [paragraph for article in squad_dev["data"][:2] for paragraph in article["paragraphs"][:20]]
    passages = [Passage(str(row), "", paragraph["context"]) for row, paragraph in enumerate(paragraphs)]
    pairs = [(qa["question"], row) for row, paragraph in enumerate(paragraphs) for qa in paragraph["qas"][:2]]
    gold = np.array([row for _, row in pairs])

    def share_found(strategy: str) -> float:
        encoder = DualEncoder.from_backbone(str(minilm), EncoderSpec(strategy=strategy, use_title=False))
        views, mask = encoder.embed_passages(encoder.tokenize_passages(passages))
        queries = encoder.embed_queries([question for question, _ in pairs])
        scores = np.where(mask, np.einsum("qd,pvd->qpv", queries, views), -np.inf).max(-1)
        return float((scores.argmax(1) == gold).mean())

    assert share_found("snippet_means") > share_found("mean") + 0.03


@pytest.mark.parametrize("name", ["cls", "mean", "first_k", "snippet_means", "sentences", "splits mean"])
def test_a_passage_without_a_token_is_refused_by_its_id(tiny, tmp_path: Path, name: str):
    folder = shutil.copytree(tiny("llama"), tmp_path / "bare")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    encoder = DualEncoder.from_backbone(str(folder), STRATEGIES[name])
    river, nothing = Passage("a", "", "The river."), Passage("b", "", "")
    assert np.isfinite(encoder.embed_passages(encoder.tokenize_passages([river]))[0]).all()
    with pytest.raises(EncoderError, match=r"passage 'b' has no token"):
        encoder.embed_passages(encoder.tokenize_passages([river, nothing]))
