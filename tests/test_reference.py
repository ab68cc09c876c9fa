"""The reference is right: by hand, against torch's attention on each sequence, and by gradcheck."""

import math

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from jfa.reference import attention  # noqa: E402

NAN = float("nan")
# (q lengths, kv lengths): empty ones first, in the middle and last, more and fewer keys than queries.
LENGTHS = ([0, 5, 3, 4, 6, 0, 2], [4, 0, 7, 4, 2, 0, 1])
MASKS = {
    "full": (-1, -1),
    "causal": (-1, 0),
    "diagonal": (0, 0),
    "left 2": (2, 0),
    "both sides": (1, 2),
    "right only": (-1, 1),
    "left only": (1, -1),
}


def offsets(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def tensors(*shapes, dtype=torch.float64, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_(grad) for shape in shapes]


def sees(q_len, kv_len, left, right):
    """The mask, from the definition, one pair at a time."""
    mask = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for i in range(q_len):
        for j in range(kv_len):
            distance = j - (i + kv_len - q_len)
            mask[i, j] = (left < 0 or distance >= -left) and (right < 0 or distance <= right)
    return mask


def per_sequence_sdpa(q, k, v, q_lens, kv_lens, left, right, scale=None):
    """torch's attention on each sequence alone; rows that see nothing are cut out before and zero after."""
    outs = []
    queries = q.split(q_lens) if q_lens is not None else [q] * len(kv_lens)
    for query, key, value in zip(queries, k.split(kv_lens), v.split(kv_lens), strict=True):
        group = q.shape[1] // k.shape[1]
        mask = sees(len(query), len(key), left, right)
        rows = mask.any(1)
        out = torch.zeros_like(query)
        if rows.any():
            h_first = [x.transpose(0, 1) for x in (query[rows], *(t.repeat_interleave(group, 1) for t in (key, value)))]
            found = F.scaled_dot_product_attention(*h_first, attn_mask=mask[rows], scale=scale)
            out = out.index_put((rows.nonzero()[:, 0],), found.transpose(0, 1))
        outs.append(out)
    return torch.cat(outs) if q_lens is not None else torch.stack(outs)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("broadcast", [False, True])
def test_same_as_torch_on_each_sequence(mask, heads, broadcast):
    q_lens, kv_lens = LENGTHS
    q, k, v = tensors((4 if broadcast else sum(q_lens), heads[0], 8), *2 * [(sum(kv_lens), heads[1], 8)])
    q_offsets = None if broadcast else offsets(q_lens, torch.int64)
    left, right = MASKS[mask]
    out, _ = attention(q, k, v, offsets(kv_lens), q_offsets, window_left=left, window_right=right)
    expected = per_sequence_sdpa(q, k, v, None if broadcast else q_lens, kv_lens, left, right)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    (grad,) = tensors(out.shape, seed=1, grad=False)
    actual = torch.autograd.grad(out, (q, k, v), grad)
    for found, wanted in zip(actual, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_two_keys_by_hand(dtype):
    q = torch.tensor([[[2.0]]])
    k = torch.tensor([[[0.0]], [[math.log(3.0)]], [[9.0]]])
    v = torch.tensor([[[10.0]], [[20.0]], [[70.0]]])
    ends = torch.tensor([0, 2, 3], dtype=dtype)
    out, lse = attention(q, k, v, ends, scale=0.5)
    # Weights 1/4 and 3/4 on the first sequence's values; the only key of the second has weight 1.
    torch.testing.assert_close(out, torch.tensor([[[[17.5]]], [[[70.0]]]]))
    torch.testing.assert_close(lse, torch.tensor([[math.log(4.0), 9.0]]))


def test_causal_aligns_the_ends():
    q, v = torch.zeros(3, 1, 2), torch.arange(10.0).view(5, 1, 2)
    k = torch.zeros(5, 1, 2)
    out, lse = attention(q, k, v, offsets([5]), offsets([3]), window_right=0)
    # Three queries against five keys: the first sees three of them, the last all.
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([2.0, 3.0, 4.0]))
    torch.testing.assert_close(lse[0].exp(), torch.tensor([3.0, 4.0, 5.0]))
    out, lse = attention(torch.zeros(5, 1, 2), k[:2], v[:2], offsets([2]), offsets([5]), window_right=0)
    # Five queries against two keys: the first three see nothing.
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))
    assert lse[0, :3].tolist() == [-torch.inf] * 3


@pytest.mark.parametrize("mask", MASKS)
def test_lse_is_the_log_of_the_sum(mask):
    q_lens, kv_lens = LENGTHS
    q, k, v = tensors((sum(q_lens), 2, 4), *2 * [(sum(kv_lens), 1, 4)])
    left, right = MASKS[mask]
    _, lse = attention(q, k, v, offsets(kv_lens), offsets(q_lens), window_left=left, window_right=right, scale=0.3)
    assert lse.dtype == torch.float64 and lse.shape == (2, sum(q_lens))
    row = 0
    for query, key in zip(q.split(q_lens), k.split(kv_lens), strict=True):
        seen = sees(len(query), len(key), left, right)
        for i in range(len(query)):
            for head in range(2):
                total = sum(math.exp(0.3 * (query[i, head] @ key[j, 0]).item()) for j in range(len(key)) if seen[i, j])
                assert lse[head, row].item() == pytest.approx(math.log(total) if total else -math.inf, abs=1e-12)
            row += 1


