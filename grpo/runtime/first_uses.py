"""Does once, in a preloaded process, what every stage would do again at the first use of a library.

Nothing here may start a thread; reading a table would.
"""

import pandas as pd
import pandera.pandas as pa
import pyarrow.parquet  # noqa: F401
import torch.utils.flop_counter  # noqa: F401
import transformers.generation.utils
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

pa.DataFrameSchema({"number": pa.Column(int)}).validate(pd.DataFrame({"number": [1]}))
get_checkpoint_conversion_mapping("llama")
