"""Preloaded last: what is imported at a first use, and then the garbage collector's part of it.

No forked stage looks for garbage among, nor copies, what was loaded before.
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
