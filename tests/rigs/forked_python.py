"""Program that runs `-m MODULE` in a process forked by `fork_server.py`.

It passes signals to that process, and ends as it does. Without a server, or with other
arguments, it becomes the interpreter.
"""

import json
import os
import select
import signal
import socket
import sys

SOCKET = "socket"
CODE_BYTES_MAX = 16
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    directory, words = os.path.dirname(sys.argv[0]), sys.argv[1:]  # without imports
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        if words[:1] != ["-m"] or server.connect_ex(f"{directory}/{SOCKET}"):
            os.execv(sys.executable, [sys.executable, *words])
        passed_on = [n for n in PASSED_ON if signal.getsignal(n) != signal.SIG_IGN]
        signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
        request = json.dumps([words[1:], os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(server, [request], [0, 1, 2])
        # Only the other process keeps them open, so that its end is seen.
        os.closerange(0, 3)
        for number in passed_on:
            signal.signal(number, lambda _number, _frame: None)
        server.setblocking(False)
        # From here on only numbers of signals are written to it.
        signal.set_wakeup_fd(server.fileno())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        select.select([server], [], [])
        code = int(server.recv(CODE_BYTES_MAX))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
