"""Preloaded last: imports modules that are otherwise imported at first use, then freezes objects.

Forked stages neither traverse nor copy frozen objects during garbage collection.
"""

import gc
import io

import pandas as pd
import pandera.pandas as pa
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

_frame = pd.DataFrame({"number": [1]})
pa.DataFrameSchema({"number": pa.Column(int)}).validate(_frame)
_file = io.BytesIO()
_frame.to_parquet(_file)
pd.read_parquet(_file)
get_checkpoint_conversion_mapping("llama")

gc.freeze()
