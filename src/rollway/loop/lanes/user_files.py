"""Imports a Python file that a user names by its path: an environment, or an advantage function."""

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_file(path: Path, source: bytes | None = None) -> ModuleType:
    """Import a file, once for each process. A hash of its path is part of the module's name, so that
    files with the same stem do not collide. `source` is taken instead of what is in the file now."""
    name = f"rollway_file_{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        if source is None:
            spec.loader.exec_module(module)
        else:
            exec(compile(source, str(path), "exec"), module.__dict__)
    except BaseException:  # whatever it raised: the module did not load
        del sys.modules[name]
        raise
    return module
