"""Write lock files, and install packages from them.

    pip freeze --all | python dev/lock.py write locks/dev.lock
    python dev/lock.py install locks/dev.lock

A lock file pins each package with the hashes of its wheels for Linux, of all supported versions of
Python, and pip refuses every file with another hash. torch is the exception: its version has a CPU
build and CUDA builds, and pip prefers those with a published hash. A lock file therefore
lists the build of the machine that wrote it, and torch.lock beside it the published ones.
`install` finds out which build pip would choose on this machine, and allows that one alone.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
GLIBC = ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5")  # manylinux versions, newest first
HEADER = "# Written by dev/lock.py (see CONTRIBUTING.md).\n"
TORCH = "torch.lock"  # in the same folder
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")

Hashes = Mapping[str, Iterable[str]]  # by pin


def read_lock(lines: Iterable[str]) -> dict[str, list[str]]:
    r"""Return the pins of a lock file, or of `pip freeze`, with their hashes.

    Local versions are left out: "torch==2.13.0+cpu" becomes "torch==2.13.0".

    >>> read_lock(["torch==2.13.0+cpu", "numpy==2.4.6 \\", "    --hash=sha256:01", "# note"])
    {'torch==2.13.0': [], 'numpy==2.4.6': ['01']}
    """
    found: dict[str, list[str]] = {}
    for line in lines:
        if pin := re.match(r"[A-Za-z0-9._-]+==[^\s\\;+]+", line):
            found[pin[0]] = []
        elif digest := re.match(r"\s+--hash=sha256:([0-9a-f]+)", line):
            found[next(reversed(found))].append(digest[1])
    return found


def format_lock(hashes: Hashes) -> str:
    """Return the text of a lock file; raise ValueError if a pin has no hash."""
    lines = [HEADER]
    for pin, digests in sorted(hashes.items(), key=lambda item: item[0].lower()):
        own = sorted(digests)
        if not own:
            raise ValueError(f"{pin}: no index that pip knows has a file for it")
        lines.append(" \\\n".join([pin, *(f"    --hash=sha256:{digest}" for digest in own)]) + "\n")
    return "".join(lines)


# Writing


def find_hashes(pins: Sequence[str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Ask the package indexes for the wheels of all pins.

    Returns:
        The hashes of all packages; and those of the published builds of torch, which the first
        does not hold.
    """
    own = _chosen(pins, [], os.environ)  # this machine: also builds from --find-links
    published: dict[str, set[str]] = defaultdict(set)
    # Without local builds, which would hide the published ones.
    plain = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    for version, machine in ((v, m) for v in PYTHONS for m in MACHINES):
        target = ["--python-version", version, "--only-binary", ":all:", "--target", "unused"]
        for platform in (*(f"manylinux_{glibc}" for glibc in GLIBC), "manylinux2014", "linux"):
            target += ["--platform", f"{platform}_{machine}"]
        for pin, digest in _chosen(pins, target, plain).items():
            published[pin].add(digest)
    is_torch = {pin: pin.startswith("torch==") for pin in pins}
    found = {
        pin: {own[key]} if is_torch[pin] else published[key] | ({own[key]} if key in own else set())
        for pin in pins
        if (key := _key(pin))
    }
    return found, {pin: published[pin] for pin in pins if is_torch[pin]}


def _chosen(pins: Sequence[str], options: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the hashes of the files that pip would install, by normalized pin.

    pip fails if one pin has no wheel, for example for a version of Python. Then each half of the
    pins is tried, and in the end that pin alone is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [*PIP, "install", "--dry-run", "--ignore-installed", "--no-deps"]
        command += ["--report", str(report), *options, *pins]
        if subprocess.run(command, env=dict(env), capture_output=True).returncode == 0:
            return {
                _key(f"{item['metadata']['name']}=={item['metadata']['version']}"): item[
                    "download_info"
                ]["archive_info"]["hashes"]["sha256"]
                for item in json.loads(report.read_text())["install"]
            }
    if len(pins) < 2:
        return {}
    half = len(pins) // 2
    return _chosen(pins[:half], options, env) | _chosen(pins[half:], options, env)


def _key(pin: str) -> str:
    """Return a pin in normalized spelling, without a local version."""
    name, _, version = pin.partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version.partition('+')[0]}"


# Installing


def install(lock: Path) -> None:
    """Install the packages of a lock file into the environment of this Python."""
    hashes = read_lock(lock.read_text().splitlines())
    torch = [pin for pin in hashes if pin.startswith("torch==")]
    for pin in torch:
        known = {*hashes[pin], *read_lock((lock.parent / TORCH).read_text().splitlines())[pin]}
        digest = _chosen([pin], [], os.environ).get(_key(pin), "none")
        if digest not in known:
            raise SystemExit(
                f"pip would install {pin} with the SHA-256 {digest}, which neither {lock} nor "
                f"{TORCH} lists. If you trust this build, add its hash to {TORCH}."
            )
        hashes[pin] = [digest]
    print(f"Installing {len(hashes)} packages of {lock} into {sys.prefix}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        allowed = Path(folder) / lock.name
        allowed.write_text(format_lock(hashes))
        # Without --no-deps, pip would refuse the libraries that CUDA builds of torch require.
        _pip("install", "--require-hashes", "--no-deps", "-r", str(allowed))
    if torch:  # these libraries; nothing for the CPU build
        _pip("install", *torch)


def _pip(*arguments: str) -> None:
    if code := subprocess.run([*PIP, *arguments]).returncode:
        raise SystemExit(code)


def main() -> None:
    action, path = sys.argv[1], Path(sys.argv[2])
    if action == "install":
        install(path)
        return
    hashes, builds = find_hashes(list(read_lock(sys.stdin)))
    path.write_text(format_lock(hashes))
    if builds:
        path.with_name(TORCH).write_text(format_lock(builds))


if __name__ == "__main__":
    main()
