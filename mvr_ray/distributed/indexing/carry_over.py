"""Reuse embeddings of earlier versions, so that no passage is encoded twice by the same encoder.

A passage's embedding depends on its title, its text and the encoder. An existing version of the same encoder, in any
index of the store, has the embedding of a passage with the same content: under the same id, or under another, as of a
renamed passage. One task a shard compares its part with the parts of earlier versions, newest first, and writes a plan
to the staging folder, which a resumed command reuses. Before, one task a part looks there for the contents that changed
in any shard, so that each file is read once, unless they are too many to be in memory together.

    base            an earlier shard at the same number of shards, whose file stays; changes are written beside it
    carried over    embeddings from other shards: of other indexes, or of a version over another number of shards
    rows            rows without embeddings in any version: these are encoded
    copies          of these, passages equal to an earlier one in any shard: they get its embedding

Views as encoded come from versions built by `index`, without pruning, and from reshards, compactions and rollbacks of
them; of a version that kept refined views, from passages that its parent has not, or with other content. Where
refinement has changed the live version and `index.keep_refinement` is set, its own views come first.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.tasks import run_tasks, share
from mvr_ray.distributed.indexing.shards import (
    embeddings_alone,
    gather_batches,
    promised_recall,
    related_shards,
    shard_embeddings,
)
from mvr_ray.distributed.indexing.staging import REFINED, BaseShard, EncodePlan, EncodeTask, staged_shards
from mvr_ray.errors import MissingInputError, StorageError
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus, CorpusFile, CorpusInfo, PartInfo, ids_by_shard, shard_of
from mvr_ray.store.embeddings import BATCH_PASSAGES, BlockRow, EmbeddingShard, Views, gather_rows
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.parts import difference, find_contents
from mvr_ray.types import EmbeddingBlock, IntArray, Passage, Progress, no_progress

log = logging.getLogger(__name__)
CONTENT_BYTES = 16
"""Length of a content digest."""
MAX_CONTENT_CHARS = 1 << 28
"""Characters of all contents that one pass over the earlier parts looks for: each of its tasks has them in memory."""
Contents = frozenset[tuple[str, str]]
"""Titles and texts."""
Matches = Mapping[str, tuple[str, str]]
"""Some contents by their ids in one file of a part."""


@dataclass(frozen=True)
class EmbeddedCorpus:
    """A version whose embeddings can be reused: all of them, as refined if `is_refined`; or, with `parent`, those of
    passages that are new or have new content since that version, as encoded."""

    store: Store
    version: Manifest
    is_refined: bool = False
    parent: Manifest | None = None

    @cached_property
    def _info(self) -> CorpusInfo:
        """Read once for all shards of a process."""
        return Corpus.open(self.store, self.version.corpus, self.version.corpus_digest).info

    def corpus(self) -> Corpus:
        """Open the corpus anew: parts that were read stay open as long as their corpus."""
        return Corpus(self.store, self._info)

    def unchanged_since_parent(self, ids: Collection[str]) -> set[str]:
        """Return those of `ids` that a parent has with the same content."""
        if self.parent is None or not ids:
            return set()
        before = Corpus.open(self.store, self.parent.corpus, self.parent.corpus_digest).get(ids)
        own = self.corpus().get(ids)
        return {name for name in own.keys() & before.keys() if _has_same_content(own[name], before[name])}

    def embeddings(self, shard: int) -> EmbeddingShard:
        """Open a shard's embeddings; its index may be damaged."""
        return shard_embeddings(self.store, self.version.index, embeddings_alone(self.version.shards[shard]))


