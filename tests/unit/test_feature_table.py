"""docs/features.md is what the tests say, and they say something of every cell."""

import pytest

from jax_flash_metal import config
from tests.support import feature_table
from tests.support.feature_table import FEATURES, IMPLEMENTATIONS, PASSES


def test_the_file_is_up_to_date():
    assert feature_table.FILE.read_text() == feature_table.text(), (
        "run `python -m tests.support.feature_table`"
    )


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_no_cell_is_empty(feature):
    for implementation in IMPLEMENTATIONS:
        for which in PASSES:
            assert feature_table.cell(feature, implementation, which)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
@pytest.mark.parametrize("backend", config.BACKENDS)
def test_the_kernels_are_tested_in_every_dtype(feature, backend):
    assert len(feature_table.dtypes(feature, backend)) == 3


def test_every_option_and_operand_has_a_row():
    names = " ".join(feature.name for feature in FEATURES)
    options = set(config.AttentionConfig.__dataclass_fields__) - {"implementation"}
    options |= set(config.OPTIONAL_OPERANDS)
    as_given = {
        "q_segment_ids": "segment_ids",
        "kv_segment_ids": "segment_ids",
        # made from the key and the shapes
        "dropout_batch_indices": "dropout_key",
        "dropout_head_indices": "dropout_key",
    }
    for option in options:
        assert f"`{as_given.get(option, option)}`" in names, option
