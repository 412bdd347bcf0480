"""Ray at this machine's own address, and nowhere else.

Ray replaces 127.0.0.1 by an address of the network, so that other machines can join, and all of its processes then
listen on every interface. With 127.0.0.1 left as it is, they listen on loopback alone.

    python -m mainstem.fleet.loopback start --head ...      Ray's own command line
"""

from __future__ import annotations


def stay_on_loopback() -> None:
    """Makes Ray leave 127.0.0.1 as it is, in this process."""
    from ray._private import services

    services.resolve_ip_for_localhost = lambda host: host


def listen_on_loopback() -> None:
    """Makes the replica of this process listen for calls of others on loopback, not on every interface."""
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", "127.0.0.1"))


if __name__ == "__main__":
    from ray.scripts.scripts import main

    stay_on_loopback()
    main()