def test_rows_that_see_nothing_are_zero_in_both_directions():
    q_lens, kv_lens = [4, 3], [0, 1]
    q, k, v = tensors((7, 2, 4), (1, 2, 4), (1, 2, 4))
    out, lse = attention(q, k, v, offsets(kv_lens), offsets(q_lens), window_right=0)
    blind = slice(0, 6)
    assert (out[blind] == 0).all() and (lse[:, blind] == -torch.inf).all()
    dq, dk, dv = torch.autograd.grad((out * 3).sum(), (q, k, v))
    assert (dq[blind] == 0).all() and dk.isfinite().all()
    torch.testing.assert_close(dv, torch.full_like(dv, 3.0))


def test_lse_has_gradients_and_blind_rows_none():
    q, k, v = tensors((5, 1, 4), (2, 1, 4), (2, 1, 4))
    _, lse = attention(q, k, v, offsets([2]), offsets([5]), window_right=0)
    dq, dk = torch.autograd.grad(lse[:, 3:].sum(), (q, k), retain_graph=True)
    torch.testing.assert_close(dq[3], k[0] / 2)
    everything = torch.autograd.grad(lse[lse.isfinite()].sum(), (q, k))
    assert torch.equal(everything[0], dq) and torch.equal(everything[1], dk)


@pytest.mark.parametrize("filler", [7.0, NAN, float("inf")])
@pytest.mark.parametrize("broadcast", [False, True])
def test_tokens_past_the_end_neither_give_nor_take(filler, broadcast):
    q_lens, kv_lens = [3, 0, 2], [4, 2, 0]
    q, k, v = tensors((5, 2, 4), (6, 2, 4), (6, 2, 4), grad=False)
    (padded_k, padded_v) = (torch.cat([x, torch.full((3, 2, 4), filler, dtype=x.dtype)]) for x in (k, v))
    padded_q = q if broadcast else torch.cat([q, torch.full((4, 2, 4), filler, dtype=q.dtype)])
    q_offsets = None if broadcast else offsets(q_lens)
    results = []
    for three in ((q, k, v), (padded_q, padded_k, padded_v)):
        three = [x.clone().requires_grad_() for x in three]
        out, lse = attention(*three, offsets(kv_lens), q_offsets)
        results.append((out, lse, *torch.autograd.grad(out.sin().sum(), three)))
    (out, lse, *grads), (padded_out, padded_lse, *padded_grads) = results
    rows = len(out)
    assert torch.equal(padded_out[:rows], out) and (padded_out[rows:] == 0).all()
    assert torch.equal(padded_lse[:, : lse.shape[1]], lse) and (padded_lse[:, lse.shape[1] :] == -torch.inf).all()
    for grad, padded in zip(grads, padded_grads, strict=True):
        assert torch.equal(padded[: len(grad)], grad) and (padded[len(grad) :] == 0).all()


@pytest.mark.parametrize("broadcast", [False, True])
def test_batches_without_keys_or_sequences(broadcast):
    for batch in (0, 3):
        q, k, v = tensors((4, 2, 8), (0, 1, 8), (2, 1, 8))
        v = v[:0]
        ends = torch.zeros(batch + 1, dtype=torch.int32)
        out, lse = attention(q, k, v, ends, None if broadcast else ends)
        assert out.shape == ((batch, 4, 2, 8) if broadcast else (4, 2, 8)) and (out == 0).all()
        assert lse.shape == (2, batch * 4 if broadcast else 4) and (lse == -torch.inf).all()
        dq, dk = torch.autograd.grad(out.sum(), (q, k))
        assert (dq == 0).all() and dk.shape == k.shape


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("mask", ["full", "causal", "both sides"])
def test_gradcheck(mask, broadcast):
    q_lens, kv_lens = [2, 3, 0, 1], [3, 1, 2, 0]
    q, k, v = tensors((2 if broadcast else sum(q_lens), 2, 3), *2 * [(sum(kv_lens), 1, 3)])
    left, right = MASKS[mask]

    def out_of(q, k, v):
        q_offsets = None if broadcast else offsets(q_lens)
        return attention(q, k, v, offsets(kv_lens), q_offsets, window_left=left, window_right=right)[0]

    assert torch.autograd.gradcheck(out_of, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    q, k, v = tensors((9, 4, 16), (12, 2, 16), (12, 2, 16), dtype=dtype)
    ends = offsets([3, 0, 9]), offsets([4, 2, 3])
    out, lse = attention(q, k, v, *ends)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    exact, exact_lse = attention(q, k, v, *ends, dtype=torch.float64)
    assert (exact.dtype, exact_lse.dtype) == (torch.float64, torch.float64)
    steps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=steps, atol=steps)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=steps, atol=steps)
    upcast, _ = attention(q, k, v, *ends, dtype=torch.float32)
    assert upcast.dtype == dtype
    assert (upcast.double() - exact).norm() <= (out.double() - exact).norm() + 1e-12


def test_strided_views_give_the_same():
    packed = tensors((10, 3, 2, 8), grad=False)[0]
    q, k, v = packed[2:].unbind(1)
    ends = offsets([3, 5])
    expected, _ = attention(q.contiguous(), k.contiguous(), v.contiguous(), ends, ends)
    out, _ = attention(q, k, v, ends, ends)
    assert torch.equal(out, expected)
