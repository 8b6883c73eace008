"""Make questions without labels: a sentence of a passage asks for the rest of it (inverse cloze, Lee et al. 2019).

The sentence is removed from its passage, except with probability `keep_share`, so that exact words keep some weight.
Its position determines the answer's snippet for CAMVR.
"""

import numpy as np

from mvr_ray.core.encoding.snippets import Splitter, sentence_spans
from mvr_ray.core.learning.batches import Example
from mvr_ray.types import Passage

MIN_WORDS = 4
"""Shorter sentences are drawn only where there is no other."""


def cloze_example(passage: Passage, splitter: Splitter, keep_share: float, rng: np.random.Generator) -> Example:
    """Build one question from one passage. A passage of a single sentence keeps it."""
    spans = sentence_spans(passage.text, splitter)
    if not spans:
        return Example(passage.title or passage.id, passage)
    long_spans = [(start, stop) for start, stop in spans if len(passage.text[start:stop].split()) >= MIN_WORDS]
    candidates = long_spans or spans
    start, stop = candidates[int(rng.integers(len(candidates)))]
    keep = rng.random() < keep_share
    if keep or len(spans) == 1:
        return Example(passage.text[start:stop], passage, start)
    before, after = passage.text[:start].rstrip(), passage.text[stop:].lstrip()
    rest = f"{before} {after}" if before and after else before or after
    at = len(before) + 1 if before and after else max(0, len(rest) - 1) if before else 0
    return Example(passage.text[start:stop], passage._replace(text=rest), at)
