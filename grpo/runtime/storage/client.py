"""S3 client shared by uploads and downloads: locations, retries, one-line errors."""

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from grpo.errors import MissingExtraError, StorageError

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import (
        ClientError,
        ConnectionError,
        HTTPClientError,
        IncompleteReadError,
        NoCredentialsError,
        PartialCredentialsError,
    )
except ImportError:
    raise MissingExtraError("s3:// needs boto3; run pip install -e '.[s3]'") from None

URI = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(.*[^/])/*", flags=re.DOTALL)
ENDPOINT = "AWS_ENDPOINT_URL_S3"
CREDENTIALS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if they expire, AWS_SESSION_TOKEN"
REFUSED = f"the credentials are refused; renew {CREDENTIALS}"
DENIED = "access is denied; the role needs what infra/s3/ grants"
ABSENT = "no such object; correct the URI, or upload with python -m grpo upload"
REASONS = {  # by S3 error code
    "NoSuchBucket": "no such bucket; correct the URI, or create it with infra/s3/bootstrap.py",
    "NoSuchKey": ABSENT,
    "404": ABSENT,  # the answer to a HEAD request has no body
    "AccessDenied": DENIED,
    "403": DENIED,
    "InvalidAccessKeyId": REFUSED,
    "SignatureDoesNotMatch": REFUSED,
    "ExpiredToken": REFUSED,
    "InvalidToken": REFUSED,
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
}
# By S3 error code: errors that a retry may cure and that botocore does not retry.
TRANSIENT_REASONS = {
    "PreconditionFailed": "was changed by another",
    "ConditionalRequestConflict": "is being written by another",
    "NoSuchUpload": "its upload was ended by another",
    "BadDigest": "arrived with other bytes than were sent",
}
LONGEST_WAIT_SECONDS = 5.0  # between retries during an outage
JITTER = random.Random()  # separate, so that seeded streams do not depend on the network
T = TypeVar("T")
S = TypeVar("S")


class TruncatedError(StorageError):
    """A response ended early; the request is retried."""


class TransientError(StorageError):
    """An object changed or differs from the expected content; the transfer restarts."""


class Location(NamedTuple):
    """An object's bucket and key, or the key prefix of a directory."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def within(self, name: str) -> "Location":
        return Location(self.bucket, f"{self.key}/{name}")


class Transfer(NamedTuple):
    """Settings of uploads and downloads."""

    part_bytes: int  # S3 allows 5 MiB to 5 GiB, and 10,000 parts per object
    parts_at_once: int  # parallel transfers; each part is held in memory
    attempts: int  # per request, part and object
    first_wait_seconds: float  # maximum wait before the first retry; doubles with every retry
    timeout_seconds: float  # without receiving data
    outage_seconds: float  # maximum outage of S3 during which requests are retried


USUAL = Transfer(
    part_bytes=32 * 2**20,
    parts_at_once=8,
    attempts=6,
    first_wait_seconds=0.5,
    timeout_seconds=60.0,
    outage_seconds=120.0,
)


class Store:
    """An S3 client with retries."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.client = _connect(transfer)

    def retried(self, call: Callable[[], T], error: type[StorageError]) -> T:
        """Returns the result of `call`; retries with exponential backoff if it raises `error`."""
        for attempt in range(self.transfer.attempts - 1):
            try:
                return call()
            except error:
                time.sleep(JITTER.uniform(0, self.transfer.first_wait_seconds * 2**attempt))
        return call()

    def each(self, call: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """Returns the result of `call` for each item; runs several calls in parallel."""
        with ThreadPoolExecutor(self.transfer.parts_at_once) as pool:
            return list(pool.map(call, items))

    def read(self, location: Location) -> bytes:
        """Returns the bytes of an object.

        Raises:
          StorageError: If the object does not exist or every read ends early.
        """
        return self.retried(lambda: self._read(location, {}), TruncatedError)

    def read_range(self, location: Location, start: int, end: int, *, etag: str) -> bytes:
        """Returns the bytes [start, end) of an object.

        Raises:
          TransientError: If its ETag has changed.
          StorageError: If the object does not exist or every read ends early.
        """
        asked = {"Range": f"bytes={start}-{end - 1}", "IfMatch": etag}
        return self.retried(lambda: self._read(location, asked), TruncatedError)

    def _read(self, location: Location, asked: dict[str, str]) -> bytes:
        with explained(location):
            answer = self.client.get_object(Bucket=location.bucket, Key=location.key, **asked)
        try:
            content: bytes = answer["Body"].read()
        except (HTTPClientError, IncompleteReadError):
            raise TruncatedError(f"{location}: every read ended early; rerun") from None
        return content


class _OutageRetry:
    """Retries requests during an outage of up to `outage_seconds`, longer than botocore does.

    Applies only after S3 has answered once: before that the endpoint may be wrong.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.has_answered = False

    def wait(
        self,
        *,
        response: tuple[Any, Any] | None,
        caught_exception: Exception | None,
        request_dict: dict[str, Any],
        attempts: int,
        **_: object,
    ) -> float | None:
        """Returns the seconds until the retry of a request; None: botocore decides."""
        if response is None:
            is_out = isinstance(caught_exception, ConnectionError | HTTPClientError)
        else:
            is_out = response[0].status_code >= 500
            self.has_answered |= not is_out
        if not is_out or not self.has_answered:
            return None
        now = time.monotonic()
        since = request_dict["context"].setdefault("out_since", now)
        if now - since >= self.transfer.outage_seconds:
            return None
        most = min(self.transfer.first_wait_seconds * 2**attempts, LONGEST_WAIT_SECONDS)
        return JITTER.uniform(most / 2, most)


def parse_uri(uri: str) -> Location:
    """Returns the location of an `s3://BUCKET/KEY` URI.

    Raises:
      StorageError: If the URI does not have this form.
    """
    found = URI.fullmatch(uri)
    if found is None:
        shown = uri.rpartition("@")[2]  # the part before @ may hold a password
        raise StorageError(f"a URI must be s3://BUCKET/KEY, got {shown!r}")
    return Location(*found.groups())


@contextmanager
def explained(location: Location) -> Iterator[None]:
    """Converts botocore errors to one-line errors with a remedy and without secrets.

    Raises:
      TransientError: For the codes in TRANSIENT_REASONS.
      StorageError: For other errors, after botocore's own retries.
    """
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError):
        raise StorageError(f"{location}: there are no credentials; set {CREDENTIALS}") from None
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code in TRANSIENT_REASONS:
            raise TransientError(f"{location}: {TRANSIENT_REASONS[code]}; rerun") from None
        reason = REASONS.get(code, f"S3 answers {code}; rerun later")
        raise StorageError(f"{location}: {reason}") from None
    except (ConnectionError, HTTPClientError) as error:
        raise StorageError(
            f"{location}: cannot be reached, {type(error).__name__}; "
            f"check the network and {ENDPOINT}"
        ) from None


def _connect(transfer: Transfer) -> Any:
    """Returns a client with the endpoint and credentials of the environment.

    Raises:
      StorageError: If the endpoint is not a URL.
    """
    config = Config(
        retries={"mode": "standard", "total_max_attempts": transfer.attempts},
        connect_timeout=transfer.timeout_seconds,
        read_timeout=transfer.timeout_seconds,
        max_pool_connections=transfer.parts_at_once,
        # Downloads verify the SHA-256 of whole files instead.
        response_checksum_validation="when_required",
    )
    try:
        client = boto3.client("s3", config=config)
    except ValueError:
        raise StorageError(f"{ENDPOINT} must be a URL such as https://HOST:PORT") from None
    client.meta.events.register_first("needs-retry.s3", _OutageRetry(transfer).wait)
    return client
