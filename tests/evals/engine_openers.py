"""Engines that come to nothing in a process of their own; without torch, so that they start at once."""

import os
import sys

from mergelab.errors import MachineError


def open_refused(setup):
    raise MachineError("the engine cannot be started (no such architecture)")


def open_faulty(setup):
    raise ZeroDivisionError("a bug")


def open_dying(setup):
    """Takes its whole process along when it is asked, as a native library does."""

    class Dying:
        def generate(self, *_):
            sys.stdout.write("Segmentation fault\n")
            sys.stdout.flush()
            os._exit(139)

        def close(self):
            pass

    return Dying()
