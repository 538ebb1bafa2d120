"""Run the command line with `python -m metaq`."""

import signal

# Loading the commands takes a moment. Ctrl-C ends the process in it, as it ends any
# program, and not with a traceback; who starts us with the signal ignored is obeyed.
_handles_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _handles_interrupts:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from metaq.cli.main import main  # noqa: E402  # see above

if _handles_interrupts:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if __name__ == "__main__":
    main()
