"""Which devices of a supervisor are free."""

import random

from dynamo_lite.serve.devices import Devices


def test_names_are_handed_out_in_order_and_come_back():
    devices = Devices((0, "GPU-b", 2))
    first = devices.take(2)
    assert first is not None and first == ("0", "GPU-b")
    assert devices.environment(first) == {"CUDA_VISIBLE_DEVICES": "0,GPU-b"}
    assert devices.take(2) is None
    assert devices.free == 1
    devices.put_back(first)
    assert devices.take(3) == ("0", "GPU-b", "2")


def test_a_number_is_only_counted():
    devices = Devices(2)
    taken = devices.take(1)
    assert taken is not None and devices.environment(taken) == {}
    assert (devices.free, devices.take(2)) == (1, None)


def test_one_that_needs_none_sees_all_that_the_host_has():
    devices = Devices(("0",))
    assert devices.take(0) == ()
    assert devices.environment(()) == {}


def test_no_device_is_handed_out_twice_or_lost():
    rng = random.Random(5)
    devices = Devices(range(8))
    held: list[tuple[str, ...]] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            devices.put_back(held.pop(rng.randrange(len(held))))
        elif (taken := devices.take(rng.randrange(4))) is not None:
            held.append(taken)
        names = [name for taken in held for name in taken]
        assert len(set(names)) == len(names)
        assert devices.free == 8 - len(names)
