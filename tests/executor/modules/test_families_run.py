"""What is predicted alone is refused by `run`, by the name of its type."""

import pytest

from executor.modules.decoder import DecoderModel
from ir.core.errors import PiperError
from ir.workload import config_from
from ir.workload.config.keys import FORMS
from tests.ir.workload.models import FAMILIES

CONFIGS = {name: row["config"] for name, row in FAMILIES.items() if name in FORMS}
SIZES = {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 8, "vocab_size": 96}
CONFIGS["megatron"] = {"model_type": "megatron", **SIZES}


@pytest.mark.parametrize("model_type", FORMS)
def test_a_family_without_modules_is_refused_by_name(model_type):
    config = config_from(CONFIGS[model_type], "config.json")
    with pytest.raises(PiperError) as e:
        DecoderModel(config)
    assert (e.value.key, e.value.kind.exit_code) == ("model_type", 2)
    assert model_type in e.value.message and "llama" in str(e.value.allowed)
