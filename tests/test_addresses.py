"""Which addresses are public: our own table beside the one of Python, and the only way to download."""

from __future__ import annotations

import ast
import ipaddress
import time
from pathlib import Path

import pytest

from diptych.addresses import REGISTRY, RESERVED_4, RESERVED_6, UNICAST_6, download, is_public
from diptych.errors import AddressError

PACKAGE = Path(__file__).parent.parent / "src" / "diptych"


@pytest.mark.parametrize(
    "address",
    [
        "192.0.0.8", "192.0.0.9", "192.0.0.10", "192.0.0.100", "192.0.0.171", "192.0.0.255", "192.31.196.1",
        "192.52.193.1", "192.88.99.1", "192.88.99.2", "192.175.48.1", "3fff::1", "3fff:fff::1", "5f00::1", "4000::1",
        "100::1", "100:0:0:1::1", "2001:1::1", "2001:30::1", "2620:4f:8000::1", "3ffe::1", "64:ff9b:1::1",
        "64:ff9b:1:ffff::8.8.8.8", "::ffff:192.88.99.1", "::ffff:192.0.0.9", "64:ff9b::192.0.0.10",
        "64:ff9b::192.88.99.1", "2002:c058:6301::1", "::ffff:0:8.8.8.8", "::8.8.8.8", "8000::1", "fe00::1",
        "2001:db8::5efe:8.8.8.8", "3fff::200:5efe:1.1.1.1", "2001:0:7f00:1:0:5efe:3f57:fefe",
        "2606:4700::5efe:10.0.0.1",
    ],
)  # fmt: skip
def test_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "172.15.255.255", "172.32.0.0",
        "191.255.255.255", "192.0.1.0", "192.0.3.0", "192.88.98.255", "192.88.100.0", "198.17.255.255", "198.20.0.0",
        "223.255.255.255", "2000::1", "2001:200::1", "2001:db9::1", "2400:cb00::1", "2a00:1450::1", "3000::1",
        "3fff:1000::1", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1", "2606:4700::5efe:1.1.1.1",
    ],
)  # fmt: skip
def test_their_neighbours_are_public(address: str) -> None:
    assert is_public(address)


def edges(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> list[str]:
    middle = network.network_address + network.num_addresses // 2
    return [str(one) for one in (network[0], middle, network[-1])]


@pytest.mark.parametrize("network", [*RESERVED_4, *RESERVED_6], ids=str)
def test_the_table_is_what_decides(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> None:
    assert not any(is_public(address) for address in edges(network))
    if isinstance(network, ipaddress.IPv6Network):
        assert network.subnet_of(UNICAST_6)
    else:
        mapped = [f"::ffff:{address}" for address in edges(network)]
        assert not any(map(is_public, [*mapped, *(f"64:ff9b::{address}" for address in edges(network))]))


def test_whatever_python_refuses_is_refused() -> None:
    """At every edge of both tables, and of a grid over all addresses: ours is never wider than Python's."""
    v4 = [ipaddress.IPv4Address(n << 16 | low) for n in range(1 << 16) for low in (0, 0xFFFF)][::7]
    v6 = [ipaddress.IPv6Address(n << 112 | low) for n in range(1 << 16) for low in (0, 1, 1 << 100)][::3]
    beside = [network[-1] + 1 for network in (*RESERVED_4[:-1], *RESERVED_6)]
    beside += [network[0] - 1 for network in (*RESERVED_4[1:], *RESERVED_6)]
    assert len(v4) + len(v6) + len(beside) > 80_000
    for ip in (*v4, *v6, *beside):
        inner = isinstance(ip, ipaddress.IPv6Address) and (ip.ipv4_mapped or ip.sixtofour)
        if not ip.is_global or ip.is_multicast or ip.is_reserved or ip.is_unspecified:
            assert inner or not is_public(str(ip)), ip


REGISTERED = """
    0.0.0.0/8 0.0.0.0/32 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.0.0/29
    192.0.0.8/32 192.0.0.9/32 192.0.0.10/32 192.0.0.170/32 192.0.0.171/32 192.0.2.0/24 192.31.196.0/24 192.52.193.0/24
    192.88.99.0/24 192.88.99.2/32 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24
    240.0.0.0/4 255.255.255.255/32
    ::1/128 ::/128 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/23 2001::/32 2001:1::1/128 2001:1::2/128 2001:1::3/128
    2001:2::/48 2001:3::/32 2001:4:112::/48 2001:10::/28 2001:20::/28 2001:30::/28 2001:db8::/32 2620:4f:8000::/48
    3fff::/20 5f00::/16 fc00::/7 fe80::/10
"""
"""All rows of both registries, but for those that hold an IPv4 address (mapped, NAT64 and 6to4), which decides."""


@pytest.mark.parametrize("network", REGISTERED.split())
def test_every_registered_network_is_refused(network: str) -> None:
    """The registries of IANA that are newest on the date of REGISTRY, also where they say 'globally reachable'."""
    assert REGISTRY == "2025-10-09", "compare the rows above with the registries of that date"
    assert not any(is_public(address) for address in edges(ipaddress.ip_network(network)))


@pytest.mark.parametrize(
    "address",
    ["http://a b/", "http://[", "http://host:x/", "http://127.0.0.1:1/x.png", "http://192.88.99.1/x.png"],
)
def test_a_refused_address_is_one_sentence(address: str) -> None:
    with pytest.raises(AddressError) as told:
        download(address, 100, time.monotonic() + 5)
    assert str(told.value).count("\n") == 0


FETCHING = {"http.client", "urllib.request", "requests", "httpx", "urllib3", "aiohttp", "ftplib"}


def test_nothing_else_downloads() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if FETCHING & set(names):
                found[str(path.relative_to(PACKAGE))] = names
    asks = found.pop("encoders/pretrained.py")  # which proxies are set; the hub's own library downloads
    assert asks == ["urllib.request", "urllib.request.getproxies"]
    assert list(found) == ["addresses.py"]
