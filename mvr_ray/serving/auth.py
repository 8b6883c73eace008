"""Reads bearer tokens and looks up the role, `read` or `admin`, of each.

Only the SHA-256 of a token is kept, so nothing secret leaves this module for a replica on another node or a log.

    serve.tokens_file            one `ROLE TOKEN` a line; empty lines and comments from ` #` on are left out
    MVR_RAY_READ_TOKEN           one token, and
    MVR_RAY_ADMIN_TOKEN          one token, each beside those of the file
"""

import hashlib
import hmac
import ipaddress
import logging
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mvr_ray.config import resolve_path
from mvr_ray.errors import ConfigError

log = logging.getLogger(__name__)

Role = Literal["read", "admin"]
VARIABLES: dict[Role, str] = {"read": "MVR_RAY_READ_TOKEN", "admin": "MVR_RAY_ADMIN_TOKEN"}
REALM = 'Bearer realm="mvr_ray"'
MIN_CHARS = 20
"""A hexadecimal token of so many characters has 80 random bits."""

_HOW = (
    'make one with `python -c "import secrets; print(secrets.token_urlsafe(32))"` and write it as `read TOKEN` or '
    f"`admin TOKEN` into a file that serve.tokens_file names, or set {VARIABLES['read']} or {VARIABLES['admin']}"
)


@dataclass(frozen=True)
class TokenStore:
    """The roles of the tokens that a server accepts, by SHA-256 in hexadecimal digits; without any token, every client
    may only read."""

    roles: Mapping[str, Role] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.roles)

    def role(self, token: bytes) -> Role | None:
        """Return the role of a token, None for an unknown one, in constant time."""
        digest = hashlib.sha256(token).hexdigest()
        matches = [role for own, role in self.roles.items() if hmac.compare_digest(digest, own)]
        return matches[0] if matches else None


def read_tokens(file: str | None, environ: Mapping[str, str]) -> TokenStore:
    """Read the tokens of file and environment. Raises ConfigError naming the line or variable, never the token."""
    roles: dict[str, Role] = {}
    for number, line in enumerate(_lines(file) if file is not None else (), 1):
        where = f"serve.tokens_file {file} line {number}"
        match re.split(r"(?:^|\s)#", line)[0].split():
            case []:
                continue
            case ["read" | "admin" as role, token]:
                _add(roles, role, token, where)
            case _:
                raise ConfigError(f"{where} is not `read TOKEN` or `admin TOKEN`; {_HOW}")
    if file is not None and not roles:
        raise ConfigError(f"serve.tokens_file {file} holds no token; {_HOW}, or leave serve.tokens_file out")
    for role, variable in VARIABLES.items():
        if environ.get(variable):
            _add(roles, role, environ[variable].strip(), variable)
    return TokenStore(dict(sorted(roles.items())))


def require_tokens(host: str, tokens: TokenStore) -> None:
    """Raise ConfigError if other machines could reach a server without tokens."""
    if not tokens and not is_loopback(host):
        raise ConfigError(f"serve.host {host} is reached from other machines, and there is no token to ask for; {_HOW}")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _lines(file: str) -> list[str]:
    path = resolve_path(file)
    try:
        text, mode = path.read_text(encoding="utf-8-sig"), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.tokens_file {file} cannot be read ({type(error).__name__}); {_HOW}") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("tokens readable by others: file=%s; chmod 600 keeps them yours", file)
    return text.splitlines()


def _add(roles: dict[str, Role], role: Role, token: str, where: str) -> None:
    if len(token) < MIN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"the token of {where} is not {MIN_CHARS} or more printable ASCII characters; {_HOW}")
    digest = hashlib.sha256(token.encode()).hexdigest()
    if roles.setdefault(digest, role) != role:
        raise ConfigError(f"the token of {where} is given for both read and admin; one token has one role")
