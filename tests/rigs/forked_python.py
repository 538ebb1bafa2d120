"""Program that runs `-m MODULE` in a process of `fork_server.py`, which lies beside it.

It passes signals on, and ends as that process does. Without a server, or for anything
else, it is the interpreter.
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
        # What reads from them or writes to them sees the end of the other process.
        os.closerange(0, 3)
        for number in passed_on:
            signal.signal(number, lambda _number, _frame: None)
        server.setblocking(False)
        # The numbers of signals are all that is written there from now on.
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
