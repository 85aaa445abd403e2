"""No file of a finished run has a secret of its environment."""

from pathlib import Path

import pandas as pd

from tests.modalities.exposure import PLANTED, leaks

HELD = ("mlflow.db", "dvc.lock", "params.yaml", "artifacts/report/index.html", ".runs/base.json")


def test_no_file_of_a_finished_run_holds_a_secret_of_its_environment(finished: Path):
    assert [name for name in HELD if not (finished / name).is_file()] == []
    assert leaks(finished) == []


def test_a_secret_in_a_text_a_database_or_a_table_would_be_found(tmp_path: Path):
    secret = PLANTED["AWS_SECRET_ACCESS_KEY"]
    (tmp_path / "stage.log").write_text(f"connecting as {secret}\n")
    (tmp_path / "cache").mkdir()
    pd.DataFrame({"text": [f"said {secret}"] * 9}).to_parquet(
        tmp_path / "cache/table", compression="zstd"
    )
    found = ["cache/table: AWS_SECRET_ACCESS_KEY", "stage.log: AWS_SECRET_ACCESS_KEY"]
    assert leaks(tmp_path) == found
