"""Reading without padding gives what reading with padding gives."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mvr_ray.core.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.cuda_packed import UnpaddedEncoder, filled_batches, pack
from mvr_ray.errors import EncoderError
from mvr_ray.types import Passage

SPEC = EncoderSpec(num_views=3, max_query_tokens=24, max_passage_tokens=64)
STRATEGIES = {
    "cls": replace(SPEC, strategy="cls"),
    "mean": replace(SPEC, strategy="mean"),
    "first_k": replace(SPEC, strategy="first_k", normalize=False),
    "snippet_means": SPEC,
    "viewers": replace(SPEC, strategy="viewers"),
    "snippets": replace(SPEC, strategy="snippets"),
    "sentences": replace(SPEC, strategy="sentences"),
    "splits mean": replace(SPEC, strategy="splits", readout="snippet_mean"),
}
PASSAGES = [
    Passage("1", "The river", "The river rises in the hills. It runs to the sea! Where does the river end?"),
    Passage("2", "", "Salt made the town rich."),
    Passage("3", "Old bridge", "The bridge was built in 1801. Boats came every day; later they did not. So?"),
    Passage("4", "The sea", ""),
    Passage("5", "Trade", "Salt and trade " * 60),
]


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "distilbert"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_views_are_those_of_the_padded_encoder(tiny, kind, name):
    encoder = DualEncoder.from_backbone(tiny(kind), STRATEGIES[name])
    tokenized = encoder.tokenize_passages(PASSAGES)
    views_PVD, mask_PV = encoder.embed_passages(tokenized)
    packed = UnpaddedEncoder(encoder, torch.float32, "cpu")
    for batches in ([range(5)], [range(0, 2), range(2, 3), range(3, 5)]):
        parts = list(packed.embed(pack(encoder, [tokenized[row] for row in rows]) for rows in batches))
        np.testing.assert_allclose(np.concatenate([part.views_PVD for part in parts]), views_PVD, atol=1e-5)
        assert (np.concatenate([part.mask_PV for part in parts]) == mask_PV).all()


def test_half_the_bits_turn_a_view_by_little_and_the_encoder_stays_as_it_was(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC)
    tokenized = encoder.tokenize_passages(PASSAGES)
    before = encoder.fingerprint
    packed = UnpaddedEncoder(encoder, torch.bfloat16, "cpu")
    low = packed.embed_passages(tokenized)
    plain = encoder.embed_passages(tokenized)
    cosine_PV = (low.views_PVD * plain.views_PVD).sum(-1)[plain.mask_PV]
    assert cosine_PV.min() > 0.999 and not np.array_equal(low.views_PVD, plain.views_PVD)
    assert encoder.fingerprint == before


def test_a_backbone_with_an_attention_of_its_own_is_refused(tiny):
    encoder = DualEncoder.from_backbone(tiny("mpnet"), SPEC)
    with pytest.raises(EncoderError, match="'mpnet' cannot be read without padding"):
        UnpaddedEncoder(encoder, torch.float32, "cpu")


@given(st.lists(st.integers(1, 30)), st.integers(1, 60))
def test_batches_are_all_rows_in_order_and_none_could_take_the_next(lengths, budget):
    batches = filled_batches(lengths, budget)
    assert [row for batch in batches for row in batch] == list(range(len(lengths)))
    for number, batch in enumerate(batches):
        tokens = sum(lengths[row] for row in batch)
        assert len(batch) >= 1 and (tokens <= budget or len(batch) == 1)
        if number + 1 < len(batches):
            assert tokens + lengths[batch.stop] > budget


def test_an_encoder_that_cuts_no_sentences_never_loads_what_cuts_them(tiny):
    script = (
        "import sys\n"
        "from mvr_ray.core.encoder import DualEncoder, EncoderSpec\n"
        "from mvr_ray.core.encoding.cuda_packed import UnpaddedEncoder\n"
        "from mvr_ray.index.flat import FlatIndex\n"
        "from mvr_ray.types import Passage\n"
        f"encoder = DualEncoder.from_backbone({tiny('bert')!r}, EncoderSpec(strategy='mean', max_passage_tokens=64))\n"
        "encoder.embed_passages(encoder.tokenize_passages([Passage('1', '', 'the river')]))\n"
        "print(sorted({'ray', 'faiss', 'pydantic', 'nltk'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stdout + done.stderr
