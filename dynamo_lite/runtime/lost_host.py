"""Notices that the host at the other end of a TCP connection is gone without having said so."""

import socket


def notice_a_lost_host(sock: socket.socket | None, within_s: float) -> None:
    """The kernel closes the connection about `within_s` after the peer's last sign of life, whether
    bytes are under way or not: the limit also replaces the number of keep-alive probes. The time in
    which a living peer has no room counts, too. A process that stands still is not noticed, because
    its kernel acknowledges. None, and Unix sockets: does nothing."""
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 3),
        (socket.TCP_USER_TIMEOUT, round(within_s * 1000)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
