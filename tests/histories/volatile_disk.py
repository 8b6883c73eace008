"""Records how a program changes a folder, and makes the states that a power failure may leave of it.

What survives is less than on any file system with a journal:

    bytes    of a file survive once the file was synced; before, it may be empty, zeros, cut short or whole
    names    a name that was made, moved or removed survives once its folder was synced; before, each such change may
             have happened or not, whatever became of the others, or all up to some moment, as by a journal
    a move   is one change within a folder; across folders, the old name goes only where the new one is there

`os.fsync` is only recorded, so that nothing waits for a real disk. Files that other languages write are seen, too: each
call of `os` that changes names or syncs is followed by a look at the whole folder.
"""

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

CALLS = ("fsync", "link", "rename", "replace", "mkdir", "unlink", "remove", "rmdir")
SYNCS = frozenset({"file", "folder"})
ROOT = 0
Tree = dict[int, dict[str, int]]
"""Names and what they stand for, of each folder."""


class ProcessKill(BaseException):
    """Ends the recorded program at a call, as a kill does: none of its later calls has an effect."""


@dataclass(eq=False)
class NameChange:
    """In a folder, at a time: `name` stands for `node`, or for nothing; `moved_from` goes in the same moment."""

    time: int
    folder: int
    name: str
    node: int | None
    moved_from: str = ""
    after: "NameChange | None" = None
    """What must have happened for this one to happen: the new name of a file that was moved to another folder."""
    sync_time: float = inf


class Content(NamedTuple):
    """Bytes that a file had at a time."""

    time: int
    data: bytes
    is_synced: bool


@dataclass
class DiskRecorder:
    """Records every change below `root`. `syncs` are the kinds of syncs that have an effect."""

    root: Path
    syncs: frozenset[str] = SYNCS
    now: int = 0
    """Calls so far."""
    kill_at: float = inf
    changes: list[NameChange] = field(default_factory=list)
    contents: dict[int, list[Content]] = field(default_factory=dict)
    _folders: set[int] = field(default_factory=lambda: {ROOT})
    _node_of: dict[int, int] = field(default_factory=dict)
    _tree: Tree = field(default_factory=lambda: {ROOT: {}})

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this process does until the block ends."""
        plain = {name: getattr(os, name) for name in CALLS}
        self.root.mkdir(parents=True)
        for name, call in plain.items():
            setattr(os, name, self._with_record(name, call))
        try:
            yield
        finally:
            for name, call in plain.items():
                setattr(os, name, call)

    def _with_record(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self.now >= self.kill_at:
                raise ProcessKill
            self.now += 1
            if name == "fsync":
                self._look()
                self._sync(os.fstat(args[0]))
                return None
            result = plain(*args, **options)
            self._look()
            return result

        return call

    def _sync(self, what: os.stat_result) -> None:
        node = ROOT if what.st_ino == self.root.stat().st_ino else self._node_of.get(what.st_ino)
        if node in self._folders and "folder" in self.syncs:
            for change in self.changes:
                if change.folder == node and change.sync_time == inf:
                    change.sync_time = self.now
        elif node is not None and not stat.S_ISDIR(what.st_mode) and "file" in self.syncs:
            [path] = self._paths_of(node)[:1]
            self.contents[node].append(Content(self.now, path.read_bytes(), True))

    def _paths_of(self, node: int, folder: int = ROOT, path: Path | None = None) -> list[Path]:
        path = path or self.root
        paths = [path / name for name, own in self._tree[folder].items() if own == node]
        for name, own in self._tree[folder].items():
            if own in self._folders:
                paths += self._paths_of(node, own, path / name)
        return paths

    def _look(self) -> None:
        """Compare the folder with what it was, and note each name that changed."""
        before, self._tree = self._tree, {}
        files: dict[int, str] = {}
        inodes: set[int] = set()
        pending = [(str(self.root), ROOT)]
        while pending:
            place, folder = pending.pop()
            names = self._tree[folder] = {}
            for entry in os.scandir(place):
                inodes.add(entry.inode())
                node = names[entry.name] = self._node_of.setdefault(entry.inode(), 1 + self._num_nodes())
                self.contents.setdefault(node, [])
                if entry.is_dir():
                    self._folders.add(node)
                    pending.append((entry.path, node))
                else:
                    files[node] = entry.path
        self._node_of = {inode: node for inode, node in self._node_of.items() if inode in inodes}
        removals = {
            (before[folder][name], folder): name
            for folder in before
            for name in before[folder]
            if name not in self._tree.get(folder, {})
        }
        additions: dict[int, NameChange] = {}
        for folder, names in self._tree.items():
            for name, node in names.items():
                if before.get(folder, {}).get(name) == node:
                    continue
                additions[node] = NameChange(self.now, folder, name, node, removals.pop((node, folder), ""))
                self.changes.append(additions[node])
                if node in files:
                    self._note_content(node, Path(files[node]))
        for (node, folder), name in removals.items():
            self.changes.append(NameChange(self.now, folder, name, None, after=additions.get(node)))

    def _num_nodes(self) -> int:
        return len(self.contents)

    def _note_content(self, node: int, file: Path) -> None:
        data, history = file.read_bytes(), self.contents[node]
        if not history or history[-1].data != data:
            history.append(Content(self.now, data, False))

    def write_state(self, time: int, draw: random.Random | None, folder: Path) -> None:
        """Write to a new folder what a power failure after call number `time` may have left: what was synced, and what
        else is drawn."""
        share, moment, is_ordered = 0.0, 0, False
        if draw:
            share, moment = draw.choice((0, 0.1, 0.5, 0.9, 1)), draw.randint(0, time)
            is_ordered = draw.random() < 0.3
        tree: Tree = {node: {} for node in self._folders}
        survivors: set[NameChange | None] = {None}
        for change in self.changes:
            if change.time > time:
                break
            survives = change.time <= moment if is_ordered else draw is not None and draw.random() < share
            if (change.sync_time <= time or survives) and change.after in survivors:
                survivors.add(change)
                names = tree[change.folder]
                names.pop(change.moved_from, None)
                names.pop(change.name, None)
                if change.node is not None:
                    names[change.name] = change.node
        bytes_of = {node: self._content_after(node, time, draw) for node in self.contents if node not in self._folders}
        self._write(tree, ROOT, bytes_of, folder)

    def _write(self, tree: Tree, node: int, bytes_of: dict[int, bytes], folder: Path) -> None:
        folder.mkdir()
        for name, own in tree[node].items():
            if own in tree:
                self._write(tree, own, bytes_of, folder / name)
            else:
                (folder / name).write_bytes(bytes_of[own])

    def _content_after(self, node: int, time: int, draw: random.Random | None) -> bytes:
        history = [content for content in self.contents[node] if content.time <= time]
        synced_data = next((content.data for content in reversed(history) if content.is_synced), b"")
        data = history[-1].data if history else b""
        if draw is None or data == synced_data:
            return synced_data
        return draw.choice((synced_data, data[: len(data) // 2], bytes(len(data)), data))
