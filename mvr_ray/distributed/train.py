"""Train the encoder, in this process or on the workers of Ray Train, and save the best snapshot.

Checkpoints are in the store, under a digest of everything that determines the result: the same command resumes, a
changed one starts from the beginning.
"""

import hashlib
import json

from mvr_ray.config import RunConfig
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.views import MODEL_SETTINGS
from mvr_ray.distributed.encoders import encoder_spec, make_encoder, starting_snapshot
from mvr_ray.distributed.training.checkpoints import Checkpoints
from mvr_ray.distributed.training.examples import input_digests, open_dev, open_examples
from mvr_ray.distributed.training.retriever import RetrieverLoop, loss_name
from mvr_ray.distributed.training.steps import TrainingJob
from mvr_ray.distributed.training.train_model import TrainedModel, train_model
from mvr_ray.errors import ConfigError, EncoderError
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.types import Progress, no_progress


def train(run: RunConfig, progress: Progress = no_progress) -> TrainedModel:
    """Train the encoder by the `train` section and record the snapshot as the newest of `encoder.name`.

    Raises ConfigError, DataError, MissingInputError or EncoderError before any worker starts, ResourceError when the
    workers cannot be placed or keep dying.
    """
    if run.train.task != "retriever":
        raise ConfigError(
            f"train.task is {run.train.task}; train it with mvr_ray.distributed.training.{run.train.task}.train"
        )
    workers = run.resources.train_workers
    if run.train.batch_questions % max(1, workers):
        raise ConfigError(
            f"train.batch_questions is {run.train.batch_questions}, which {workers} workers (resources.train_workers) "
            f"cannot share evenly; make it a multiple of {workers}"
        )
    return train_model(RetrieverLoop, open_job, run, progress)


def open_job(run: RunConfig) -> TrainingJob:
    """Open the model and data of a rank. This is cheap: passages stay in their mapped files."""
    store = Store(run.store.path)
    corpus = Corpus.open(store, run.prepare.corpus)
    model = _starting_encoder(run, store, corpus)
    parts = [run.digest("encoder", "train"), model.fingerprint, corpus.digest, *input_digests(corpus, run.train)]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]  # of everything that determines the weights
    loss_name(run, model)
    examples = open_examples(corpus, model.splitter, run.train)
    dev = open_dev(corpus, run.train)
    checkpoints = Checkpoints(store, paths.training_dir(run.encoder.name, key))
    return TrainingJob(run, run.encoder.name, model, examples, dev, checkpoints)


def _starting_encoder(run: RunConfig, store: Store, corpus: Corpus) -> DualEncoder:
    start = run.train.init_from
    if start is None:
        return make_encoder(run, store, corpus)
    encoder = DualEncoder.load(starting_snapshot(run, start).folder)
    spec = encoder_spec(run).fill({name: getattr(encoder.spec, name) for name in MODEL_SETTINGS})
    expected, actual = spec.settings(), encoder.spec.settings()
    if expected != actual:
        differing = sorted(set(expected.items()) ^ set(actual.items()))
        raise EncoderError(
            f"train.init_from {start} was made with other settings than the encoder section asks for: "
            f"{', '.join(dict(differing))}; make them equal, or start from the backbone"
        )
    return encoder.to_precision("fp32")
