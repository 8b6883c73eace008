"""Creating an S3 object only where none is: one signed PUT that says `If-None-Match: *`, which Arrow cannot say.

    200              created, by this call
    412              something is there: ours where an earlier try went unanswered and the bytes are equal, else not
    409, 429, 5xx    nothing is known to be wrong: again after a pause
    no answer        it may have been created: again; the 412 that may follow is read as above
    400, 501         the server does not know the condition

Keys, region and endpoint are those of Arrow's file system; where it was given no keys, those of the environment, else
those that botocore finds, where it is installed (profiles, roles of machines and pods). Signature: AWS Signature
Version 4, https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html.
"""

import hashlib
import hmac
import http.client
import importlib.util
import os
import random
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from pyarrow import fs

TRIES = 6
FIRST_PAUSE_S = 0.1
TIMEOUT_S = 30.0
CREATED, THERE, UNKNOWN_CONDITION = (200, 201, 204), 412, (400, 405, 501)
TRY_AGAIN = (408, 409, 425, 429)


class Keys(NamedTuple):
    access: str
    secret: str
    session: str = ""


class UnknownConditionError(OSError):
    """The server does not take a conditional PUT."""


class ConditionalPuts:
    """Creates objects of one S3 service, each at most once."""

    def __init__(self, endpoint: str, region: str, keys: Keys | None, ca_file: str = "") -> None:
        """`keys` None: requests are not signed, for buckets that are open to all."""
        self.endpoint = endpoint.rstrip("/")
        self.region = region
        self.keys = keys
        tls = ssl.create_default_context(cafile=ca_file or None)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=tls))

    def create(self, path: str, data: bytes, read: Callable[[], bytes | None]) -> None:
        """Put `data` at `path` (`bucket/key`) unless something is there; then FileExistsError.

        `read` tells what is there, None for nothing. After the last try without an answer it decides alone; OSError
        where nothing came to be. UnknownConditionError where the server does not know the condition.
        """
        answered, told = True, ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(random.uniform(0.5, 1) * FIRST_PAUSE_S * 2**attempt)
            try:
                status, told = self._put(path, data)
            except (OSError, http.client.HTTPException) as error:
                answered, told = False, f"{type(error).__name__}: {error}"
                continue
            if status in CREATED:
                return
            if status == THERE:
                if not answered and read() == data:
                    return
                raise FileExistsError(f"{path} exists")
            if status in UNKNOWN_CONDITION:
                raise UnknownConditionError(f"{path}: a conditional PUT was answered {status} {told}")
            if status < 500 and status not in TRY_AGAIN:
                raise PermissionError(f"{path} not created: the store answered {status} {told}")
            answered, told = answered and status < 500, f"{status} {told}"
        found = None if answered else read()
        if found is None:
            raise TimeoutError(f"{path} not created in {TRIES} tries: {told}")
        if found != data:
            raise FileExistsError(f"{path} exists")

    def _put(self, path: str, data: bytes) -> tuple[int, str]:
        """Status, and what an error's body says."""
        url = f"{self.endpoint}/{quote(path, safe='/-_.~')}"
        headers = {"If-None-Match": "*", "Content-Type": "application/octet-stream"}
        if self.keys:
            headers |= signed("PUT", url, headers, data, self.keys, self.region, datetime.now(UTC))
        request = urllib.request.Request(url, data, headers, method="PUT")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return answer.status, ""
        except urllib.error.HTTPError as error:
            return error.code, error.read(500).decode(errors="replace").strip()


def conditional_puts(filesystem: fs.FileSystem) -> ConditionalPuts | None:
    """For the service that Arrow's file system speaks to; None where that is not S3, or where no keys are known."""
    if not isinstance(filesystem, fs.S3FileSystem):
        return None
    options: dict[str, Any] = filesystem.__reduce__()[1][0]  # how pyarrow hands a file system to another process
    if options["proxy_options"]["host"] or options["force_virtual_addressing"] or options["role_arn"]:
        return None
    keys = None
    if not options["anonymous"]:
        given = options["access_key"], options["secret_key"]
        keys = Keys(*given, options["session_token"] or "") if all(given) else found_keys()
        if keys is None:
            return None
    place = options["endpoint_override"] or endpoint_of(options["region"])
    endpoint = place if "://" in place else f"{options['scheme']}://{place}"
    return ConditionalPuts(endpoint, options["region"], keys, options["tls_ca_file_path"])


def endpoint_of(region: str) -> str:
    """Where AWS serves S3, unless the environment names another place as it does for every AWS program."""
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return named or f"s3.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")


def found_keys() -> Keys | None:
    """Keys of the environment, else those that botocore finds."""
    access, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if access and secret:
        return Keys(access, secret, os.environ.get("AWS_SESSION_TOKEN", ""))
    if importlib.util.find_spec("botocore") is None:
        return None
    session: Any = importlib.import_module("botocore.session")
    found = session.get_session().get_credentials()
    if not found:
        return None
    access, secret, token = found.get_frozen_credentials()
    return Keys(access, secret, token or "")


def signed(
    method: str, url: str, headers: Mapping[str, str], data: bytes, keys: Keys, region: str, now: datetime
) -> dict[str, str]:
    """The headers that sign a request without a query; `headers` and the host are covered."""
    parts = urlsplit(url)
    payload = hashlib.sha256(data).hexdigest()
    own = {"x-amz-content-sha256": payload, "x-amz-date": now.strftime("%Y%m%dT%H%M%SZ")}
    if keys.session:
        own["x-amz-security-token"] = keys.session
    lowered = {name.lower(): value.strip() for name, value in {**headers, **own, "host": parts.netloc}.items()}
    names = ";".join(sorted(lowered))
    lines = "".join(f"{name}:{lowered[name]}\n" for name in sorted(lowered))
    request = f"{method}\n{parts.path}\n\n{lines}\n{names}\n{payload}"
    scope = f"{now:%Y%m%d}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{own['x-amz-date']}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{keys.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    own["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope},SignedHeaders={names},Signature={signature}"
    )
    return own
