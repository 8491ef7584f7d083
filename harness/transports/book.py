"""AddressBook: a folder that says where the end of a name listens, shared by the processes of one test or benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote


class Address(NamedTuple):
    """Where an end listens on 127.0.0.1; `incarnation` tells two ends of one name apart, and is the word to get in."""

    port: int
    incarnation: str


class AddressBook:
    """One file per name. The last process that took a name owns it; the entry of a dead one stays and leads nowhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def publish(self, name: str, address: Address) -> None:
        """Say where `name` is; a reader sees the old entry or the new one, whole."""
        path = self._path(name)
        fresh = path.with_suffix(f".{address.incarnation}")
        fresh.write_text(json.dumps(address._asdict()), encoding="utf-8")
        fresh.replace(path)

    def find(self, name: str) -> Address | None:
        """Where `name` was last; None when nobody took that name."""
        try:
            entry = json.loads(self._path(name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Address(**entry)

    def withdraw(self, name: str, incarnation: str) -> None:
        """Take the entry out, unless a later end owns the name."""
        address = self.find(name)
        if address is not None and address.incarnation == incarnation:
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{quote(name, safe='')}.json"
