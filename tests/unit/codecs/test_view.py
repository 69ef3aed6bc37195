import numpy as np
import pytest
import torch

from kvtier.codecs.view import KVView
from kvtier.errors import KVMismatch
from kvtier.spec import KVSpec

SPEC = KVSpec(2, 3, 8, "float32", block_tokens=4)


def test_one_tensor_and_its_layers_are_the_same_view() -> None:
    kv = torch.zeros(2, 2, 10, 3, 8)
    whole, layers = KVView.of(kv, SPEC), KVView.of([(layer[0], layer[1]) for layer in kv], SPEC)
    assert np.array_equal(whole.addresses, layers.addresses)
    assert np.array_equal(whole.strides, layers.strides)
    assert (whole.tokens, whole.dtype, whole.writable) == (10, "float32", True)


def test_one_latent_tensor_and_its_layers_are_the_same_view() -> None:
    spec, kv = KVSpec(2, 1, 24, "float32", mla=True), np.zeros((2, 5, 48), np.float32)[:, :, ::2]
    whole, layers = KVView.of(kv, spec), KVView.of(list(kv), spec)
    assert np.array_equal(whole.addresses, layers.addresses)
    assert np.array_equal(whole.strides[..., [0, 2]], layers.strides[..., [0, 2]])


def test_strides_are_bytes_and_may_be_negative() -> None:
    part = np.zeros((5, 3, 8), np.float32)
    view = KVView.of([(part[::-1], part.transpose(0, 1, 2))] * 2, SPEC)
    assert view.strides[0].tolist() == [[-96, 32, 4], [96, 32, 4]]
    assert view.addresses[0, 0] - view.addresses[0, 1] == 4 * 96


def test_bits_of_16_bit_elements_are_accepted() -> None:
    spec = KVSpec(1, 1, 4, "bfloat16")
    assert KVView.of(np.zeros((1, 2, 6, 1, 4), np.uint16), spec).dtype == "bfloat16"


def test_tensors_that_require_grad_and_tensors_without_tokens_are_views_too() -> None:
    assert KVView.of(torch.zeros(2, 2, 7, 3, 8, requires_grad=True), SPEC).tokens == 7
    assert KVView.of(torch.zeros(2, 2, 0, 3, 8), SPEC).tokens == 0
    assert KVView.of(np.zeros((2, 2, 0, 3, 8), np.float32), SPEC).tokens == 0


def test_overlapping_tensors_are_views_too() -> None:
    assert KVView.of(torch.zeros(1, 1, 1, 3, 8).expand(2, 2, 9, 3, 8), SPEC).strides[0, 0, 0] == 0


def test_read_only_arrays_can_be_saved_and_not_loaded_into() -> None:
    kv = np.zeros((2, 2, 6, 3, 8), np.float32)
    kv.flags.writeable = False
    view = KVView.of(kv, SPEC)
    with pytest.raises(KVMismatch, match="read-only"):
        view.require_writable()


@pytest.mark.parametrize(
    ("kv", "says"),
    [
        (torch.zeros(2, 2, 6, 3), "pass \\[layers, 2, tokens"),
        (torch.zeros(2, 2, 6, 4, 8), "the spec says"),
        (torch.zeros(3, 2, 6, 3, 8), "the spec says"),
        (torch.zeros(2, 2, 6, 3, 8, dtype=torch.float64), "float64"),
        (torch.zeros(2, 2, 6, 3, 8, device="meta"), "meta"),
        (np.zeros((2, 2, 6, 3, 8), ">f4"), "the spec says float32"),
        ([(torch.zeros(6, 3, 8), torch.zeros(6, 3, 8))], "1 layers"),
        ([(torch.zeros(6, 3, 8),)] * 2, "1 parts"),
        ([(torch.zeros(6, 3, 8), torch.zeros(5, 3, 8))] * 2, "\\[5, 6\\] tokens"),
        ([(torch.zeros(6, 3, 8), torch.zeros(6, 3, 7))] * 2, "the spec says"),
    ],
)
def test_what_does_not_fit_is_refused(kv: object, says: str) -> None:
    with pytest.raises(KVMismatch, match=says):
        KVView.of(kv, SPEC)


def test_k_and_v_of_different_width_are_not_one_tensor() -> None:
    with pytest.raises(KVMismatch, match="one \\(k, v\\) pair"):
        KVView.of(torch.zeros(2, 2, 6, 3, 8), KVSpec(2, 3, 8, "float32", v_head_dim=4))


def test_memory_that_is_not_the_values_is_refused():
    spec = KVSpec(1, 1, 4, "float32")
    real = torch.zeros(1, 2, 64, 1, 4)
    for lazy in (torch.complex(real, real).conj().imag, real.to_sparse()):
        with pytest.raises(KVMismatch, match="resolve_neg"):
            KVView.of(lazy, spec)


def test_elements_that_share_memory_cannot_be_loaded_into():
    spec = KVSpec(1, 1, 4, "float32")
    view = KVView.of(torch.zeros(1, 1, 1, 1, 1).expand(1, 2, 64, 1, 4), spec)
    with pytest.raises(KVMismatch):
        view.require_writable()


@pytest.mark.parametrize("kv", [None, 5, object(), [None], [(None, None)]])
def test_what_is_no_kv_is_said_to_be_none(kv):
    with pytest.raises(KVMismatch):
        KVView.of(kv, KVSpec(1, 1, 4, "float32"))
