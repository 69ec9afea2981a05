"""Connection: one end of a session's Unix socket, bounded in both directions."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from orbitkv.errors import OrbitError, ProtocolError, SessionLost
from orbitkv.runtime.wire import (
    LENGTH,
    MAX_DESCRIPTORS,
    MAX_MESSAGE_NBYTES,
    Reply,
    Request,
    encode,
)

M = TypeVar("M", bound=Request | Reply)

_READ_NBYTES = 256 * 2**10
_DESCRIPTOR = array.array("i").itemsize
_ANCILLARY_NBYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * _DESCRIPTOR)
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Pid, uid and gid of the process at the other end, as the kernel has them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


class Connection(Generic[M]):
    """One end of a session's socket, on a loop. Bounded in both directions.

    Args:
        sock: Connected ``AF_UNIX`` stream, which the connection owns from now on.
        decoder: Of what comes from the other side.
        max_unsent_nbytes: What may wait for a peer that does not read; more end the connection.
        message_s: How long the rest of a message may take. None: for ever.
        lingers: Whether what was received before the connection ended is still given out.
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        max_unsent_nbytes: int = 2 * MAX_MESSAGE_NBYTES,
        message_s: float | None = None,
        lingers: bool = False,
    ) -> None:
        sock.setblocking(False)  # noqa: FBT003 - the socket module's own signature
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._decoder = decoder
        self._max_unsent_nbytes = max_unsent_nbytes
        self._message_s = message_s
        self._lingers = lingers
        self._taken = 0
        self._half: asyncio.TimerHandle | None = None
        self._received = bytearray()
        self._start = 0  # of the first frame that was not taken yet
        self._descriptors: deque[int] = deque()
        self._readable: asyncio.Future[None] | None = None
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_nbytes = 0
        self._ended: OrbitError | None = None
        self._broken: OrbitError | None = None  # a rule, so that nothing more is received
        self._at_end = False
        self._reading = True
        self._loop.add_reader(self._fd, self._on_readable)

    @property
    def ended(self) -> OrbitError | None:
        """Why nothing can be sent or received any more; None while it can."""
        return self._ended

    @property
    def half_received(self) -> bool:
        """Whether the next message has begun to come, and is not here as a whole."""
        held = len(self._received) - self._start
        if held < LENGTH.size:
            return held > 0
        (nbytes,) = LENGTH.unpack_from(self._received, self._start)
        return held < LENGTH.size + int(nbytes)

    def send(self, message: Request | Reply, descriptors: Sequence[int] = ()) -> None:
        """Send a message, or keep it until the peer reads. Descriptors are dup'ed by the kernel.

        Raises:
            ProtocolError: the message is too long; nothing was sent.
            SessionLost: the connection has ended.
        """
        frame = encode(message)
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        if not self._unsent:
            sent = self._send(memoryview(frame), descriptors)
            if sent == len(frame) or self._ended is not None:
                return
            frame, descriptors = frame[sent:], () if sent else descriptors
            self._loop.add_writer(self._fd, self._on_writable)
        self._unsent.append((memoryview(frame), descriptors))
        self._unsent_nbytes += len(frame)
        if self._unsent_nbytes > self._max_unsent_nbytes:
            self.close(SessionLost(f"the peer left {self._unsent_nbytes} bytes unread"))

    async def receive(self) -> M | None:
        """The next message; None once the peer has closed, and all was received.

        Descriptors of the messages before it must have been taken.

        Raises:
            ProtocolError: what came is no message.
            SessionLost: the connection was closed on this side, or broke.
        """
        while True:
            if self._ended is None or self._lingers:
                message = self._next()
                if message is not None:
                    return message
            if self._ended is not None:
                raise self._ended.with_traceback(None)
            if self._broken is not None:
                raise self._broken.with_traceback(None)
            if len(self._descriptors) > MAX_DESCRIPTORS:
                raise ProtocolError(f"more than {MAX_DESCRIPTORS} descriptors of one message")
            if self._at_end:
                if self.half_received:
                    raise ProtocolError("the peer closed in the middle of a message")
                return None
            self._readable = self._loop.create_future()
            self._read_on()
            try:
                await self._readable
            finally:
                self._readable = None

    def take_descriptors(self, count: int) -> list[int]:
        """The next ``count`` descriptors that came; the caller closes them.

        Raises:
            ProtocolError: so many have not come.
        """
        if count > len(self._descriptors):
            raise ProtocolError(f"{len(self._descriptors)} descriptors came; {count} are named")
        return [self._descriptors.popleft() for _ in range(count)]

    def close(self, reason: OrbitError | None = None) -> None:
        """Close the socket now. What was not sent is lost. Idempotent."""
        if self._ended is not None:
            return
        self._ended = reason or SessionLost("the session is closed")
        if self._half:
            self._half.cancel()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        self._unsent.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._wake()

    def _next(self) -> M | None:
        """Cut the next whole message from what was received."""
        held = len(self._received) - self._start
        if held < LENGTH.size:
            self._drop_taken()
            return None
        (nbytes,) = LENGTH.unpack_from(self._received, self._start)
        if nbytes > MAX_MESSAGE_NBYTES:
            raise ProtocolError(f"a message of {nbytes} bytes; accepted: {MAX_MESSAGE_NBYTES}")
        if held < LENGTH.size + nbytes:
            self._drop_taken()
            return None
        first = self._start + LENGTH.size
        self._start = first + nbytes
        self._taken += 1
        try:
            with memoryview(self._received) as whole, whole[first : self._start] as frame:
                message: M = self._decoder.decode(frame)
        except OrbitError:
            raise
        # Whatever a damaged message makes a decoder or a dataclass say.
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"a message that cannot be read: {error}") from error
        return message

    def _drop_taken(self) -> None:
        del self._received[: self._start]
        self._start = 0
        self._time_half()

    def _read_on(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        # To the end: of a socket that broke, uvloop tells once, whatever is left in it.
        while self._reading and self._ended is None and self._receive_some():
            large = len(self._received) - self._start > MAX_MESSAGE_NBYTES
            if large or len(self._descriptors) > MAX_DESCRIPTORS:
                self._stop_reading()  # the rest is left in the kernel, which bounds it
        self._wake()

    def _receive_some(self) -> bool:
        """Take what one call gives; False where there is nothing now, or nothing any more."""
        try:
            received, ancillary, flags, _ = self._sock.recvmsg(
                _READ_NBYTES, _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.close(SessionLost(f"the socket broke: {error}"))
            return False
        came = 0
        for _, kind, payload in ancillary:
            if kind == socket.SCM_RIGHTS:
                came = len(payload) // _DESCRIPTOR
                self._descriptors.extend(array.array("i", payload[: came * _DESCRIPTOR]))
        if flags & socket.MSG_CTRUNC:
            self._break(_lost_descriptors(came))
            return False
        self._received += received
        if not received:
            self._at_end = True
            self._stop_reading()
        return bool(received)

    def _time_half(self) -> None:
        if self._message_s is not None and self._half is None and self.half_received:
            self._half = self._loop.call_later(self._message_s, self._expire, self._taken)

    def _expire(self, taken: int) -> None:
        """End a connection whose peer began a message long ago, and has not finished it."""
        self._half = None
        if self.half_received and self._taken == taken:
            self._break(ProtocolError(f"half a message, and not the rest in {self._message_s} s"))
            self._wake()
        else:
            self._time_half()

    def _break(self, error: OrbitError) -> None:
        """Receive nothing more; whoever receives may still tell the peer why."""
        self._broken = error
        self._stop_reading()

    def _stop_reading(self) -> None:
        self._reading = False
        self._loop.remove_reader(self._fd)

    def _wake(self) -> None:
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)

    def _send(self, frame: memoryview, descriptors: Sequence[int]) -> int:
        """Give the kernel what it takes now; returns how much that was."""
        try:
            if descriptors:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                return self._sock.sendmsg([frame], [rights])
            return self._sock.send(frame)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._on_readable()  # what the peer said before it went is still to be received
            self.close(SessionLost(f"the peer has gone: {error}"))
            return 0

    def _on_writable(self) -> None:
        while self._unsent:
            frame, descriptors = self._unsent.popleft()
            sent = self._send(frame, descriptors)
            if self._ended is not None:
                return
            self._unsent_nbytes -= sent
            if sent < len(frame):
                self._unsent.appendleft((frame[sent:], () if sent else descriptors))
                return
        self._loop.remove_writer(self._fd)


def _lost_descriptors(came: int) -> OrbitError:
    """Why the kernel has not handed over all descriptors of a message."""
    if came >= MAX_DESCRIPTORS:
        return ProtocolError(f"more than {MAX_DESCRIPTORS} descriptors of one message")
    return SessionLost("no descriptor is free for the memory that came: raise the limit, nofile")
