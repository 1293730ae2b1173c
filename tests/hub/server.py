"""The sockets: reading requests, letting faults happen, sending replies, keeping the log."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from . import objects, routes
from .faults import Fault
from .messages import HubError, Reply, Request
from .store import Hub


@contextlib.contextmanager
def serve(root: str | Path | None = None, port: int = 0, **options: Any) -> Iterator[Hub]:
    """A hub with its data in ``root`` (a temporary folder by default), and the options of ``Hub``.

    The object store listens on the port after the given one; without one both are chosen freely.
    """
    with contextlib.ExitStack() as stack:
        if root is None:
            root = stack.enter_context(tempfile.TemporaryDirectory(prefix="hub-", ignore_cleanup_errors=True))
        hub = Hub(root, **options)
        hub.url = stack.enter_context(listen(hub, "hub", routes.answer, port))
        hub.cdn = stack.enter_context(listen(hub, "cdn", objects.answer, port + 1 if port else 0))
        yield hub


@contextlib.contextmanager
def listen(hub: Hub, name: str, answer: Callable[[Hub, Request], Reply], port: int) -> Iterator[str]:
    """Answer requests in the background; gives the address."""
    server = Listener(hub, name, answer, port)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # clients open many connections at once

    def __init__(self, hub: Hub, name: str, answer: Callable[[Hub, Request], Reply], port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.hub, self.name, self.answer = hub, name, answer


class DroppedError(Exception):
    """The connection is to be reset."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Listener
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and body are two writes, and the second must not wait for an answer

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet: the hub has a log of its own."""

    def handle_one_request(self) -> None:
        # A client may leave at any time, and after a reset the standard library flushes a closed file.
        try:
            super().handle_one_request()
        except (ConnectionError, ValueError):
            self.close_connection = True

    def dispatch(self) -> None:
        """Any request."""
        if self.path.startswith("/__"):
            return self.control()
        hub, started = self.server.hub, time.time()
        self.entry = self.log_entry()
        with hub.lock:
            hub.log.append(self.entry)
            fault = next((fault for fault in hub.faults if fault.strikes(self.command, self.path)), None)
        try:
            self.work(fault)
        except DroppedError:
            self.entry["status"] = "reset"
            self.reset()
        finally:
            self.entry["t"] = round(time.time() - started, 4)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = dispatch  # noqa: N815

    def log_entry(self) -> dict[str, Any]:
        header = self.headers.get
        return {
            "server": self.server.name,
            "method": self.command,
            "path": self.path,
            "status": None,
            "user": None,
            "auth": header("Authorization"),
            "length": header("Content-Length"),
            "range": header("Range"),
            "ua": header("User-Agent"),
        }

    def work(self, fault: Fault | None) -> None:
        """Answer the request, in spite of the fault or as it has it."""
        action = fault.action if fault else None
        if fault and action == "hang":
            time.sleep(fault.seconds)
        if action == "reset":
            raise DroppedError
        if fault and action == "reset_body":
            self.read_body(limit=fault.bytes)
            raise DroppedError
        body = self.read_body()
        if fault and action == "status":
            answer = {"error": fault.error} if fault.json is None else fault.json
            return self.send(Reply(answer, fault.status, fault.headers or {}))
        path, _, query = self.path.partition("?")
        path = re.sub("/+", "/", path).rstrip("/")
        reply = self.answer(Request(self.command, path, dict(parse_qsl(query)), self.headers, body, fault=fault))
        if action == "reset_after":
            raise DroppedError
        self.send(reply, fault if action == "truncate" else None)

    def answer(self, request: Request) -> Reply:
        try:
            return self.server.answer(self.server.hub, request)
        except HubError as error:
            return error.reply()
        except Exception as error:  # a mistake in here, or a request such as no client sends: show it in the test
            traceback.print_exc()
            return HubError(500, repr(error)).reply()
        finally:
            self.entry["user"] = request.account.user if request.account else None

    def read_body(self, limit: int | None = None) -> bytes:
        """The whole body, or at least ``limit`` bytes of it if there are so many."""
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            return self.read_chunks(limit)
        length = int(self.headers.get("Content-Length") or 0)
        wanted = length if limit is None else min(limit, length)
        data = self.rfile.read(wanted)
        if len(data) < wanted:
            raise DroppedError  # the client went away in the middle of its upload: nothing is stored
        return data

    def read_chunks(self, limit: int | None) -> bytes:
        data = bytearray()
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
            if limit is not None and len(data) >= limit:
                return bytes(data)
        while self.rfile.readline().strip():
            pass  # trailers
        return bytes(data)

    def send(self, reply: Reply, cut: Fault | None = None) -> None:
        """Send a reply, or as much of it as the fault lets through."""
        body, headers = reply.encode()
        self.entry["status"] = reply.status
        self.send_response_only(reply.status)
        for name, value in {"Date": self.date_time_string(), "X-Request-Id": "Root=1-test", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: cut.bytes] if cut else body)
        if cut and not cut.fin:
            raise DroppedError
        if cut:
            self.close_connection = True

    def reset(self) -> None:
        """Close the connection so that the client gets a TCP reset, not an orderly end."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # The socket stays open as long as a file made of it is.
        for stream in (self.rfile, self.wfile, self.connection):
            with contextlib.suppress(OSError, ValueError):
                stream.close()

    def control(self) -> None:
        """Order faults and read the log over HTTP."""
        hub, self.entry = self.server.hub, {}
        body = self.read_body()
        with hub.lock:
            answer = self.control_answer(hub, Request(self.command, self.path, {}, self.headers, body))
        self.send(answer)

    def control_answer(self, hub: Hub, request: Request) -> Reply:
        if (request.method, request.path) == ("POST", "/__faults"):
            try:
                for details in request.json():
                    hub.fault(**details)
            except (TypeError, ValueError) as error:
                return HubError(400, str(error)).reply()
        elif (request.method, request.path) == ("DELETE", "/__log"):
            hub.log.clear()
        elif (request.method, request.path) == ("GET", "/__log"):
            return Reply(list(hub.log))
        else:
            return HubError(404, "not found").reply()
        return Reply({})
