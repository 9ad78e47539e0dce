"""Names and passwords in the URLs of endpoints: used for every request, and shown nowhere.

They are kept in an environment variable of this process, which the processes that it starts inherit. All
else, also config.toml, sees the URL without them.
"""

import base64
import json
import os
import re
from typing import Any
from urllib.parse import unquote

VARIABLE = "ROLLWAY_URL_CREDENTIALS"
_HOST = r"(?:\[[^\]\s]*\]|[^\s/@:?#]*)(?::\d*)?[/?#]"
_USER_INFO = re.compile(
    rf"(?<![a-z0-9+.-])(?P<scheme>[a-z0-9+.-]+://)(?!{_HOST})(?P<user_info>(?:(?!://)\S)+)@",
    re.IGNORECASE,
)
"""Names and passwords end at the last @, because people write / and @ in passwords as they are. A URL
that begins with a host and a path has neither, whatever its path contains."""


def without_credentials(url: str) -> str:
    """Return the URL without name and password, and keep these for requests to it."""
    found = _USER_INFO.match(url)
    if found is None:
        return url
    hidden = found["scheme"] + url[found.end() :]
    known = json.loads(os.environ.get(VARIABLE, "{}"))
    os.environ[VARIABLE] = json.dumps({**known, _base(hidden): found["user_info"]})
    return hidden


def authorization(url: str) -> str:
    """Return the header that proves who asks; empty if the URL came without name and password."""
    user_info = json.loads(os.environ.get(VARIABLE, "{}")).get(_base(url), "")
    if not user_info:
        return ""
    return f"Basic {base64.b64encode(unquote(user_info).encode()).decode()}"


def hide_credentials(text: str) -> str:
    """Return a text with *** in place of the names and passwords in its URLs."""
    return _USER_INFO.sub(r"\g<scheme>***@", text)


def hide_all_credentials(tree: Any) -> Any:
    """Return a tree of dicts and lists in which no text has names and passwords in URLs."""
    if isinstance(tree, dict):
        hide = hide_all_credentials
        return {hide(key): hide(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [hide_all_credentials(value) for value in tree]
    return hide_credentials(tree) if isinstance(tree, str) else tree


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
