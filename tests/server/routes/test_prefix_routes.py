"""`/admin/prefixes`: computing, pinning, listing, unpinning, and what is refused."""

from __future__ import annotations

import asyncio

import pytest
from dummy_engine import solo_text

ADMIN = {"authorization": "Bearer root"}
SYSTEM = "You are a helpful assistant, and you answer in one line."  # 56 bytes: 3 blocks of 16
SETTINGS = {"server.admin_key": "root"}


async def post(server, body, status=200):
    response = await server.client.post("/admin/prefixes", json=body, headers=ADMIN)
    assert response.status == status, await response.text()
    return await response.json()


async def listed(server):
    response = await server.client.get("/admin/prefixes", headers=ADMIN)
    assert response.status == 200
    return await response.json()


async def cached_tokens(server, prompt):
    response = await server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    return (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_pinned_prefix_is_warm_for_the_first_request_and_after_a_flood(start_server):
    server = await start_server(SETTINGS, num_blocks=32, max_context=256)
    made = await post(server, {"prompt": SYSTEM, "label": "assistant"})
    assert made == {
        "id": made["id"],
        "object": "prefix",
        "label": "assistant",
        "prompt_tokens": 56,
        "cached_tokens": 0,
        "pinned_tokens": 48,
    }
    assert await cached_tokens(server, SYSTEM + " Hello!") == 56
    for number in range(12):
        assert await cached_tokens(server, f"{number:02}" * 50) == 0
    assert await cached_tokens(server, SYSTEM + " Hello!") == 48
    assert await listed(server) == {
        "object": "list",
        "data": [
            {
                "id": made["id"],
                "object": "prefix",
                "label": "assistant",
                "pinned_tokens": 48,
            }
        ],
        "pinned_tokens": 48,
        "max_pinned_tokens": 256,
    }
    assert SYSTEM not in str(await listed(server))


async def test_unpinning_gives_the_blocks_back(start_server):
    server = await start_server(SETTINGS)
    made = await post(server, {"prompt": SYSTEM})
    assert (await listed(server))["pinned_tokens"] == 48
    assert server.stats().num_blocks_used == 3
    path = f"/admin/prefixes/{made['id']}"
    response = await server.client.delete(path, headers=ADMIN)
    assert await response.json() == {"id": made["id"], "object": "prefix.deleted", "deleted": True}
    await server.idle()
    assert (await listed(server))["data"] == []
    response = await server.client.delete(path, headers=ADMIN)
    assert response.status == 404
    assert (await response.json())["error"]["code"] == "not_found"


async def test_without_a_pin_a_prefix_is_only_computed(start_server):
    server = await start_server(SETTINGS)
    made = await post(server, {"prompt": SYSTEM, "pin": False})
    assert (made["id"], made["pinned_tokens"]) == (None, 0)
    assert await cached_tokens(server, SYSTEM + " Hello!") == 56
    await server.idle()


async def test_messages_are_pinned_as_the_template_writes_them_without_a_generation_prompt(
    start_server,
):
    server = await start_server(SETTINGS)
    messages = [{"role": "system", "content": SYSTEM}]
    made = await post(server, {"messages": messages})
    assert made["prompt_tokens"] == len(f"system: {SYSTEM}\n")
    messages.append({"role": "user", "content": "Hi"})
    response = await server.client.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": 1}
    )
    usage = (await response.json())["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == made["pinned_tokens"] == 64


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_value", "prompt"),
        ({"prompt": "a" * 20, "messages": [{"role": "user", "content": "a"}]}, "invalid_value", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": ["a"]}, "invalid_value", "prompt[0]"),
        ({"prompt": [5, 257]}, "invalid_value", "prompt[1]"),
        ({"prompt": 5}, "invalid_value", "prompt"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"prompt": "a" * 20, "pin": 1}, "invalid_value", "pin"),
        ({"prompt": "a" * 20, "label": "x" * 129}, "invalid_value", "label"),
        ({"prompt": "a" * 20, "label": 5}, "invalid_value", "label"),
        ({"prompt": "a" * 20, "tools": [{}]}, "unsupported_value", "tools"),
        ({"prompt": "a" * 20, "cache_salt": "x"}, "unsupported_value", "cache_salt"),
        ({"prompt": "short"}, "prefix_too_short", "prompt"),
        ({"prompt": "a" * 300}, "context_length_exceeded", "prompt"),
    ],
)  # fmt: skip
async def test_what_cannot_be_pinned_is_refused_with_its_field(start_server, body, code, param):
    server = await start_server(SETTINGS, num_blocks=32, max_context=256)
    error = (await post(server, body, status=400))["error"]
    assert (error["code"], error["param"]) == (code, param)
    await server.idle()


