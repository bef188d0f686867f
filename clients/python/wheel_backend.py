"""Builds the package's wheels: the client alone, or with the server in it.

    python3 clients/python/wheel_backend.py            # cargo build --release, then target/wheels/….whl
    pip install clients/python                         # the client alone, from the sources

Only the standard library is needed. A wheel has the same bytes whenever it is built from the same
files.
"""

import argparse
import base64
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

HERE = Path(__file__).resolve().parent
PACKAGE = HERE / "src" / "dormouse"
FAST = False
MACHINES = {62: "x86_64", 183: "aarch64"}


class Entry(NamedTuple):
    """A file of an archive."""

    name: str
    content: bytes
    executable: bool = False


def project() -> Dict[str, Any]:
    """The table ``project`` of ``pyproject.toml``; its version has to be the package's."""
    table: Dict[str, Any] = _toml().loads((HERE / "pyproject.toml").read_text("utf-8"))["project"]
    found = re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text("utf-8"), re.M)
    if found is None or found.group(1) != table["version"]:
        raise SystemExit(f"pyproject.toml has the version {table['version']}, __init__.py another one")
    return table


def _toml() -> Any:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib
    try:
        import tomli
    except ImportError:
        from pip._vendor import tomli
    return tomli


def metadata(table: Dict[str, Any]) -> str:
    """The file ``METADATA``."""
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {table['name']}",
        f"Version: {table['version']}",
        f"Summary: {table['description']}",
        f"License-Expression: {table['license']}",
        "License-File: LICENSE",
        f"Requires-Python: {table['requires-python']}",
        "Description-Content-Type: text/markdown",
    ]
    lines += [f"Requires-Dist: {requirement}" for requirement in table["dependencies"]]
    for extra, requirements in table["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {requirement}; extra == "{extra}"' for requirement in requirements]
    return "\n".join(lines) + "\n\n" + (HERE / "README.md").read_text("utf-8")


def licence() -> bytes:
    """The licence: in the repository, or beside this file in a source distribution."""
    for folder in (HERE, HERE.parent.parent):
        if (folder / "LICENSE").is_file():
            return (folder / "LICENSE").read_bytes()
    raise SystemExit("there is no file LICENSE here or two folders above")


def sources() -> List[Entry]:
    """The package's own files."""
    return [
        Entry(f"dormouse/{path.name}", path.read_bytes())
        for path in sorted(PACKAGE.iterdir())
        if path.suffix in (".py", ".binpb") or path.name == "py.typed"
    ]


def platform_tag(program: bytes) -> str:
    """What a Linux program needs: its processor, and the oldest C library that has its symbols."""
    if program[:5] != b"\x7fELF\x02":
        raise SystemExit("the server is no 64-bit ELF program")
    machine = MACHINES.get(int.from_bytes(program[18:20], "little"))
    if machine is None:
        raise SystemExit("the server is for a processor that there is no wheel for")
    minors = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)(?=\0)", program)]
    if not minors:
        return f"manylinux_2_17_{machine}.musllinux_1_1_{machine}"
    return f"manylinux_2_{max(17, *minors)}_{machine}"


def server_entries(program: Path, data: str) -> List[Entry]:
    """The server, its manual pages and completions, where an installation puts them."""
    entries = [Entry(f"{data}/scripts/dormouse", program.read_bytes(), executable=True)]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([program, "man", "--out", folder], check=True)
        for page in sorted(Path(folder).iterdir()):
            entries.append(Entry(f"{data}/data/share/man/man1/{page.name}", page.read_bytes()))
    for shell, place in (
        ("bash", "bash-completion/completions/dormouse"),
        ("fish", "fish/vendor_completions.d/dormouse.fish"),
        ("zsh", "zsh/site-functions/_dormouse"),
    ):
        script = subprocess.run([program, "completions", shell], check=True, stdout=subprocess.PIPE)
        entries.append(Entry(f"{data}/data/share/{place}", script.stdout))
    return entries


