"""The retrievers of LangChain and LlamaIndex give what the client gives, over HTTP and in this process."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from in_memory_index import InMemoryIndex
from langchain_core.runnables import RunnableLambda
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import MetadataMode
from pydantic import ValidationError
from server import listening

from mvr_ray.client import AsyncClient, Client, RefusedError
from mvr_ray.config import ServeConfig
from mvr_ray.integrations.langchain import LangChainRetriever
from mvr_ray.integrations.llama_index import LlamaIndexRetriever
from mvr_ray.serving.app import create_app
from mvr_ray.serving.service import SearchService

QUESTION = "nile and a hill"


@pytest.fixture(params=["http", "in process"])
def client(request) -> Iterator[Client]:
    service = SearchService(InMemoryIndex(), ServeConfig())
    if request.param == "http":
        with listening(create_app(service)) as address, Client(address, timeout_s=30) as client:
            yield client
    else:
        with Client.over(service, timeout_s=30) as client:
            yield client


def test_documents_of_langchain_are_the_hits_in_their_order(client) -> None:
    hits = client.search([QUESTION], k=2).results[0]
    retriever = LangChainRetriever(client=client, k=2)
    documents = retriever.invoke(QUESTION)
    assert [(one.id, one.page_content, one.metadata["score"]) for one in documents] == [
        (hit.id, hit.text, hit.score) for hit in hits
    ]
    assert [one.metadata["title"] for one in documents] == ["Rivers", "Hills"]
    assert documents[0].metadata["snippet"] == "The Nile is long." and documents[0].metadata["version"] == 3
    assert asyncio.run(retriever.ainvoke(QUESTION)) == documents
    chain = retriever | RunnableLambda(lambda hits: " ".join(one.page_content for one in hits))
    assert chain.invoke(QUESTION) == " ".join(hit.text for hit in hits)
    matches = LangChainRetriever(client=client, filter={"title": "Seas"}).invoke(QUESTION)
    assert [one.id for one in matches] == ["p3"]
    with pytest.raises(RefusedError, match="k_out_of_range"):
        LangChainRetriever(client=client, k=0).invoke(QUESTION)


def test_langchain_passes_the_options_of_a_call_and_refuses_unknown_ones(client) -> None:
    retriever = LangChainRetriever(client=client, k=2)
    assert len(retriever.invoke(QUESTION, k=1)) == 1
    assert len(asyncio.run(retriever.bind(k=1).ainvoke(QUESTION))) == 1
    assert [one.id for one in retriever.invoke(QUESTION, filter={"title": "Seas"})] == ["p3"]
    with pytest.raises(TypeError, match="top_k"):
        retriever.invoke(QUESTION, top_k=1)
    with pytest.raises(ValidationError, match="search_kwargs"):
        LangChainRetriever(client=client, search_kwargs={"k": 1})


def test_a_retriever_joins_words_and_views_as_requested() -> None:
    """The index of these tests has no words, and says so."""
    with Client.over(SearchService(InMemoryIndex(), ServeConfig())) as client:
        with pytest.raises(RefusedError, match="no_words"):
            client.search([QUESTION], hybrid="rrf")
        for invoke in (
            LangChainRetriever(client=client, hybrid="rrf").invoke,
            LlamaIndexRetriever(client, hybrid="rrf").retrieve,
        ):
            with pytest.raises(RefusedError, match="no_words"):
                invoke(QUESTION)


@pytest.mark.parametrize("make", [lambda client: LangChainRetriever(client=client), LlamaIndexRetriever])
def test_what_is_no_blocking_client_is_refused_with_what_to_give(make) -> None:
    for client in (SimpleNamespace(), AsyncClient("http://127.0.0.1:8000"), "http://127.0.0.1:8000"):
        with pytest.raises(ValueError, match=r"client is of type .*Client.in_process.index.run. of an Index"):
            make(client)


class WithScores(InMemoryIndex):
    """Passages with fields of the names that the metadata of documents have, too."""

    corpus = SimpleNamespace(fields={"score": "int", "view": "string"})

    def passages(self, ids):
        fields = (("score", 7), ("view", "north"))
        return {name: passage._replace(fields=fields) for name, passage in super().passages(ids).items()}


def test_fields_that_are_named_are_in_the_metadata_whatever_their_names() -> None:
    with Client.over(SearchService(WithScores(), ServeConfig())) as client:
        for fields, score, view in (
            ([], client.search(QUESTION).results[0][0].score, 0),
            (["score", "view"], 7, "north"),
        ):
            metadata = LangChainRetriever(client=client, fields=fields).invoke(QUESTION)[0].metadata
            assert (metadata["score"], metadata["view"]) == (score, view)
        node = LlamaIndexRetriever(client, fields=["score"]).retrieve(QUESTION)[0]
        assert (node.metadata["score"], node.score) == (7, client.search(QUESTION).results[0][0].score)


class WithReviews(WithScores):
    """A field whose name contains one of the search's own."""

    corpus = SimpleNamespace(fields={"review": "string"})

    def passages(self, ids):
        return {name: one._replace(fields=(("review", "fine"),)) for name, one in super().passages(ids).items()}


def test_one_field_is_its_name_and_not_the_names_within() -> None:
    with Client.over(SearchService(WithReviews(), ServeConfig())) as client:
        node = LlamaIndexRetriever(client, fields="review").retrieve(QUESTION)[0]
        assert node.metadata["review"] == "fine"
        assert {"snippet", "view", "index", "version"} == set(node.node.excluded_llm_metadata_keys)
        retriever = LangChainRetriever(client=client, fields="review")
        assert retriever.invoke(QUESTION)[0].metadata["review"] == "fine"


def test_nodes_of_llama_index_are_the_hits_in_their_order(client) -> None:
    hits = client.search([QUESTION], k=2).results[0]
    retriever = LlamaIndexRetriever(client, k=2)
    nodes = retriever.retrieve(QUESTION)
    assert [(one.node_id, one.get_content(MetadataMode.NONE), one.score) for one in nodes] == [
        (hit.id, hit.text, hit.score) for hit in hits
    ]
    assert nodes[0].metadata["snippet"] == "The Nile is long." and nodes[0].metadata["title"] == "Rivers"
    assert asyncio.run(retriever.aretrieve(QUESTION)) == nodes
    matches = LlamaIndexRetriever(client, filter={"title": "Seas"}).retrieve(QUESTION)
    assert [one.node_id for one in matches] == ["p3"]


def test_llama_index_gives_models_the_text_once_with_its_title_and_the_requested_fields() -> None:
    with Client.over(SearchService(WithScores(), ServeConfig())) as client:
        for fields, lines in (([], ["title: Rivers"]), (["view"], ["title: Rivers", "view: north"])):
            node = LlamaIndexRetriever(client, fields=fields).retrieve(QUESTION)[0].node
            for mode in (MetadataMode.LLM, MetadataMode.EMBED):
                assert node.get_content(mode) == "\n".join([*lines, "", node.get_content(MetadataMode.NONE)])


def test_an_async_retrieval_of_llama_index_leaves_the_event_loop_running(client) -> None:
    retriever = LlamaIndexRetriever(client, callback_manager=CallbackManager())
    threads: list[int] = []
    retriever._retrieve = lambda query: threads.append(threading.get_ident()) or []
    assert asyncio.run(retriever.aretrieve(QUESTION)) == []
    assert threads != [threading.get_ident()]
