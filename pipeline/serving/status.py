"""What went wrong with a request, in the canonical codes that gRPC, TensorFlow and REST share. No TensorFlow."""

import dataclasses

OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED = range(8)
RESOURCE_EXHAUSTED, FAILED_PRECONDITION, ABORTED, OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL = range(8, 14)
UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED = range(14, 17)

NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
HTTP = {
    OK: 200,
    CANCELLED: 499,
    UNKNOWN: 500,
    INVALID_ARGUMENT: 400,
    DEADLINE_EXCEEDED: 504,
    NOT_FOUND: 404,
    ALREADY_EXISTS: 409,
    PERMISSION_DENIED: 403,
    RESOURCE_EXHAUSTED: 429,
    FAILED_PRECONDITION: 400,
    ABORTED: 409,
    OUT_OF_RANGE: 400,
    UNIMPLEMENTED: 501,
    INTERNAL: 500,
    UNAVAILABLE: 503,
    DATA_LOSS: 500,
    UNAUTHENTICATED: 401,
}
LONGEST_TEXT = 1024  # bytes of an error's text, as in TF Serving


@dataclasses.dataclass
class ServingError(Exception):
    """A request or a load that failed.

    Attributes:
        code: one of the codes above. text: what clients read.
        retry_after: whole seconds after which to come back; None: no such advice.
    """

    code: int
    text: str
    retry_after: int | None = None

    def __post_init__(self):
        encoded = self.text.encode(errors="replace")
        if len(encoded) > LONGEST_TEXT:
            self.text = encoded[:LONGEST_TEXT].decode(errors="ignore") + "...TRUNCATED"

    def __str__(self):
        return f"{NAMES[self.code]}: {self.text}"
