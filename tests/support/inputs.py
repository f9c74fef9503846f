"""The arrays of a case: operands rounded to its dtype, and random cotangents."""

from typing import NamedTuple

import numpy as np


class Inputs(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    dout: np.ndarray
    dlogsumexp: np.ndarray  # float32

    @property
    def operands(self):
        return self.query, self.key, self.value


def make_inputs(case, seed=None) -> Inputs:
    """N(0, 1) values, changed by the case's kind of inputs."""
    rng = np.random.default_rng(case.seed if seed is None else seed)
    arrays = {
        name: rng.standard_normal(case.shape(name))
        for name in ("query", "key", "value", "dout")
    }
    KINDS[case.inputs](arrays)
    dlogsumexp = rng.standard_normal((*case.batch, case.num_heads, case.q_len))
    return Inputs(
        **{name: x.astype(case.np_dtype) for name, x in arrays.items()},
        dlogsumexp=dlogsumexp.astype(np.float32),
    )


def _equal_keys(arrays):
    arrays["key"][...] = arrays["key"][..., :1, :, :]


def _zero_query(arrays):
    arrays["query"][...] = 0


def _identity(arrays):
    """Key j is the unit vector j, value j is j in every column: easy to read."""
    kv_len, _, head_dim = arrays["key"].shape[-3:]
    unit = np.eye(head_dim)[np.arange(kv_len) % head_dim]
    arrays["key"][...] = unit[:, None, :]
    arrays["value"][...] = (np.arange(kv_len) % 16)[:, None, None]


def _one_large_key(arrays):
    """One key, in the last block, whose scores dwarf the others."""
    arrays["key"][..., -2, :, :] *= 30


KINDS = {
    "normal": lambda arrays: None,
    "equal-keys": _equal_keys,
    "zero-query": _zero_query,
    "identity": _identity,
    "one-large-key": _one_large_key,
}