async def test_what_does_not_fit_beside_other_pins_is_refused_before_it_is_computed(start_server):
    server = await start_server(SETTINGS, num_blocks=32, max_context=256)
    await post(server, {"prompt": "a" * 200})
    steps = server.runner.num_steps
    error = (await post(server, {"prompt": "b" * 200}, status=400))["error"]
    assert error["code"] == "pinned_full"
    assert (
        "256 tokens can be pinned in this pool, 192 are; this prefix needs 192 more"
        in error["message"]
    )
    assert server.runner.num_steps == steps


async def test_without_a_prefix_cache_there_is_nothing_to_pin(start_server):
    server = await start_server({**SETTINGS, "engine.prefix_caching": False})
    assert (await post(server, {"prompt": SYSTEM}, status=400))["error"][
        "code"
    ] == "unsupported_value"


async def test_an_unknown_model_is_not_found(start_server):
    server = await start_server(SETTINGS)
    error = (await post(server, {"prompt": SYSTEM, "model": "nope"}, status=404))["error"]
    assert error["code"] == "model_not_found"


async def test_without_the_admin_key_nothing_is_told_and_nothing_done(start_server):
    server = await start_server(SETTINGS)
    for send in (server.client.get, server.client.post):
        assert (await send("/admin/prefixes")).status == 401
    assert (await server.client.delete("/admin/prefixes/prefix-1")).status == 401


async def test_a_snapshot_makes_the_first_request_after_a_restart_warm(start_server, tmp_path):
    settings = {**SETTINGS, "kv_cache.snapshot_file": str(tmp_path / "prefixes")}
    server = await start_server(settings)
    assert server.backend.start_lines() == ()
    made = await post(server, {"prompt": SYSTEM, "label": "assistant"})
    assert await cached_tokens(server, "Another prompt of some length. And more of it.") == 0
    response = await server.client.post("/admin/prefixes/snapshot", headers=ADMIN)
    told = await response.json()
    assert response.status == 200
    assert (told["object"], told["blocks"], told["tokens"]) == ("prefix.snapshot", 7, 102)
    assert told["bytes"] == (tmp_path / "prefixes").stat().st_size
    again = await start_server(settings)
    assert again.backend.start_lines()[0].startswith("prefix snapshot: 102 tokens")
    assert await cached_tokens(again, SYSTEM + " Hello!") == 56
    assert await cached_tokens(again, "Another prompt of some length. And more of it.") == 45
    pins = (await listed(again))["data"]
    assert [(pin["id"], pin["label"]) for pin in pins] == [(made["id"], "assistant")]


async def test_a_shutdown_writes_the_snapshot(start_server, tmp_path):
    settings = {**SETTINGS, "kv_cache.snapshot_file": str(tmp_path / "prefixes")}
    server = await start_server(settings)
    await cached_tokens(server, SYSTEM)
    await server.backend.stop(5)
    again = await start_server(settings)
    assert await cached_tokens(again, SYSTEM + " Hello!") == 56
    assert [path.name for path in tmp_path.iterdir()] == ["prefixes"]


async def test_a_snapshot_needs_a_file_that_can_be_written(start_server, tmp_path):
    server = await start_server(SETTINGS)
    response = await server.client.post("/admin/prefixes/snapshot", headers=ADMIN)
    assert response.status == 400
    assert "kv_cache.snapshot_file" in (await response.json())["error"]["message"]
    nowhere = await start_server(
        {**SETTINGS, "kv_cache.snapshot_file": str(tmp_path / "absent" / "prefixes")}
    )
    response = await nowhere.client.post("/admin/prefixes/snapshot", headers=ADMIN)
    assert response.status == 500
    assert await cached_tokens(nowhere, SYSTEM) == 0, "the server goes on"


async def test_streams_go_on_while_a_snapshot_is_written(start_server, tmp_path):
    settings = {**SETTINGS, "kv_cache.snapshot_file": str(tmp_path / "prefixes")}
    server = await start_server(settings, step_time_s=0.001)
    body = {"prompt": SYSTEM, "max_tokens": 100, "ignore_eos": True}

    async def save():
        return (await server.client.post("/admin/prefixes/snapshot", headers=ADMIN)).status

    stream = asyncio.create_task(server.client.post("/basic_generate", json=body))
    statuses = [await save() for _ in range(5)]
    text = (await (await stream).json())["generated_text"]
    assert statuses == [200] * 5
    assert text == SYSTEM + solo_text(SYSTEM.encode(), 100)
