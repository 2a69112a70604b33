"""`/admin/prefixes` beside several models: which one is meant, and that looking at one does not load it."""

from __future__ import annotations

from test_several_models import KEY, start_pool

__all__ = ["start_pool"]
PROMPT = "A prefix that fills some blocks."


async def test_looking_at_the_prefixes_of_a_model_does_not_load_it(start_pool):
    pooled = await start_pool()
    response = await pooled.client.get("/admin/prefixes?model=b", headers=KEY)
    assert response.status == 200
    assert (await response.json())["data"] == []
    response = await pooled.client.delete("/admin/prefixes/prefix-1?model=b", headers=KEY)
    assert response.status == 404
    response = await pooled.client.get("/admin/prefixes?model=z", headers=KEY)
    assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
    assert pooled.state("b") == "unloaded"
    assert pooled.workshop.loads == {"a": 1}


async def test_a_snapshot_is_of_the_model_that_body_or_query_name(start_pool, tmp_path):
    pooled = await start_pool("ab", kv_cache__snapshot_file=str(tmp_path / "prefixes"))
    path = "/admin/prefixes/snapshot"
    response = await pooled.client.post(path, json={"model": "b"}, headers=KEY)
    assert (response.status, (await response.json())["error"]["code"]) == (409, "model_not_loaded")
    body = {"prompt": PROMPT, "model": "b"}
    assert (await pooled.client.post("/admin/prefixes", json=body, headers=KEY)).status == 200
    by_body = await pooled.client.post(path, json={"model": "b"}, headers=KEY)
    by_query = await pooled.client.post(f"{path}?model=b", headers=KEY)
    other = await pooled.client.post(path, json={"model": "a"}, headers=KEY)
    found = [(await each.json())["tokens"] for each in (by_body, by_query, other)]
    assert found == [len(PROMPT), len(PROMPT), 0]


async def test_a_field_that_a_snapshot_does_not_know_is_refused(start_pool):
    pooled = await start_pool("ab")
    for body in ({"modle": "b"}, {"model": 5}):
        response = await pooled.client.post("/admin/prefixes/snapshot", json=body, headers=KEY)
        assert response.status == 400
