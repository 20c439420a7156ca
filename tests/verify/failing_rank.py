"""A rank that fails before its first step, for the tests that start it instead of `tapas.verify.rank`.

TAPAS_TEST_FAILURE says which one and how: "RANK:raise", "RANK:kill" or "RANK:sleep".
"""

import os
import signal
import sys
import threading

from tapas.verify import rank


def fail(*_: object) -> None:
    match os.environ["TAPAS_TEST_FAILURE"].split(":")[1]:
        case "raise":
            raise RuntimeError("this rank was told to fail")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            threading.Event().wait()


if __name__ == "__main__":
    if os.environ["TAPAS_TEST_FAILURE"].split(":")[0] == sys.argv[2]:
        rank.take_steps = fail
    rank.run_and_exit()
