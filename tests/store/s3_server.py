"""Serves as much of the S3 protocol as a store needs, over a dictionary in memory.

Every request's signature is checked. A test may script what goes wrong with the next puts of a name.
"""

import hashlib
import hmac
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

PIECE_BYTES = 1 << 20


class StoredObject(NamedTuple):
    data: bytes
    time: datetime


class Fault(NamedTuple):
    """What happens to one put of a key that ends with `name`.

    `lost`: stored, but the connection breaks before the answer. `broken`: the same, not stored. `500`: stored, and
    answered so. `503`, `409`: answered so, not stored. `down`: stored, and no request is answered any more.
    """

    name: str
    kind: str


class Script(NamedTuple):
    """How the server behaves: what goes wrong in which order, and what became of conditional puts."""

    faults: list[Fault]
    answers: list[tuple[str, int]]
    """Key and status of each conditional put that was answered."""
    conditional: str = "honoured"
    """honoured, ignored (as if it were not there) or refused (501)."""
    on_request: Callable[[str, str], bool] = lambda moment, request: True
    """Called twice for every put, post and delete: `before` it has any effect, and `after` that, before it is answered.
    False breaks the connection off there."""
    pause_s: float = 0.0
    """After each piece of an answer."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    objects: dict[str, StoredObject]
    uploads: dict[str, dict[int, bytes]]
    script: Script
    writing: threading.Lock
    down = False

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def do_HEAD(self) -> None:
        key, _ = self._key_and_query()
        stored_object = self.objects.get(key)
        if "/" not in key:
            self._answer(200)
        elif stored_object:
            self._answer(200, stored_object.data, item=stored_object)
        else:
            self._answer(404)

    def do_GET(self) -> None:
        key, query = self._key_and_query()
        if "/" not in key:
            self._answer(200, self._listing(key, query).encode())
        elif (stored_object := self.objects.get(key)) and self.headers.get("If-Match", "*") not in (
            "*",
            f'"{hashlib.md5(stored_object.data).hexdigest()}"',
        ):
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        elif stored_object:
            low, high = 0, len(stored_object.data)
            if byte_range := self.headers.get("Range"):
                first, _, last = byte_range.removeprefix("bytes=").partition("-")
                low, high = int(first), min(int(last) + 1, high) if last else high
            place = f"bytes {low}-{high - 1}/{len(stored_object.data)}" if byte_range else ""
            self._answer(206 if byte_range else 200, stored_object.data[low:high], item=stored_object, place=place)
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_PUT(self) -> None:
        key, query = self._key_and_query()
        data = self._body()
        once = self.headers.get("If-None-Match") == "*"
        if not self._goes_on("before"):
            return
        with self.writing:
            faults = [fault for fault in self.script.faults if key.endswith(fault.name)]
            fault = faults[0].kind if faults else ""
            if faults:
                self.script.faults.remove(faults[0])
            status = 200
            if fault in ("503", "409"):
                status = int(fault)
            elif once and self.script.conditional == "refused":
                status = 501
            elif once and self.script.conditional == "honoured" and key in self.objects:
                status = 412
            elif "partNumber" in query:
                self.uploads[query["uploadId"]][int(query["partNumber"])] = data
            elif source := self.headers.get("x-amz-copy-source"):
                if stored_object := self.objects.get(unquote(source).lstrip("/")):
                    self.objects[key] = StoredObject(stored_object.data, datetime.now(UTC))
                else:
                    status = 404
            elif "/" in key and fault != "broken":
                self.objects[key] = StoredObject(data, datetime.now(UTC))
                status = 500 if fault == "500" else status
            if fault in ("lost", "broken", "down"):
                type(self).down = fault == "down"
                self._break_off()
                return
            if once:
                self.script.answers.append((key, status))
        body = b"" if status == 200 else f"<Error><Code>E{status}</Code></Error>".encode()
        body = b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>" if "x-amz-copy-source" in self.headers else body
        self._answer(status, body, etag=data)

    def do_POST(self) -> None:
        key, query = self._key_and_query()
        body = self._body()
        if not self._goes_on("before"):
            return
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            self._answer(200, text.encode())
        elif "uploadId" in query:
            parts = self.uploads.pop(query["uploadId"])
            self.objects[key] = StoredObject(b"".join(parts[number] for number in sorted(parts)), datetime.now(UTC))
            self._answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")
        else:
            names = [n.text for n in ElementTree.fromstring(body).iter() if n.tag.rpartition("}")[2] == "Key"]
            for name in names:
                self.objects.pop(f"{key.rstrip('/')}/{name}", None)
            entries = "".join(f"<Deleted><Key>{escape(name or '')}</Key></Deleted>" for name in names)
            self._answer(200, f"<DeleteResult>{entries}</DeleteResult>".encode())

    def do_DELETE(self) -> None:
        key, _ = self._key_and_query()
        if self._goes_on("before"):
            self.objects.pop(key, None)
            self._answer(204)

    def _key_and_query(self) -> tuple[str, dict[str, str]]:
        """`bucket/key`, or `bucket`, and the query."""
        assert self.headers["Authorization"].endswith(self._signature()), f"{self.command} {self.path}: wrong signature"
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        key = unquote(url.path).removeprefix("/")
        return (key if key.rstrip("/").count("/") else key.rstrip("/")), query

    def parse_request(self) -> bool:
        if self.down:
            self._break_off()
        return super().parse_request() and not self.down

    def _goes_on(self, moment: str) -> bool:
        """Whether the sender is still to be served, as the script says."""
        goes_on = self.script.on_request(moment, f"{self.command} {self.path}")
        if not goes_on:
            self._break_off()
        return goes_on

    def _break_off(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _signature(self) -> str:
        """Signature Version 4 of the request as it came in, by the key `secret`."""
        scope, names = re.findall(r"Credential=key/(\S+?), ?SignedHeaders=(\S+?),", self.headers["Authorization"])[0]
        path, _, query = self.path.partition("?")
        pairs = sorted(pair if "=" in pair else f"{pair}=" for pair in query.split("&") if pair)
        lines = [f"{name}:{' '.join(self.headers[name].split())}" for name in names.split(";")]
        request = [self.command, path, "&".join(pairs), *lines, "", names, self.headers["x-amz-content-sha256"]]
        digest = hashlib.sha256("\n".join(request).encode()).hexdigest()
        key = b"AWS4secret"
        for word in scope.split("/"):
            key = hmac.new(key, word.encode(), hashlib.sha256).digest()
        text = f"AWS4-HMAC-SHA256\n{self.headers['x-amz-date']}\n{scope}\n{digest}"
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while length := int(self.rfile.readline(), 16):
                data += self.rfile.read(length)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return data
        plain = b""
        while data:
            size, _, data = data.partition(b"\r\n")
            length = int(size.partition(b";")[0], 16)
            if not length:
                break
            plain, data = plain + data[:length], data[length + 2 :]
        return plain

    def _listing(self, bucket: str, query: dict[str, str]) -> str:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        contents, folders = [], set()
        for name, item in sorted(self.objects.items()):
            key = name.removeprefix(f"{bucket}/")
            if not name.startswith(f"{bucket}/") or not key.startswith(prefix):
                continue
            head, has_delimiter, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if has_delimiter:
                folders.add(prefix + head + delimiter)
            else:
                contents.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(item.data)}</Size>"
                    f"<LastModified>{item.time:%Y-%m-%dT%H:%M:%S.%fZ}</LastModified></Contents>"
                )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders))
        count = len(contents) + len(folders)
        limit = int(query.get("max-keys", 1000))
        assert count <= 1000 or limit < 1000, "this server does not page"
        return (
            f"<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>{count}</KeyCount>"
            f"{''.join(contents[:limit])}{common}</ListBucketResult>"
        )

    def _answer(
        self, status: int, body: bytes = b"", item: StoredObject | None = None, etag: bytes = b"", place: str = ""
    ) -> None:
        if self.command in ("PUT", "POST", "DELETE") and not self._goes_on("after"):
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.md5(item.data if item else etag).hexdigest()}"')
        if place:
            self.send_header("Content-Range", place)
        if item:
            self.send_header("Last-Modified", format_datetime(item.time, usegmt=True))
        self.end_headers()
        if self.command != "HEAD":
            for start in range(0, len(body), PIECE_BYTES):
                self.wfile.write(body[start : start + PIECE_BYTES])
                self.wfile.flush()
                time.sleep(self.script.pause_s)


@contextmanager
def serve(script: Script | None = None) -> Iterator[str]:
    """Run a server; gives the root of an empty store on it."""
    own = {"objects": {}, "uploads": {}, "script": script or Script([], []), "writing": threading.Lock()}
    handler = type("OwnHandler", (Handler,), own)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        place = f"endpoint_override=127.0.0.1:{server.server_port}&scheme=http&region=us-east-1"
        yield f"s3://key:secret@bucket/some/prefix?{place}"
    finally:
        server.shutdown()
        server.server_close()
