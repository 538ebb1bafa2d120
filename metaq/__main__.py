"""Run the command line with `python -m metaq`."""

import gc
import signal

# Loading the commands takes a moment. Ctrl-C ends the process in it, as it ends any
# program, and not with a traceback; who starts us with the signal ignored is obeyed.
_handles_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _handles_interrupts:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# What they are made of stays: to look for garbage among it, now and at the end, is a
# third of the processor time of a short command.
gc.disable()

from metaq.cli.main import main  # noqa: E402  # see above

gc.freeze()
gc.enable()

if _handles_interrupts:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if __name__ == "__main__":
    main()
