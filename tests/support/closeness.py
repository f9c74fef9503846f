"""assert_close: a JAX result against expected values, by the ceiling of its kind."""

import numpy as np

from tests.support import compare, tolerances

KINDS = {
    "out": tolerances.OUT,
    "logsumexp": tolerances.LOGSUMEXP,
    "dquery": tolerances.GRADIENT,
    "dkey": tolerances.GRADIENT,
    "dvalue": tolerances.GRADIENT,
    "dbias": tolerances.DBIAS,
    "dsinks": tolerances.DBIAS,
    "dslopes": tolerances.DBIAS,
}


def assert_close(name, actual, expected, dtype, context=""):
    """`dtype`: of query, key and value; it sets the tolerance."""
    dtype = tolerances.DTYPES[dtype]
    kind = KINDS[name]
    actual = np.asarray(actual)
    if kind == tolerances.DBIAS:  # has bias' own dtype
        actual = actual.astype(dtype)
    compare.assert_matches(
        actual,
        np.asarray(expected).astype(np.float64),
        None,
        name=name,
        kind=kind,
        dtype=dtype,
        context=context,
    )
