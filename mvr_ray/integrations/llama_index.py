"""Retrieves for LlamaIndex, over a client: of a server, or of an index that this process opens.

retriever = LlamaIndexRetriever(Client("http://127.0.0.1:8000", token=token), k=5)
retriever.retrieve("who built it?")
"""

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from mvr_ray.client import Client
from mvr_ray.integrations import hit_metadata


class LlamaIndexRetriever(BaseRetriever):
    """The best `k` passages of a query as nodes, best first. Raises what the client raises."""

    def __init__(
        self, client: Client, k: int = 10, *, filter: Mapping[str, Any] | None = None, fields: Sequence[str] = ()
    ) -> None:
        """`filter` is a condition over fields of passages; `fields` are those that nodes have in their metadata."""
        super().__init__()
        self.client = client
        self.k = k
        self.filter = filter
        self.fields = fields

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        answer = self.client.search([query_bundle.query_str], self.k, filter=self.filter, fields=self.fields)
        return [
            NodeWithScore(
                node=TextNode(id_=hit.id, text=hit.text or "", metadata=hit_metadata(answer, hit)), score=hit.score
            )
            for hit in answer.results[0]
        ]
