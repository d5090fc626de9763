"""No test reaches the network: Python's sockets go to this machine only, and no name is looked up.

Python imports this file at its start where its folder is in PYTHONPATH, as tests/conftest.py sets
it for all processes that tests start; it imports nothing of this project. What opens sockets
without Python (gloo, a shell's tools) is not seen, nor is the look-up of a name that is given to
`connect` itself.
"""

import ipaddress
import socket
import sys

RULE = "tests reach no network (tests/offline): "
LOOK_UPS = {
    f"socket.{name}" for name in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getnameinfo")
}


def is_own(host):
    """Whether an address or a name is this machine's, without looking it up elsewhere."""
    if isinstance(host, (bytes, bytearray)):
        host = host.decode()
    if not host or host.lower() in ("localhost", socket.gethostname().lower()):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as free:
            free.bind((host, 0))  # which a machine can do at its own addresses only
    except OSError:
        return False
    return True


def watch(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        used, address = arguments[:2]
        inet = used.family in (socket.AF_INET, socket.AF_INET6)
        if inet and address is not None and not is_own(address[0]):
            raise OSError(f"{RULE}connection to {address[0]!r}, port {address[1]}, refused")
    elif event in LOOK_UPS:
        name = arguments[0][0] if event == "socket.getnameinfo" else arguments[0]
        if not is_own(name):
            raise OSError(f"{RULE}look-up of {name!r} refused")


def next_sitecustomize():
    """Runs the one that this file stands before, if the environment has one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    folder = __file__.rpartition("/")[0]
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != folder])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


sys.addaudithook(watch)
if __name__ == "sitecustomize":
    next_sitecustomize()
