"""Retrieves for LangChain, over a client: of a server, or of an index that this process opens.

retriever = LangChainRetriever(client=Client("http://127.0.0.1:8000", token=token), k=5)
retriever.invoke("who built it?")
"""

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field

from mvr_ray.client import Client
from mvr_ray.integrations import hit_metadata


class LangChainRetriever(BaseRetriever):
    """The best `k` passages of a query as documents, best first. Raises what the client raises."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    client: Client
    k: int = 10
    filter: dict[str, Any] | None = None
    """A condition over fields of passages, as a search takes it."""
    fields: list[str] = Field(default_factory=list)
    """Fields of passages that documents have in their metadata; one named `score` replaces that of the search."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        answer = self.client.search([query], self.k, filter=self.filter, fields=self.fields)
        return [
            Document(id=hit.id, page_content=hit.text or "", metadata={"score": hit.score} | hit_metadata(answer, hit))
            for hit in answer.results[0]
        ]
