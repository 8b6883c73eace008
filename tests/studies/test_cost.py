"""Late interaction and centroids against loops."""

import numpy as np
import pytest
import torch

from mvr_ray.config import parse_run
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.studies.cost import TokenStates, _systems, centroids, late_interaction, token_states
from mvr_ray.types import Passage

PASSAGES = [
    Passage("1", "The river", "The river rises in the hills. It runs to the sea! Where does the river end?"),
    Passage("2", "", "Salt made the town rich."),
]
QUERIES = ["where does the river rise", "salt"]


def test_a_passage_scores_by_the_best_token_for_every_token_of_the_question_whatever_it_is_padded_with(tiny_backbone):
    encoder = DualEncoder.from_backbone(
        str(tiny_backbone), EncoderSpec(strategy="cls", num_views=1, max_passage_tokens=64)
    )
    queries = token_states(encoder, encoder.tokenize_queries(QUERIES))
    passages = token_states(encoder, encoder.tokenize_passages(PASSAGES))
    scores_QP = late_interaction(*queries, passages)
    for row, query in enumerate(encoder.tokenize_queries(QUERIES)):
        for column, passage in enumerate(encoder.tokenize_passages(PASSAGES)):
            query_ID, passage_TD = (token_states(encoder, [one]).states_PTD[0].double() for one in (query, passage))
            expected = sum(max(float(q @ p) for p in passage_TD) for q in query_ID)
            assert abs(float(scores_QP[row, column]) - expected) < 1e-4
    norms = passages.states_PTD.norm(dim=-1)
    torch.testing.assert_close(norms, passages.real_PT.float(), atol=1e-5, rtol=0)


def test_padding_does_not_win_where_every_token_scores_below_zero():
    states = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    scores_QP = late_interaction(states, torch.ones_like(real), TokenStates(-states * real[..., None], real))
    alone_Q1 = late_interaction(states, torch.ones_like(real), TokenStates(-states[1:, :3], real[1:, :3]))
    assert (scores_QP < 0).all()
    torch.testing.assert_close(scores_QP[:, 1:], alone_Q1)


def test_centroids_are_where_k_means_stands_still_or_nearer_to_the_tokens_than_it_began():
    rng = np.random.default_rng(0)
    states = torch.from_numpy(rng.normal(size=(2, 12, 4)))
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, 7:] = False
    states = states * real[..., None]

    def spread(views_VD: torch.Tensor, own_TD: torch.Tensor) -> float:
        return float(torch.cdist(own_TD, views_VD).min(dim=1).values.square().sum())

    for at in range(2):
        own = states[at][real[at]]
        alone = TokenStates(states[at : at + 1], real[at : at + 1])
        spreads = [spread(centroids(alone, 3, rounds=rounds)[0], own) for rounds in (0, 1, 2, 20)]
        assert spreads == sorted(spreads, reverse=True) and spreads[0] > spreads[-1]
        torch.testing.assert_close(centroids(alone, 3, rounds=40), centroids(alone, 3, rounds=41))
        torch.testing.assert_close(centroids(alone, len(own))[0], own)
    together = centroids(TokenStates(states, real), 3)
    torch.testing.assert_close(together[1], centroids(TokenStates(states[1:], real[1:]), 3)[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "snippets", "title_view": True, "empty_snippets": "kept"},
        {"whole_view": True},
        {"overlap_tokens": 8},
    ],
)
def test_every_system_is_measured_whatever_the_studys_encoder_is(tiny_backbone, settings):
    encoder = {"backbone": str(tiny_backbone), "max_passage_tokens": 64, **settings}
    systems = _systems(parse_run({"encoder": encoder}, "test"), PASSAGES, QUERIES, torch.device("cpu"))
    for system in systems.values():
        assert system.search(system.encode()).shape == (2, 2)
