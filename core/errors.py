"""The error tree: what can go wrong for a user, with the code and HTTP status the public sees.

Messages are bounded and neutral: they name the field, the limit and the size of the value, never a path,
a class name or a piece of a prompt. Our own bugs are asserts, not members of this tree.
"""

from __future__ import annotations


class NoriaError(Exception):
    """Base of all errors that may reach a user.

    `param` is the path of the offending field, such as `messages[2].content`.
    """

    status = 500
    type = "server_error"
    code: str | None = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidValue(NoriaError):
    """A field has the wrong type or lies outside its range."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnsupportedValue(NoriaError):
    """A known field asks for something that would change the answer and is not supported."""

    status = 400
    type = "invalid_request_error"
    code = "unsupported_value"


class ContextLengthExceeded(NoriaError):
    """The prompt leaves no room for a single token in the context or in the KV pool."""

    status = 400
    type = "invalid_request_error"
    code = "context_length_exceeded"


class PrefixTooShort(NoriaError):
    """A prefix cannot be pinned, because it fills no block."""

    status = 400
    type = "invalid_request_error"
    code = "prefix_too_short"


class PinnedFull(NoriaError):
    """A prefix cannot be pinned: it would leave the KV pool too little room."""

    status = 400
    type = "invalid_request_error"
    code = "pinned_full"


class SnapshotRefused(Exception):
    """A snapshot of the prefix cache is not used; the message says why. Goes to the log, never to a user."""


class InvalidApiKey(NoriaError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class AdminDisabled(NoriaError):
    """Routes below /admin are closed: no server.admin_key is set."""

    status = 403
    type = "permission_error"
    code = "admin_disabled"


class ModelNotFound(NoriaError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NotFound(NoriaError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(NoriaError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class BodyTooLarge(NoriaError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedMediaType(NoriaError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class QueueFull(NoriaError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class InternalError(NoriaError):
    status = 500
    code = "internal_error"


class VllmUnavailable(NoriaError):
    status = 501
    type = "not_implemented_error"
    code = "vllm_unavailable"


class QueueTimeout(NoriaError):
    status = 503
    code = "queue_timeout"


class Busy(NoriaError):
    """Other requests keep the threads that read prompts: nothing is wrong with this one."""

    status = 503
    code = "busy"


class Draining(NoriaError):
    status = 503
    code = "draining"


class EngineDead(NoriaError):
    status = 503
    code = "engine_dead"


class ModelLoading(NoriaError):
    status = 503
    code = "loading"


class ModelUnavailable(NoriaError):
    """One of several models could not be loaded; the others are served."""

    status = 503
    code = "model_unavailable"


class ModelNotLoaded(NoriaError):
    """One of several models is asked about what only a loaded one has; asking loads nothing."""

    status = 409
    type = "invalid_request_error"
    code = "model_not_loaded"


class ModelPinned(NoriaError):
    """A pinned model was asked to go."""

    status = 409
    type = "invalid_request_error"
    code = "model_pinned"


class ModelRefused(NoriaError):
    """A model cannot be loaded, or cannot be computed correctly; the message says why and what to do."""


class ConfigError(NoriaError):
    """The configuration is impossible; the message is one line that names the key and what it accepts."""


BY_CODE: dict[str, type[NoriaError]] = {
    cls.code: cls
    for cls in (
        InvalidValue,
        InternalError,
        QueueTimeout,
        Draining,
        EngineDead,
        ContextLengthExceeded,
    )
    if cls.code
}
