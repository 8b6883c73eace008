"""Opens or makes the corpus that a test reads or writes question sets of."""

from mvr_ray.store.corpus import Corpus, CorpusInfo, publications
from mvr_ray.store.files import Store


def only_corpus(store: Store) -> Corpus:
    """The one corpus of a store. Raises ValueError where there is none, or several."""
    (name,) = store.list("corpora")
    return Corpus.open(store, name)


def empty_corpus(store: Store, name: str = "corpus") -> Corpus:
    """A corpus without passages, as `prepare` leaves one, so that question sets can belong to it."""
    corpus = Corpus(store, CorpusInfo(name, "0" * 32, 0, (), (), {}, {}))
    corpus.publish(after=max(publications(store, name), default=0))
    return corpus
