"""`python drive_langchain.py URL`: what `langchain-openai` must find, for chats, completions and embeddings."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"


class Place(BaseModel):
    """A place."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def chat(model: ChatOpenAI) -> None:
    asked = [SystemMessage("Answer in one sentence."), HumanMessage(QUESTION)]
    whole = model.invoke(asked)
    assert "Paris" in whole.content
    assert whole.usage_metadata["output_tokens"] > 3
    chunks = list(model.stream(asked, stream_usage=True))
    assert len(chunks) > 3
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.content == whole.content
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | model
    both = chain.batch([{"question": QUESTION}, {"question": "Say hello."}])
    assert "Paris" in both[0].content
    assert both[1].content


def structured_and_tools(model: ChatOpenAI) -> None:
    place = model.with_structured_output(Place, method="json_schema").invoke(QUESTION)
    assert isinstance(place, Place)
    called = model.with_structured_output(Place, method="function_calling").invoke(QUESTION)
    assert isinstance(called, Place)
    bound = model.bind_tools([weather], tool_choice="any")
    answer = bound.invoke("How is the weather in Paris?")
    assert isinstance(answer, AIMessage)
    assert answer.tool_calls[0]["name"] == "weather"
    assert "sunny" in weather.invoke(answer.tool_calls[0]["args"])
    joined = None
    for chunk in bound.stream("How is the weather in Paris?"):
        joined = chunk if joined is None else joined + chunk
    assert joined.tool_calls[0]["args"] == answer.tool_calls[0]["args"]


def others(url: str) -> None:
    shared = {"base_url": f"{url}/v1", "api_key": "any", "model": MODEL}
    text = OpenAI(**shared, temperature=0, max_tokens=8).invoke("The capital of France is")
    assert "Paris" in text
    embeddings = OpenAIEmbeddings(**shared, check_embedding_ctx_length=False)
    vectors = embeddings.embed_documents(["a river", "a mountain"])
    assert len(vectors) == 2
    assert len(vectors[0]) == len(embeddings.embed_query("a river"))


async def many(model: ChatOpenAI) -> None:
    async def one() -> str:
        return "".join([chunk.content async for chunk in model.astream(QUESTION)])

    assert len(set(await asyncio.gather(*(one() for _ in range(8))))) == 1


if __name__ == "__main__":
    url = sys.argv[1]
    options = {"temperature": 0, "max_tokens": 40, "max_retries": 0}
    model = ChatOpenAI(base_url=f"{url}/v1", api_key="any", model=MODEL, **options)
    chat(model)
    structured_and_tools(model)
    others(url)
    asyncio.run(many(model))
    print(version("langchain-openai"))