def carry_over(
    task: EncodeTask,
    corpus: Corpus,
    shards: Sequence[int],
    own_versions: Mapping[int, Manifest],
    progress: Progress = no_progress,
) -> None:
    """Plan these shards: embeddings to reuse, and rows to encode. Runs in the current Ray session, if any.

    `own_versions` are those of the task's index, newest first. Shards with a staged chunk or plan are skipped. Where
    the plan's earlier shard is gone, as after a collection, the staged work is removed first. Raises StorageError if
    refined views to keep are damaged.
    """
    index, store = task.draft.index, Store(task.store)
    for shard in staged_shards(task, "plan-").intersection(shards):
        base = task.plan(store, shard).base
        if base and (missing := manifests.missing_files(store, base.index, base.entry)):
            log.warning("%s", task.discard(store, shard, MissingInputError(f"{store.where(missing[0])} is gone")))
    started_shards = staged_shards(task, "chunk-", "plan-")
    open_shards = [shard for shard in shards if shard not in started_shards]
    sources = embedded_corpora(store, task, own_versions) if open_shards else []
    shared_sources = share(sources)
    calls = [(task, shard, shared_sources) for shard in open_shards if sources]
    contents: list[Contents] = [frozenset()] * len(calls)
    if len(calls) > 1 or session.in_ray():  # else the task itself reads each part once
        what = "compare passages with earlier versions, shards"
        limited_calls = [(*call, MAX_CONTENT_CHARS // len(calls)) for call in calls]
        contents = run_tasks(changed_contents, limited_calls, "comparing passages", what, progress)
    matches = share(_find_in_parts(sources, frozenset().union(*contents), progress))
    calls = [(*call, own, matches) for call, own in zip(calls, contents)]
    what = "look for embeddings of earlier versions, shards"
    run_tasks(carry_shard, calls, "looking for embeddings of earlier versions", what, progress)
    counts = count_passages(task, corpus, shards)
    total = counts["encoded"] + counts["carried_over"]
    log.info("carried over: index=%s passages=%d to_encode=%d", index, counts["carried_over"], counts["encoded"])
    if counts["carried_over"]:
        progress("carried over from earlier versions, passages", counts["carried_over"], total)


def find_copies(task: EncodeTask, corpus: Corpus, shards: Sequence[int], progress: Progress = no_progress) -> None:
    """Plan these shards so that each content among the passages to encode is encoded once. Follows `carry_over`.

    A shard with a chunk staged before such a plan is skipped.
    """
    store, started_shards = Store(task.store), staged_shards(task, "chunk-")
    plans = dict(zip(shards, task.plans(store, shards)))
    copies_of: dict[int, dict[int, str]] = {
        shard: {} for shard in shards if plans[shard].copies is None and shard not in started_shards
    }
    if not copies_of:
        return
    calls, what = [(task, shard) for shard in shards], "look for equal passages, shards"
    digests = b"".join(run_tasks(digest_contents, calls, "comparing passages", what, progress))
    rows_of = {shard: plans[shard].rows_to_encode(corpus.info.parts[shard].num_passages) for shard in shards}
    starts = np.cumsum([0, *(len(rows_of[shard]) for shard in shards[:-1])])

    def shard_and_row(place: int) -> tuple[int, int]:
        """Return the shard and the row of a position in the concatenated rows of all shards."""
        at = int(np.searchsorted(starts, place, side="right")) - 1
        return shards[at], rows_of[shards[at]][place - int(starts[at])]

    originals = _first_equal(np.frombuffer(digests, np.uint64).reshape(-1, 2))
    corpus.open_parts({shard_and_row(original)[0] for original in originals.values()})
    for place, original in originals.items():
        (shard, row), (number, original_row) = shard_and_row(place), shard_and_row(original)
        if shard in copies_of:
            copies_of[shard][row] = corpus.part(number).passages(original_row, original_row + 1)[0].id

    def write_plan(shard: int) -> None:
        copies = copies_of[shard]
        rows = [row for row in rows_of[shard] if row not in copies] if copies else plans[shard].rows
        task.write_plan(store, shard, replace(plans[shard], rows=rows, copies=copies))

    store.for_each(write_plan, copies_of)
    log.info("equal passages: index=%s copies=%d", task.draft.index, sum(map(len, copies_of.values())))


def digest_contents(task: EncodeTask, shard: int) -> bytes:
    """Return the concatenated content digests of a shard's passages to encode."""
    part = task.open_corpus().part(shard)
    rows, digests = task.plan(Store(task.store), shard).rows_to_encode(len(part)), list[bytes]()
    for start in range(0, len(rows), BATCH_PASSAGES):
        for _, title, text, *_ in part.take(rows[start : start + BATCH_PASSAGES]):
            content = f"{len(title)} {title}{text}".encode()
            digests.append(hashlib.blake2b(content, digest_size=CONTENT_BYTES).digest())
    return b"".join(digests)


def _first_equal(digests_N2: IntArray) -> dict[int, int]:
    """Map each repeated row to the first row with an equal digest."""
    order_N = np.lexsort(digests_N2.T)  # stable
    is_later_N = np.zeros(len(order_N), bool)
    is_later_N[1:] = (digests_N2[order_N[1:]] == digests_N2[order_N[:-1]]).all(1)
    first_N = np.maximum.accumulate(np.where(is_later_N, 0, np.arange(len(order_N))))
    return dict(zip(order_N[is_later_N].tolist(), order_N[first_N[is_later_N]].tolist()))


def count_passages(task: EncodeTask, corpus: Corpus, shards: Iterable[int]) -> dict[str, int]:
    """Count the passages of planned shards by action; `encoded` and `carried_over` add up to all of them."""
    counts = Counter(encoded=0, carried_over=0, deleted=0, unlearned=0)
    numbers = list(shards)
    for shard, plan in zip(numbers, task.plans(corpus.store, numbers)):
        total = corpus.info.parts[shard].num_passages
        num_encoded = len(plan.rows_to_encode(total))
        counts.update(encoded=num_encoded, carried_over=total - num_encoded)
        counts.update(deleted=plan.num_deleted, unlearned=plan.num_unlearned)
    return counts


def embedded_corpora(store: Store, task: EncodeTask, own_versions: Mapping[int, Manifest]) -> list[EmbeddedCorpus]:
    """Return the versions of the store that the task's encoder embedded: first the one with refined views to keep, then
    those as encoded, then those with a parent; of these the task's own index, newest first, then others."""
    draft = task.draft
    indexes = sorted(store.list(paths.INDEXES), key=lambda name: name != draft.index)
    corpora: dict[tuple[bool, str, tuple[str, ...]], EmbeddedCorpus] = {}
    with_parent: list[EmbeddedCorpus] = []
    for index in indexes:
        versions = own_versions
        if index != draft.index:
            versions = manifests.read_all(store, index, require_live=False)
        for version in versions.values():
            same = (version.encoder_fingerprint, version.dtype) == (draft.encoder_fingerprint, draft.dtype)
            is_parent = (index, version.version) == (draft.index, draft.parent)
            is_refined = draft.operation == REFINED and is_parent
            if same and (is_refined or is_as_encoded(version, versions)):
                key = is_refined, version.corpus_digest, tuple(entry.digest for entry in version.shards)
                corpora.setdefault(key, EmbeddedCorpus(store, version, is_refined))
            if same and not lacks_views(version) and version.operation == REFINED and version.parent in versions:
                with_parent.append(EmbeddedCorpus(store, version, parent=versions[version.parent]))
    return [*sorted(corpora.values(), key=lambda source: not source.is_refined), *with_parent]


def is_as_encoded(version: Manifest, versions: Mapping[int, Manifest]) -> bool:
    """Return whether a version holds all views as encoded. `versions` are the existing ones of the index."""
    return not lacks_views(version) and not has_refined_views(version, versions)


def lacks_views(version: Manifest) -> bool:
    """Return whether `index.prune_views` left out views of a version; which ones is not recorded."""
    return version.metrics.get("pruned_views", 0.0) > 0


def has_refined_views(version: Manifest, versions: Mapping[int, Manifest]) -> bool:
    """Return whether refinement may have changed views or queries of a version: of a copy as of its original, or as it
    records if that is collected. `versions` are the existing ones of the index."""
    if version.operation not in manifests.COPIES:
        return version.operation != "index"
    originals = [versions[version.parent]] if version.parent in versions else []
    if version.operation == manifests.ROLLBACK:
        content = version.shards, version.refined_queries  # a refinement may have moved queries alone
        earlier = [one for one in versions.values() if one.version < version.version]
        originals = [one for one in earlier if (one.shards, one.refined_queries) == content]
    if originals:
        return all(has_refined_views(one, versions) for one in originals)
    return bool(version.metrics.get("refined", True))


def changed_contents(task: EncodeTask, shard: int, sources: Sequence[EmbeddedCorpus], limit: int) -> Contents:
    """Return the contents of a shard that differ from its base; none if it has no base, or they have over `limit`
    characters."""
    corpus = task.open_corpus()
    plan = _plan_over_base(task, corpus, shard, sources, reads=False)
    rows = plan.rows if plan and plan.rows and len(plan.rows) <= limit else ()
    contents = frozenset(passage[1:3] for passage in corpus.part(shard).take(rows))
    return contents if sum(len(title) + len(text) for title, text in contents) <= limit else frozenset()


def _find_in_parts(
    sources: Sequence[EmbeddedCorpus], contents: Contents, progress: Progress
) -> list[list[Matches] | None]:
    """Look for these contents in each file of the sources' parts, with a task for each part. Returns for each source
    what the files that have some of them have, in order; None if one cannot be read: the tasks of shards report it."""

    def parts_of(source: EmbeddedCorpus) -> Sequence[PartInfo] | None:
        with suppress(MissingInputError, StorageError):
            return source.corpus().info.parts
        return None

    if not sources or not contents:
        return [None] * len(sources)
    parts_by_source = sources[0].store.for_each(parts_of, sources)
    files: dict[int, dict[tuple[str, str], CorpusFile]] = {}
    for source, parts in zip(sources, parts_by_source):
        for number, part in enumerate(parts or ()):
            files.setdefault(number, {}).update({(source.version.corpus, file.file): file for file in part.files})
    shared_contents, what = share(contents), "look for texts in earlier versions, parts"
    address = sources[0].store.address
    calls = [(address, [(name, file) for (name, _), file in own.items()], shared_contents) for own in files.values()]
    results = run_tasks(find_in_part, calls, "looking for texts in earlier versions", what, progress)
    matches = {key: one for own, result in zip(files.values(), results) for key, one in zip(own, result)}

    def matches_in(source: EmbeddedCorpus, parts: Sequence[PartInfo] | None) -> list[Matches] | None:
        own = [matches[source.version.corpus, file.file] for part in parts or () for file in part.files]
        readable = [one for one in own if one is not None]
        return None if parts is None or len(readable) < len(own) else [one for one in readable if one]

    return [matches_in(source, parts) for source, parts in zip(sources, parts_by_source)]


def find_in_part(address: str, files: Sequence[tuple[str, CorpusFile]], contents: Contents) -> Sequence[Matches | None]:
    """Find the ids of contents in these files of a part of several corpora, each with its corpus's name; None for one
    that cannot be read."""
    store = Store(address)

    def find(own: tuple[str, CorpusFile]) -> Matches | None:
        name, file = own
        with suppress(MissingInputError, StorageError):
            corpus = Corpus(store, CorpusInfo(name, "", 0, (), (), {}, {}))  # of any digest: a file's name is its own
            return find_contents(corpus.open_file("a part", file), contents)
        return None

    return store.for_each(find, files)


def carry_shard(
    task: EncodeTask,
    shard: int,
    sources: Sequence[EmbeddedCorpus],
    contents: Contents,
    matches: Sequence[list[Matches] | None],
) -> None:
    """Stage embeddings of one shard's passages from other shards, then the plan. `matches` is where `contents` are in
    each source; other contents are looked for here."""
    store, corpus = Store(task.store), task.open_corpus()
    part = corpus.part(shard)
    plan = _plan_over_base(task, corpus, shard, sources) or EncodePlan()
    passages = part.passages() if plan.rows is None else part.take(plan.rows)
    remaining = {passage.id: passage for passage in passages}
    blocks: list[EmbeddingBlock] = []
    places: list[BlockRow] = []

    def take(source: EmbeddedCorpus, ids_of: Mapping[str, Sequence[str]]) -> None:
        """Take the embeddings of remaining passages from those of a source, by its ids."""
        for block in _blocks_with(source, ids_of):
            rows = ((own, row) for row, name in enumerate(block.ids) for own in ids_of[name])
            places.extend(BlockRow(own, len(blocks), row) for own, row in rows if remaining.pop(own, None) is not None)
            blocks.append(block)

    for source in sources if plan.base is None else ():  # else these ids have other contents in the newest source
        if not remaining:
            break
        take(source, _unchanged_ids(source, remaining))
        if source.is_refined:
            deleted_ids, replaced_ids = _deleted_or_replaced(source, corpus, shard, remaining)
            num_unlearned = _num_unlearned(source, sources, [*deleted_ids, *replaced_ids])
            plan = replace(plan, num_deleted=len(deleted_ids), num_unlearned=num_unlearned)
    is_complete, own_matches = all(passage[1:3] in contents for passage in remaining.values()), dict[str, Matches]()
    for source, source_matches in zip(sources, matches):
        if remaining and not source.is_refined and (not is_complete or source_matches is None or source_matches):
            source_matches = source_matches if is_complete else None
            take(source, _ids_of_same_content(source, remaining, source_matches, own_matches))
    if places:
        task.write_staged(store, task.carried_path(shard), gather_batches(blocks, sorted(places)))
        rows = [row for row, name in enumerate(part.ids()) if name in remaining]
        plan = replace(plan, rows=rows, is_carried=True)
    task.write_plan(store, shard, plan)


def _plan_over_base(
    task: EncodeTask, corpus: Corpus, shard: int, sources: Sequence[EmbeddedCorpus], *, reads: bool = True
) -> EncodePlan | None:
    """Plan over the first source with the same shards as parts, and this one whole, encoding all changed passages; None
    without one, or if that is not the source of refined views to keep, or not the first source of vectors of another
    program: `carry_shard` takes them passage by passage. What a source of another index has beside the corpus does not
    count as deleted. Without `reads` the plan is for its rows alone: no shard is read."""
    for source in sources:
        version = source.version
        with suppress(MissingInputError, StorageError):  # `carry_shard` reports what it cannot take
            before = source.corpus()
            if not source.parent and len(version.shards) == corpus.num_shards == before.num_shards:  # else resharded
                if reads:
                    manifests.open_shard(source.store, version.index, version.shards[shard])
                same = before.info.parts[shard].digest == corpus.info.parts[shard].digest
                changed_rows, deleted_ids = ([], []) if same else difference(before.part(shard), corpus.part(shard))
                replaced_ids = [passage.id for passage in corpus.part(shard).take(changed_rows)]
                num_unlearned = 0
                if source.is_refined and reads:
                    num_unlearned = _num_unlearned(source, sources, [*replaced_ids, *deleted_ids])
                own = BaseShard(version.index, version.shards[shard], version.index_params, promised_recall(version))
                num_deleted = len(deleted_ids) if version.index == task.draft.index else 0
                return EncodePlan(changed_rows, own, deleted_ids, num_deleted, num_unlearned)
        if source.is_refined or task.is_external:
            return None
    return None


def _deleted_or_replaced(
    source: EmbeddedCorpus, corpus: Corpus, shard: int, remaining: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the passages of a source over another number of shards that hash to this shard, but are deleted from it,
    or have new content: those still in `remaining` after reuse."""
    ids = set(corpus.part(shard).ids())
    source_ids = [
        name
        for number in related_shards(shard, len(source.version.shards), corpus.num_shards)
        for name in source.embeddings(number).ids()
        if shard_of(name, corpus.num_shards) == shard
    ]
    return [name for name in source_ids if name not in ids], [name for name in source_ids if name in remaining]


def _num_unlearned(source: EmbeddedCorpus, sources: Sequence[EmbeddedCorpus], ids: Iterable[str]) -> int:
    """Count passages with moved or added views in a refined source, as far as another source has them as encoded."""
    passages, encoded_views = source.corpus().get(ids), dict[str, Views]()
    for other in sources:
        missing = {name: passage for name, passage in passages.items() if name not in encoded_views}
        if missing and not other.is_refined:
            with suppress(MissingInputError, StorageError):
                encoded_views |= _views(other, _unchanged_ids(other, missing))
    num_unlearned = 0
    for name, views in _views(source, passages).items():
        is_added = bool((views.view_numbers_N >= source.version.num_views).any())
        is_moved = name in encoded_views and views.vectors_ND.tobytes() != encoded_views[name].vectors_ND.tobytes()
        num_unlearned += is_added or is_moved
    return num_unlearned


def _views(source: EmbeddedCorpus, ids: Iterable[str]) -> dict[str, Views]:
    """Copy the views of these passages from the shards of a source."""
    views: dict[str, Views] = {}
    for shard, own in ids_by_shard(ids, len(source.version.shards)).items():
        views |= source.embeddings(shard).find(own)
    return views


def _skip_source(source: EmbeddedCorpus, error: Exception) -> None:
    """Skip a missing or damaged source, so that its passages are encoded; raise if refined views would be lost."""
    if source.is_refined:
        raise StorageError(
            f"what refinement changed in index {source.version.index!r} cannot be kept: {error}; repair it first "
            f"(mvr-ray versions CONFIG repair {source.version.version}), roll back, or index without it "
            f"(index.keep_refinement=false)"
        ) from error
    log.warning("embeddings are not carried over: index=%s (%s)", source.version.index, error)


def _unchanged_ids(source: EmbeddedCorpus, passages: dict[str, Passage]) -> dict[str, list[str]]:
    """Return the ids of those of `passages` that have the same id and content in the source, each by itself."""
    try:
        before = source.corpus().get(passages)
        names = [name for name, passage in before.items() if _has_same_content(passage, passages[name])]
        refined_names = source.unchanged_since_parent(names)
        return {name: [name] for name in names if name not in refined_names}
    except (MissingInputError, StorageError) as error:
        _skip_source(source, error)
        return {}


def _blocks_with(source: EmbeddedCorpus, passage_ids: Iterable[str]) -> Iterator[EmbeddingBlock]:
    """Yield blocks of these passages of a source, as far as its shards are undamaged."""
    for number, own in ids_by_shard(passage_ids, len(source.version.shards)).items():
        try:
            embeddings = source.embeddings(number)
        except (MissingInputError, StorageError) as error:
            _skip_source(source, error)
            continue
        yield from passages_of(embeddings.blocks(), set(own))


def passages_of(blocks: Iterable[EmbeddingBlock], ids: Collection[str]) -> Iterator[EmbeddingBlock]:
    """Yield the passages of these ids, as blocks of them."""
    for block in blocks:
        if rows := [BlockRow(name, 0, row) for row, name in enumerate(block.ids) if name in ids]:
            yield gather_rows([block], rows)


def _ids_of_same_content(
    source: EmbeddedCorpus,
    passages: Mapping[str, Passage],
    matches: Iterable[Matches] | None,
    matches_by_file: dict[str, Matches],
) -> dict[str, list[str]]:
    """Return the ids of those of `passages` that have the same content in the source, by their ids there.

    `matches` is where their contents are in its files. Without it they are looked for in each file that
    `matches_by_file` lacks, which is added to it.
    """
    ids_of: dict[tuple[str, str], list[str]] = {}
    for passage in passages.values():
        ids_of.setdefault((passage.title, passage.text), []).append(passage.id)
    ids_by_name: dict[str, list[str]] = {}
    all_contents = set(ids_of)

    def find_in(corpus: Corpus) -> Iterator[Matches]:
        for number, file in ((number, file) for number, part in enumerate(corpus.info.parts) for file in part.files):
            if file.file not in matches_by_file:
                matches_by_file[file.file] = find_contents(corpus.open_file(f"part {number}", file), all_contents)
            yield matches_by_file[file.file]

    try:
        before = source.corpus()
        for own in find_in(before) if matches is None else matches:
            if not ids_of:
                break
            if not (contents := {name: content for name, content in own.items() if content in ids_of}):
                continue
            current = [name for name, passage in before.get(contents).items() if passage[1:3] == contents[name]]
            refined_names = source.unchanged_since_parent(current)
            for name in current:
                if name not in refined_names and contents[name] in ids_of:
                    ids_by_name[name] = ids_of.pop(contents[name])
    except (MissingInputError, StorageError) as error:
        _skip_source(source, error)
    return ids_by_name


def _has_same_content(one: Passage, other: Passage) -> bool:
    return (one.title, one.text) == (other.title, other.text)
