"""Imports the package `renderers` without its HTTP client, which nothing here uses.

That client loads the package `openai`, which more than doubles the CPU time that a worker takes to start
(`bench/imports.py`).
"""

import sys
from types import ModuleType

CLIENT = "renderers.client"


def _placeholder() -> ModuleType:
    """Return a module with the names that `renderers` takes from its client."""
    client = ModuleType(CLIENT)
    for name in ("MalformedGenerateResponseError", "OverlongPromptError"):
        setattr(client, name, type(name, (Exception,), {"__module__": CLIENT}))
    return client


def _import_without_client() -> None:
    if "renderers" in sys.modules:
        return  # user code was first, and has the client
    sys.modules[CLIENT] = _placeholder()
    try:
        import renderers
    finally:
        # user code that imports the client later gets the real one
        del sys.modules[CLIENT]
    vars(renderers).pop("client", None)


_import_without_client()

import renderers  # noqa: E402
import renderers.base  # noqa: E402
import renderers.parsers  # noqa: E402

__all__ = ["renderers"]
