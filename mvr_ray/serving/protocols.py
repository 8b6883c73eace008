"""Defines what serving needs from a router."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from mvr_ray.deadline import Deadline
from mvr_ray.types import Answer, FleetCounts, FloatArray, Hit, Passage, PassageScores


class Searchable(Protocol):
    """The part of a router that answering needs."""

    @property
    def dimension(self) -> int: ...

    @property
    def num_views(self) -> int: ...

    def search(
        self, queries_QD: FloatArray, k: int, *, deadline: Deadline | None = None, min_coverage: float = 1.0
    ) -> Answer: ...

    def search_text(
        self, texts: Sequence[str], k: int, *, deadline: Deadline | None = None, min_coverage: float = 1.0
    ) -> Answer: ...

    def passages(self, ids: Sequence[str]) -> Mapping[str, Passage]: ...

    def view_spans(self, passage: Passage) -> Sequence[tuple[int, int] | None]: ...


class Explainable(Searchable, Protocol):
    """The part of a router that explaining needs."""

    def embed(self, texts: Sequence[str]) -> FloatArray: ...

    def explain(self, queries_QD: FloatArray, passage_ids: Sequence[str]) -> Sequence[PassageScores]: ...


class VersionSwitcher(Protocol):
    """What goes from version to version."""

    def pinned(
        self, version: int | None = None, deadline: Deadline | None = None
    ) -> AbstractContextManager[Explainable]:
        """A router of one version (None: the one that is answered from now), that version's until the block ends.

        Raises MissingInputError for a version that is not published, OverloadedError where another one than that which
        is answered from is not open by the deadline.
        """
        ...

    @property
    def failure(self) -> str:
        """Why the last move failed; empty where it did not."""
        ...

    def follow(self) -> bool:
        """Look for a newer version now; whether it is answered from."""
        ...


class ExactSearch(Protocol):
    """What can answer past its index."""

    def pinned(self, version: int | None = None) -> AbstractContextManager[Explainable]: ...

    def exact(self, queries_QD: FloatArray, k: int, version: int | None = None) -> list[list[Hit]]:
        """The true best k of one version."""
        ...


class SearchStats(Protocol):
    """What knows of its calls to searchers, and of the version that it answers from."""

    @property
    def index(self) -> str: ...

    @property
    def dirty_share(self) -> float | None: ...

    def counts(self) -> FleetCounts: ...
