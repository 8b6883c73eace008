"""Add, replace and delete passages, and go back: `python examples/changing_corpus.py [PASSAGES]`.

Every change publishes a version; only the changes are embedded.
"""

from wikipedia import passages

from mvr_ray import Index

rows = passages()
index = Index.build(rows, path="example-store/changing")
built = index.manifest.version

new = {"id": "note", "title": "A note", "text": "The zeppelin lands on the roof of the library at noon.", "words": 11}
manifest = index.upsert([new])
print(f"version {manifest.version}: {manifest.metrics['encoded']} encoded, {manifest.metrics['carried_over']} kept")
print(index.search("When does the zeppelin land?", k=1))

index.upsert([{**new, "text": "The zeppelin does not land today."}])
print(index.search("When does the zeppelin land?", k=1))

index.delete("note")
assert "note" not in index.passages(["note"])
index.rollback(built)
for line in index.versions():
    print(line.version, line.operation, f"{line.passages:,} passages", "(live)" if line.live else "")
assert len(index) == len(rows)
