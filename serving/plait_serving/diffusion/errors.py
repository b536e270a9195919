"""Every error that the engine raises on purpose.

EngineError
├── RequestError            the caller must change the request; `param` names the field
│   └── NotFound            a model, ControlNet or LoRA of that name does not exist
├── Refused                 the request is valid but cannot be taken now
│   ├── Overloaded          the queue is full; `retry_after_s` is when to retry
│   └── DeadlineMissed      the deadline passed, or cannot be met
├── Cancelled               the caller disconnected
├── LoraError               a LoRA file cannot be used (format, shape, unmatched keys, non-finite)
├── ModelError              a base model or ControlNet folder cannot be used
├── ControlNetUnavailable   no replica of that ControlNet answers
├── NumericalError          a row turned NaN or infinite; batch mates are unharmed
├── OutOfMemory             one request alone does not fit the device
├── KillsReplicas           two replicas died with the request, one after the other; it is not tried again
└── EngineStopped           the engine is shutting down or its compute thread died
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose. `code` is stable and machine-readable."""

    code = "engine_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        """`retry_after_s`: when the same request may succeed, if that is known."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(EngineError):
    """The caller must change the request; `param` names the field (dotted, e.g. `loras.0.name`)."""

    code = "invalid_value"


class NotFound(RequestError):
    """A model, ControlNet or LoRA of that name does not exist."""

    code = "not_found"


class Refused(EngineError):
    """The request is valid but cannot be taken now."""

    code = "refused"


class Overloaded(Refused):
    """The queue is full."""

    code = "overloaded"


class DeadlineMissed(Refused):
    """The deadline passed, or can no longer be met."""

    code = "deadline_missed"


class Cancelled(EngineError):
    """The caller disconnected or cancelled the request."""

    code = "cancelled"


class LoraError(EngineError):
    """A LoRA file cannot be used; the message gives the reason and lists the offending keys."""

    code = "invalid_lora"


class ModelError(EngineError):
    """A base model or ControlNet folder cannot be used."""

    code = "invalid_model"


class ControlNetUnavailable(EngineError):
    """No replica of a ControlNet answers."""

    code = "controlnet_unavailable"


class NumericalError(EngineError):
    """A row turned NaN or infinite."""

    code = "numerical_error"


class OutOfMemory(EngineError):
    """One request alone does not fit the device."""

    code = "out_of_memory"


class KillsReplicas(EngineError):
    """The request was there each time when replicas died one after the other; it is not tried again."""

    code = "request_kills_replicas"


class EngineStopped(EngineError):
    """The engine is shutting down or its compute thread died."""

    code = "engine_stopped"
