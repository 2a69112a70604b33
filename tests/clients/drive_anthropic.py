"""`python drive_anthropic.py URL`: what the `anthropic` package must find; run in an environment that has it."""

from __future__ import annotations

import asyncio
import sys

import anthropic

ASK = {
    "model": "smollm2-135m-instruct",
    "max_tokens": 24,
    "extra_body": {"temperature": 0},  # newer clients have no parameter of that name
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


def whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK, system="Answer in one sentence.")
    assert "Paris" in whole.content[0].text, whole
    assert whole._request_id
    with client.messages.stream(
        **ASK, system=[{"type": "text", "text": "Answer in one sentence."}]
    ) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 3
    assert "".join(pieces) == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    sum_in = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    asked = {"model": ASK["model"], "messages": ASK["messages"]}
    counted = client.messages.count_tokens(**asked, system="Answer in one sentence.")
    assert counted.input_tokens == sum_in
    kinds = [event.type for event in client.messages.create(**ASK, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def stops_and_prefill(client: anthropic.Anthropic) -> None:
    stopped = client.messages.create(
        **ASK, system="Answer in one sentence.", stop_sequences=["ris"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "ris"), stopped
    begun = [*ASK["messages"], {"role": "assistant", "content": "The capital of France is"}]
    going_on = client.messages.create(**{**ASK, "messages": begun})
    assert going_on.content[0].text.startswith(" Paris"), going_on


def errors(client: anthropic.Anthropic) -> None:
    for changes, kind in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"extra_body": {"temperature": 3}}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 10000}]}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{**ASK, **changes})
        except kind as error:
            said = error.body["error"]["message"]
        else:
            said = ""
        assert said, f"{changes} was accepted, or refused without a word"


async def many(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any") as client:

        async def one() -> str:
            async with client.messages.stream(**ASK) as stream:
                return "".join([text async for text in stream.text_stream])

        assert len(set(await asyncio.gather(*(one() for _ in range(8))))) == 1


if __name__ == "__main__":
    with anthropic.Anthropic(base_url=sys.argv[1], api_key="any", max_retries=0) as client:
        whole_and_streamed(client)
        stops_and_prefill(client)
        errors(client)
    asyncio.run(many(sys.argv[1]))
    print(anthropic.__version__)
