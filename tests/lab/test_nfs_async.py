"""What a power cut of the NFS server does where the server promises more than it keeps."""

from __future__ import annotations

from labkit.peers import guest_peer
from labkit.systems import LabPool, Nfs


def test_async_export_is_noticed(lab_pool: LabPool) -> None:
    """On an export with ``async``, which acknowledges what is not on the disk, a cut loses objects.

    So the power cuts above are real ones, and such an export is no place for a store.
    """
    careless = lab_pool.get(Nfs, VERSION="4.2", SYNC="async")
    program = "backend_peer.py"
    keys = [f"kept/{n:02d}" for n in range(50)]
    with guest_peer(careless, "c1", program) as one, guest_peer(careless, "c2", program) as two:
        for peer in (one, two):
            peer.ask("open", url=f"{careless.mount}/careless", options={})
        assert one.ask("race", keys=keys, mine="x")["won"] == keys
        careless.tell("cut-server")
        careless.tell("start-server")
        assert two.ask("list", prefix="kept/") != keys
