"""store, copy and transfer, for the implementations that run on the CPU."""

import pytest
import torch

import kernels

IMPLEMENTATIONS = ["reference", "cpu"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return kernels.load(request.param)


def pool(num_slots: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_slots)
    return torch.randn(3, 2, num_slots, 2, 8, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_store_writes_the_named_slots_only(implementation, dtype):
    kv, slots = pool(20, dtype), torch.tensor([7, 0, -1, 19, -1])
    before, new = kv.clone(), torch.randn(2, 5, 2, 8).to(dtype)
    implementation.store_kv(new[0], new[1], kv[1, 0], kv[1, 1], slots)
    named = slots[slots >= 0]
    assert torch.equal(kv[1][:, named], new[:, slots >= 0])
    kv[1][:, named] = before[1][:, named]
    assert torch.equal(kv, before)


def test_copies_run_in_order_over_all_layers(implementation):
    kv = pool(40)
    before = kv.clone()
    implementation.copy_slots(kv, torch.tensor([[0, 10, 4], [11, 20, 2], [30, 0, 3]]))
    expected = before.clone()
    expected[:, :, 10:14] = before[:, :, 0:4]
    expected[:, :, 20:22] = before[:, :, 1:3]  # what the first copy put at 11
    expected[:, :, 0:3] = before[:, :, 30:33]
    assert torch.equal(kv, expected)


def test_transfers_go_between_pools_of_any_size(implementation):
    device, host = pool(40), pool(12)
    source, before = device.clone(), host.clone()
    implementation.transfer_slots(device, host, torch.tensor([[33, 0, 7], [2, 9, 3]]))
    assert torch.equal(device, source)
    before[:, :, 0:7], before[:, :, 9:12] = source[:, :, 33:40], source[:, :, 2:5]
    assert torch.equal(host, before)


def test_no_ranges_change_nothing(implementation):
    kv = pool(5)
    before = kv.clone()
    implementation.copy_slots(kv, torch.empty(0, 3, dtype=torch.int64))
    assert torch.equal(kv, before)


@pytest.mark.parametrize("ranges", [[38, 0, 4], [0, 38, 4], [-1, 3, 1]])
def test_cpu_copies_stay_inside_the_pool(ranges):
    with pytest.raises((IndexError, RuntimeError)):
        kernels.load("cpu").copy_slots(pool(40), torch.tensor([ranges]))


def test_cpu_store_refuses_slots_outside_the_pool():
    kv, new = pool(4), torch.zeros(1, 2, 8)
    for slot in (-2, 4):
        with pytest.raises((IndexError, RuntimeError)):
            kernels.load("cpu").store_kv(new, new, kv[0, 0], kv[0, 1], torch.tensor([slot]))
