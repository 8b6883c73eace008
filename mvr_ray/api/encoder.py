"""Turn texts into vectors with any encoder of a run file or of an index."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from mvr_ray.api.progress import progress_callback
from mvr_ray.api.rows import passage_records, rows_of
from mvr_ray.config import parse_run, resolve_model, resolve_path
from mvr_ray.core.encoding.encoder import DualEncoder, EmbeddedViews
from mvr_ray.core.encoding.precision import fastest_float
from mvr_ray.distributed.encoders import encoder_spec
from mvr_ray.distributed.indexing.encode import embed_chunk
from mvr_ray.errors import ConfigError, DataError, count_noun
from mvr_ray.serving.schemas import is_text
from mvr_ray.store.formats.records import PassageRecord
from mvr_ray.store.local_files import finished_file
from mvr_ray.types import FloatArray, Progress

MANY = 512
"""Passages embedded at once; as many texts show their progress."""
DEVICES = ("cpu", "cuda")
PRECISIONS = ("auto", "fp32", "bf16", "openvino", "openvino-bf16")


class Encoder:
    """An embedding model that gives a question one vector and a passage one a view.

        encoder = Encoder("all-MiniLM-L6-v2", num_views=4)
        queries_QD = encoder.embed_queries(["When was the university founded?"])
        views_PVD, mask_PV = encoder.embed_passages(["The university was founded in 1413. It is in St Andrews."])
        scores_QPV = queries_QD @ views_PVD.transpose(0, 2, 1)

    Shapes: Q questions, P passages, V views, D dimension.
    """

    def __init__(
        self,
        model: str | Path = "all-MiniLM-L6-v2",
        *,
        precision: str = "fp32",
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        """`model` is a folder, a Hugging Face name or `package:NAME/path`; `settings` are those of the run file's
        `encoder` section, such as `strategy`, `num_views` and `max_passage_tokens`.

        `precision` is that of passages, as `index.precision` of a run file: `auto` is up to five times as fast as
        `fp32`, and OpenVINO may convert the model first, which takes seconds. `int8` is calibrated on the passages of
        an index, so it is refused here. With `device` `cuda`, this process's GPU embeds, by `fp32` or
        `bf16`, and `auto` is `fp32` there, as in an index.
        Raises ConfigError, EncoderError.
        """
        if precision not in PRECISIONS:
            raise ConfigError(f"precision is {precision!r}; give one of {', '.join(PRECISIONS)}")
        if device not in DEVICES:
            raise ConfigError(f"device is {device!r}; give one of {', '.join(DEVICES)}")
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device is 'cuda', but torch finds no GPU here; leave device out to embed on the CPU")
        if device == "cuda" and precision.startswith("openvino"):
            raise ConfigError(f"precision {precision} is for CPUs, and device is 'cuda'; give fp32 or bf16")
        if "backbone" in settings:
            raise ConfigError("Encoder: settings has encoder.backbone; give model= instead")
        backbone = str(model.expanduser().absolute()) if isinstance(model, Path) else model
        run = parse_run({"encoder": {**settings, "backbone": backbone}}, "Encoder")
        full = DualEncoder.from_backbone(resolve_model(run.encoder.backbone), encoder_spec(run)).to(device)
        name = fastest_float(full.passage_tower) if precision == "auto" else precision
        self._encoder = full.to_precision(name) if name != "fp32" else full
        self._open_whole: Callable[[], DualEncoder] | None = None

    @classmethod
    def of(cls, encoder: DualEncoder, open_whole: Callable[[], DualEncoder] | None = None) -> Self:
        """Wrap an open encoder, such as an index's (`Index.encoder`); `open_whole` opens one of the same weights to
        export, if this one only embeds."""
        instance = cls.__new__(cls)
        instance._encoder, instance._open_whole = encoder, open_whole
        return instance

    def __repr__(self) -> str:
        views = count_noun(self.num_views, "view")
        return f"Encoder(up to {views} of {self.dimension}, fingerprint {self.fingerprint})"

    @property
    def dimension(self) -> int:
        return self._encoder.dimension

    @property
    def num_views(self) -> int:
        """The most views that a passage has."""
        return self._encoder.num_views

    @property
    def fingerprint(self) -> str:
        """Digest of the model and everything that changes an embedding; an index manifest holds it."""
        return self._encoder.fingerprint

    def export(self, folder: str | Path) -> list[str]:
        """Write a new folder that sentence-transformers loads to the same question vectors; returns what it cannot
        carry, such as views, a sentence each. Raises ConfigError for a folder that exists or has no parent,
        EncoderError for strategies with viewers."""
        path = resolve_path(str(folder))
        if path.exists() or not path.absolute().parent.is_dir():
            raise ConfigError(f"export: {path} exists already, or the folder above it does not; name a new one")
        encoder = self._open_whole() if self._open_whole else self._encoder
        with finished_file(path) as aside:
            return encoder.export(aside)

    def embed_queries(
        self, questions: str | Sequence[str], batch_size: int = 64, *, progress: Progress | bool | None = None
    ) -> FloatArray:
        """Return queries_QD, float32, of one question (Q = 1) or several. `progress` as in the methods of `Index`; None
        shows it for `MANY` texts or more. Raises EncoderError for a question without a word, DataError for one that is
        not text, ConfigError for a wrong `batch_size`."""
        _check_size("batch_size", batch_size)
        texts = [questions] if isinstance(questions, str) else list(rows_of(questions))
        for number, text in enumerate(texts):
            if not isinstance(text, str) or not is_text(text):
                raise DataError(f"question {number} is not text that UTF-8 can encode: {text!r:.60}")
        blocks = [self._encoder.embed_queries([])]
        with _callback(progress, len(texts)) as callback:
            for low in range(0, len(texts), batch_size):
                blocks.append(self._encoder.embed_queries(texts[low : low + batch_size], batch_size))
                callback("embed questions", min(low + batch_size, len(texts)), len(texts))
        return np.concatenate(blocks)

    def embed_passages(
        self,
        passages: str | Iterable[Any],
        tokens_per_batch: int = 8192,
        *,
        progress: Progress | bool | None = None,
    ) -> EmbeddedViews:
        """Return (views_PVD, mask_PV) of one text, or of passages as `Index.build` takes them: float32, zero where the
        mask is False, because the passage has fewer snippets. `progress` as in `embed_queries`. Raises DataError for an
        invalid passage, NoTokensError for a text that the encoder cannot read, ConfigError for a wrong
        `tokens_per_batch`."""
        _check_size("tokens_per_batch", tokens_per_batch)
        valid_passages = []
        for record in passage_records([passages] if isinstance(passages, str) else passages):
            if not isinstance(record, PassageRecord):
                raise DataError(f"{record}; give texts, (id, text), (id, title, text), or mappings with text")
            valid_passages.append(record.passage)
        views_PVD = np.zeros((len(valid_passages), self.num_views, self.dimension), np.float32)
        mask_PV = np.zeros(views_PVD.shape[:2], bool)
        with _callback(progress, len(valid_passages)) as callback:
            for low in range(0, len(valid_passages), MANY):
                chunk = valid_passages[low : low + MANY]
                tokens = self._encoder.tokenize_passages(chunk)
                block = embed_chunk(self._encoder, [passage.id for passage in chunk], tokens, tokens_per_batch, "fp32")
                places = low + np.repeat(np.arange(len(chunk)), np.diff(block.row_ptr)), block.view_numbers_N
                views_PVD[places], mask_PV[places] = block.vectors_ND, True
                callback("embed passages", low + len(chunk), len(valid_passages))
        return EmbeddedViews(views_PVD, mask_PV)


def _callback(progress: Progress | bool | None, num_texts: int) -> AbstractContextManager[Progress]:
    return progress_callback(False if progress is None and num_texts < MANY else progress)


def _check_size(name: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
        raise ConfigError(f"{name} is {size!r}; give a whole number of at least 1")
