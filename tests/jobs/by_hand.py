"""Starts ranks as scripts do that set RANK and the like themselves, and takes none down.

by_hand.py RANKS SCRIPT [ARGUMENT...]

What they print to stderr is passed on line by line: ranks that end together write words in turns.
"""

import os
import socket
import subprocess
import sys
import threading
from typing import IO


def pass_on(lines: IO[str]) -> None:
    for line in lines:
        sys.stderr.write(line)
        sys.stderr.flush()


def main(ranks: int, command: list[str]) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | meeting | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for rank in range(ranks)
    ]
    readers = [threading.Thread(target=pass_on, args=(process.stderr,)) for process in processes]
    for reader in readers:
        reader.start()
    codes = [process.wait() for process in processes]
    for reader in readers:
        reader.join()
    print(f"exit codes: {codes}", flush=True)
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
