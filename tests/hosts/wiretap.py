"""What is on the cables between the hosts."""

import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Self

from tests.hosts.network import Host

#: Of Linux: a packet socket gets every protocol.
_EVERYTHING = 3
_IPV4 = b"\x08\x00"
#: Room for what arrives while other processes have the processor.
_BUFFER_BYTES = 256 << 20
_SO_RCVBUFFORCE = 33
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
#: A segment that the network device would split is one frame here.
_FRAME_BYTES = 1 << 17
_LOOK_S = 0.2
#: How long what has arrived is still read at the end, if more arrives all the time.
_REST_S = 2.0

#: A cable, source and destination with their ports.
Flow = tuple[str, str, int, str, int]


class Wiretap:
    """Context manager: reads all TCP segments on the cables of these hosts, in a thread. What it
    has read is known at its end."""

    def __init__(self, hosts: Iterable[Host]):
        self._cables = {host.port for host in hosts}
        self._read: dict[Flow, bytearray] = defaultdict(bytearray)
        #: How many packets had no room.
        self.lost = 0
        self._ends_at = float("inf")
        self._thread = threading.Thread(target=self._listen, name="wiretap")

    def __enter__(self) -> Self:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERYTHING))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        self._socket.settimeout(_LOOK_S)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends_at = time.monotonic() + _REST_S
        self._thread.join()
        counts = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        self.lost = struct.unpack("II", counts)[1]
        self._socket.close()

    def of_ports(self, ports: Iterable[int]) -> bytes:
        """What went from and to these ports, one direction of a connection after the other."""
        wanted = set(ports)
        return b"\n".join(read for flow, read in self._read.items() if {flow[2], flow[4]} & wanted)

    def of_other_ports(self, ports: Iterable[int]) -> bytes:
        """What neither came from nor went to these ports."""
        others = set(ports)
        return b"\n".join(
            read for flow, read in self._read.items() if not {flow[2], flow[4]} & others
        )

    def _listen(self) -> None:
        while time.monotonic() < self._ends_at:
            try:
                frame, address = self._socket.recvfrom(_FRAME_BYTES)
            except TimeoutError:
                if self._ends_at < float("inf"):
                    return
                continue
            cable = address[0]
            if cable in self._cables and frame[12:14] == _IPV4 and frame[23] == socket.IPPROTO_TCP:
                self._note(cable, frame)

    def _note(self, cable: str, frame: bytes) -> None:
        """frame: Ethernet, IPv4 (RFC 791) and TCP (RFC 9293), each with its header."""
        end = 14 + int.from_bytes(frame[16:18])
        tcp = 14 + 4 * (frame[14] & 15)
        source, destination = (socket.inet_ntoa(frame[at : at + 4]) for at in (26, 30))
        ports = int.from_bytes(frame[tcp : tcp + 2]), int.from_bytes(frame[tcp + 2 : tcp + 4])
        data = frame[tcp + 4 * (frame[tcp + 12] >> 4) : end]
        self._read[cable, source, ports[0], destination, ports[1]] += data
