"""As much of the S3 protocol as Arrow's client speaks, over a dictionary in memory, for tests of object stores."""

import hashlib
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape


class Stored(NamedTuple):
    data: bytes
    changed: datetime


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    objects: dict[str, Stored]
    uploads: dict[str, dict[int, bytes]]

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def do_HEAD(self) -> None:
        key, _ = self._asked()
        found = self.objects.get(key)
        if "/" not in key:
            self._answer(200)
        elif found:
            self._answer(200, found.data, stored=found)
        else:
            self._answer(404)

    def do_GET(self) -> None:
        key, query = self._asked()
        if "/" not in key:
            self._answer(200, self._listing(key, query).encode())
        elif found := self.objects.get(key):
            low, high = 0, len(found.data)
            if wanted := self.headers.get("Range"):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                low, high = int(first), min(int(last) + 1, high) if last else high
            self._answer(206 if wanted else 200, found.data[low:high], stored=found)
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_PUT(self) -> None:
        key, query = self._asked()
        data = self._body()
        if "partNumber" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = data
        elif "/" in key:
            self.objects[key] = Stored(data, datetime.now(UTC))
        self._answer(200, etag=data)

    def do_POST(self) -> None:
        key, query = self._asked()
        body = self._body()
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            self._answer(200, text.encode())
        elif "uploadId" in query:
            parts = self.uploads.pop(query["uploadId"])
            self.objects[key] = Stored(b"".join(parts[number] for number in sorted(parts)), datetime.now(UTC))
            self._answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")
        else:
            for node in ElementTree.fromstring(body).iter():
                if node.tag.rpartition("}")[2] == "Key":
                    self.objects.pop(f"{key.rstrip('/')}/{node.text}", None)
            self._answer(200, b"<DeleteResult></DeleteResult>")

    def do_DELETE(self) -> None:
        key, _ = self._asked()
        self.objects.pop(key, None)
        self._answer(204)

    def _asked(self) -> tuple[str, dict[str, str]]:
        """`bucket/key`, or `bucket`, and the query."""
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        key = unquote(url.path).removeprefix("/")
        return (key if key.rstrip("/").count("/") else key.rstrip("/")), query

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
        for name, stored in sorted(self.objects.items()):
            key = name.removeprefix(f"{bucket}/")
            if not name.startswith(f"{bucket}/") or not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if found:
                folders.add(prefix + head + delimiter)
            else:
                contents.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(stored.data)}</Size>"
                    f"<LastModified>{stored.changed:%Y-%m-%dT%H:%M:%S.%fZ}</LastModified></Contents>"
                )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders))
        count = len(contents) + len(folders)
        limit = int(query.get("max-keys", 1000))
        assert count <= 1000 or limit < 1000, "this server does not page"
        return (
            f"<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>{count}</KeyCount>"
            f"{''.join(contents[:limit])}{common}</ListBucketResult>"
        )

    def _answer(self, status: int, body: bytes = b"", stored: Stored | None = None, etag: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.md5(stored.data if stored else etag).hexdigest()}"')
        if stored:
            self.send_header("Last-Modified", format_datetime(stored.changed, usegmt=True))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serve() -> Iterator[str]:
    """Run a server; gives the root of an empty store on it."""
    handler = type("OwnHandler", (Handler,), {"objects": {}, "uploads": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        place = f"endpoint_override=127.0.0.1:{server.server_port}&scheme=http&region=us-east-1"
        yield f"s3://key:secret@bucket/some/prefix?{place}"
    finally:
        server.shutdown()
        server.server_close()
