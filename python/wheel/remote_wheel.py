"""Parts of wheels in a package index, without downloading the rest: PyTorch's wheels have half a gigabyte, of which its
headers are ten megabytes.

A wheel is a zip file, whose table of contents is at its end; the index's server is asked for ranges of bytes. The
checksums are those of the zip file, for each of its files.
"""

import html
import io
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Iterable, Sequence

_BLOCK = 4 << 20
_TRIES = 4


def extract(url: str, patterns: Sequence[str], folder: Path) -> int:
    """Unpacks the files of a wheel whose names match any pattern; returns how many there are."""
    with zipfile.ZipFile(io.BufferedReader(_Ranges(url), _BLOCK)) as archive:
        wanted = [
            info
            for info in archive.infolist()
            if not info.is_dir() and any(fnmatch(info.filename, pattern) for pattern in patterns)
        ]
        # In the order in which they lie in the file, so that neighbours are in one range.
        for info in sorted(wanted, key=lambda info: info.header_offset):
            archive.extract(info, folder)
    return len(wanted)


def find(package: str, version: str, tags: Iterable[str]) -> str:
    """The address of a wheel: of `package`, of exactly that version or the newest one that begins with it and `.`, with
    the first of `tags` that there is. `PIP_INDEX_URL` names another index than PyPI."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page_url = f"{index}/{package}/"
    page = _read(urllib.request.Request(page_url)).decode()
    links = [html.unescape(link) for link in re.findall(r'<a[^>]*\shref="([^"]+)"', page)]
    wheels = {urllib.parse.unquote(link.split("#")[0].rsplit("/", 1)[-1]): link.split("#")[0] for link in links}
    for tag in tags:
        named = rf"{re.escape(package.replace('-', '_'))}-({re.escape(version)}(?:\.[0-9.]+)?)-(?:{tag})\.whl"
        found = [(match[1], link) for name, link in wheels.items() if (match := re.fullmatch(named, name))]
        if found:
            newest = max(found, key=lambda pair: [int(part) for part in pair[0].split(".")])
            return urllib.parse.urljoin(page_url, newest[1])
    raise LookupError(f"{page_url} has no wheel of {package} {version} for this platform")


class _Ranges(io.RawIOBase):
    """A file at an address, read by ranges of bytes."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            if answer.status != 206:
                raise OSError(f"the server of {url} does not answer ranges of bytes")
            self._length = int(answer.headers["Content-Range"].rsplit("/", 1)[-1])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: "memoryview") -> int:
        end = min(self._at + len(buffer), self._length)
        if self._at >= end:
            return 0
        found = _read(urllib.request.Request(self._url, headers={"Range": f"bytes={self._at}-{end - 1}"}))
        if len(found) != end - self._at:
            raise OSError(f"the server of {self._url} answered {len(found)} bytes of {end - self._at}")
        buffer[: len(found)] = found
        self._at = end
        return len(found)


def _read(request: urllib.request.Request) -> bytes:
    """The answer to a request, tried again after failures of the network."""
    for remaining in reversed(range(_TRIES)):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bytes(answer.read())
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            known = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if known or not remaining:
                raise OSError(f"{request.full_url}: {error}") from error
            time.sleep(_TRIES - remaining)
    raise AssertionError("unreachable")
