"""The program in a process of its own: `python -I -S _child.py FILE ARGUMENTS`, FILE being the native module.

The native half starts it to try a grammar within limits. It looks for no packages and runs no start-up code, so that it
takes a few milliseconds and no module of the working folder can take the place of this one.
"""

import importlib.machinery
import importlib.util
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    loader = importlib.machinery.ExtensionFileLoader("_native", sys.argv[1])
    spec = importlib.util.spec_from_loader("_native", loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    sys.exit(native.main(["moebius", *sys.argv[2:]]))
