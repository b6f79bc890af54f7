"""Network interfaces by name, against the output of the system's own tool."""

import json
import shutil
import subprocess

import pytest

from keras_hvd.exceptions import RendezvousError
from keras_hvd.world.rendezvous import network_interfaces


@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no ip command")
def test_finds_what_the_system_says():
    shown = subprocess.run(
        ["ip", "-json", "address"], check=True, capture_output=True, text=True
    )
    for interface in json.loads(shown.stdout):
        wanted = {
            address["local"]
            for address in interface.get("addr_info", [])
            if address["scope"] != "link"
        }
        if wanted:
            name = interface["ifname"]
            assert set(network_interfaces.addresses([name])) == wanted
            assert {network_interfaces.name_of(one) for one in wanted} == {name}


def test_takes_the_first_that_is_here():
    assert "127.0.0.1" in network_interfaces.addresses(["no0", "lo", "no1"])


def test_names_those_that_are_here():
    with pytest.raises(
        RendezvousError, match="no network interface 'no0' or 'no1'.*lo"
    ):
        network_interfaces.addresses(["no0", "no1"])


def test_a_host_is_reached_by_the_name_that_others_know(monkeypatch):
    """Of several addresses, also by one of IPv6, and never by one that is not its."""
    own = ["10.0.0.1", "10.0.1.1", "fd00::2"]
    monkeypatch.setattr(network_interfaces, "reachable", lambda names: own)
    for names, expected in {
        ("10.0.1.1",): "10.0.1.1",
        ("fd00:0::2",): "fd00::2",
        ("[fd00::2]",): "fd00::2",
        ("192.0.2.7", "10.0.1.1"): "10.0.1.1",
        ("192.0.2.7",): "10.0.0.1",
    }.items():
        assert network_interfaces.reached_as(names, []) == expected