def write_wheel(folder: Path, program: Optional[Path], editable: bool = False) -> Path:
    """Writes a wheel, with the server if there is one, and returns where it is."""
    table = project()
    stem = f"{table['name']}-{table['version']}"
    tag = "py3-none-any"
    path = Entry("dormouse.pth", f"{HERE / 'src'}\n".encode())
    entries = [path] if editable else sources()
    if program is not None:
        tag = f"py3-none-{platform_tag(program.read_bytes())}"
        entries += server_entries(program, f"{stem}.data")
    tags = "".join(f"Tag: py3-none-{one}\n" for one in tag.rpartition("-")[2].split("."))
    pure = "true" if program is None else "false"
    info = f"{stem}.dist-info"
    entries += [
        Entry(f"{info}/METADATA", metadata(table).encode()),
        Entry(
            f"{info}/WHEEL",
            f"Wheel-Version: 1.0\nGenerator: dormouse\nRoot-Is-Purelib: {pure}\n{tags}".encode(),
        ),
        Entry(f"{info}/licenses/LICENSE", licence()),
    ]
    record = "".join(f"{e.name},sha256={_digest(e.content)},{len(e.content)}\n" for e in entries)
    entries.append(Entry(f"{info}/RECORD", f"{record}{info}/RECORD,,\n".encode()))
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in entries:
            one = zipfile.ZipInfo(entry.name, date_time=(1980, 1, 1, 0, 0, 0))
            one.external_attr = (0o100755 if entry.executable else 0o100644) << 16
            one.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(one, entry.content, compresslevel=1 if FAST else None)
    return wheel


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


# What pip calls.


def get_requires_for_build_wheel(config_settings: Optional[Dict[str, Any]] = None) -> List[str]:
    return [] if sys.version_info >= (3, 11) else ["tomli"]


get_requires_for_build_editable = get_requires_for_build_wheel
get_requires_for_build_sdist = get_requires_for_build_wheel


def build_wheel(
    wheel_directory: str,
    config_settings: Optional[Dict[str, Any]] = None,
    metadata_directory: Optional[str] = None,
) -> str:
    program = (config_settings or {}).get("server")
    return write_wheel(Path(wheel_directory), Path(program) if program else None).name


def build_editable(
    wheel_directory: str,
    config_settings: Optional[Dict[str, Any]] = None,
    metadata_directory: Optional[str] = None,
) -> str:
    return write_wheel(Path(wheel_directory), None, editable=True).name


def build_sdist(sdist_directory: str, config_settings: Optional[Dict[str, Any]] = None) -> str:
    table = project()
    stem = f"{table['name']}-{table['version']}"
    entries = [Entry(f"src/{entry.name}", entry.content) for entry in sources()]
    for name in ("README.md", "pyproject.toml", "wheel_backend.py"):
        entries.append(Entry(name, (HERE / name).read_bytes()))
    entries += [Entry("LICENSE", licence()), Entry("PKG-INFO", metadata(table).encode())]
    with tarfile.open(Path(sdist_directory) / f"{stem}.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            one = tarfile.TarInfo(f"{stem}/{entry.name}")
            one.size = len(entry.content)
            archive.addfile(one, io.BytesIO(entry.content))
    return f"{stem}.tar.gz"


# What people call.


def built_by_cargo(profile: str) -> Path:
    """Builds the server and says where it is."""
    root = HERE.parent.parent
    subprocess.run(
        ["cargo", "build", "--locked", "--profile", profile, "--bin", "dormouse"], cwd=root, check=True
    )
    target = Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    return target / ("debug" if profile == "dev" else profile) / "dormouse"


def stripped(program: Path, folder: str) -> Path:
    """A copy without its debugging information, if there is a tool for that."""
    if shutil.which("strip") is None or platform.system() != "Linux":
        return program
    smaller = Path(folder) / "dormouse"
    subprocess.run(["strip", "--strip-debug", "-o", smaller, program], check=True)
    return smaller


def main() -> None:
    """Builds a wheel with the server in it."""
    parser = argparse.ArgumentParser(description="Builds a wheel of the Python client and the server.")
    parser.add_argument("--server", type=Path, help="the program to put in, instead of building it")
    parser.add_argument("--profile", default="release", help="cargo's profile to build it with [release]")
    parser.add_argument("--client-only", action="store_true", help="leave the server out")
    parser.add_argument("--out", type=Path, default=HERE.parent.parent / "target" / "wheels", help="folder")
    parser.add_argument("--fast", action="store_true", help="compress less, for trying things out")
    given = parser.parse_args()
    global FAST
    FAST = given.fast
    if given.client_only:
        print(write_wheel(given.out, None))
        return
    program = given.server or built_by_cargo(given.profile)
    with tempfile.TemporaryDirectory() as folder:
        print(write_wheel(given.out, stripped(program, folder)))


if __name__ == "__main__":
    main()
