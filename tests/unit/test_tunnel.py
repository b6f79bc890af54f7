"""A tunnel waits for the other host as long as the ranks wait for each other."""

import contextlib
import time

from keras_hvd.launch import tunnel
from keras_hvd.world import renewal
from keras_hvd.world.rendezvous import listener


def test_it_waits_for_a_host_as_long_as_it_was_told(monkeypatch, capfd):
    monkeypatch.setenv("KERAS_HVD_INIT_TIMEOUT_SECONDS", "0.5")
    monkeypatch.setenv("KERAS_HVD_SECRET", "only this test knows")
    with contextlib.closing(renewal.listen("a job of test_tunnel")):
        words = "listen", "a job of test_tunnel", "127.0.0.1", "node1@b", "true"
        assert tunnel.main(words) == 255
    _, err = capfd.readouterr()
    assert err == "khvdrun: node1@b: it has not connected for 0.5 s\n"


def test_the_other_end_waits_as_long(monkeypatch, capfd):
    monkeypatch.setenv("KERAS_HVD_INIT_TIMEOUT_SECONDS", "0.5")
    monkeypatch.setenv("KERAS_HVD_SECRET", "only this test knows")
    (free,) = listener.listen_at_free_ports(["127.0.0.1"])
    place = f"127.0.0.1:{free.getsockname()[1]}"
    free.close()
    since = time.monotonic()
    assert tunnel.main(("dial", place, "a name", "true")) == 255
    assert time.monotonic() - since < 20
    _, err = capfd.readouterr()
    assert f"khvdrun: cannot reach {place}: " in err
