"""Finds the folder of a model: on this machine, or on the Hugging Face hub, which is asked only once."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..errors import ModelError
from .folder import INDEX, check_folder

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""What looks like a name on the hub: an owner and a model, with one slash between them."""
DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHTS = "*.safetensors"
CODE = "*.py"
OTHER_COPIES = ["consolidated*", "*/*"]
"""The same weights in other layouts, which some models have beside those of transformers."""
NUM_LOOKS, LOOK_EVERY_S = 10, 0.01
"""How often a download that is given up looks for the files that it has begun."""


def find_folder(model: str, *, needs_weights: bool = True, trusts_code: bool = False) -> str:
    """Return the folder of a model that is given as a folder or as a name on the hub. A model from the
    hub is downloaded first, with its progress on the terminal, unless it was before. Blocks."""
    if Path(model).exists() or not HUB_NAME.fullmatch(model):
        folder = model
    else:
        wanted = [*DESCRIPTION, *[WEIGHTS] * needs_weights, *[CODE] * trusts_code]
        folder = _download(model, wanted)
        if needs_weights and not list(Path(folder).glob(WEIGHTS)):
            raise ModelError(f"the model '{model}' on the hub has no weights in {WEIGHTS}")
    check_folder(
        folder, trusts_code=trusts_code or not needs_weights, needs_weights=needs_weights
    )
    return folder


def _download(name: str, wanted: list[str]) -> str:
    """Download in a process of its own, which Ctrl-C ends at once: the hub's client would first finish
    the files that it has begun."""
    command = [sys.executable, "-m", __name__, name, *wanted]
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                answer = process.communicate()[0].strip()
            except BaseException:
                process.send_signal(signal.SIGINT)
                raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if process.returncode:
        raise ModelError(
            answer or f"the download of '{name}' ended with {process.returncode}"
        )
    return answer


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _give_up(number: int, frame: object) -> None:
    """End this process, and remove the files that it has begun: nothing would use them again. Meanwhile
    its threads go on. They may begin another file, or give one that they have just closed its name, so
    this looks several times."""
    for _ in range(NUM_LOOKS):
        for descriptor in Path("/proc/self/fd").glob("*"):
            with suppress(OSError):
                path = os.readlink(descriptor)
                if path.endswith(".incomplete"):
                    Path(path).unlink()
        select.select([], [], [], LOOK_EVERY_S)
    os._exit(128 + number)


def is_whole(folder: Path, *, needs_weights: bool) -> bool:
    """Return whether a folder in the cache has all that is needed. Other programs may have downloaded
    only a part of it."""
    needed, index = ["config.json", "tokenizer.json"], folder / INDEX
    if needs_weights:
        listed = json.loads(index.read_bytes())["weight_map"] if index.exists() else {}
        needed += {*listed.values()} or ["model.safetensors"]
    return all((folder / file).exists() for file in needed)


def describe(error: Exception) -> str:
    """Return the first line of an error, or its class if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0].removeprefix("Got: ")


def main(name: str, *wanted: str) -> None:
    """Print the folder that a model was downloaded to, or exit with the reason why it was not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _give_up)
    download = partial(
        snapshot_download, name, allow_patterns=list(wanted), ignore_patterns=OTHER_COPIES
    )
    try:
        with suppress(LocalEntryNotFoundError):
            folder = download(local_files_only=True)
            if is_whole(Path(folder), needs_weights=WEIGHTS in wanted):
                print(folder)
                return
        print(download())
        return
    except GatedRepoError:
        reason = (
            f"the hub gives the model '{name}' only to those who accepted its terms: accept them on "
            "its page, and set HF_TOKEN"
        )
    except RepositoryNotFoundError:
        reason = (
            f"no model folder '{name}', and no model of this name on the hub that you may see (for a "
            "private one, set HF_TOKEN)"
        )
    except Exception as error:  # also those of the HTTP client that the hub's client uses
        cause = describe(error)
        reason = (
            f"no model folder '{name}', and it cannot be downloaded from the hub ({cause}): start again "
            "to continue, or copy the model's files to a folder of this machine and give that folder"
        )
    print(reason)
    sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
