"""``python -IS client.py SOCKET COMMAND...``: represents a process that the fork server starts.

It forwards signals and ends with the status of that process, which dies if this client is killed.
The process joins the process group of its client. This client executes a command itself that the
fork server does not know. It imports only fast modules.
"""

import array
import json
import os
import signal
import socket
import struct
import sys

STATUS = struct.Struct("!i")


def is_known(command: list[str]) -> bool:
    """Whether it is a daemon, a launcher, or a script or module of the undisturbed run."""
    serves = command[1:4] == ["-P", "-m", "tmd.daemon"]
    launches = command[1:5] == ["-P", "-m", "tmd.cli", "launch"]
    # Libraries of its own, such as one that changes its clock, need a daemon that is executed.
    ours = launches or (serves and not {"LD_PRELOAD", "LD_LIBRARY_PATH"} & os.environ.keys())
    return ours or command[1] == "-m" or command[1].endswith(".py")


def ask(server: socket.socket, command: list[str]) -> None:
    """Send the command with everything that a process inherits."""
    order = json.dumps(
        {"command": command, "env": dict(os.environ), "cwd": os.getcwd(), "group": os.getpgrp()}
    ).encode()
    streams = array.array("i", [0, 1, 2])
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
    server.sendmsg([struct.pack("!I", len(order))], rights)
    server.sendall(order)


def end_as(status: int) -> None:
    """Exit with ``status``, or by the signal whose negative it is."""
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def main() -> None:
    address, *command = sys.argv[1:]
    if not is_known(command):
        os.execv(command[0], command)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda n, _: server.send(bytes([n])))
        ask(server, command)
        answer = server.recv(STATUS.size, socket.MSG_WAITALL)
    if len(answer) < STATUS.size:
        sys.exit("the fork server has ended")
    end_as(STATUS.unpack(answer)[0])


if __name__ == "__main__":
    main()
