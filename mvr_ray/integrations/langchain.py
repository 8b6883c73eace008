"""Retrieves for LangChain, over a client: of a server, or of an index that this process opens.

retriever = LangChainRetriever(client=Client("http://127.0.0.1:8000", token=token), k=5)
retriever.invoke("who built it?")
retriever.invoke("who built it?", k=2, filter={"year": {"gte": 1958}})
"""

import asyncio
from typing import Annotated, Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import BeforeValidator, ConfigDict, Field

from mvr_ray.client import Client
from mvr_ray.integrations import field_names, hit_metadata, require_client
from mvr_ray.serving.schemas import Hybrid


class LangChainRetriever(BaseRetriever):
    """The best `k` passages of a query as documents, best first. Raises what the client raises.

    A call may have arguments of `Client.search` of its own: `k`, `filter`, `fields`, `hybrid`, `timeout_s`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    client: Annotated[Client, BeforeValidator(require_client)]
    k: int = 10
    filter: dict[str, Any] | None = None
    """A condition over fields of passages, as a search takes it."""
    fields: Annotated[list[str], BeforeValidator(field_names)] = Field(default_factory=list)
    """Fields of passages that documents have in their metadata; one named `score` replaces that of the search."""
    hybrid: Hybrid = None
    """How words and views are joined, as a search takes it."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        own: dict[str, Any] = {"k": self.k, "filter": self.filter, "fields": self.fields, "hybrid": self.hybrid}
        answer = self.client.search([query], **own | options)
        return [
            Document(id=hit.id, page_content=hit.text or "", metadata={"score": hit.score} | hit_metadata(answer, hit))
            for hit in answer.results[0]
        ]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        """Retrieve in a thread, as the base does, which takes no options."""
        manager = run_manager.get_sync()
        return await asyncio.to_thread(self._get_relevant_documents, query, run_manager=manager, **options)
