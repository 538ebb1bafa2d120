"""Run the command line with `python -m metaq`."""

import gc
import signal

# Loading the commands takes a moment. Until it is done, Ctrl-C ends the process without
# a traceback. If our parent started us with SIGINT ignored, it stays ignored.
_handles_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _handles_interrupts:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Freeze the objects made by the imports: scanning them for garbage, now and at exit,
# would take a third of the processor time of a short command.
gc.disable()

from metaq.cli.main import main  # noqa: E402  # see above

gc.freeze()
gc.enable()

if _handles_interrupts:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if __name__ == "__main__":
    main()
