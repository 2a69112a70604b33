"""Routes below `/admin` as the OpenAPI document tells them. All need `server.admin_key`. Data."""

from __future__ import annotations

from server.protocol import admin, admin_answers
from server.protocol.operation import Operation

_CHANGE = (400, 401, 403, 404, 409, 413, 415, 500, 503)

ADMIN_OPERATIONS = (
    Operation(
        "post",
        "/admin/prefixes",
        "Admin",
        "Compute a prefix and pin it",
        "Its full blocks stay in the KV cache until they are unpinned; with `pin: false` it is only computed. Exactly "
        "one of `prompt` and `messages`. At most half of the pool can be pinned, and never so much that a request of "
        "full context would not fit.",
        request="PrefixRequest",
        example={"messages": [{"role": "system", "content": "You are a helpful pirate. Arr."}]},
        answer=admin.Prefix,
        errors=(400, 401, 403, 404, 413, 415, 429, 500, 503),
    ),
    Operation(
        "get",
        "/admin/prefixes",
        "Admin",
        "List what is pinned",
        "Of a model that is not loaded nothing is; asking does not load it.",
        query="SnapshotRequest",
        answer=admin.PinList,
        errors=(400, 401, 403, 404, 500, 503),
    ),
    Operation(
        "delete",
        "/admin/prefixes/{id}",
        "Admin",
        "Unpin a prefix",
        "It stays cached as long as any other.",
        query="SnapshotRequest",
        answer=admin.DeletedPin,
        errors=(400, 401, 403, 404, 500, 503),
    ),
    Operation(
        "post",
        "/admin/prefixes/snapshot",
        "Admin",
        "Write the prefix cache to its file",
        "Beside the steps, without holding them up. The file is `kv_cache.snapshot_file`, which is also written at a "
        "shutdown and read at a start. The model may be named in the body or in the query; it must be loaded.",
        request="SnapshotRequest",
        query="SnapshotRequest",
        is_body_optional=True,
        answer=admin.Snapshot,
        errors=(400, 401, 403, 404, 409, 413, 415, 500, 503),
    ),
    Operation(
        "get",
        "/admin/models",
        "Admin",
        "The models, what they take and how they do",
        "As one body, or with `accept: text/event-stream` as an event now and whenever a state or the progress of "
        "loading changes. Needs the admin key.",
        answer=admin_answers.ModelReports,
        events=(("models", admin_answers.ModelReports),),
        errors=(401, 403, 500),
    ),
    Operation(
        "post",
        "/admin/models/load",
        "Admin",
        "Load one of several models, and pin it or not",
        "Answers when it is loaded. Others are unloaded for it as for a request. Needs the admin key.",
        request="ModelLoadRequest",
        answer=admin_answers.ModelReport,
        errors=_CHANGE,
    ),
    Operation(
        "post",
        "/admin/models/unload",
        "Admin",
        "Unload one of several models",
        "Answers when it is unloaded: the answers that it is giving end first. Needs the admin key.",
        request="ModelUnloadRequest",
        answer=admin_answers.ModelReport,
        errors=_CHANGE,
    ),
)
