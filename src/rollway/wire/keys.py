"""CURVE keys: whom a server lets in, and how a client knows that it speaks to the right server.

    FOLDER/server/secret.key         known to the server alone
    FOLDER/server/clients/*.public   the clients it lets in, one file each
    FOLDER/client/secret.key         known to the client alone
    FOLDER/client/server.public      the server it speaks to

A key is 40 printable characters. Secrets are readable by their owner only, and refused otherwise.
"""

import os
import struct
from pathlib import Path
from typing import Any

import zmq
from msgspec import Struct
from zmq.utils import z85

from ..errors import KeysError

SECRET, PUBLIC, CLIENTS, SERVER_KEY = "secret.key", ".public", "clients", "server.public"
SERVER, CLIENT = "server", "client"
FIRST_CLIENT = f"{CLIENT}{PUBLIC}"
KEY_CHARACTERS = 40
HOW_TO_MAKE = (
    "'rollway keys new keys' makes them: keys/server for the server, keys/client for whoever connects"
)


class ServerKeys(Struct, frozen=True):
    """A server's own secret, and the public keys of the clients it lets in."""

    secret: bytes
    clients: frozenset[bytes]

    @property
    def public(self) -> bytes:
        return zmq.curve_public(self.secret)

    def secure(self, wire: Any) -> None:
        """Make a socket that will be bound speak to these clients only; a `Gate` must be open."""
        wire.setsockopt(zmq.CURVE_SERVER, 1)
        wire.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def __repr__(self) -> str:
        return f"ServerKeys({self.public.decode()}, {len(self.clients)} clients)"


class ClientKeys(Struct, frozen=True):
    """A client's own secret, and the public key of its server."""

    secret: bytes
    server: bytes

    @property
    def public(self) -> bytes:
        return zmq.curve_public(self.secret)

    def secure(self, wire: Any) -> None:
        """Make a socket that will be connected speak to this server only."""
        wire.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        wire.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        wire.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def __repr__(self) -> str:
        return f"ClientKeys({self.public.decode()}, server {self.server.decode()})"


def make(folder: Path) -> tuple[Path, Path]:
    """Write a server's and a client's folder that know each other. Nothing is ever overwritten."""
    server, client = folder / SERVER, folder / CLIENT
    for one in (server, client):
        if one.exists():
            raise KeysError(f"{one} exists; keys are not overwritten: choose another folder")
    (server_public, server_secret), (client_public, client_secret) = (
        zmq.curve_keypair(),
        zmq.curve_keypair(),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        server.mkdir(mode=0o700)
        client.mkdir(mode=0o700)
        (server / CLIENTS).mkdir()
        _write(server / SECRET, server_secret, mode=0o600)
        _write(server / CLIENTS / FIRST_CLIENT, client_public)
        _write(client / SECRET, client_secret, mode=0o600)
        _write(client / SERVER_KEY, server_public)
    except OSError as error:
        raise KeysError(f"cannot write keys to {folder}: {error.strerror or error}") from None
    return server, client


def server_keys(folder: Path) -> ServerKeys:
    """What a server is given; says what is missing."""
    secret = _secret(folder, SERVER)
    clients = frozenset(_read(path) for path in sorted((folder / CLIENTS).glob(f"*{PUBLIC}")))
    if not clients:
        raise KeysError(
            f"{folder / CLIENTS} holds no *{PUBLIC}: nobody could connect; "
            f"{_where(folder, SERVER) or HOW_TO_MAKE}"
        )
    return ServerKeys(secret, clients)


def client_keys(folder: Path) -> ClientKeys:
    """What a client is given; says what is missing."""
    secret = _secret(folder, CLIENT)
    path = folder / SERVER_KEY
    if not path.exists():
        raise KeysError(
            f"{folder} holds no {SERVER_KEY}, the key of the server to speak to; "
            f"{_where(folder, CLIENT) or HOW_TO_MAKE}"
        )
    return ClientKeys(secret, _read(path))


def public_keys(folder: Path) -> dict[str, str]:
    """The public keys a folder knows, by what they are."""
    shown: dict[str, str] = {}
    for place in (folder, folder / SERVER, folder / CLIENT):
        if not (place / SECRET).exists():
            continue
        shown[f"{place} (its own)"] = zmq.curve_public(_secret(place, "")).decode()
        others = [*sorted((place / CLIENTS).glob(f"*{PUBLIC}")), *place.glob(SERVER_KEY)]
        shown |= {str(path): _read(path).decode() for path in others}
    if not shown:
        raise KeysError(f"{folder} holds no keys; {HOW_TO_MAKE}")
    return shown


def _secret(folder: Path, role: str) -> bytes:
    path = folder / SECRET
    if not path.exists():
        raise KeysError(f"{folder} holds no {SECRET}; {_where(folder, role) or HOW_TO_MAKE}")
    key = _read(path)
    if path.stat().st_mode & 0o077:
        raise KeysError(f"{path} can be read by others: run 'chmod 600 {path}', or make new keys")
    return key


def _where(folder: Path, role: str) -> str:
    """For whoever names the folder above, or the other side's."""
    for place in (folder / role, folder.parent / role):
        if role and place != folder and (place / SECRET).exists():
            return f"did you mean {place}?"
    return ""


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
        z85.decode(key)
    except OSError as error:
        raise KeysError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, struct.error):  # the length, a character, or a value of Z85
        key = b""
    if len(key) != KEY_CHARACTERS:
        raise KeysError(f"{path} holds no key: one is {KEY_CHARACTERS} characters in one line")
    return key


def _write(path: Path, key: bytes, mode: int = 0o644) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(key + b"\n")
