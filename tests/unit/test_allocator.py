"""The variables that make TensorFlow use its pool, beside the user's settings."""

import mmap
import os

import pytest

from keras_hvd.backends.tensorflow import allocator
from keras_hvd.job import settings

POOL = {"TF_CPU_ALLOCATOR_USE_BFC": "true"}
GIB = 1 << 30


@pytest.fixture
def memory(monkeypatch):
    """Makes this a machine of `size` bytes; a small one at first."""

    def set_to(size: int) -> None:
        pages = size // mmap.PAGESIZE
        monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": pages}.__getitem__)

    set_to(16 * GIB)
    return set_to


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"KERAS_HVD_ALLOCATOR": ""},
        {"KERAS_HVD_ALLOCATOR": "pool"},
        {"LD_PRELOAD": "/usr/lib/libfaketime.so.1"},
        {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=4096"},
        {"MALLOC_ARENA_MAX": ""},
        {"KERAS_HVD_ALLOCATOR": "pool", "MALLOC_ARENA_MAX": "1"},
        {"KERAS_HVD_ALLOCATOR": "pool", "TF_CPU_ALLOCATOR_USE_BFC": "false"},
    ],
)
def test_the_pool_is_the_default_and_what_pool_means(memory, environment):
    assert allocator.variables(environment) == POOL


@pytest.mark.parametrize(
    "environment",
    [
        {"KERAS_HVD_ALLOCATOR": "unchanged"},
        {"KERAS_HVD_ALLOCATOR": "unchanged", "TF_CPU_ALLOCATOR_USE_BFC": "true"},
        {"TF_CPU_ALLOCATOR_USE_BFC": "false"},
        {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"},
        {"MALLOC_ARENA_MAX": "1"},
        {"MALLOC_MMAP_MAX_": "0"},
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        {"LD_PRELOAD": "/usr/lib/libfaketime.so.1:/usr/lib/libtcmalloc_minimal.so.4"},
        {"LD_PRELOAD": "libjemalloc.so.2"},
        {"LD_PRELOAD": "/opt/libmimalloc.so"},
    ],
)
def test_what_users_have_chosen_themselves_stays(memory, environment):
    assert allocator.variables(environment) == {}


def test_the_pool_may_have_all_that_a_large_machine_has(memory):
    """TensorFlow's own limit is 64 GiB for each process."""
    memory(64 * GIB)
    assert allocator.variables({}) == POOL
    memory(512 * GIB)
    limit = {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(512 << 10)}
    assert allocator.variables({}) == {**POOL, **limit}
    assert allocator.variables({"TF_CPU_BFC_MEM_LIMIT_IN_MB": "100"}) == POOL


def test_a_malformed_choice_is_an_error():
    with pytest.raises(ValueError, match="be pool or unchanged, got 'jemalloc'"):
        settings.allocator({"KERAS_HVD_ALLOCATOR": "jemalloc"})
