"""One rank: join the process group, then run the functions the parent names until it says stop.

Started as `python -m tests.harness.worker FD`, FD being this end of the socket to the parent.
"""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

from tests.harness.backends import Backend, make_backend
from tests.harness.lifeline import die_with_parent
from tests.harness.protocol import Call, Failure, Ready, Success, decode, encode, resolve


def main(fd: int) -> NoReturn:
    """Serve the parent at the other end of `fd`."""
    die_with_parent()
    os.set_inheritable(fd, False)  # a copy in a child of ours would hide our death from the parent
    connection = Connection(fd)
    try:
        _print_stack_when_asked()
        backend = make_backend(os.environ["HYPER_PARALLEL_PLATFORM"])
        backend.join()
        _print_stack_when_asked()  # again, in case the framework has taken the signal
        connection.send_bytes(encode(Ready()))
    except BaseException as error:
        connection.send_bytes(encode(Failure.of(error)))
        _leave()
    while True:
        try:
            call = decode(connection.recv_bytes())
        except EOFError:  # the parent is gone
            _leave()
        assert isinstance(call, Call), call
        connection.send_bytes(_answer(call, backend))


def _print_stack_when_asked() -> None:
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _answer(call: Call, backend: Backend) -> bytes:
    try:
        function = resolve(call)
        # A copy of the context, so that no test leaves a ContextVar set for the next one.
        value = contextvars.copy_context().run(function, *call.args, **call.kwargs)
        backend.settle()
        return encode(Success(value))
    except BaseException as error:
        answer = encode(Failure.of(error))
        with contextlib.suppress(Exception):
            backend.recover()
        return answer


def _leave() -> NoReturn:
    """End at once: tearing a process group down waits for the other ranks, and nothing here needs it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
