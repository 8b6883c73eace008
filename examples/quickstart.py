"""Build an index in five lines, ask it, and open it again: `python examples/quickstart.py [PASSAGES]`."""

from wikipedia import passages

from mvr_ray import Index

index = Index.build(passages(), path="example-store/quickstart")
print(index)

hits = index.search("a city at a river", k=3)
print(hits)  # the snippet that matched stands between » and «
print("certified to be the best of all passages:", hits.exact.certified)

many = index.search(["a composer of operas", "an island in the Pacific"], k=2)
for one in many:
    print(one.question, "->", ", ".join(hit.title for hit in one))

index.close()
with Index.open("example-store/quickstart") as again:  # as another program would, later
    assert [hit.id for hit in again.search("a city at a river", k=3)] == [hit.id for hit in hits]
