"""Changes one file of a store at a time and reads the store as programs do; prints what came of it, a JSON line a case.

    python store_fuzzer.py FIXTURE FOLDER SEED CASES

A case is `equal` (the same answers as before), `refused` (an error of ours), or what must not be: `another answer`,
`traceback`, `unnamed` (an error that names neither the file by its path, nor the encoder or early corpus it is of).
A line `{"begin": ...}` comes before each case, so that a process that dies says in which one. The last line has the
peak of memory.
"""

import json
import os
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from peak_memory import peak_kb

from mvr_ray.config import PrepareConfig, RunConfig
from mvr_ray.distributed.router import open_router
from mvr_ray.errors import MvrRayError
from mvr_ray.store import update
from mvr_ray.store.corpus import Corpus, question_sets
from mvr_ray.store.files import Store
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import read_questions

K = 5
SWAPS = 0.1
NEW = "new"
WITHOUT_DIGEST = {"questions years.arrow"}
"""Question sets of stores before corpus versions."""
ARTICLE = "Towers are high. They are built of stone, and some of them lean. A bridge is long, and crosses a river."


def main(fixture: Path, folder: Path, seed: int, cases: int) -> None:
    answers = json.loads((fixture / "answers.json").read_text(encoding="utf-8"))
    queries_QD = np.array(answers["queries"], np.float32)
    whole = shutil.copytree(fixture / "store", folder / "whole")
    add_corpus_of_today(whole, folder)
    files = sorted(file.relative_to(whole) for file in whole.rglob("*") if file.is_file())
    kinds: dict[str, list[Path]] = {}
    for file in files:
        if kind_of(file) not in WITHOUT_DIGEST:
            kinds.setdefault(kind_of(file), []).append(file)
    expected: dict[str, Any] = {}
    rng = random.Random(seed)
    store = shutil.copytree(whole, folder / "case", copy_function=os.link)
    for number in range(cases):
        kind = sorted(kinds)[number % len(kinds)]
        file = rng.choice(kinds[kind])
        name, content = mutate(whole, file, kinds[kind], rng)
        case = {"number": number, "kind": kind, "file": str(file), "mutation": name}
        say({"begin": case})
        store = store.rename(folder / f"case-{number}")  # what remembers a path remembers nothing of this one
        (store / file).unlink()
        (store / file).write_bytes(content)
        subject, look = subject_of(file, queries_QD, answers["questions"])
        if subject not in expected:
            expected[subject] = look(whole)
        say({**case, **outcome(store, file, look, expected[subject])})
        (store / file).unlink()
        os.link(whole / file, store / file)
    assert sorted(one.relative_to(store) for one in store.rglob("*") if one.is_file()) == files, (
        "to read is to add none"
    )
    say({"kinds": sorted(kinds), "peak_bytes": 1024 * peak_kb()})


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def add_corpus_of_today(store: Path, folder: Path) -> None:
    """A corpus in today's format, with a question set and a file of changes beside a part."""
    source, changes = folder / "squad.json", folder / "changes.jsonl"
    paragraphs = []
    for number in range(30):
        answers = [{"text": "Towers", "answer_start": 0}]
        question = {"id": f"q{number}", "question": f"How high is {number}?", "answers": answers}
        paragraphs.append({"context": f"{ARTICLE} Number {number}.", "qas": [question]})
    source.write_text(json.dumps({"version": "1.1", "data": [{"title": "Towers", "paragraphs": paragraphs}]}))
    sources = [{"path": str(source), "format": "squad", "questions": "dev"}]
    section = {"corpus": NEW, "num_shards": 2, "sources": sources}
    config = PrepareConfig.model_validate(section)
    prepare(config, Store(str(store)))
    changes.write_text(json.dumps({"id": "Towers_3", "title": "Towers", "text": "This one fell."}) + "\n")
    update.update(config, Store(str(store)), str(changes))


def kind_of(file: Path) -> str:
    parts = file.parts
    if parts[0] == "indexes":
        return f"{parts[1]} {'manifest' if parts[2] == 'versions' else file.name}"
    if parts[0] == "corpora":
        what = "questions" if "questions" in parts else "version" if "versions" in parts else file.suffixes[0][1:]
        return f"corpus {parts[1]} {what}"
    return f"{parts[0]} {file.name}"


