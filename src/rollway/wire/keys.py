"""CURVE keys: which clients a server accepts, and how a client knows that it speaks to the right server.

    FOLDER/server/secret.key         known to the server alone
    FOLDER/server/clients/*.public   the clients it accepts, one file each
    FOLDER/client/secret.key         known to the client alone
    FOLDER/client/server.public      the server it speaks to

A key is 40 printable characters. Secrets are readable by their owner only, and refused otherwise.
"""

import os
import struct
from pathlib import Path

import zmq
from msgspec import Struct
from zmq.asyncio import Socket
from zmq.utils import z85

from ..errors import CurveKeysError

SECRET, PUBLIC, CLIENTS, SERVER_KEY = "secret.key", ".public", "clients", "server.public"
SERVER, CLIENT = "server", "client"
FIRST_CLIENT = f"{CLIENT}{PUBLIC}"
KEY_CHARACTERS = 40
HOW_TO_MAKE = (
    "'rollway keys new keys' makes them: "
    "keys/server for the server, keys/client for its clients"
)


class ServerKeys(Struct, frozen=True):
    """A server's secret key, and the public keys of the clients it accepts."""

    secret: bytes
    clients: frozenset[bytes]

    @property
    def public(self) -> bytes:
        return zmq.curve_public(self.secret)

    def secure(self, wire: Socket) -> None:
        """Make a socket accept these clients only. Call it before `bind`. Needs `authenticate`."""
        wire.setsockopt(zmq.CURVE_SERVER, 1)
        wire.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def __repr__(self) -> str:
        return f"ServerKeys({self.public.decode()}, {len(self.clients)} clients)"


class ClientKeys(Struct, frozen=True):
    """A client's secret key, and the public key of its server."""

    secret: bytes
    server: bytes

    @property
    def public(self) -> bytes:
        return zmq.curve_public(self.secret)

    def secure(self, wire: Socket) -> None:
        """Make a socket speak to this server only. Call it before `connect`."""
        wire.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        wire.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        wire.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def __repr__(self) -> str:
        return f"ClientKeys({self.public.decode()}, server {self.server.decode()})"


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Write the folder of a server and of a client that know each other. Overwrite nothing."""
    server, client = folder / SERVER, folder / CLIENT
    for path in (server, client):
        if path.exists():
            raise CurveKeysError(
                f"{path} exists; keys are not overwritten: choose another folder"
            )
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
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
        raise CurveKeysError(
            f"cannot write keys to {folder}: {error.strerror or error}"
        ) from None
    return server, client


def read_server_keys(folder: Path) -> ServerKeys:
    secret = _secret(folder, SERVER)
    clients = frozenset(_read(path) for path in sorted((folder / CLIENTS).glob(f"*{PUBLIC}")))
    if not clients:
        raise CurveKeysError(
            f"{folder / CLIENTS} holds no *{PUBLIC}, so no client could connect; "
            f"{_advice(folder, SERVER)}"
        )
    return ServerKeys(secret, clients)


def read_client_keys(folder: Path) -> ClientKeys:
    secret = _secret(folder, CLIENT)
    path = folder / SERVER_KEY
    if not path.exists():
        raise CurveKeysError(
            f"{folder} holds no {SERVER_KEY}, the key of the server to speak to; "
            f"{_advice(folder, CLIENT)}"
        )
    return ClientKeys(secret, _read(path))


def read_public_keys(folder: Path) -> dict[str, str]:
    """Return the public keys in a folder, each by its file or the folder it belongs to."""
    keys: dict[str, str] = {}
    for place in (folder, folder / SERVER, folder / CLIENT):
        if not (place / SECRET).exists():
            continue
        keys[f"{place} (its own)"] = zmq.curve_public(_secret(place, "")).decode()
        others = [*sorted((place / CLIENTS).glob(f"*{PUBLIC}")), *place.glob(SERVER_KEY)]
        keys |= {str(path): _read(path).decode() for path in others}
    if not keys:
        raise CurveKeysError(f"{folder} holds no keys; {HOW_TO_MAKE}")
    return keys


def _secret(folder: Path, role: str) -> bytes:
    path = folder / SECRET
    if not path.exists():
        raise CurveKeysError(f"{folder} holds no {SECRET}; {_advice(folder, role)}")
    key = _read(path)
    if path.stat().st_mode & 0o077:
        raise CurveKeysError(
            f"{path} can be read by others: run 'chmod 600 {path}', or make new keys"
        )
    return key


def _advice(folder: Path, role: str) -> str:
    """Name the right folder if the user named the one above it, or that of the other side."""
    for place in (folder / role, folder.parent / role):
        if role and place != folder and (place / SECRET).exists():
            return f"did you mean {place}?"
    return HOW_TO_MAKE


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
        z85.decode(key)
    except OSError as error:
        raise CurveKeysError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, struct.error):  # the length, a character, or a value of Z85
        key = b""
    if len(key) != KEY_CHARACTERS:
        raise CurveKeysError(
            f"{path} does not hold a key: a key is one line of {KEY_CHARACTERS} characters"
        )
    return key


def _write(path: Path, key: bytes, mode: int = 0o644) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(key + b"\n")
