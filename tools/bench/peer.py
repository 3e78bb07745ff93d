"""The classes of a script with torch_bert.py's model, for those that train it otherwise than it does itself."""

import importlib.util
import sys


def load(path):
    # The script runs its own main() when imported; --help stops it before anything is computed.
    argv, sys.argv = sys.argv, [path, "--help"]
    spec = importlib.util.spec_from_file_location("torch_peer", path)
    module = importlib.util.module_from_spec(spec)
    try:
        sys.stdout, stdout = open("/dev/null", "w"), sys.stdout
        spec.loader.exec_module(module)
    except SystemExit:
        pass
    finally:
        sys.stdout, sys.argv = stdout, argv
    return module
