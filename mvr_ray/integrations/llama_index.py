"""Retrieves for LlamaIndex, over a client: of a server, or of an index that this process opens.

retriever = LlamaIndexRetriever(Client("http://127.0.0.1:8000", token=token), k=5)
retriever.retrieve("who built it?")
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from mvr_ray.client import Client
from mvr_ray.integrations import OWN_METADATA, field_names, hit_metadata, require_client
from mvr_ray.serving.schemas import Hybrid


class LlamaIndexRetriever(BaseRetriever):
    """The best `k` passages of a query as nodes, best first. Raises what the client raises.

    Models read the text with its title and the requested fields; the snippet, the view and the version are in the
    metadata alone.
    """

    def __init__(
        self,
        client: Client,
        k: int = 10,
        *,
        filter: Mapping[str, Any] | None = None,
        fields: str | Sequence[str] = (),
        hybrid: Hybrid = None,
        **options: Any,
    ) -> None:
        """`filter` is a condition over fields of passages; `fields` are those that nodes have in their metadata;
        `hybrid` joins words and views as a search does; `options` are those of every retriever, such as
        `callback_manager`."""
        super().__init__(**options)
        self.client = require_client(client)
        self.k = k
        self.filter = filter
        self.fields = field_names(fields)
        self.hybrid = hybrid

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        options = {"filter": self.filter, "fields": self.fields, "hybrid": self.hybrid}
        answer = self.client.search([query_bundle.query_str], self.k, **options)
        unread = [name for name in OWN_METADATA if name not in self.fields]
        return [
            NodeWithScore(
                node=TextNode(
                    id_=hit.id,
                    text=hit.text or "",
                    metadata=hit_metadata(answer, hit),
                    excluded_llm_metadata_keys=unread,
                    excluded_embed_metadata_keys=unread,
                ),
                score=hit.score,
            )
            for hit in answer.results[0]
        ]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Retrieve in a thread, so that the event loop goes on."""
        return await asyncio.to_thread(self._retrieve, query_bundle)
