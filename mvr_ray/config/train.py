"""Defines the sections `train` and `mine` of the run file."""

from typing import Annotated, Literal

from pydantic import Field

from mvr_ray.config.base import Count, Fraction, Name, Section
from mvr_ray.errors import ConfigError


class TrainConfig(Section):
    task: Literal["retriever", "reader", "cross_encoder"] = "retriever"
    """reader: train `encoder.backbone` to find the answers of `questions` in their passages, by their offsets, and none
    in hard negatives (else in passages of its batch). cross_encoder: train it to score a question's passage above hard
    negatives (else passages of its batch). Both ignore losses, temperatures, views and the warm start."""
    reader: Name = "reader"
    """Name under which a trained reader is stored."""
    cross_encoder: Name = "cross_encoder"
    """Name under which a trained cross-encoder is stored."""
    head_lr_factor: Annotated[float, Field(gt=0)] = 10.0
    """For a reader or cross-encoder: learning rate of a new head, as a multiple of the backbone's."""
    questions: Name | None = None
    """Stored question set with positive ids; absent: inverse cloze questions from the corpus."""
    dev_questions: Name | None = None
    """Scored after each epoch, or every `dev_steps` steps, to keep the best snapshot; absent: the last one is kept."""
    dev_steps: Annotated[int, Field(ge=0)] = Field(default=0, exclude_if=lambda steps: not steps)
    """Score `dev_questions` every so many steps (the warm start's not counted) and at the end; 0: after each epoch."""
    patience: Annotated[int, Field(ge=0)] = Field(default=0, exclude_if=lambda number: not number)
    """Stop after this many scores of `dev_questions` in a row without a better one; 0: never."""
    hard_negatives: Name | None = None
    """A mined question set (`mvr-ray mine`) whose hard negatives are used."""
    init_from: Name | None = None
    """Encoder snapshot to start from: a fingerprint of `encoder.name`, or another encoder's name, for its newest;
    absent: the backbone. Settings of the encoder section that differ from its own are refused. A reader or
    cross-encoder starts from the backbone alone."""
    loss: Literal["auto", "dpr", "mvr", "camvr"] = "auto"
    """dpr: every passage by its best view. auto: dpr for snippet means and one view, camvr for other snippets, mvr for
    several other views. camvr needs questions with answers in their passages (`answer_views`)."""
    epochs: Annotated[int, Field(ge=0)] = 1
    max_steps: Annotated[int, Field(ge=0)] = 0
    """At most so many steps of the epochs (the warm start's not counted); 0: all of them."""
    batch_questions: Annotated[int, Field(ge=2)] = 32
    """Questions a step over all workers; a multiple of their number."""
    questions_per_passage: Count = 1
    """Questions of one passage are drawn in groups of at most this many, which stand together in a batch."""
    max_passage_questions: Annotated[int, Field(ge=0)] = 0
    """Train on at most this many questions of a passage, drawn by a stable hash; 0: on all."""
    num_hard_negatives: Annotated[int, Field(ge=0)] = 1
    siblings: bool = False
    """Fill batches with passages of one article, which are hard negatives of each other."""
    lr: Annotated[float, Field(gt=0)] = 2e-5
    viewer_lr_factor: Annotated[float, Field(gt=0)] = 10.0
    warmup_share: Fraction = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    clip_norm: Annotated[float, Field(gt=0)] = 2.0
    dropout: Fraction = 0.1
    local_weight: Annotated[float, Field(ge=0)] = 0.01
    """Lambda of MVR eq. 5."""
    temperature_decay: Annotated[float, Field(ge=0)] = 0.1
    """Alpha of MVR eq. 8."""
    temperature_floor: Annotated[float, Field(gt=0)] = 0.3
    temperature_steps: Annotated[int, Field(ge=0)] = 0
    """Steps that count as one epoch of eq. 8; 0: a pass over the questions."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """One temperature throughout, in place of eq. 8."""
    answer_share: Fraction = 1.0
    """Loss camvr: weight of scoring the positive by the answer's view; the rest scores it by its best view."""
    answer_views: Literal["first", "all"] = "first"
    """Loss camvr: the view of the answer's known place, as in the paper, or the best of those whose snippets contain
    an answer."""
    distil_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from a cross-encoder's scores of each question's passage and mined negatives, which
    `mine.cross_encoder` stores with them."""
    warm_start_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps without labels, before the others, that distil the readout towards the backbone's own mean pooling; absent:
    30 for viewers that start from a backbone, which was not trained with them, and none for any other readout."""
    cloze_keep_share: Fraction = 0.1
    """Inverse cloze: share of sentences that stay in their passage."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """`auto` is bf16 if every worker's device has instructions for it and the model can be trained in it (the first
    DeBERTa cannot), else fp32; a resumed training keeps its first precision."""
    gradient_checkpointing: bool = False
    cache_chunk: Annotated[int, Field(ge=0)] = 0
    """Gradient cache: passages a pass; 0: everything in one pass."""
    max_passage_tokens: Annotated[int, Field(ge=0)] = 0
    """Shorter passages in training; 0: the encoder's. A reader has `read.max_tokens`, a cross-encoder
    `mine.max_pair_tokens`."""
    checkpoint_steps: Count = 100
    snapshot_steps: list[Count] = Field(default_factory=list, exclude_if=lambda steps: not steps)
    """When training has ended, also store the weights after these steps (the warm start's not counted), as models of
    the names `NAME-step-STEPS`: for a curve over the budget."""
    seed: int = 12345


def check_train(cfg: TrainConfig) -> None:
    """Raise ConfigError for a setting that the training needs and lacks, or has and would ignore."""
    if cfg.task != "retriever" and cfg.questions is None:
        what = "answers; name a stored set" if cfg.task == "reader" else "questions; name a set"
        raise ConfigError(f"train.task is {cfg.task}, which learns from {what} in train.questions")
    if (cfg.dev_steps or cfg.patience) and cfg.dev_questions is None:
        raise ConfigError("train.dev_steps and train.patience need train.dev_questions; name a set, or leave them out")
    if cfg.patience and cfg.snapshot_steps:
        raise ConfigError("train.patience may stop before a step of train.snapshot_steps; leave one of them out")
    if cfg.task != "retriever" and cfg.init_from is not None:
        raise ConfigError(
            f"train.init_from is {cfg.init_from}, an encoder's snapshot, but train.task={cfg.task} starts from "
            f"encoder.backbone; leave train.init_from out, and name the folder of a model there to start from it"
        )
    if cfg.task == "cross_encoder" and not cfg.num_hard_negatives:
        raise ConfigError(
            "train.num_hard_negatives is 0, but train.task=cross_encoder scores a question's passage above others; set "
            "train.num_hard_negatives=1 or more"
        )
    if cfg.task != "retriever" and cfg.max_passage_tokens:
        raise ConfigError(
            f"train.max_passage_tokens is {cfg.max_passage_tokens}, but train.task={cfg.task} reads as many "
            f"tokens in training as later; set train.max_passage_tokens=0, and lower "
            f"{'read.max_tokens' if cfg.task == 'reader' else 'mine.max_pair_tokens'} instead"
        )
    for name in ("hard_negatives", "distil_weight"):
        value = getattr(cfg, name)
        if value and cfg.questions is None:
            raise ConfigError(
                f"train.{name} is {value!r}, but training on questions of the corpus's own sentences has no hard "
                f"negatives; name the mined questions in train.questions, or leave train.{name} out"
            )
        if value and not cfg.num_hard_negatives:
            raise ConfigError(
                f"train.{name} is {value!r}, but train.num_hard_negatives is 0, so no hard negative is used; set "
                f"train.num_hard_negatives=1 or more, or leave train.{name} out"
            )


class MineConfig(Section):
    questions: Name = "train"
    output: Name = "train_mined"
    max_passage_questions: Annotated[int, Field(ge=0)] = 0
    """Mine for at most this many questions of a passage, drawn by a stable hash; 0: for all. With 1, batches of several
    questions a passage (`train.questions_per_passage`) read about as many negatives as passages."""
    method: Literal["bm25", "index"] = "bm25"
    rank_from: Annotated[int, Field(ge=0)] = 0
    """Number of best hits to skip; negatives are among the others of the best `rank_to`."""
    rank_to: Count = 100
    num_negatives: Count = 8
    drop_answer_bearing: bool = True
    sample: bool = False
    """Draw from the window, with `cross_encoder` from its `denoise_depth` best, instead of taking its best."""
    seed: int = 0
    cross_encoder: str | None = None
    """Drop negatives that this model scores as answers (RocketQA's denoising), and store its scores of the others.
    A stored one (`train.task: cross_encoder`) by NAME or NAME/FINGERPRINT; else a folder, `package:NAME/path` or hub
    name of a model that scores pairs, reached from every worker."""
    denoise_share: Fraction = 0.1
    """Drop negatives of at least this probability against the known passage: 1 / (1 + exp(s+ - s))."""
    denoise_depth: Count = 24
    """Score at most this many of a question's hits that the other filters leave."""
    max_pair_tokens: Annotated[int, Field(ge=16, le=8192)] = 256
    """Question, title and text for the cross-encoder, in training and mining."""
