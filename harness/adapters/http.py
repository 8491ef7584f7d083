"""Servers behind a URL: `http://host:port?dialect=sglang&control=URL&prefill=URL,URL&decode=URL&bootstrap=PORT,PORT`.

The URL is one server. With `prefill` and `decode` (else the URL itself is the decode worker) the adapter plays the
router of a P/D pair: both workers get the same request at once. With `through=URL` a real router gets the requests
instead, and the workers are only looked at; what prefill alone knows is then not told. `control` is the same engine
unsharded. `promises=-NAME` takes a promise away that the server does not keep, `promises=recalls_facts,salts` makes the
two that no server can tell of. With `operate=LOG_DIR`, the log folder of the `kvshard up .. -- COMMAND` that runs the
servers, they can be ended and restarted; without it nobody's processes are touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from harness.adapter import ConfigError, Session
from harness.adapters.http_client import Client
from harness.adapters.http_dialects import Dialect, OpenAI, Sglang
from harness.adapters.http_info import Info, Told, read
from harness.adapters.http_llamacpp import LlamaCpp
from harness.adapters.http_operator import Operator
from harness.adapters.http_session import HttpSession, Route
from harness.adapters.http_vllm import Vllm
from harness.capabilities import PROMISE_SENTENCES
from harness.types import Config, Manifest
from harness.usage import UserError, nearest

OPTIONS = (
    *("url", "dialect", "control", "prefill", "decode", "bootstrap", "timeout", "page", "promises", "near", "far"),
    *("settle", "through", "operate"),
)
DIALECTS: Mapping[str, type[Dialect]] = MappingProxyType({each.name: each for each in (Sglang, OpenAI, LlamaCpp, Vllm)})
SAID = ("recalls_facts", "salts")  # promises that no server can tell of: its user does
TIMEOUT_SECONDS = 120.0
SETTLE_SECONDS = 30.0


class HttpEngine:
    """An engine that runs already; its sessions share its cache, so only one is open at a time."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Raises `UserError` for an option that is wrong; asks nothing of the servers."""
        unknown = [name for name in options if name not in OPTIONS]
        if unknown:
            near = nearest(unknown[0], OPTIONS)
            raise UserError(f"option {unknown[0]!r} of a server{near} There is: {', '.join(OPTIONS[1:])}")
        self._options = dict(options)
        dialect = self._options.get("dialect", "sglang")
        if dialect not in DIALECTS:
            raise UserError(f"dialect {dialect!r}; expected {' or '.join(DIALECTS)}")
        self.dialect: Dialect = DIALECTS[dialect]()
        seconds = self._number("timeout", TIMEOUT_SECONDS)
        for name in ("page", "near", "far"):
            self._number(name, 1.0)
        known = [*(f"-{name}" for name in PROMISE_SENTENCES), *SAID]
        for name in filter(None, self._options.get("promises", "").split(",")):
            if name not in known:
                raise UserError(
                    f"promises={name}{nearest(name, known)} Take one away with -NAME, or say {', '.join(SAID)}"
                )
            if name == "salts" and not self.dialect.salt:
                raise UserError(f"promises=salts; dialect {dialect} has no salt in a request: leave it out")

        def clients(name: str) -> list[Client]:
            return [self.dialect.client(url, seconds) for url in self._options.get(name, "").split(",") if url]

        base = self.dialect.client(self._options["url"], seconds)
        self.prefill = clients("prefill")
        self.serving = (clients("decode") or [base]) if self.prefill else [base]
        self.control = clients("control")[:1]
        self.through = clients("through")[:1]
        if not self.prefill and ("decode" in options or "bootstrap" in options):
            raise UserError("decode or bootstrap without prefill; a P/D pair needs the URL of its prefill worker")
        self._ports = self._options.get("bootstrap", "").replace(",", " ").split()
        if any(not port.isdigit() for port in self._ports) or len(self._ports) not in {0, len(self.prefill)}:
            wanted = f"a port for each of {len(self.prefill)} prefill workers"
            raise UserError(f"bootstrap {self._options['bootstrap']!r}; expected {wanted}")
        if self.through and "operate" in options:
            raise UserError("operate with through: a router decides for itself when a worker is back; leave out one")
        self._told: Told | None = None
        self._operator: Operator | None = None
        self._infos: list[Info] = []

    def describe(self) -> Manifest:
        """Asks the servers the first time. Raises `UserError` when one does not answer."""
        return self._known().manifest()

    def open(self, config: Config) -> Session:
        """A session on a cache that was flushed. Raises `ConfigError` for another config than the servers have."""
        fixed = self._known().config
        if config != fixed:
            raise ConfigError(f"config {config}; a server that runs has the one {fixed}")
        ports = self._ports or [str(info.args.get("disaggregation_bootstrap_port") or 8998) for info in self._infos]
        numbers = [int(port) for port in ports][: len(self.prefill)]
        route = Route(self.prefill, numbers, self.serving, self.control, self.through)
        settle = self._number("settle", SETTLE_SECONDS)
        return HttpSession(route, self.dialect, self.describe(), settle, self._operator)

    def _known(self) -> Told:
        if self._told is None:
            if "operate" in self._options:
                self._operator = Operator(Path(self._options["operate"]), [*self.prefill, *self.serving])
                self._operator.revive()
            self._infos = [read(client) for client in self.prefill]
            serving = [read(client) for client in self.serving]
            control = [read(client) for client in self.control]
            front = self._infos[0] if self.prefill else serving[0]
            if isinstance(self.dialect, OpenAI):
                self.dialect.model = str(front.card.get("id") or "")
            if not front.args.get("can_flush", front.args):
                front.flushes = False
            self._told = Told(
                front,
                serving[0] if self.prefill else None,
                control[0] if control else None,
                self._options,
                self.dialect,
            )
        return self._told

    def _number(self, name: str, default: float) -> float:
        text = self._options.get(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not value > 0:
            raise UserError(f"option {name} is {text!r}; expected a number above 0")
        return value
