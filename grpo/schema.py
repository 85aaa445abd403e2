"""Parameter types that several sections share, and the path of the parameter file."""

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic_core import PydanticCustomError

PARAMS = Path("params.yaml")
DATA = Path("data")  # file names in params.yaml are relative to it
LANGUAGE_TAG = re.compile(r"^>>(\S+)<< ?")  # of a prompt: the language to translate into
ANSWER = "{answer}"  # the place of a first answer in the template of a revision
# No dots: DVC splits parameter paths at dots. Names are also used as file names.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
WITHHELD = "withheld"  # pydantic's error type of values that may be secrets: no message shows them


def _require_below_data(path: str) -> str:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError("must lie under data/")
    return path


def _require_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError("must be at most 64 letters, digits, _ and -, a letter or digit first")
    return text


def _require_s3(text: str) -> str:
    if not re.match("s3://[a-z0-9.-]+/", text):
        raise ValueError("must be s3://BUCKET/PREFIX, without a user or password")
    return text


def _require_sha256(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ValueError("must be 64 digits from 0 to f, as python -m grpo upload prints them")
    return text


def require_one_group(pattern: str, what: str) -> str:
    """Returns a regular expression; raises ValueError unless it has one group, which is `what`."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"must have exactly one group, {what}")
    return pattern


def _require_variable(text: str) -> str:
    if not re.fullmatch("[A-Z_][A-Z0-9_]{0,63}", text):
        raise PydanticCustomError(
            WITHHELD,
            "must be the name of an environment variable, of capital letters, digits and _; the "
            "secret itself belongs into the environment",
        )
    return text


DataPath = Annotated[str, AfterValidator(_require_below_data)]
Name = Annotated[str, AfterValidator(_require_name)]
VariableName = Annotated[str, AfterValidator(_require_variable)]  # of a secret in the environment
Positive = Annotated[int, Field(gt=0, le=10**9)]
Updates = Annotated[int, Field(ge=0, le=10**9)]  # optimizer steps; may be none
Rollouts = Annotated[int, Field(gt=0, le=65536)]  # of a prompt
Steps = Annotated[int, Field(gt=0, le=2**20)]  # of a rollout, and tokens of a caption
Processes = Annotated[int, Field(gt=0, le=4096)]
Pixels = Annotated[int, Field(gt=0, le=16384)]  # of a side; the largest image takes 3 GB
Timeout = Annotated[float, Field(ge=0.01, le=86400)]  # seconds; at most a day
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average; 1 would never update it
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Normalization = Literal["none", "z_score_in_group", "rank"]  # of a judge's scores
Fraction = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class WithOptionalKeys(Strict):
    """Parameters whose keys with the default None may be missing; dumps leave them out then."""

    @model_serializer(mode="wrap")
    def _leave_out_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {
            name: value
            for name, value in dump(self).items()
            if value is not None or fields[name].is_required()
        }


class DirectoryBase(Strict):
    """A model directory under data/ in the format of `save_pretrained`."""

    source: Literal["directory"]
    path: DataPath


class HubBase(Strict):
    """A model id of the Hugging Face Hub at an exact revision."""

    source: Literal["hub"]
    id: str
    revision: str


class S3Base(Strict):
    """A directory in S3 that `python -m grpo upload` stored, verified by its hash."""

    source: Literal["s3"]
    uri: Annotated[str, AfterValidator(_require_s3)]  # no user:password@
    sha256: Annotated[str, AfterValidator(_require_sha256)]  # of its manifest, as upload prints it


class Machine(WithOptionalKeys):
    """Where models run; a parameter because results differ between devices."""

    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    threads: Annotated[int, Field(gt=0, le=1024)]  # of torch, per process
    compile: bool  # the forward pass of updates, by torch.compile; needs a C++ compiler
    # Of the GPU of a process, or of the host that all processes share; stages that need more are
    # refused before they start. On a CPU, processes then return freed memory at once, which is
    # slower. null: not checked.
    memory_gb: Rate | None = None
