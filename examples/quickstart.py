"""Build an index of twelve passages, search it, change it and measure it, in this process.

    python examples/quickstart.py

Run it whole, or cell by cell in an editor that knows `# %%`; `jupytext --to ipynb examples/quickstart.py` makes a
notebook of it.
"""

# %% Passages: texts, (id, title, text), mappings, frames, tables, datasets or files. Further keys are fields.
import sys
from pathlib import Path

from mvr_ray import Encoder, Index

TOWERS = [
    ("Eiffel Tower", 1889, "Gustave Eiffel's company built the Eiffel Tower in Paris. It is 330 metres tall."),
    (
        "Tower of Pisa",
        1372,
        "The tower of Pisa leans by four degrees. Soft ground on one side gave way as it was built.",
    ),
    (
        "Tokyo Tower",
        1958,
        "Tokyo Tower was built for broadcasting. White and orange paint keeps it visible to aircraft.",
    ),
    (
        "CN Tower",
        1976,
        "A railway company built the CN Tower in Toronto. Its glass floor is 342 metres above the street.",
    ),
    (
        "Big Ben",
        1859,
        "Big Ben is the great bell of the clock tower in London. The clock keeps time by pennies on its swing.",
    ),
    ("Burj Khalifa", 2010, "The Burj Khalifa stands in Dubai. Its 828 metres hold flats, offices and a hotel."),
    (
        "Space Needle",
        1962,
        "The Space Needle was made for the world's fair in Seattle. Its restaurant turns once an hour.",
    ),
    ("Sutro Tower", 1973, "Sutro Tower carries radio and television over San Francisco. Fog often hides its feet."),
    ("Giralda", 1198, "The Giralda was the minaret of the mosque of Seville. Ramps, not stairs, lead to its bells."),
    ("Qutb Minar", 1220, "The Qutb Minar rises over Delhi in five storeys. Red sandstone and marble cover it."),
    ("Willis Tower", 1974, "Nine tubes of steel, bound together, hold up the Willis Tower in Chicago."),
    ("Galata Tower", 1348, "Genoese merchants raised the Galata Tower in Constantinople as part of their walls."),
]
passages = [{"id": title.replace(" ", "_"), "title": title, "text": text, "year": year} for title, year, text in TOWERS]

# %% Build an index in a folder. `mvr-ray search towers/run.yaml "..."` searches the same one.
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "towers")
index = Index.build(passages, model="all-MiniLM-L6-v2", path=folder)
print(index)

# %% Search: each hit has the matching snippet of the passage, its score and its fields.
hits = index.search("Why does the tower lean?", k=2)
print(hits)
assert hits[0].id == "Tower_of_Pisa"

# %% Why it matched: the score of every view, that is of every sentence. A notebook shows `explanation` as a page.
explanation = index.explain("Why does the tower lean?", "Tower_of_Pisa")
for view in explanation.passages[0].views:
    print(f"{view.scores[0]:.3f}  {view.text}")

# %% Several questions at once, and only towers finished after 1900.
for hits in index.search(["Who built a tower in Paris?", "Where can I eat?"], k=2, filter={"year": {"gte": 1900}}):
    print(hits)

# %% Change passages: only new texts are embedded, and each change is a version of its own.
index.upsert([{"id": "Petronas", "title": "Petronas Towers", "text": "A bridge joins the twin towers.", "year": 1998}])
index.delete("Sutro_Tower")
print(index.search("Which towers does a bridge join?", k=1))
for version in index.versions():
    print(version.version, version.operation, version.passages, "live" if version.live else "")
assert len(index) == len(passages)

# %% Measure it on questions with known answers.
answers = [("Who built the tower in Paris?", "Gustave Eiffel"), ("How tall is it in Dubai?", "828")]
print(index.evaluate(answers, k=[1, 5]))

# %% Only vectors: one for a question, one per snippet for a passage.
encoder = Encoder("all-MiniLM-L6-v2")
queries_QD = encoder.embed_queries(["Why does the tower lean?"])
views_PVD, mask_PV = encoder.embed_passages(passages[:3])
print(queries_QD.shape, views_PVD.shape, f"{mask_PV.sum()} views")

index.close()
