"""No test reaches the network, nor does a process that it starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.helpers.commands import ROOT, finish, start

pytestmark = pytest.mark.tools

RULE = r"tests reach no network \(tests/offline\): "
AWAY = "192.0.2.1"  # an address that RFC 5737 keeps for documentation


def datagram(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", address)


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        (lambda: socket.create_connection((AWAY, 80), 1), f"look-up of '{AWAY}'"),
        (lambda: socket.socket().connect((AWAY, 80)), f"connection to '{AWAY}', port 80,"),
        (lambda: socket.socket().connect_ex((AWAY, 80)), f"connection to '{AWAY}', port 80,"),
        (lambda: datagram((AWAY, 53)), f"connection to '{AWAY}', port 53,"),
        (lambda: socket.getaddrinfo("example.com", 80), "look-up of 'example.com'"),
        (lambda: socket.getaddrinfo(b"example.com", 80), "look-up of b'example.com'"),
        (lambda: socket.gethostbyname("example.com"), "look-up of 'example.com'"),
        (lambda: socket.gethostbyname_ex("example.com"), "look-up of 'example.com'"),
        (lambda: socket.gethostbyaddr(AWAY), f"look-up of '{AWAY}'"),
        (lambda: socket.getnameinfo((AWAY, 80), 0), f"look-up of '{AWAY}'"),
    ],
)
def test_what_would_leave_this_machine_is_refused(call, refused):
    with pytest.raises(OSError, match=RULE + refused):
        call()


CHILD = """
import multiprocessing, socket, subprocess, sys

def attempt():
    try:
        socket.create_connection(("example.com", 443), 1)
    except OSError as error:
        print(error, flush=True)

if __name__ == "__main__":
    attempt()
    if sys.argv[1:]:
        subprocess.run([sys.executable, __file__])
        child = multiprocessing.get_context("spawn").Process(target=attempt)
        child.start()
        child.join()
"""


def test_a_process_of_a_test_and_its_own_are_refused(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    code, out, err = finish(start(str(tmp_path / "child.py"), "all", fresh=True))
    assert code == 0, err
    line = "tests reach no network (tests/offline): look-up of 'example.com' refused"
    assert out.splitlines() == [line] * 3


def test_this_machine_is_reached_under_all_its_names(tmp_path):
    names = ["127.0.0.1", "127.1.2.3", "localhost", socket.gethostname()]
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        for name in names:
            socket.create_connection((name, port), 10).close()
            own = socket.gethostbyname(name)
            with socket.socket() as client:
                client.connect((own, port))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "socket"))
    datagram(("127.0.0.1", port))
    socket.getaddrinfo(None, 0)
    socket.getfqdn()


def test_the_environments_own_sitecustomize_is_run_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the own one')")
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", "import socket; socket.getaddrinfo('example.com', 80)"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "the own one\n"
    assert "OSError: tests reach no network" in done.stderr