def mutate(whole: Path, file: Path, others: list[Path], rng: random.Random) -> tuple[str, bytes]:
    data = bytearray((whole / file).read_bytes())
    others = [one for one in others if one != file]
    if others and rng.random() < SWAPS:
        other = rng.choice(others)
        return f"replaced by {other}", (whole / other).read_bytes()
    at = rng.randrange(len(data))
    match rng.choice(("bit", "bit", "byte", "cut", "extend", "zeros", "digit", "empty", "random")):
        case "bit":
            data[at] ^= 1 << rng.randrange(8)
            return f"bit at {at}", bytes(data)
        case "byte":
            at = rng.choice((rng.randrange(min(64, len(data))), len(data) - 1 - rng.randrange(min(64, len(data)))))
            data[at] = (data[at] + 1 + rng.randrange(255)) % 256
            return f"byte at {at}", bytes(data)
        case "cut":
            return f"cut at {at}", bytes(data[:at])
        case "extend":
            return "extended", bytes(data) + rng.randbytes(1 + rng.randrange(4096))
        case "zeros":
            data[at : at + 64] = bytes(len(data[at : at + 64]))
            return f"zeros at {at}", bytes(data)
        case "digit":
            digits = [place for place, value in enumerate(data) if 48 <= value <= 57]
            if digits:
                at = rng.choice(digits)
                data[at] = 48 + (data[at] - 48 + 1 + rng.randrange(9)) % 10
            return f"digit at {at}", bytes(data)
        case "empty":
            return "emptied", b""
        case _:
            return "random bytes", rng.randbytes(len(data))


Look = Callable[[Path], Any]


def subject_of(file: Path, queries_QD: np.ndarray, questions: list[str]) -> tuple[str, Look]:
    """What to read of a store in which this file was changed."""
    parts = file.parts
    if parts[0] == "indexes":
        index, numbers = parts[1], (1, 2) if parts[1] in ("flat", "codes") else (1,)
        return index, lambda store: [answers_of(store, index, number, queries_QD) for number in numbers]
    if parts[0] == "encoders":
        return "encoder", lambda store: embeddings_of(store, questions)
    if parts[0] == "questions" or parts[:2] == ("corpora", "corpus"):
        return "corpus", lambda store: texts_of(store, "corpus")
    return NEW, lambda store: texts_of(store, NEW)


def run_over(store: Path, index: str) -> RunConfig:
    return RunConfig.model_validate({"store": {"path": str(store)}, "index": {"name": index}, "retrieve": {"k": K}})


def answers_of(store: Path, index: str, version: int, queries_QD: np.ndarray) -> Any:
    run = run_over(store, index)
    with open_router(run, version, local=True) as router:
        answer = router.search(queries_QD, K)
        explanations = router.explain(queries_QD, [answer.hits[0][0].passage_id])
    return [answer.hits, answer.exact, answer.shards, repr(explanations)]


def embeddings_of(store: Path, questions: list[str]) -> Any:
    with open_router(run_over(store, "flat"), 1, local=True) as router:
        passages = router.passages(router.corpus.part(0).ids()[:3])
        spans = [router.view_spans(passage) for passage in passages.values()]
        return [router.embed(questions).tolist(), spans]


def texts_of(store: Path, name: str) -> Any:
    corpus = Corpus.open(Store(str(store)), name)
    sets = {one: read_questions(corpus, one) for one in question_sets(corpus)}
    return [[list(corpus.part(shard).passages()) for shard in range(corpus.num_shards)], sets]


def names_of(file: Path) -> list[str]:
    """What an error may name this file by, of which at least one: its path, or the folder of its encoder."""
    parts = file.parts
    if parts[0] == "encoders":
        return ["/".join(parts[:3])]
    if file.name == "corpus.json":  # it has no checksum: a wrong digest in it shows as damage of the file that it is of
        return [str(file), f"corpus {parts[1]!r}"]
    return [str(file)]


def outcome(store: Path, file: Path, look: Look, expected: Any) -> dict[str, str]:
    try:
        is_equal = look(store) == expected
    except MvrRayError as error:
        message = str(error)
        return {
            "outcome": "refused" if any(name in message for name in names_of(file)) else "unnamed",
            "message": message[:300],
        }
    except Exception:  # noqa: BLE001 - this is what is looked for
        return {"outcome": "traceback", "message": traceback.format_exc()[-800:]}
    return {"outcome": "equal" if is_equal else "another answer"}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
